"""The loop above search and lowering.

Every mesh worth trying is solved; the best few are lowered without tensors and simulated; the plan
is the one that the simulator finds fastest and within memory. If the program needs more than the
model of the search said, the limit is tightened by the difference and the mesh is solved again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import HintError, UnsupportedError
from autopar.hint import Shard
from autopar.ir.sharding import Mesh
from autopar.plan.records import AllWays, Plan
from autopar.planner.assemble import assemble
from autopar.planner.batches import (
    COUNTS,
    batch_misfit,
    in_time,
    microbatch_counts,
    samples_of,
    stage_counts,
)
from autopar.planner.bounds import Bounds
from autopar.planner.cuts import least_starts
from autopar.planner.failures import keep_conflict, nothing_fits
from autopar.planner.hints import Settled, check_optimizer, settle
from autopar.planner.lanes import WORTH, Lanes, prepare
from autopar.planner.layout import Layout
from autopar.planner.parts import Part, parts
from autopar.planner.pipelines import CHEAP, Pipelines, Way, layouts
from autopar.planner.prove import prove, prove_harder
from autopar.planner.refine import refined
from autopar.planner.request import Candidate, Failure, Request
from autopar.planner.sizes import Promising, unlike, ways
from autopar.planner.stagewise import stagewise
from autopar.planner.units import Units
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from autopar.search.collection import no_collection
from autopar.search.outer import (
    flat_mesh,
    is_free,
    proportional,
    run_meshes,
    stage_meshes,
    with_shares,
)
from autopar.search.restrict import axis_named


@no_collection()
def make_plan(analysis: Analysis, request: Request) -> Plan:
    """The fastest plan within memory that the hints allow.

    Raises:
        HintError: A hint matches nothing or contradicts another.
        InfeasibleError: No plan was found that fits the memory.
        SearchTimeoutError: The time ran out before a plan was found.
    """
    first_batch = request.settled_plan is None
    settled = settle(
        analysis, request.cluster, request.hints, request.memory_fraction, first=first_batch
    )
    check_optimizer(analysis.graph, settled.restrictions, request.optimizer)
    start = time.perf_counter()
    first, *others = parts(request, settled)
    outer = _Outer(analysis, first.asked(request), settled)
    outer.run()
    outers, known = {first: outer}, {first: outer}
    for part in others:
        best_s = min((c.step_s for own in outers.values() for c in own.found), default=math.inf)
        left_s = max(0.0, request.time_limit_s - (time.perf_counter() - start))
        own = _Outer(analysis, part.asked(request, time_limit_s=left_s), settled, best_s)
        known[part] = own
        if own.least_s >= best_s:
            continue
        if not left_s:
            outer.cut_short = True
            continue
        outers[part] = own
        own.run_if_allowed()
    if not any(own.found for own in outers.values()):
        outer.run_harder()
    found = [(part, c) for part, own in outers.items() for c in own.found]
    if not found:
        conflict = keep_conflict(analysis, outer.request, settled, outer.failures)
        raise conflict or nothing_fits(analysis, settled, outer.failures, first.cluster)
    part, best = _fewest(found)
    best = refined(analysis, outers[part].request, best, settled.usable_bytes)
    return assemble(
        analysis,
        request,
        part.moved(best),
        [candidate for _, candidate in found],
        tried=[
            (f"{part.name}{mesh}", seconds)
            for part, own in outers.items()
            for mesh, seconds in own.tried
        ],
        all_ways=_all_ways(known.values(), best.step_s),
        seconds=time.perf_counter() - start,
        cut_short=any(own.cut_short for own in outers.values()),
    )


def _all_ways(outers: Collection[_Outer], step_s: float) -> AllWays:
    """What is proven of all ways, of which the best plan that was found takes so long."""
    bound_s = min(outer.least_s for outer in outers)
    listed = [way for outer in outers for way in outer.listed()]
    left = [way.bound_s < step_s for way in listed if not way.tried]
    return AllWays(
        bound_s=bound_s,
        gap=max(0.0, 1 - bound_s / step_s) if step_s else 0.0,
        tried=len(listed) - len(left),
        excluded=left.count(False),
        estimated=left.count(True),
    )


SAME = 1e-3
"""Relative difference of seconds up to which steps are as fast."""


def _fewest(found: Sequence[tuple[Part, Candidate]]) -> tuple[Part, Candidate]:
    """The fastest candidate and its part; of those as fast, the one on fewest ranks."""
    best_s = min(c.step_s for _, c in found)
    same = [(part, c) for part, c in found if c.step_s <= (1 + SAME) * best_s]
    return min(same, key=lambda own: (own[1].num_ranks, own[1].step_s))


@dataclass(frozen=True, slots=True)
class _Listed:
    """A way that there is.

    Attributes:
        bound_s: Seconds that none of its plans takes less than.
        tried: Whether it was solved.
    """

    bound_s: float
    tried: bool


class _Outer:
    """The outer choices: stages, schedule, microbatches and mesh.

    Attributes:
        beat_s: Step of the best plan on other ranks.
        bounds: What is proven of every way.
        tried: Meshes with what the search found on them.
        found: What fits; ``piped`` the pipelines in it, with their meshes.
        failures: What does not.
        ideal_s: Least seconds of a step without a pipeline if nothing moved, over meshes tried.
        cut_short: Whether the clock ended the search.
        harder: Whether nothing fits at first, so that local moves and sparse checkpoints are tried.
    """

    def __init__(
        self, analysis: Analysis, request: Request, settled: Settled, beat_s: float = math.inf
    ) -> None:
        self.analysis = analysis
        self.request = request
        self.settled = settled
        self.beat_s = beat_s
        self.bounds = Bounds(analysis, request, settled)
        self.start = time.perf_counter()
        self.tried: list[tuple[str, float | None]] = []
        self.found: list[Candidate] = []
        self.piped: list[tuple[Candidate, Lanes]] = []
        self.failures: list[Failure] = []
        self.ideal_s = math.inf
        self.cut_short = False
        self.harder = False
        self._laid: dict[tuple[tuple[Mesh, ...], Layout], bool] = {}
        self._piped: Pipelines | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def run_harder(self) -> None:
        """Try it all again, as far as local moves and sparser checkpoints go: nothing fits without.

        What fails once more is not said again.
        """
        if self.left_s > 1:
            failures, self.harder = list(self.failures), True
            self.run()
            self.failures = failures

    def run(self) -> None:
        """Try what the hints leave."""
        taken, settled = self.request.settled_plan, self.settled
        cluster, degrees = self.request.cluster, settled.degrees
        if taken is not None:
            chunks = len(taken.stages) // taken.num_stages
            self.settled = settled = replace(settled, schedule=taken.schedule, chunks=chunks)
            spaces = tuple(mesh.space for mesh in taken.meshes)
            layout = Layout(schedule=taken.schedule, num_stages=taken.num_stages, num_chunks=chunks)
            if settled.microbatches is not None:
                count = self._at_most(settled.microbatches, layout, spaces)
                self.settled = settled = replace(settled, microbatches=count)
            self._try_layout(layout, (spaces,))
            return
        choices, refused = self._with_axes(self._choices()), None
        if not settled.is_piped:
            layout = Layout(schedule=settled.schedule, num_stages=1, num_chunks=settled.chunks)
            try:
                alone = self._with_axes(stage_meshes(cluster, degrees, 1))
                flat = flat_mesh(cluster) if is_free(degrees) else None
                alone = alone or self._with_axes([] if flat is None else [(flat,)])
            except HintError as error:
                refused = error
            else:
                if not alone and not choices:
                    raise self._without_axis()
                if alone:
                    self._try_layout(layout, alone)
                if is_free(degrees):
                    self._try_flat(layout)
        if choices:
            self._piped = Pipelines(self.analysis, self.request, settled, self)
            self._piped.run(choices)
            self._try_sizes()
        if settled.is_piped and not choices and self._axes and self._choices():
            raise self._without_axis()
        if settled.is_piped and not self.found:
            self._try_filled(choices)
        self._refine()
        if refused is not None and not self.tried:
            raise refused

    def _at_most(self, count: int, layout: Layout, spaces: Sequence[Mesh]) -> int:
        """Microbatches of a later batch, which may be too small for as many as were asked for.

        As many as were asked for where no fewer will do, or where their number is part of what the
        model computes.
        """
        samples = samples_of(self.analysis.graph)
        for fewer in () if self.analysis.graph.alone else range(count, 0, -1):
            full = (fewer - 1) * math.ceil(samples / fewer) < samples
            if full and layout.fits(fewer) and self._fits(self._in_time(spaces, fewer)):
                return fewer
        return count

    def run_if_allowed(self) -> None:
        """As `run`; nothing is found where the hints ask for another number of ranks."""
        with suppress(HintError, UnsupportedError):
            self.run()

    def _try_layout(self, layout: Layout, choices: Sequence[tuple[Mesh, ...]]) -> None:
        """Try meshes of the stages with more and more microbatches, as long as memory asks."""
        counts = microbatch_counts(
            self.analysis.graph,
            self.settled.microbatches,
            layout,
            lambda count: any(self._fits(self._in_time(s, count)) for s in choices),
        )
        before = beat_s = math.inf
        ways = {count: [self._in_time(spaces, count) for spaces in choices] for count in counts}
        for meshes in itertools.chain.from_iterable(ways.values()):
            if self._fits(meshes):
                self._laid.setdefault((meshes, layout), False)
        for count in counts:
            try:
                here = [self._try(layout, meshes, beat_s) for meshes in ways[count]]
            except UnsupportedError:
                # The model needs its whole batch at once: then there are no more microbatches.
                if count == counts[0]:
                    raise
                for meshes in itertools.chain.from_iterable(ways[c] for c in counts if c >= count):
                    self._laid.pop((meshes, layout), None)
                break
            fitting = [candidate for candidate in here if candidate is not None]
            now = min((c.step_s for c in fitting), default=math.inf)
            # More microbatches only help to hold less.
            if any(not c.limited for c in fitting) or now >= before < math.inf:
                break
            before = now
            if layout.num_stages == 1:
                beat_s = (1 + SLOWER) * min((c.objective_s for c in self.found), default=math.inf)

    def _try_flat(self, layout: Layout) -> None:
        """Try all ranks as one axis, if that is modelled faster than what was found."""
        flat = flat_mesh(self.request.cluster)
        best = min(self.found, key=lambda c: c.objective_s, default=None)
        if flat is None or best is None or not self._with_axes([(flat,)]):
            return
        meshes = self._in_time((flat,), best.mesh.microbatches)
        if self.late() or not self._fits(meshes):
            return
        self._laid[meshes, layout] = False
        if self.is_beaten(meshes, best.mesh.microbatches, layout):
            return
        search = prepare(self.analysis, self.request, self.settled, meshes, layout)
        (kind,) = search.kinds
        self.ideal_s = min(self.ideal_s, _ideal_s(kind.plain))
        if kind.modelled_s(self.left_s) < best.objective_s:
            self._laid[meshes, layout] = True
            self.finish(search)
        else:
            self.tried.append((search.name, None))

    def _fits(self, meshes: Sequence[Mesh]) -> bool:
        """Whether the batch can be cut over the meshes of all stages."""
        return not any(batch_misfit(self.analysis.graph, mesh) for mesh in meshes)

    def _in_time(self, spaces: Sequence[Mesh], microbatches: int) -> tuple[Mesh, ...]:
        """The meshes of stages with shares of the batch and a time axis."""
        return in_time(self.analysis.graph, self._shared(spaces, microbatches), microbatches)

    def _shared(self, spaces: Sequence[Mesh], microbatches: int) -> tuple[Mesh, ...]:
        """The meshes of stages with the shares of the batch that their ``dp`` ranks take."""
        samples = samples_of(self.analysis.graph)
        settled, found, first = self.request.settled_plan is not None, [], 0
        for space in spaces:
            parts = self._parts(space, first, samples // microbatches)
            # Another batch than the one that was planned for may not divide so.
            fits = parts is not None and samples % (sum(parts) * microbatches) == 0
            bare = space.even
            found.append(with_shares(bare, parts) if parts and (fits or not settled) else bare)
            first += space.num_ranks
        return tuple(found)

    def _parts(self, space: Mesh, first_rank: int, samples: int) -> tuple[int, ...] | None:
        """Parts of the batch for the ranks of ``dp``: as hinted, else as they are fast."""
        size = dict(zip(space.roles, space.sizes, strict=True)).get("dp", 1)
        given = self.settled.shares
        if given is not None and len(given) == size:
            return given
        runs = self.request.cluster.runs_between(first_rank, first_rank + space.num_ranks)
        if size == 1 or len(runs) == 1:
            return None
        speeds = [math.inf] * size
        for rank in range(space.num_ranks):
            device = self.request.cluster.device(first_rank + rank)
            at = dict(zip(space.roles, space.coordinates(rank), strict=True)).get("dp", 0)
            speeds[at] = min(speeds[at], max(device.peak_flops_per_s.values()))
        return None if len(set(speeds)) == 1 else proportional(samples, speeds)

    def _try(
        self, layout: Layout, meshes: Sequence[Mesh], beat_s: float = math.inf
    ) -> Candidate | None:
        for mesh in meshes:
            if misfit := batch_misfit(self.analysis.graph, mesh):
                if self.settled.microbatches is not None or self.settled.shares is not None:
                    raise HintError(misfit)
                self.failures.append(Failure(mesh, True, float("inf")))
                return None
        if self.is_beaten(meshes, meshes[0].microbatches, layout):
            return None
        if self.late():
            self.failures.append(Failure(meshes[0], False, math.inf))
            return None
        search = prepare(self.analysis, self.request, self.settled, meshes, layout)
        self._laid[tuple(meshes), layout] = True
        if len(meshes) == 1:
            self.ideal_s = min(self.ideal_s, _ideal_s(search.kinds[0].plain))
        return self.finish(search, beat_s)

    def finish(self, search: Lanes, beat_s: float = math.inf) -> Candidate | None:
        if self.harder:
            outcome = prove_harder(self.analysis, self.request, search, self.left_s)
        else:
            outcome = self._proven(search, beat_s)
        if isinstance(outcome, Candidate):
            self.found.append(outcome)
            if len(search.searches) > 1:
                self.piped.append((outcome, search))
            self.tried.append((search.under(outcome.schedule), outcome.objective_s))
            return outcome
        self.failures.append(outcome)
        self.tried.append((search.under(search.layout.schedule), None))
        return None

    def _proven(self, search: Lanes, beat_s: float) -> Candidate | Failure:
        """The fastest that fits: stages that are alike, or that differ where none of these fit.

        Of a long step, stages that are alike are lowered only where none that differ are found.
        """
        unlike = self._unlike(search, self.best_s) if self._is_long else None
        if unlike is not None:
            return unlike
        outcome = prove(self.analysis, self.request, search, self.left_s, beat_s)
        if isinstance(outcome, Failure) and not self._is_long:
            return self._unlike(search, self.best_s) or outcome
        return outcome

    @property
    def _is_long(self) -> bool:
        return len(self.analysis.graph.nodes) > CHEAP

    def _try_sizes(self) -> None:
        """Try stages of unlike sizes, and of other meshes, that the inter-op program promises.

        None are looked for of a long step, where hints name axes, or with nothing to beat.
        """
        if self._is_long or self._axes or self.best_s == math.inf or self.late():
            return
        promising: list[Promising] = []
        # What hints leave no mesh for is no plan.
        with suppress(HintError, UnsupportedError):
            promising = unlike(
                self.analysis,
                self.request,
                self.settled,
                below_s=self.best_s,
                time_limit_s=self.left_s,
            )
        for searches, units in promising:
            for search in searches:
                found = None if self.late() else self._unlike(search, math.inf, units)
                schedule = search.layout.schedule if found is None else found.schedule
                step_s = None if found is None else found.objective_s
                self.tried.append((search.under(schedule), step_s))
                if found is not None:
                    self.found.append(found)
                    break

    def _refine(self) -> None:
        """Let stages of the best pipeline differ, if they do not yet."""
        if not self.piped or self._is_long:
            return
        best, search = min(self.piped, key=lambda own: own[0].step_s)
        if best.step_s > (1 + WORTH) * self.best_s or self.late():
            return
        unlike = self._unlike(search, self.best_s)
        if unlike is not None and unlike.step_s < self.best_s:
            self.found.append(unlike)
            self.tried.append((search.under(unlike.schedule), unlike.objective_s))

    def _unlike(self, search: Lanes, beat_s: float, units: Units | None = None) -> Candidate | None:
        """A pipeline of stages that differ."""
        if len(search.searches) == 1 or self.request.settled_plan is not None:
            return None
        # What does not go together is no plan.
        with suppress(HintError, UnsupportedError):
            return stagewise(
                self.analysis,
                self.request,
                search,
                self.left_s,
                beat_s,
                thorough=not self._is_long,
                units=units,
            )
        return None

    @property
    def left_s(self) -> float:
        return max(self.request.time_limit_s - self.seconds, 1.0)

    def late(self) -> bool:
        """Whether the time is over: then what is left is not tried, which is noted."""
        late = bool(self.tried) and self.seconds > self.request.time_limit_s
        self.cut_short |= late
        return late

    def _choices(self) -> list[tuple[Mesh, ...]]:
        """Meshes of the stages of pipelines, of more and more stages.

        Stages are whole nodes, equal parts of nodes, and equal devices; as hints ask where they do,
        and of all meshes then.

        Raises:
            HintError: There are no such stages where hints ask for them.
        """
        settled, cluster = self.settled, self.request.cluster
        if settled.num_stages == 1:
            return []
        if settled.num_stages is not None:
            return list(stage_meshes(cluster, settled.degrees, settled.num_stages))
        choices: list[tuple[Mesh, ...]] = []
        for num_stages in stage_counts(self.analysis, cluster, whole=not settled.cuts):
            try:
                found = stage_meshes(cluster, settled.degrees, num_stages)
            except HintError:
                continue
            choices += found[:1] if is_free(settled.degrees) else found
        if settled.degrees is None:
            choices += run_meshes(cluster)
        return choices

    @property
    def _axes(self) -> list[Shard]:
        """Hints that name an axis, but for roles that hints leave one rank."""
        degrees = self.settled.degrees
        hints = self.settled.restrictions.parameters
        shards = [h for h in hints if isinstance(h, Shard)]
        return [h for h in shards if getattr(degrees, h.axis, None) != 1]

    def _with_axes(self, choices: Sequence[tuple[Mesh, ...]]) -> list[tuple[Mesh, ...]]:
        """Those in which every axis that a hint names is there, on a stage at least."""
        return [
            meshes
            for meshes in choices
            if all(any(_has_axis(mesh, h.axis) for mesh in meshes) for h in self._axes)
        ]

    def _without_axis(self) -> HintError:
        """The error where a hint names an axis that no mesh has."""
        cluster, degrees = self.request.cluster, self.settled.degrees
        tried = [*self._choices()]
        with suppress(HintError):
            tried += stage_meshes(cluster, degrees, 1)
        names = [zip(mesh.names, mesh.sizes, strict=True) for meshes in tried for mesh in meshes]
        there = dict.fromkeys(name for own in names for name, size in own if size > 1)
        absent = next((h for h in self._axes if h.axis not in there), self._axes[0])
        make = ", or make one with hint.degrees" if degrees is None else ""
        return HintError(
            f"cannot apply {absent}: there is no mesh axis {absent.axis!r}, there are "
            f"{', '.join(map(repr, there)) or 'none'}; name one of these{make}"
        )

    def _try_filled(self, choices: Sequence[tuple[Mesh, ...]]) -> None:
        """Try the schedule in force in more and more microbatches, as long as memory asks.

        Raises:
            HintError: The hints leave no cuts.
            UnsupportedError: The schedule cannot do what the hints ask for.
        """
        refused: HintError | None = None
        for num_stages, group in itertools.groupby(choices, key=len):
            layout = layouts(self.analysis, self.settled, num_stages)[0]
            try:
                least_starts(self.analysis, layout.hints, layout.lanes)
            except HintError as error:
                refused = error
                continue
            self._try_layout(layout, list(group))
            if self.found:
                break
        if not self.tried:
            cluster = self.request.cluster
            raise refused or HintError(
                f"cannot apply {self.settled.cuts[0]}: the {cluster.num_devices} ranks of cluster "
                f"{cluster.name!r} make no stages of equal size; say how many there are with "
                "hint.degrees(pp=...)"
            )

    @property
    def best_s(self) -> float:
        return min((c.step_s for c in self.found), default=math.inf)

    def is_beaten(self, spaces: Sequence[Mesh], microbatches: int, layout: Layout) -> bool:
        """Whether it is proven that no plan of a way is faster than the best."""
        best_s = min(self.best_s, self.beat_s)
        return best_s < math.inf and self.bounds.way_s(spaces, microbatches, layout) >= best_s

    def listed(self) -> Iterator[_Listed]:
        """Every way that there is; all of them as one where none was looked at."""
        if not self.tried:
            if self.least_s < math.inf:
                yield _Listed(self.least_s, False)
            return
        for (meshes, layout), tried in self._laid.items():
            count = meshes[0].microbatches
            yield _Listed(self.bounds.way_s(_spaces(meshes), count, layout), tried)
        outcomes = self._piped.outcomes if self._piped else {}
        for way, outcome in outcomes.items():
            if outcome is not None:
                bound_s = self.bounds.way_s(way.spaces, way.count, way.layout)
                yield _Listed(bound_s, outcome)
        for spaces, layout in self._possible():
            for count in self._counts(layout) if len(spaces) > 1 else ():
                meshes = self._in_time(spaces, count)
                known = (meshes, layout) in self._laid
                known |= Way(spaces=spaces, count=count, layout=layout) in outcomes
                if not known and self._fits(meshes):
                    yield _Listed(self.bounds.way_s(_spaces(meshes), count, layout), False)

    @cached_property
    def least_s(self) -> float:
        """Seconds that no plan on these ranks takes less than; infinite where hints allow none."""
        bounds_s = []
        unlike_sizes = () if self._is_long else ways(self.request.cluster, self.settled)
        for spaces, layout in (*self._possible(), *unlike_sizes):
            for count in self._counts(layout):
                # A pipeline may take its ranks' parts of the batch for equal.
                for own in {spaces, self._shared(spaces, count)}:
                    bounds_s.append(self.bounds.way_s(own, count, layout))
        return min(bounds_s, default=math.inf)

    def _counts(self, layout: Layout) -> list[int]:
        """Microbatches that a layout may run."""
        forced, num_stages = self.settled.microbatches, layout.num_stages
        if forced is not None or num_stages == 1:
            # Without a pipeline, more of them only take longer.
            return [forced or 1]
        samples = samples_of(self.analysis.graph)
        rounds = {count * n for count in COUNTS for n in (1, num_stages)}
        return [n for n in sorted(rounds) if samples % n == 0 and layout.fits(n)]

    def _possible(self) -> Iterator[tuple[tuple[Mesh, ...], Layout]]:
        """Meshes of stages, and schedules, that hints leave."""
        taken, settled = self.request.settled_plan, self.settled
        if taken is not None:
            chunks = len(taken.stages) // taken.num_stages
            spaces = tuple(mesh.space for mesh in taken.meshes)
            stages = taken.num_stages
            yield spaces, Layout(schedule=taken.schedule, num_stages=stages, num_chunks=chunks)
            return
        with suppress(HintError, UnsupportedError):
            for spaces in self._choices():
                for layout in layouts(self.analysis, settled, len(spaces)):
                    yield spaces, layout
        if not settled.is_piped:
            layout = Layout(schedule=settled.schedule, num_stages=1, num_chunks=settled.chunks)
            with suppress(HintError, UnsupportedError):
                for spaces in stage_meshes(self.request.cluster, settled.degrees, 1):
                    yield spaces, layout


def _spaces(meshes: Sequence[Mesh]) -> tuple[Mesh, ...]:
    """Meshes without their time axis."""
    return tuple(mesh.space for mesh in meshes)


def _has_axis(mesh: Mesh, name: str) -> bool:
    axis = axis_named(mesh, name)
    return axis is not None and mesh.sizes[axis] > 1


SLOWER = 0.02
"""What the search may model more, of a step in more microbatches, for it to be lowered."""


def _ideal_s(built: Built) -> float:
    """Seconds of the step if every class took its fastest strategy and nothing moved."""
    return sum(min(node.seconds) for node in built.problem.nodes)
