"""Stages of unlike sizes on equal devices: which are worth a look, before any is cut.

The inter-op program chooses cuts, places of any sizes with any mesh, microbatches and schedule at
once. What units of the forward take on a place is worked out only where the program would use it,
by solving the mesh and lowering every kind of unit alone. Until then it is bounded from below: more
devices do not take fewer device-seconds, more microbatches no fewer seconds in all. So as soon as
the program's best is no faster than what is known, no other stages are either, by these costs; for
most steps that is before anything was solved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from autopar.errors import HintError, UnsupportedError
from autopar.ir.sharding import Mesh
from autopar.planner.batches import COUNTS, batch_misfit, in_time, samples_of
from autopar.planner.fronts import ways_of
from autopar.planner.hints import Settled
from autopar.planner.lanes import Lanes, prepare
from autopar.planner.layout import Layout
from autopar.planner.outline import Seconds, course_of
from autopar.planner.parts import seconds_alone
from autopar.planner.pipelines import siblings
from autopar.planner.request import Request
from autopar.planner.stagewise import joint
from autopar.planner.units import Units, divided, narrows, units_of
from autopar.search.analysis import Analysis
from autopar.search.inter import solve_inter
from autopar.search.interproblem import Choice, Family, InterProblem, Link, Place, Point, Setting
from autopar.search.outer import is_free, meshes
from autopar.search.segments import costs_of
from autopar.search.timeline import REDUCE, Floats
from cost_models.cluster import Cluster
from cost_models.records import Level

FEW = 8
"""Devices up to which there may be as many stages as `MOST_STAGES`; on more there are two."""

MOST_STAGES = 3
"""Stages of unlike sizes."""

BORDERS = 16
"""Places for the border of two stages, on a large cluster."""

GRAIN = 16
"""Units of the forward, where blocks are not finer."""

MOST_COUNT = 16
"""Microbatches, unless hints ask for more."""

ROUNDS = 10
"""Times that the program is solved."""

GAP = 0.1
"""Part of the step by which what the program finds may be slower than the best: what is found is
dealt out anew."""

TRIED = 3
"""Choices that are lowered, of those that are about as fast."""

SLACK = 0.1
"""Part of the step by which what the program finds may be slower than what is known: of ZB-H1 it
knows a bound, and what is lowered takes a little less or more than units alone."""

SCHEDULES = ("zb-h1", "1f1b")
"""Of one chunk a stage, as stages of unlike sizes have no other: the first is looked for, as it
idles least, and the other taken where what it holds is too much."""


ALONE = ("1f1b", "gpipe", "zb-h1")
"""Schedules of one chunk a stage that the inter-op program knows."""


def unlike(
    analysis: Analysis,
    request: Request,
    settled: Settled,
    *,
    below_s: float,
    time_limit_s: float,
) -> list[Promising]:
    """Stages of any sizes that the inter-op program finds faster than what is known.

    The fastest first.

    Args:
        analysis: The step.
        request: What was asked.
        settled: Hints in force.
        below_s: Seconds of a step that is known.
        time_limit_s: For each run of a solver.
    """
    if not _may_be(request.cluster, settled):
        return []
    state = _Sizes(analysis, request, settled, below_s, time_limit_s)
    return state.run() if state.counts else []


def ways(cluster: Cluster, settled: Settled) -> Iterator[tuple[tuple[Mesh, ...], Layout]]:
    """Stages of any sizes that may be chosen, as replicas, under each kind of schedule.

    Args:
        cluster: Where.
        settled: Hints in force.
    """
    if not _may_be(cluster, settled):
        return
    total = cluster.num_devices
    each = 1 if total <= FEW else math.ceil(total / BORDERS)
    for count in _counts_of_stages(cluster, settled):
        for borders in combinations(range(each, total, each), count - 1):
            sizes = [b - a for a, b in pairwise((0, *borders, total))]
            spaces = tuple(Mesh(("dp",), (size,), roles=("dp",)) for size in sizes)
            for name in (settled.schedule,) if settled.schedule_is_hinted else SCHEDULES:
                yield spaces, Layout(schedule=name, num_stages=count, num_chunks=1)


def _may_be(cluster: Cluster, settled: Settled) -> bool:
    """Whether hints and devices leave stages of any sizes."""
    plain = settled.shares is None and not settled.cuts and settled.schedule in ALONE
    counts = _counts_of_stages(cluster, settled)
    return is_free(settled.degrees) and plain and bool(counts) and len(cluster.devices) == 1


def _counts_of_stages(cluster: Cluster, settled: Settled) -> range:
    """Numbers of stages that may be of unlike sizes."""
    most = min(MOST_STAGES, cluster.num_devices - 1) if cluster.num_devices <= FEW else 2
    forced = settled.num_stages
    if forced is None:
        return range(2, most + 1)
    return range(forced, forced + 1) if 2 <= forced <= most else range(0)


Promising = tuple[tuple[Lanes, ...], Units]
"""Meshes of the stages under one schedule or another, the best of which that fits is to be taken,
and the units to deal out to them."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What places have in common on which units take the same.

    Attributes:
        space: Mesh of the stage.
        levels: Of the network, that join its ranks.
    """

    space: Mesh
    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        return self.space.num_ranks

    def bounds(self, other: _Kind) -> bool:
        """Whether more devices, no faster joined, are another kind's."""
        return self.size < other.size and len(self.levels) <= len(other.levels)


