"""Stages that differ: cuts, and what every stage recomputes, shards and sends away, at once.

The inter-op program deals the units of the forward out to the stages, each in one of the ways in
which its mesh was solved, within the memory of every stage by itself: an early stage, which holds
more microbatches, recomputes more than a late one. What it chooses is put together, cut, lowered
and simulated; a stage that needs more than was reckoned is given that much less.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.errors import UnsupportedError
from autopar.ir.sharding import Sharding
from autopar.lower.rows import turns_of
from autopar.plan.records import StagePlan
from autopar.planner.cuts import least_starts
from autopar.planner.evaluate import evaluate_pipeline, predicted_memory
from autopar.planner.fronts import held_bytes, problems_of, ways_of, within
from autopar.planner.lanes import LESS, Lanes, MeshSearch
from autopar.planner.outline import Ranks, course_of, outline
from autopar.planner.pipeline import (
    FORWARD,
    Kind,
    Lane,
    filled_s,
    seconds_by_forward,
    stage_without_parameter,
)
from autopar.planner.request import Candidate, Request, Way
from autopar.planner.staged import bytes_of_stage, lower_some
from autopar.planner.units import Units, divided, units_of
from autopar.planner.update import states_on_host
from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import rows_of, schedule_named
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from autopar.search.chunked import fullest
from autopar.search.decode import decode
from autopar.search.inter import solve_inter
from autopar.search.interproblem import Choice, Family, InterProblem, Link, Place, Setting
from autopar.search.problem import Problem, Solution
from autopar.search.stages import Pipeline, equal_lanes, split_lanes
from cost_models.cluster import Cluster
from cost_models.collectives import collective_s, pair_link

EVENED = 2
"""Times that what was dealt out is cut more evenly; lowered in full each."""

AGAIN = 2
"""Times that stages which hold less than was reckoned are given more, of a short step."""

HALVED = 3
"""Times that the memory between two ways of a stage is halved, to find one that just fits."""

PROMISING = 0.01
"""Part of the step that other cuts must be able to gain for their stages to be fitted."""

SPARE = 0.05
"""Part of what one stage holds beyond what was reckoned that others are given less for, too, where
a pipeline takes long to lower."""

NEAR = 0.01
"""Part of the memory by which two ways must differ for one between them to be looked for."""

ROUNDS = 4
"""Times that stages are dealt out again with less memory for those that need more."""

GRAIN = 8
"""Units a chunk, where blocks are not finer."""

GAP = 1e-3
"""Part of the step by which what is dealt out may be slower than the best."""

WORTH = 0.03
"""Part of the step that must be left between stages that share their work for nothing and the best
that is known."""

KNOWN = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")
"""Schedules that the inter-op program knows."""


def stagewise(
    analysis: Analysis,
    request: Request,
    search: Lanes,
    time_limit_s: float,
    beat_s: float,
    *,
    thorough: bool = False,
    units: Units | None = None,
) -> Candidate | None:
    """The fastest pipeline that fits, of stages that may differ; None where none was found.

    Args:
        analysis: The step.
        request: What was asked.
        search: Meshes of the stages and the schedule.
        time_limit_s: For each run of a solver.
        beat_s: Seconds of a step that it must be able to beat by enough.
        thorough: Whether to fit the stages of an even cut, too, each by all its ways lowered.
        units: Of the forward; None for such as the even cut has borders at.
    """
    if search.layout.schedule not in KNOWN:
        return None
    microbatches = search.searches[0].plain.mesh.microbatches
    each_s = search.work_s(time_limit_s) / microbatches
    least_s = each_s * filled_s(search.layout, microbatches, FORWARD, 0.0)
    # On unlike meshes stages that get what they are best at take less than their share of all.
    if len(search.kinds) == 1 and least_s > (1 - WORTH) * beat_s:
        return None
    state = _Stagewise(analysis, request, search, time_limit_s, thorough=thorough, units=units)
    if not all(state.ways.values()):
        return None
    dealt = state.run(again=AGAIN * thorough)
    found = [dealt] if dealt else []
    if thorough and search.is_bound:
        found += state.fitted([own.cuts for own in found])
    best = min(found, key=lambda own: own.step_s, default=None)
    return replace(best.candidate, limited=search.is_bound) if best else None


class _Stagewise:
    """Working state of `stagewise`."""

    def __init__(
        self,
        analysis: Analysis,
        request: Request,
        search: Lanes,
        time_limit_s: float,
        *,
        thorough: bool,
        units: Units | None,
    ) -> None:
        self.analysis = analysis
        self.request = request
        self.search = search
        self.left_s = time_limit_s
        self.thorough = thorough
        self.layout = search.layout
        self.fastest = {kind: kind.within(None, time_limit_s) for kind in search.kinds}
        self.units = units or self._units()
        splits = schedule_named(self.layout.schedule).splits_backward
        self.ways: dict[MeshSearch, tuple[Way, ...]] = {
            kind: ways_of(
                analysis,
                request,
                kind,
                self.units,
                bound=search.is_bound,
                thorough=thorough,
                splits_backward=splits,
                time_limit_s=time_limit_s,
            )
            for kind in search.kinds
        }
        self.microbatches = search.searches[0].plain.mesh.microbatches

    def _units(self) -> Units:
        """About as many units as the stages need to be even, with borders where they are so."""
        kinds = {
            own: Kind(decode(*self._of(self.fastest[own])), own.cost) for own in self.search.kinds
        }
        seconds = seconds_by_forward(self.analysis, kinds[self.search.searches[0]]).sum(axis=0)
        found = units_of(self.analysis, seconds.tolist(), GRAIN * len(self.layout.lanes))
        found = divided(found, self._asked)
        if self.layout.num_chunks > 1:
            return found
        return divided(found, self._even_cuts([kinds[own] for own in self.search.searches]))

    @functools.cached_property
    def _least(self) -> list[list[int]] | None:
        """Where chunks may begin, as of `cuts.least_starts`."""
        return least_starts(self.analysis, self.layout.hints, self.layout.lanes)

    @property
    def _asked(self) -> set[int]:
        """Positions of the forward before which hints let no chunk begin that ends behind them."""
        rows = self._least or []
        return {first for row in rows for end, first in enumerate(row) if 0 < first < end}

    def _meets_hints(self, cuts: Sequence[int]) -> bool:
        """Whether chunks that begin there are such as hints leave."""
        ends = *cuts, self.units.starts[-1]
        pairs = zip((0, *cuts), ends, self._least or [], strict=False)
        return all(first >= row[end] for first, end, row in pairs)

    def _even_cuts(self, kinds: Sequence[Kind]) -> tuple[int, ...]:
        """Where the plans of all stages are cut if memory does not matter."""
        by_kind = {k: seconds_by_forward(self.analysis, k) for k in dict.fromkeys(kinds)}
        spaces = [kind.whole.mesh for kind in kinds]
        ranks = Ranks(
            cluster=self.request.cluster,
            first=self.search.first_ranks,
            count=tuple(mesh.num_ranks for mesh in spaces),
        )
        seconds = [by_kind[kind] for kind in kinds]
        course = course_of(self.analysis)
        return outline(course, seconds, [self.layout], spaces[0].microbatches, ranks).cuts

    def _of(self, solved: tuple[Built, Solution]) -> tuple[Built, Analysis, Solution]:
        return solved[0], self.analysis, solved[1]

    def run(self, *, again: int = 0) -> _Found | None:
        """Deal out, lower, and deal out again.

        Args:
            again: Times that stages which hold less than was reckoned are given that much more.
        """
        allowed = [kind.allowed for kind in self.search.searches]
        limits = list(allowed) if self.thorough else self._sampled(allowed)
        best = None
        for _ in range(ROUNDS):
            choice = solve_inter(self._problem(limits), gap=GAP).best
            if choice is None:
                break
            dealt = self._dealt(choice)
            candidate, used = self._evaluated(dealt)
            reckoned = self._reckoned(choice)
            over = self._over(used)
            if not over:
                if not self._fits_host(candidate):
                    break
                found = self._evened(_Found(candidate, dealt.cuts), dealt)
                best = found if best is None or found.step_s < best.step_s else best
                roomier = [
                    a + max(0.0, r - u) for a, r, u in zip(allowed, reckoned, used, strict=True)
                ]
                if not again or roomier <= limits:
                    break
                again -= 1
                limits = [max(pair) for pair in zip(limits, roomier, strict=True)]
                continue
            for stage in over:
                room = used[stage] - reckoned[stage]
                limits[stage] = min(
                    limits[stage] - LESS * allowed[stage], allowed[stage] - max(room, 0.0)
                )
        return best

    def _sampled(self, allowed: Sequence[float]) -> list[float]:
        """Limits with which stages may fit at once, from the one in the middle, lowered alone."""
        if not self.search.is_bound:
            return list(allowed)
        choice = solve_inter(self._problem(allowed), gap=GAP).best
        if choice is None:
            return list(allowed)
        number, dealt = self.layout.num_stages // 2, self._dealt(choice)
        pipeline = self._cut(dealt)
        kind = dealt.stages[number].kind
        stage, peak = bytes_of_stage(self.analysis, kind, pipeline, self.layout, number)
        away = states_on_host(*pipeline.stages)
        memory = predicted_memory(stage.together, peak, self.request.optimizer, away=away)
        more = max(0.0, memory.total_bytes - self._reckoned(choice)[number])
        return [own - (1 + SPARE) * more for own in allowed]

    def fitted(self, known: Collection[tuple[int, ...]]) -> list[_Found]:
        """The even cut of what is fastest, and other cuts, every stage in its fastest way to fit.

        None where stages are of several chunks or meshes.

        Args:
            known: Cuts that are tried, too, where they could be enough faster.
        """
        if self.layout.num_chunks > 1 or len(self.search.kinds) > 1:
            return []
        (kind,) = self.search.kinds
        whole = Kind(decode(*self._of(self.fastest[kind])), kind.cost)
        alone = _Alone(self, kind)
        even = self._even_cuts([whole] * self.layout.num_stages)
        found: list[_Found] = []
        for cuts in dict.fromkeys((even, *known)):
            bounds = pairwise([0, *cuts, self.units.starts[-1]])
            stages = [_Stage(number, *own) for number, own in enumerate(bounds)]
            best_s = min((own.step_s for own in found), default=math.inf)
            if alone.free_s(stages) > (1 - PROMISING) * best_s:
                continue
            own = self._fitted(alone, stages)
            found += [own] if own else []
        return found

    def _fitted(self, alone: _Alone, stages: Sequence[_Stage]) -> _Found | None:
        """Given stages, each in the fastest way in which it fits alone."""
        cuts = tuple(stage.first for stage in stages[1:])
        best = [way for stage in stages if (way := alone.fastest(stage)) is not None]
        if len(best) < len(stages):
            return None
        ways = sorted(dict.fromkeys(best), key=lambda way: -held_bytes(way.solution))
        taken = {
            unit: ways.index(best[bisect_right(cuts, start)])
            for unit, start in enumerate(self.units.starts[:-1])
        }
        dealt = self._put_together(taken, cuts, {alone.kind: ways})
        with suppress(UnsupportedError):
            candidate, used = self._evaluated(dealt)
            if not self._over(used) and self._fits_host(candidate):
                return self._evened(_Found(candidate, cuts), dealt)
        return None

    def _over(self, used: Sequence[int]) -> list[int]:
        """Stages that hold more than they may."""
        pairs = zip(used, self.search.searches, strict=True)
        return [stage for stage, (held, own) in enumerate(pairs) if held > own.allowed]

    def _fits_host(self, candidate: Candidate) -> bool:
        return all(candidate.host_bytes <= kind.host_allowed for kind in self.search.kinds)

    def _evened(self, found: _Found, dealt: _Dealt) -> _Found:
        """What was dealt out cut inside units too, where that fits and is faster.

        A stage that then holds too much is left what it was dealt out at most. Stages of several
        chunks even each other out.
        """
        if self.layout.num_chunks > 1:
            return found
        cuts = self._even_cuts([lane.kind for lane in dealt.stages])
        # Where a stage would hold no parameter, nothing is moved.
        with suppress(UnsupportedError):
            for _ in range(EVENED):
                if cuts == dealt.cuts or any(b <= a for a, b in pairwise(cuts)):
                    break
                if not self._meets_hints(cuts):
                    break
                moved = replace(dealt, cuts=cuts)
                other, used = self._evaluated(moved)
                full = self._over(used)
                if not full:
                    faster = other.step_s < found.step_s and self._fits_host(other)
                    return _Found(other, cuts) if faster else found
                cuts = self._without_more(moved, dealt, full)
        return found

    def _without_more(self, moved: _Dealt, dealt: _Dealt, full: Collection[int]) -> tuple[int, ...]:
        """Moved cuts where no chunk of a full stage is larger than it was dealt out."""
        found, lanes = [], self.layout.lanes
        for chunk, (at, before) in enumerate(zip(moved.cuts, dealt.cuts, strict=True), start=1):
            end = min(at, before) if lanes[chunk - 1] in full else at
            found.append(max(end, before) if lanes[chunk] in full else end)
        return tuple(found)

    def _problem(self, limits: Sequence[float]) -> InterProblem:
        """The inter-op problem: every stage is a place of its own, whose devices count as one."""
        layout, kinds = self.layout, self.search.kinds
        places = tuple(
            Place(first=stage, size=1, kind=kinds.index(kind), memory_bytes=max(limit, 0.0))
            for stage, (kind, limit) in enumerate(zip(self.search.searches, limits, strict=True))
        )
        number = max(self.units.kinds) + 1
        fronts = tuple(
            tuple(tuple(way.points[own] for way in self.ways[kind]) for kind in kinds)
            for own in range(number)
        )
        setting = Setting(
            microbatches=self.microbatches,
            fronts=fronts,
            send_bytes=tuple(map(self._send_bytes, self.units.starts[1:-1])),
        )
        return InterProblem(
            blocks=self.units.kinds,
            settings=(setting,),
            families=(Family(name=self.search.name, places=places),),
            links=tuple(
                self._link(border, max(setting.send_bytes, default=0.0))
                for border in range(len(places) - 1)
            ),
            schedules=((layout.schedule, layout.num_chunks),),
            most_stages=len(places),
            starts=tuple(
                tuple(bisect_left(self.units.starts, row[end]) for end in self.units.starts)
                for row in self._least or ()
            ),
        )

    def _send_bytes(self, position: int) -> float:
        """Bytes of a microbatch that cross a position of the forward."""
        return float(course_of(self.analysis).crossing_bytes[position]) / self.microbatches

    def send_s(self, border: int, position: int) -> float:
        """Seconds of a message between two stages that are cut at a position of the forward."""
        num_bytes = self._send_bytes(position)
        return self._link(border, num_bytes).seconds(num_bytes, 1, 1)

    def _link(self, border: int, num_bytes: float) -> Link:
        """What joins two stages."""
        pairs = min(
            self.search.searches[stage].plain.mesh.num_ranks for stage in (border, border + 1)
        )
        ends = self.search.first_ranks[border : border + 2]
        return joint(self.request.cluster, ends, num_bytes, pairs)

    def _taken(self, choice: Choice) -> dict[int, int]:
        """Way of every unit: those of a kind on one chunk take theirs one after the other.

        The one that holds least comes first: when it runs again, those behind it hold no more.
        """
        taken: dict[int, int] = {}
        for piece in choice.pieces:
            left = {own: list(counts) for own, counts in piece.counts.items()}
            for unit in range(piece.first, piece.end):
                counts = left[self.units.kinds[unit]]
                way = max(n for n, count in enumerate(counts) if count)
                counts[way] -= 1
                taken[unit] = way
        return taken

    def _reckoned(self, choice: Choice) -> list[float]:
        """Bytes of every stage as the inter-op program sees them."""
        rows = schedule_named(self.layout.schedule).generate(
            self.layout.num_stages, self.layout.num_chunks, self.microbatches
        )
        loads = [fullest(row, choice.setting) for row in rows]
        taken, most, held = self._taken(choice), [0.0] * len(rows), [0.0] * len(rows)
        for chunk, (piece, lane) in enumerate(zip(choice.pieces, choice.lanes, strict=True)):
            load = loads[lane][chunk]
            if choice.chunks == 1 and choice.schedule != "zb-v":
                load = replace(load, begun=True)
            ways = self.ways[self.search.searches[lane]]
            for unit in range(piece.first, piece.end):
                point = ways[taken[unit]].points[self.units.kinds[unit]]
                held[lane] += load.bytes_of(point)
                most[lane] = max(most[lane], point.transient_bytes)
        return [a + b for a, b in zip(held, most, strict=True)]

    def _dealt(self, choice: Choice) -> _Dealt:
        """The choice put together."""
        cuts = tuple(self.units.starts[piece.first] for piece in choice.pieces[1:])
        return self._put_together(self._taken(choice), cuts, self.ways)

    def _put_together(
        self,
        taken: Mapping[int, int],
        cuts: tuple[int, ...],
        ways_of_kinds: Mapping[MeshSearch, Sequence[Way]],
    ) -> _Dealt:
        """Units, each in a way, cut into chunks."""
        search, lanes = self.search, self.layout.lanes
        borders = [0, *cuts, self.units.starts[-1]]
        lane_of = [lanes[bisect_right(borders, at) - 1] for at in self.units.starts[:-1]]
        stages, told = [], dict[MeshSearch, tuple[Built, Solution]]()
        for lane, (kind, first) in enumerate(zip(search.searches, search.first_ranks, strict=True)):
            plans = [way.plan for way in ways_of_kinds[kind]]
            own = {unit: way for unit, way in taken.items() if lane_of[unit] == lane}
            stages.append(Lane(Kind(composed(self.units, plans, own), kind.cost), first))
        for kind in search.kinds:
            own = {u: way for u, way in taken.items() if search.searches[lane_of[u]] is kind}
            way = ways_of_kinds[kind][_commonest(own)]
            bound_s = min(self.fastest[kind][1].bound_s, way.solution.objective_s)
            told[kind] = way.built, replace(way.solution, bound_s=bound_s, status="feasible")
        return _Dealt(told, stages, cuts)

    def _cut(self, dealt: _Dealt) -> Pipeline:
        """The pipeline of what was dealt out."""
        wholes = [replace(lane.kind.whole, first_rank=lane.first_rank) for lane in dealt.stages]
        return split_lanes(self.analysis, wholes, dealt.cuts, self.layout.lanes)

    def _evaluated(self, dealt: _Dealt) -> tuple[Candidate, tuple[int, ...]]:
        """What was dealt out, lowered and simulated."""
        pipeline = self._cut(dealt)
        if stage_without_parameter(pipeline.stages) is not None:
            raise UnsupportedError("a stage would hold no parameter")
        stages = dealt.stages, pipeline
        return evaluate_pipeline(self.analysis, self.request, self.search, dealt.told, stages)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of some cuts: its number, and where in the forward it begins and ends."""

    number: int
    first: int
    end: int


