"""How a pipeline is asked for: stages, chunks and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from autopar.errors import UnsupportedError
from autopar.planner.cuts import CutHint
from autopar.schedules.actions import Kind
from autopar.schedules.table import Size, rows_of, schedule_named
from autopar.search.space import Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a pipeline is asked for.

    Attributes:
        schedule: Name of its schedule.
        num_stages: Groups of ranks.
        num_chunks: Chunks of the model that each holds.
        hints: Where to cut.
    """

    schedule: str
    num_stages: int
    num_chunks: int
    hints: tuple[CutHint, ...] = ()

    @property
    def lanes(self) -> tuple[int, ...]:
        """Stage of every chunk."""
        spec = schedule_named(self.schedule)
        count = self.num_stages * self.num_chunks
        return tuple(spec.lane_of_chunk(chunk, self.num_stages) for chunk in range(count))

    def check(self, microbatches: int) -> None:
        """Refuse what the schedule cannot do.

        Raises:
            UnsupportedError: It does not exist for these numbers.
        """
        size = Size(lanes=self.num_stages, chunks=self.num_chunks, microbatches=microbatches)
        schedule_named(self.schedule).check(size)

    def fits(self, microbatches: int) -> bool:
        """Whether the schedule can do so many microbatches."""
        try:
            self.check(microbatches)
        except UnsupportedError:
            return False
        return True


def most_pending(layout: Layout, microbatches: int) -> Pending:
    """Of how many microbatches weight gradients wait while another one's backward runs, at most.

    A chunk of several counts as its part of a stage.
    """
    if not schedule_named(layout.schedule).splits_backward or not layout.fits(microbatches):
        return Pending()
    rows = rows_of(layout.schedule, layout.num_stages, layout.num_chunks, microbatches)
    changes = {Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: -1}
    most = [max(accumulate(changes.get(a.kind, 0) for a in row)) for row in rows]
    return Pending(
        (max(most) - 1) / layout.num_chunks, (most[layout.lanes[-1]] - 1) / layout.num_chunks
    )