class _Sizes:
    """Working state of `unlike`."""

    def __init__(
        self,
        analysis: Analysis,
        request: Request,
        settled: Settled,
        below_s: float,
        time_limit_s: float,
    ) -> None:
        self.analysis, self.request, self.settled = analysis, request, settled
        self.below_s, self.time_limit_s = below_s, time_limit_s
        self.num_devices = request.cluster.num_devices
        self.samples = samples_of(analysis.graph)
        alone = course_of(analysis).seconds(seconds_alone(analysis, request.cluster.device(0)))
        even = units_of(analysis, alone.sum(axis=0).tolist(), GRAIN)
        self.units = divided(even, narrows(even))
        self.alone = self._alone(alone)
        self.schedules = (settled.schedule,) if settled.schedule_is_hinted else SCHEDULES
        self.kinds: dict[_Kind, int] = {}
        self.places = tuple(self._places())
        self.known: dict[tuple[_Kind, int], Floats] = {}

    def run(self) -> list[Promising]:
        """Solve the program, and work out what it would use, until it uses what is known.

        Then again without its first place, for what is about as fast.
        """
        found: list[Choice] = []
        for _ in range(ROUNDS):
            best = self._solved(found)
            if best is None or len(found) == TRIED:
                break
            if not list(self._unknown(best)):
                found.append(best)
            elif not self._work_out(best):
                break
        return [
            (tuple(self._under(own, name) for name in self.schedules), self.units)
            for choice in found
            if (own := self._lanes(choice)) is not None
        ]

    def _alone(self, seconds: Seconds) -> Floats:
        """Costs of units of every kind on one device, all microbatches together, of ops alone."""
        found = []
        for _, unit in sorted(self.units.shown.items()):
            first, end = self.units.starts[unit : unit + 2]
            forward_s, awaited_s, rest_s = seconds[:, first:end].sum(axis=1).tolist()
            found.append((forward_s, awaited_s + rest_s, rest_s, 0.0, 0.0))
        return np.array(found)

    def _places(self) -> Iterator[Place]:
        """Runs of devices that follow each other, with every mesh that one may have."""
        cluster, total = self.request.cluster, self.num_devices
        if total <= FEW:
            runs = [(a, b) for a in range(total) for b in range(a + 1, total + 1)]
        else:
            borders = range(0, total, math.ceil(total / BORDERS))[1:]
            runs = [own for at in borders for own in ((0, at), (at, total))]
        for first, end in runs:
            if end - first == total:
                continue
            part = cluster.part(first, end - first)
            for space in _spaces(part):
                number = self.kinds.setdefault(_Kind(space, part.levels), len(self.kinds))
                yield Place(first=first, size=end - first, kind=number, memory_bytes=math.inf)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of microbatches."""
        if self.settled.microbatches is not None:
            return (self.settled.microbatches,)
        return tuple(n for n in COUNTS if 2 <= n <= MOST_COUNT and self.samples % n == 0)

    def _fits(self, kind: _Kind, count: int) -> bool:
        """Whether the batch can be cut: over stages that each fit, it can be."""
        (mesh,) = in_time(self.analysis.graph, (kind.space,), count)
        return self.samples % (kind.size * count) == 0 and not batch_misfit(
            self.analysis.graph, mesh
        )

    def _solved(self, found: Sequence[Choice]) -> Choice | None:
        """The best choice that may be faster than what is known, and begins unlike others."""
        crossing = course_of(self.analysis).crossing_bytes
        settings = []
        for count in self.counts:
            by_kind = [self._bounded(own, count) for own in self.kinds]
            sends = crossing[list(self.units.starts[1:-1])] / count
            settings.append(
                Setting(
                    microbatches=count,
                    fronts=tuple(
                        tuple(own[number : number + 1] for own in by_kind)
                        for number in range(len(self.alone))
                    ),
                    send_bytes=tuple(sends.tolist()),
                )
            )
        taken = {choice.places[0] for choice in found}
        places = tuple(place for place in self.places if place not in taken)
        numbers = _counts_of_stages(self.request.cluster, self.settled)
        problem = InterProblem(
            blocks=self.units.kinds,
            settings=tuple(settings),
            families=(Family(name="places of any sizes", places=places),),
            links=self._links,
            schedules=((self.schedules[0], 1),),
            most_stages=numbers[-1],
            least_stages=numbers[0],
        )
        least_s = min((choice.step_s for choice in found), default=self.below_s)
        below_s = (1 + SLACK) * min(self.below_s, least_s)
        return solve_inter(problem, gap=GAP, below_s=below_s).best

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        each = float(course_of(self.analysis).crossing_bytes.max()) / min(self.counts)
        ranks = range(self.num_devices)
        return tuple(joint(self.request.cluster, pair, each) for pair in pairwise(ranks))

    def _bounded(self, kind: _Kind, count: int) -> tuple[Point, ...]:
        """Points of a kind of place, or what they are no less than; none where it cannot be."""
        if not self._fits(kind, count):
            return ()
        own = self.known.get((kind, count))
        if own is not None:
            return _points(own, count)
        alone = self.alone / kind.size
        least = alone
        for (other, seen), costs in self.known.items():
            if other == kind or other.bounds(kind):
                shared = costs * (other.size / kind.size)
                # What is more than of ops alone grows with the microbatches, faster where small.
                part = min(1.0, count / seen) ** 2
                least = np.maximum(least, alone + part * (shared - alone))
        return _points(least, count)

    def _kinds_of(self, choice: Choice) -> list[_Kind]:
        """Kind of the place of every stage."""
        kinds = list(self.kinds)
        return [kinds[place.kind] for place in choice.places]

    def _unknown(self, choice: Choice) -> Iterator[tuple[int, _Kind]]:
        """Stages of which it is not worked out what units take there."""
        for stage, kind in enumerate(self._kinds_of(choice)):
            if (kind, choice.setting.microbatches) not in self.known:
                yield stage, kind

    def _lanes(self, choice: Choice) -> Lanes | None:
        """The meshes of a choice; None where the batch cannot be cut so."""
        spaces = [kind.space for kind in self._kinds_of(choice)]
        found = in_time(self.analysis.graph, spaces, choice.setting.microbatches)
        layout = Layout(schedule=choice.schedule, num_stages=len(spaces), num_chunks=1)
        # What hints ask of parameters may not be met on some of the meshes.
        with suppress(HintError, UnsupportedError):
            lanes = prepare(self.analysis, self.request, self.settled, found, layout)
            if lanes.work_s(self.time_limit_s) < math.inf:
                return lanes
        return None

    def _under(self, lanes: Lanes, schedule: str) -> Lanes:
        """The same meshes under a schedule."""
        layout = replace(lanes.layout, schedule=schedule)
        return replace(lanes, layout=layout, others=siblings(self.settled, layout))

    def _work_out(self, choice: Choice) -> bool:
        """What units take on the places of a choice; False if a mesh has no solution."""
        lanes = self._lanes(choice)
        if lanes is None:
            return False
        count = choice.setting.microbatches
        for stage, kind in self._unknown(choice):
            (way,) = ways_of(
                self.analysis,
                self.request,
                lanes.searches[stage],
                self.units,
                bound=False,
                thorough=False,
                splits_backward=True,
                time_limit_s=self.time_limit_s,
            )
            costs = costs_of(way.points)
            costs[:, :REDUCE] *= count
            self.known[kind, count] = costs
        return True


def _spaces(part: Cluster) -> Iterator[Mesh]:
    """Meshes of a stage on all devices of a part: replicas, and what the search makes of axes."""
    yield Mesh(("dp",), (part.num_devices,), roles=("dp",))
    if part.num_devices > 1:
        yield from meshes(part, None)


def _points(costs: Floats, count: int) -> tuple[Point, ...]:
    """Points of so many microbatches, of seconds that all take together."""
    found = []
    for forward_s, backward_s, weight_s, reduce_s, before_s in costs.tolist():
        found.append(
            Point(
                forward_s=forward_s / count,
                backward_s=backward_s / count,
                weight_s=min(weight_s, backward_s) / count,
                reduce_s=reduce_s,
                before_s=before_s,
            )
        )
    return tuple(found)
