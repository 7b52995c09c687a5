"""How a pipeline is asked for: stages, chunks and schedule."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import UnsupportedError
from autopar.planner.cuts import CutHint
from autopar.schedules.table import Size, schedule_named


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
