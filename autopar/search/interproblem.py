"""The inter-op problem: a chain of blocks, stages on places of a cluster, a schedule.

Nothing here knows ops, tensors or a solver, so the same record is solved by `inter.solve_inter` and
by the brute force of the tests.

Every block is of a class. What a block of a class can be on a stage of some kind is its *front*:
points of seconds and bytes, which the intra-op search gives. A stage takes blocks that follow each
other, and a point for each; how many blocks of a class take a point is all that matters, not which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from autopar.schedules.table import schedule_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One way to run a block on a stage; seconds and bytes of each of its ranks.

    Attributes:
        forward_s: Seconds of a microbatch's forward, with exposed collectives.
        backward_s: Seconds of its backward, with exposed collectives and recomputation.
        weight_s: The part of the backward that makes gradients of parameters alone.
        reduce_s: Seconds a step of reducing gradients and of what else follows the last backward.
        before_s: Seconds a step of what comes ahead of the first forward.
        resident_bytes: Held through the step.
        late_bytes: Held from its first backward on, beside that.
        saved_bytes: Held of every microbatch between its forward and its backward.
        transient_bytes: Held while the block itself runs; of a stage's blocks the largest counts.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    reduce_s: float = 0.0
    before_s: float = 0.0
    resident_bytes: float = 0.0
    late_bytes: float = 0.0
    saved_bytes: float = 0.0
    transient_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            assert getattr(self, name) >= 0, f"{name} of {self}"
        assert self.weight_s <= self.backward_s, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Devices that follow each other, on which a stage can run.

    Attributes:
        first: Its first device.
        size: Devices.
        kind: Places of one kind have one front for each class.
        memory_bytes: Usable, of each device.
    """

    first: int
    size: int
    kind: int
    memory_bytes: float

    @property
    def end(self) -> int:
        """The device behind its last one."""
        return self.first + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins a device to the next one, and the places on both sides of it.

    Attributes:
        latency_s: Seconds of an empty message.
        bytes_per_s: Between one device and another.
        lanes: Devices of a stage that can send at once; None for any number.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    lanes: int | None = None

    def seconds(self, num_bytes: float, left: int, right: int) -> float:
        """Seconds of a message between stages of so many devices."""
        pairs = min(left, right) if self.lanes is None else min(left, right, self.lanes)
        return self.latency_s + num_bytes / (self.bytes_per_s * pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Places that one pipeline may be made of: its stages cover all their devices, in order.

    Attributes:
        name: For reports.
        places: In any order.
    """

    name: str
    places: tuple[Place, ...]

    @property
    def first(self) -> int:
        """Its first device."""
        return min(place.first for place in self.places)

    @property
    def end(self) -> int:
        """The device behind its last one."""
        return max(place.end for place in self.places)

    @property
    def is_tiling(self) -> bool:
        """Whether its places do not overlap, so that a pipeline takes them all."""
        ordered = sorted(self.places, key=lambda place: place.first)
        return all(a.end == b.first for a, b in pairwise(ordered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A number of microbatches, and what blocks and messages then are.

    Attributes:
        microbatches: Of the step.
        fronts: Of every class, for every kind of place; empty where it cannot run.
        send_bytes: Of a microbatch, behind every block but the last.
    """

    microbatches: int
    fronts: tuple[tuple[tuple[Point, ...], ...], ...]
    send_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterProblem:
    """Where to cut, what every block does, on which places, under which schedule.

    Attributes:
        blocks: Class of every block, in the order of the model.
        settings: Numbers of microbatches to choose from.
        families: Sets of places to choose from.
        links: Between every device and the next.
        schedules: (name, chunks a stage) to choose from.
        most_stages: Of a pipeline; ``least_stages`` it has at least.
        starts: Of every piece, for every number of blocks in front of its end, the first block with
            which it may begin: pipelines then have as many pieces. Empty for any.
    """

    blocks: tuple[int, ...]
    settings: tuple[Setting, ...]
    families: tuple[Family, ...]
    links: tuple[Link, ...]
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    most_stages: int = 64
    least_stages: int = 1
    starts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, chunks in self.schedules:
            spec = schedule_named(name)
            assert spec.least_chunks <= chunks, (name, chunks)
            assert spec.most_chunks is None or chunks <= spec.most_chunks, (name, chunks)
        for setting in self.settings:
            assert len(setting.send_bytes) == len(self.blocks) - 1, "bytes behind all but the last"
            assert max(self.blocks) < len(setting.fronts)

    def may_hold(self, piece: int, first: int, end: int) -> bool:
        """Whether a piece of the pipeline may hold the blocks from one on, up to another."""
        return not self.starts or first >= self.starts[piece][end]

    def send_s(self, setting: Setting, block: int, left: Place, right: Place) -> float:
        """Seconds of the message behind a block, from one stage to the next; the way back too."""
        if left is right:
            return 0.0
        low, high = sorted((left, right), key=lambda place: place.first)
        joints = self.links[low.end - 1 : high.first] or (Link(),)
        num_bytes = setting.send_bytes[block]
        return max(link.seconds(num_bytes, left.size, right.size) for link in joints)

    def sends_s(self, choice: Choice) -> tuple[float, ...]:
        """Seconds of the message behind every piece of a choice but the last."""
        lanes = choice.lanes
        return tuple(
            self.send_s(
                choice.setting,
                piece.end - 1,
                choice.places[lanes[number]],
                choice.places[lanes[number + 1]],
            )
            for number, piece in enumerate(choice.pieces[:-1])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks that follow each other on a stage, and their points.

    Attributes:
        first: First block.
        end: The block behind the last.
        counts: Of every class in it, how many blocks take each point of its front.
    """

    first: int
    end: int
    counts: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a number of microbatches, a schedule and a family of places lead to.

    Attributes:
        setting: Number of microbatches, fronts and messages.
        schedule: Its name.
        chunks: Pieces a stage.
        places: Of every stage.
        pieces: In the order of the model; the schedule says which stage runs each.
        step_s: Seconds of the step.
    """

    setting: Setting
    schedule: str
    chunks: int
    places: tuple[Place, ...]
    pieces: tuple[Piece, ...]
    step_s: float

    @property
    def lanes(self) -> tuple[int, ...]:
        """Stage of every piece."""
        lane_of = schedule_named(self.schedule).lane_of_chunk
        return tuple(lane_of(chunk, len(self.places)) for chunk in range(len(self.pieces)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One combination of microbatches, places, number of stages and schedule.

    Attributes:
        name: For reports.
        bound_s: Proven least seconds.
        step_s: Best found; infinite where nothing is, or nothing better than what was known.
    """

    name: str
    bound_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class InterSolution:
    """The best choice, and what is proven.

    Attributes:
        best: None if it is proven that nothing fits, or nothing that is fast enough.
        bound_s: Proven least seconds of the problem.
        asked_gap: Gap that was allowed.
        tried: All combinations that were looked at.
        seconds: Of the processor, for the search.
    """

    best: Choice | None
    bound_s: float
    asked_gap: float
    tried: tuple[Tried, ...] = field(default=())
    seconds: float = 0.0

    @cached_property
    def gap(self) -> float:
        """Distance from the bound to the best, as a part of the best."""
        if self.best is None or self.best.step_s == 0:
            return 0.0
        return max(0.0, 1 - self.bound_s / self.best.step_s)

    @property
    def status(self) -> str:
        """``optimal`` within the gap that was allowed, ``feasible`` or ``infeasible``."""
        if self.best is None:
            return "infeasible"
        return "optimal" if self.gap <= self.asked_gap + 1e-9 else "feasible"