class _Alone:
    """Stages, each lowered alone in one way or another.

    Attributes:
        kind: Mesh of all of them.
    """

    def __init__(self, state: _Stagewise, kind: MeshSearch) -> None:
        self.state = state
        self.kind = kind
        layout = state.layout
        self.rows = turns_of(layout.schedule, layout.num_stages, 1, state.microbatches)
        self.built, self.problems = problems_of(kind, state.left_s)
        self._between: dict[tuple[bool, float], Way | None] = {}
        self._apart = {(way.solution.objective_s, _sums(way)): way for way in state.ways[kind]}
        self._best: dict[_Stage, Way | None] = {}
        self._known: dict[tuple[Way, _Stage], tuple[ChunkTime, int]] = {}

    def free_s(self, stages: Sequence[_Stage]) -> float:
        """Seconds of the step if all were as where memory does not matter."""
        state, (way, *_) = self.state, self.state.ways[self.kind]
        rows = rows_of(state.layout.schedule, len(stages), 1, state.microbatches)
        sends_s = [state.send_s(border, own.end) for border, own in enumerate(stages[:-1])]
        return simulate(rows, [self._measured(way, own)[0] for own in stages], sends_s).makespan_s

    def fastest(self, stage: _Stage) -> Way | None:
        """The fastest way in which a stage fits, with copies to the host or without."""
        if stage not in self._best:
            found = [way for own in self.problems for way in self._fitting(stage, own)]
            best = min(found, key=lambda way: self.seconds(way, stage), default=None)
            self._best[stage] = best
        return self._best[stage]

    def _fitting(self, stage: _Stage, problem: Problem) -> list[Way]:
        """The first way that fits, of less and less, and ways of which it is the front part."""
        copies = problem is self.problems[0]
        known = [way for way in self.state.ways[self.kind] if copies or not way.plan.copies]
        ways = sorted(known, key=lambda way: -_sums(way))
        first = bisect_left(ways, True, key=lambda way: self._fits(way, stage))
        if first == len(ways):
            return []
        lean, fast = ways[first], ways[first - 1] if first else None
        for _ in range(HALVED if fast is not None else 0):
            assert fast is not None
            limits = _sums(lean), _sums(fast)
            way = self._within(problem, sum(limits) / 2) if _apart(*limits) else None
            if way is None or way in (lean, fast):
                break
            lean, fast = (way, fast) if self._fits(way, stage) else (lean, way)
        faster = [] if fast is None else dict.fromkeys((ways[0], fast))
        return [lean, *(way for own in faster for way in self._mixed(stage, own, lean))]

    def _mixed(self, stage: _Stage, fast: Way, lean: Way) -> list[Way]:
        """As few units in front as make a stage fit in the way that fits, the others in the faster.

        What runs again in front does so when those behind hold nothing any more.
        """
        units = self.state.units
        first, end = (bisect_left(units.starts, at) for at in (stage.first, stage.end))

        @functools.cache
        def mixed(count: int) -> Way:
            taken = {unit: int(unit < first + count) for unit in range(first, end)}
            return replace(lean, plan=composed(units, (fast.plan, lean.plan), taken))

        counts = range(1, end - first)
        at = bisect_left(counts, True, key=lambda count: self._fits(mixed(count), stage))
        return [mixed(counts[at])] if at < len(counts) else []

    def _within(self, problem: Problem, limit: float) -> Way | None:
        """The fastest way that holds no more in all, by its sums."""
        key = problem is self.problems[0], limit
        if key not in self._between:
            solved = self.built, problem
            found = within(self.state.analysis, solved, limit, self.state.left_s)
            if found is not None:
                found = self._apart.setdefault((found.solution.objective_s, _sums(found)), found)
            self._between[key] = found
        return self._between[key]

    def _fits(self, way: Way, stage: _Stage) -> bool:
        return self._measured(way, stage)[1] <= self.kind.allowed

    def seconds(self, way: Way, stage: _Stage) -> float:
        """Of a microbatch on a stage."""
        time = self._measured(way, stage)[0]
        return time.forward_s + time.backward_s

    def _measured(self, way: Way, stage: _Stage) -> tuple[ChunkTime, int]:
        """What a microbatch takes on a stage, and what the stage holds."""
        if (way, stage) not in self._known:
            self._known[way, stage] = self._lowered(way, stage)
        return self._known[way, stage]

    def _lowered(self, way: Way, stage: _Stage) -> tuple[ChunkTime, int]:
        state, last = self.state, self.state.units.starts[-1]
        cuts = [at for at in (stage.first, stage.end) if 0 < at < last]
        number = int(stage.first > 0)
        wholes = equal_lanes(way.plan, len(cuts) + 1)
        pipeline = split_lanes(state.analysis, wholes, cuts, range(len(wholes)))
        own = lower_some(
            state.analysis,
            Kind(way.plan, self.kind.cost),
            pipeline,
            (number,),
            splits_backward=schedule_named(state.layout.schedule).splits_backward,
        )[number]
        away = states_on_host(pipeline.stages[number])
        row = [turn._replace(chunk=number) for turn in self.rows[stage.number]]
        memory = predicted_memory(own.together, own.peak(row), state.request.optimizer, away=away)
        (chunk,) = own.chunks
        return chunk.time, memory.total_bytes


