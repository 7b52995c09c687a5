"""Every schedule by name: what it needs, what it holds, how it is generated.

A new schedule is an entry of `SCHEDULES` and a function that returns one row of actions per lane;
`checker.verify` proves what comes out of it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.errors import HintError, UnsupportedError
from autopar.schedules import one_forward_one_backward as whole
from autopar.schedules import zero_bubble as split
from autopar.schedules.actions import Schedule
from autopar.schedules.weights import Costs
from cost_models.pipeline import interleaved_live, one_f_one_b_live


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a schedule is generated for.

    Attributes:
        lanes: Groups of ranks S, each with one row.
        chunks: Chunks v a lane.
        microbatches: Microbatches M of a step.
        max_live: Most microbatches that the memory of a lane allows to be live, all its chunks
            together; None for any number.
        costs: What the orders of zero-bubble schedules depend on.
    """

    lanes: int
    chunks: int = 1
    microbatches: int
    max_live: int | None = None
    costs: Costs = field(default_factory=Costs)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.lanes * self.chunks

    @property
    def live_limit(self) -> int:
        """Live microbatches that neither memory nor their number forbids."""
        return self.microbatches if self.max_live is None else min(self.microbatches, self.max_live)

    @property
    def pending_share(self) -> float:
        """Share of what a forward saves that is kept between the two gradients."""
        return self.costs.pending_share


def in_turn(chunk: int, lanes: int) -> int:
    """Chunks go round the lanes: chunk S is on lane 0 again."""
    return chunk % lanes