@dataclass(frozen=True, slots=True)
class _Found:
    """A pipeline that fits, and its cuts."""

    candidate: Candidate
    cuts: tuple[int, ...]

    @property
    def step_s(self) -> float:
        return self.candidate.step_s


@dataclass(frozen=True, slots=True)
class _Dealt:
    """What a choice of the inter-op program comes to.

    Attributes:
        told: For every mesh, what the report tells of.
        stages: Ranks of every stage, with a plan of the whole step.
        cuts: Positions in the forward at which chunks but the first begin.
    """

    told: Mapping[MeshSearch, tuple[Built, Solution]]
    stages: Sequence[Lane]
    cuts: tuple[int, ...]


def _sums(way: Way) -> float:
    """Bytes of the whole step at most, by the sums of its solution."""
    return max(way.solution.memory_bytes)


def _apart(low: float, high: float) -> bool:
    """Whether bytes are so far apart that ways between them are worth a look."""
    return high > (1 + NEAR) * low


def joint(cluster: Cluster, ends: Sequence[int], num_bytes: float, pairs: int = 1) -> Link:
    """What joins two stages: their ranks send at once, each its part.

    Args:
        cluster: The network.
        ends: A rank of each.
        num_bytes: Of a message, about.
        pairs: Ranks that send at once, the link's own included.
    """
    link = pair_link(cluster, *ends)
    latency_s = collective_s("send", 1, link)
    moved_s = collective_s("send", max(num_bytes / pairs, 1.0), link) - latency_s
    if moved_s <= 0:
        return Link(latency_s=latency_s)
    return Link(latency_s=latency_s, bytes_per_s=num_bytes / moved_s)


def _commonest(taken: Mapping[int, int]) -> int:
    """The way that most units take."""
    counts = Counter(taken.values())
    return min(counts, key=lambda way: (-counts[way], way), default=0)


def _leanest(found: Sequence[Collection[int]], taken: Mapping[int, int], common: int) -> int:
    """The last way that units of the first group take of which any are there; a common one if none.

    Args:
        found: Groups of units.
        taken: Way of every unit that is there.
        common: The way of those that are not.
    """
    for units in found:
        ways = [taken[unit] for unit in units if unit in taken]
        if ways:
            return max(ways)
    return common


def composed(units: Units, plans: Sequence[StagePlan], taken: Mapping[int, int]) -> StagePlan:
    """A plan of the whole step of which every unit is as in one of several plans.

    Args:
        units: Of the forward.
        plans: Of the whole step, on one mesh.
        taken: Number of the plan of every unit; the commonest for those that are not here.

    The plans are in the order of what they hold: what several units read is as in the leanest, and
    so is what comes from units that are not here.
    """
    common = _commonest(taken)
    used = [plans[place] for place in sorted({*taken.values(), common})]
    number = {name: _leanest(found, taken, common) for name, found in units.places.items()}

    def own(name: str) -> StagePlan:
        return plans[number[name]]

    again = {name for plan in used for name in plan.recomputed if plan is own(name)}
    kept: dict[str, tuple[Sharding, ...]] = {}
    for plan in used:
        for value, shardings in plan.kept.items():
            maker = value.partition(":")[0]
            # What its own plan does not keep is kept where a reader's plan reads it late.
            asked = own(maker) is plan or any(
                plans[taken.get(unit, common)] is plan for unit in units.readers[maker]
            )
            if asked and maker not in again:
                kept[value] = own(maker).kept.get(value, shardings)
    return StagePlan(
        mesh=plans[common].mesh,
        first_rank=plans[common].first_rank,
        inputs=plans[common].inputs,
        parameters=tuple(
            plans[taken.get(units.owners.get(p.name, 0), common)].parameters[at]
            for at, p in enumerate(plans[common].parameters)
        ),
        nodes=tuple(own(n.name).nodes[at] for at, n in enumerate(plans[common].nodes)),
        kept=kept,
        recomputed=tuple(n.name for n in plans[common].nodes if n.name in again),
        forgotten={
            reader: left
            for plan in used
            for reader, names in plan.forgotten.items()
            if own(reader) is plan and (left := tuple(name for name in names if name in again))
        },
        offloaded=tuple(v for v in kept if v in own(v.partition(":")[0]).offloaded),
        added_up={
            value: sharding
            for plan in used
            for value, sharding in plan.added_up.items()
            if own(value.partition(":")[0]) is plan
        },
    )