def in_a_v(chunk: int, lanes: int) -> int:
    """Chunks go down the lanes and back up: chunk S is on the last lane again."""
    return min(chunk, 2 * lanes - 1 - chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """One schedule.

    Attributes:
        name: What hints and plans call it.
        description: One line for people.
        rows: Size to schedule; sizes that `check` refuses are never asked for.
        live_bound: Most microbatches of chunks that a lane holds, of lane and size.
        lane_of_chunk: Lane of a chunk, of chunk and number of lanes.
        least_chunks: Fewest chunks a lane; `most_chunks` the most, None for any.
        splits_backward: The backward is an input-gradient and a weight-gradient action.
        whole_rounds: The microbatches must be a multiple of the lanes, or fewer.
        uses_max_live: It does with fewer live microbatches; others refuse what is too few.
    """

    name: str
    description: str
    rows: Callable[[Size], Schedule]
    live_bound: Callable[[int, Size], int]
    lane_of_chunk: Callable[[int, int], int] = in_turn
    least_chunks: int = 1
    most_chunks: int | None = 1
    splits_backward: bool = False
    whole_rounds: bool = False
    uses_max_live: bool = False

    def generate(
        self, lanes: int, chunks: int, microbatches: int, max_live: int | None = None
    ) -> Schedule:
        """One row of actions per lane.

        Raises:
            HintError: A number is no count.
            UnsupportedError: The schedule does not exist for these numbers.
        """
        size = Size(lanes=lanes, chunks=chunks, microbatches=microbatches, max_live=max_live)
        return self.generate_for(size)

    def generate_for(self, size: Size) -> Schedule:
        """One row of actions per lane, for measured or predicted costs.

        Raises:
            HintError: A number is no count.
            UnsupportedError: The schedule does not exist for these numbers.
        """
        self.check(size)
        return self.rows(size)

    def live_bounds(self, size: Size) -> tuple[int, ...]:
        """Most microbatches of chunks that each lane holds at once."""
        return tuple(self.live_bound(lane, size) for lane in range(size.lanes))

    def check(self, size: Size, num_ops: int | None = None) -> None:
        """Refuse what the schedule cannot do.

        Args:
            size: What is asked for.
            num_ops: Ops that the model can be cut between; None where that is not known.

        Raises:
            HintError: A number is no count.
            UnsupportedError: The schedule does not exist for these numbers.
        """
        where = f"cannot use schedule '{self.name}'"
        counts = {"stages": size.lanes, "chunks": size.chunks, "microbatches": size.microbatches}
        if size.max_live is not None:
            counts["live microbatches"] = size.max_live
        for what, count in counts.items():
            if count < 1:
                raise HintError(f"{where} with {count} {what}: it is a count; give 1 or more")
        self._check_chunks(size, where)
        if num_ops is not None and size.num_chunks > num_ops:
            raise UnsupportedError(
                f"{where} with {size.lanes} stages of {size.chunks} chunks: the model has "
                f"{num_ops} ops to cut it at; use fewer stages or chunks"
            )
        rounds, rest = divmod(size.microbatches, size.lanes)
        if self.whole_rounds and rounds and rest:
            below = rounds * size.lanes
            raise UnsupportedError(
                f"{where} with {size.microbatches} microbatches on {size.lanes} stages: it is not "
                f"a multiple; use {below} or {below + size.lanes} microbatches, or '1f1b'"
            )
        if size.max_live is not None and not self.uses_max_live:
            need = -(-max(self.live_bounds(size)) // size.chunks)
            if need > size.max_live:
                raise UnsupportedError(
                    f"{where} with {size.max_live} live microbatches: it holds {need}; allow "
                    f"{need}, or use 'early-backward', which holds fewer"
                )

    def _check_chunks(self, size: Size, where: str) -> None:
        if size.chunks < self.least_chunks:
            raise UnsupportedError(
                f"{where} with {size.chunks} chunks a stage: it needs {self.least_chunks}; use "
                f"chunks={self.least_chunks}, or '1f1b'"
            )
        if self.most_chunks is not None and size.chunks > self.most_chunks:
            raise UnsupportedError(
                f"{where} with {size.chunks} chunks a stage: it has {self.most_chunks}; use "
                f"chunks={self.most_chunks}, or 'interleaved'"
            )


def _early(size: Size) -> list[int]:
    return [min(size.lanes - lane, size.live_limit) for lane in range(size.lanes)]


def _early_2(size: Size) -> list[int]:
    return [min(2 * (size.lanes - lane) - 1, size.live_limit) for lane in range(size.lanes)]


def _h1_limit(size: Size) -> int:
    return min(size.lanes, size.live_limit)


def _h2_limit(size: Size) -> int:
    return min(2 * size.lanes, size.live_limit)


def _v_limit(size: Size) -> int:
    return 2 * min(size.lanes, size.microbatches)


_ALL = (
    ScheduleSpec(
        name="gpipe",
        description="all forwards, then all backwards; every lane holds all microbatches",
        rows=lambda size: whole.gpipe(size.lanes, size.microbatches),
        live_bound=lambda lane, size: size.microbatches,
    ),
    ScheduleSpec(
        name="1f1b",
        description="one forward, one backward; stage i of S holds S - i microbatches",
        rows=lambda size: whole.early_backward(range(size.lanes, 0, -1), size.microbatches),
        live_bound=lambda lane, size: one_f_one_b_live(
            lane, stages=size.lanes, num_microbatches=size.microbatches
        ),
    ),
    ScheduleSpec(
        name="early-backward",
        description="1f1b that never holds more microbatches than memory allows",
        rows=lambda size: whole.early_backward(_early(size), size.microbatches),
        live_bound=lambda lane, size: _early(size)[lane],
        uses_max_live=True,
    ),
    ScheduleSpec(
        name="early-backward-2",
        description="early backward with 2(S - i) - 1 forwards ahead, for costly messages",
        rows=lambda size: whole.early_backward(_early_2(size), size.microbatches),
        live_bound=lambda lane, size: _early_2(size)[lane],
        uses_max_live=True,
    ),
    ScheduleSpec(
        name="interleaved",
        description="1f1b over v chunks a lane: a v-th of the bubble for more memory and messages",
        rows=lambda size: whole.interleaved(size.lanes, size.chunks, size.microbatches),
        live_bound=lambda lane, size: interleaved_live(
            lane, stages=size.lanes, chunks=size.chunks, num_microbatches=size.microbatches
        ),
        least_chunks=2,
        most_chunks=None,
        whole_rounds=True,
    ),
    ScheduleSpec(
        name="zb-h1",
        description="weight gradients fill the end: a third of 1f1b's bubble in its memory",
        rows=lambda size: split.one_chunk(
            size.lanes, size.microbatches, _h1_limit(size), size.costs
        ),
        live_bound=lambda lane, size: _h1_limit(size),
        splits_backward=True,
        uses_max_live=True,
    ),
    ScheduleSpec(
        name="zb-h2",
        description="zb-h1 with twice the memory: about no bubble where steps need no barrier",
        rows=lambda size: split.one_chunk(
            size.lanes, size.microbatches, _h2_limit(size), size.costs
        ),
        live_bound=lambda lane, size: _h2_limit(size),
        splits_backward=True,
        uses_max_live=True,
    ),
    ScheduleSpec(
        name="zb-v",
        description="two chunks a lane, down and back up: about no bubble in 1f1b's memory",
        rows=lambda size: split.two_chunks(
            size.lanes, size.microbatches, _v_limit(size), size.costs
        ),
        live_bound=lambda lane, size: _v_limit(size),
        lane_of_chunk=in_a_v,
        least_chunks=2,
        most_chunks=2,
        splits_backward=True,
    ),
)

SCHEDULES: Mapping[str, ScheduleSpec] = {spec.name: spec for spec in _ALL}
"""Every schedule by name."""


def schedule_named(name: str) -> ScheduleSpec:
    """The schedule of a name.

    Raises:
        HintError: There is none.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = difflib.get_close_matches(name, SCHEDULES, n=1)
    what = f"did you mean '{near[0]}'? " if near else ""
    raise HintError(
        f"cannot use schedule '{name}': there is none of that name; {what}"
        f"use one of {', '.join(SCHEDULES)}"
    )


@functools.lru_cache(maxsize=256)
def rows_of(name: str, lanes: int, chunks: int, microbatches: int) -> Schedule:
    """The rows of a schedule by name, made once.

    Raises:
        HintError: There is none of that name, or a number is no count.
        UnsupportedError: It does not exist for these numbers.
    """
    return schedule_named(name).generate(lanes, chunks, microbatches)
