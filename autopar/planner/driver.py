"""The loop above search and lowering.

Every mesh worth trying is solved; the best few are lowered without tensors and simulated; the plan
is the one that the simulator finds fastest and within memory. If the program needs more than the
model of the search said, the limit is tightened by the difference and the mesh is solved again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost, axis_seconds, update_bytes_per_s
from autopar.errors import HintError, InfeasibleError, SearchTimeoutError, UnsupportedError
from autopar.hint import Hint, Schedule
from autopar.ir.graph import CONSTANT, INPUT, KEY, Graph
from autopar.ir.sharding import WHOLE, Mesh, Sharding, Split
from autopar.lower.overlap import overlap
from autopar.lower.program import LOOP, Program
from autopar.lower.ranks import distinct_coordinates
from autopar.lower.simulate import CollectiveUse, Prices, Simulation, prices, simulate
from autopar.lower.spmd import lower
from autopar.lower.stretch import ONCE, NotPeriodicError, Repeats
from autopar.lower.unroll import in_order, unroll
from autopar.options import ADAMW, OptimizerSpec
from autopar.plan.records import (
    CollectivePlan,
    CopyPlan,
    Memory,
    Plan,
    Prediction,
    Saving,
    SearchReport,
    StagePlan,
)
from autopar.plan.wording import bytes_text
from autopar.planner.cuts import least_starts
from autopar.planner.hints import Settled, settle
from autopar.planner.pipeline import Kind, Lane, Layout, StageResult, cut, evaluate_pipeline
from autopar.planner.savings import savings
from autopar.planner.shorten import Short, shorten
from autopar.planner.update import states_on_host, update_of
from autopar.search.analysis import Analysis
from autopar.search.build import (
    Built,
    StateBytes,
    build_problem,
    decode,
    describe_mesh,
    with_reruns,
)
from autopar.search.collection import no_collection
from autopar.search.copies import REACH
from autopar.search.intra import Least, away_bytes, fits, least_bytes, moment_of, solve
from autopar.search.outer import (
    batch_parts,
    common_rows,
    meshes,
    proportional,
    stage_meshes,
    with_shares,
)
from autopar.search.problem import Solution
from autopar.search.stages import Pipeline
from autopar.search.sums import summed_early
from cost_models.cluster import Cluster, Device

ROUNDS, PIPELINE_ROUNDS = 6, 4
"""Times a mesh is solved again with a tighter memory limit; stages are lowered in full each."""

UNEVEN = 0.1
"""Part of the memory that is left at first for stages that hold more than others."""

MORE = 1.1
"""Room that is left for what the problem does not know of, which grows as other things shrink."""

LESS = 0.01
"""Least part of the memory by which the limit is tightened from round to round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to plan.

    Attributes:
        model: Name of the model.
        fingerprint: Of the captured step.
        cluster: Where.
        hints: Restrictions of the user.
        optimizer: What its state takes.
        time_limit_s: For the whole search.
        memory_fraction: Usable part of a device's memory; None for the cluster's own.
        capture_s: Seconds the capture took, for the report.
        settled_plan: Plan whose mesh, stages and stored shardings must be taken over: the
            parameters exist already, and another batch or mode is planned.
    """

    model: str
    fingerprint: str
    cluster: Cluster
    hints: tuple[Hint, ...] = ()
    optimizer: OptimizerSpec = ADAMW
    time_limit_s: float = 120.0
    memory_fraction: float | None = None
    capture_s: float = 0.0
    settled_plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One solved and simulated choice of meshes.

    Attributes:
        mesh: Of the slowest stage.
        built: The problem of that mesh; ``solution`` what the solver found.
        pipeline: The stages, and what crosses them; ``costs`` prices each.
        schedule: Order of their microbatches.
        simulation: Of the slowest rank; its seconds are those of the step without the update.
        memory: Of the rank that holds most of what it may; ``limit_bytes`` is that.
        update_s: Of the optimizer's update.
        objective_s: Seconds as the search models them: of the whole model, shared by the stages as
            they are fast; ``bound_s`` the proven least of them on these meshes.
        host_bytes: Of host memory, a rank on average, on the node where most is used.
        limited: Whether memory kept it from being faster.
    """

    mesh: Mesh
    built: Built
    solution: Solution
    pipeline: Pipeline
    costs: tuple[NodeCost, ...]
    schedule: str
    simulation: Simulation
    memory: Memory
    limit_bytes: int
    update_s: float
    objective_s: float
    bound_s: float
    host_bytes: float = 0.0
    limited: bool = False

    @property
    def step_s(self) -> float:
        return self.simulation.seconds + self.update_s

    @property
    def num_stages(self) -> int:
        return len({stage.first_rank for stage in self.pipeline.stages})


@no_collection()
def make_plan(analysis: Analysis, request: Request) -> Plan:
    """The fastest plan within memory that the hints allow.

    Raises:
        HintError: A hint matches nothing or contradicts another.
        InfeasibleError: It is proven that no plan fits the memory.
        SearchTimeoutError: The time ran out before a plan was found.
    """
    settled = settle(analysis, request.cluster, request.hints, request.memory_fraction)
    if settled.restrictions.offload_states and request.optimizer.host_bucket_elements is None:
        raise HintError(
            "cannot apply hint.offload('optimizer'): the optimizer keeps its state on the device; "
            "pass optimizer=autopar.optim.AdamW, or an OptimizerSpec with host_bucket_elements"
        )
    outer = _Outer(analysis, request, settled)
    outer.run()
    if not outer.found:
        conflict = _keep_conflict(analysis, request, settled, outer.failures)
        raise conflict or _nothing_fits(analysis, settled, outer.failures, request.cluster)
    best = min(outer.found, key=lambda c: c.step_s)
    return _plan(analysis, request, best, outer.found, outer.tried, outer.seconds)


class _Outer:
    """The outer choices: stages, schedule, microbatches and mesh.

    Attributes:
        tried: Meshes with what the search found on them.
        found: What fits.
        failures: What does not.
        ideal_s: Least seconds of a step without a pipeline if nothing moved, over meshes tried.
    """

    def __init__(self, analysis: Analysis, request: Request, settled: Settled) -> None:
        self.analysis = analysis
        self.request = request
        self.settled = settled
        self.start = time.perf_counter()
        self.tried: list[tuple[str, float | None]] = []
        self.found: list[Candidate] = []
        self.failures: list[_Failure] = []
        self.ideal_s = math.inf

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def run(self) -> None:
        """Try what the hints leave."""
        taken, settled = self.request.settled_plan, self.settled
        cluster, degrees = self.request.cluster, settled.degrees
        if taken is not None:
            chunks = len(taken.stages) // taken.num_stages
            self.settled = settled = replace(settled, schedule=taken.schedule, chunks=chunks)
            spaces = tuple(mesh.space for mesh in taken.meshes)
            self._try_layout(self._layout(taken.num_stages), (spaces,))
            return
        asked = None if degrees is None else degrees.pp
        layout = self._layout(asked or 1)
        least_starts(self.analysis, layout.hints, layout.lanes)
        self._try_layout(layout, stage_meshes(cluster, degrees, layout.num_stages))
        if asked is None:
            self._try_pipelines()

    def _layout(self, num_stages: int) -> Layout:
        return Layout(
            schedule=self.settled.schedule,
            num_stages=num_stages,
            num_chunks=self.settled.chunks,
            hints=self.settled.cuts,
        )

    def _try_layout(self, layout: Layout, choices: Sequence[tuple[Mesh, ...]]) -> None:
        """Try meshes of the stages with more and more microbatches, as long as memory asks."""
        counts = microbatch_counts(
            self.analysis.graph,
            self.settled.microbatches,
            layout,
            lambda count: any(self._fits(in_time(self._shared(s, count), count)) for s in choices),
        )
        before = beat_s = math.inf
        for count in counts:
            try:
                here = [
                    self._try(layout, in_time(self._shared(s, count), count), beat_s)
                    for s in choices
                ]
            except UnsupportedError:
                # The model needs its whole batch at once: then there are no more microbatches.
                if count == counts[0]:
                    raise
                break
            fitting = [candidate for candidate in here if candidate is not None]
            now = min((c.step_s for c in fitting), default=math.inf)
            # More microbatches only help to hold less.
            if any(not c.limited for c in fitting) or now >= before < math.inf:
                break
            before = now
            if layout.num_stages == 1:
                beat_s = (1 + SLOWER) * min((c.objective_s for c in self.found), default=math.inf)

    def _fits(self, meshes: Sequence[Mesh]) -> bool:
        """Whether the batch can be cut over the meshes of all stages."""
        return not any(batch_misfit(self.analysis.graph, mesh) for mesh in meshes)

    def _shared(self, spaces: Sequence[Mesh], microbatches: int) -> tuple[Mesh, ...]:
        """The meshes of stages with the shares of the batch that their ``dp`` ranks take."""
        samples = _samples(self.analysis.graph)
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
                self.failures.append(_Failure(mesh, True, float("inf")))
                return None
        search = _prepare(self.analysis, self.request, self.settled, meshes, layout)
        if len(meshes) == 1:
            self.ideal_s = min(self.ideal_s, _ideal_s(search.kinds[0].plain))
        return self._finish(search, beat_s)

    def _finish(self, search: _Lanes, beat_s: float = math.inf) -> Candidate | None:
        outcome = _finish(self.analysis, self.request, search, self._left_s, beat_s)
        if isinstance(outcome, Candidate):
            self.found.append(outcome)
            self.tried.append((search.name, outcome.objective_s))
            return outcome
        self.failures.append(outcome)
        self.tried.append((search.name, None))
        return None

    @property
    def _left_s(self) -> float:
        return max(self.request.time_limit_s - self.seconds, 1.0)

    def _try_pipelines(self) -> None:
        """Try stages of whole nodes, the `PIPELINES` that promise most, until one fits.

        A pipeline idles for (stages - 1) / microbatches of what it computes: where that leaves
        less than `WORTH` of the step to gain, it is not solved.
        """
        promising: list[tuple[float, int, _Lanes]] = []
        for num_stages in stage_counts(self.analysis, self.request.cluster):
            search = self._pipeline(self._layout(num_stages))
            if search is not None:
                seconds = search.estimate_s(self._left_s)
                promising.append((seconds, num_stages, search))
        for seconds, _, search in sorted(promising, key=lambda item: item[:2])[:PIPELINES]:
            if seconds >= (1 - WORTH) * self._best_s or self._finish(search) is not None:
                break

    def _pipeline(self, layout: Layout) -> _Lanes | None:
        """The problem of a pipeline, if it is worth a look."""
        cluster, degrees = self.request.cluster, self.settled.degrees
        try:
            mesh = meshes(cluster, degrees, num_stages=layout.num_stages)[0]
        except HintError:
            return None
        count = self.settled.microbatches or _filling(self.analysis.graph, layout, mesh)
        mesh = mesh.with_time(count)
        if not layout.fits(count) or count < 2 or batch_misfit(self.analysis.graph, mesh):
            return None
        ideal_s = 0.0 if self.ideal_s == math.inf else self.ideal_s
        if ideal_s * (1 + (layout.num_stages - 1) / count) > (1 - WORTH) * self._best_s:
            return None
        try:
            alike = (mesh,) * layout.num_stages
            return _prepare(self.analysis, self.request, self.settled, alike, layout)
        except (HintError, UnsupportedError):
            # It cannot run in microbatches, or not under the hints: then it is no pipeline.
            return None

    @property
    def _best_s(self) -> float:
        return min((c.step_s for c in self.found), default=math.inf)


PIPELINES = 2
"""Pipelines that are solved within memory, cut and simulated."""

SLOWER = 0.02
"""What the search may model more, of a step in more microbatches, for it to be lowered."""

WORTH = 0.1
"""Least part of the step that a pipeline must be able to gain to be tried."""


def stage_counts(analysis: Analysis, cluster: Cluster) -> tuple[int, ...]:
    """Numbers of stages to try: powers of two of whole nodes, no more than repeated blocks."""
    nodes = cluster.num_devices // cluster.levels[0].size
    depth = max((len(names) for names in analysis.folding.classes), default=1)
    return tuple(count for count in (2, 4, 8, 16) if nodes % count == 0 and count <= max(depth, 2))


def _filling(graph: Graph, layout: Layout, mesh: Mesh) -> int:
    """Microbatches of a pipeline: the most that leave every outer rank a sample, up to 8 a stage.

    Args:
        graph: The step.
        layout: The pipeline.
        mesh: Of one stage; its outermost axis is the likeliest to split the batch.
    """
    samples = _samples(graph)
    outer = mesh.sizes[0] if len(mesh.sizes) > 1 else 1
    fitting = [
        count
        for count in COUNTS
        if samples % count == 0
        and samples // count >= min(outer, samples)
        and count <= 8 * layout.num_stages
        and layout.fits(count)
    ]
    return max(fitting, default=1)


def _ideal_s(built: Built) -> float:
    """Seconds of the step if every class took its fastest strategy and nothing moved."""
    return sum(min(node.seconds) for node in built.problem.nodes)


COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of microbatches that are tried."""


def _samples(graph: Graph) -> int:
    """Samples of the batch: of its input that has fewest."""
    return min(
        (
            node.outputs[0].shape[graph.batch_dims[node.target]]
            for node in graph.sources(INPUT)
            if node.target in graph.batch_dims
        ),
        default=1,
    )


def microbatch_counts(
    graph: Graph,
    forced: int | None,
    layout: Layout | None = None,
    fits: Callable[[int], bool] = lambda count: True,
) -> tuple[int, ...]:
    """Numbers of microbatches to try, fewest first: more are needed only where memory binds.

    Args:
        graph: The step.
        forced: The number a hint gives, or None.
        layout: Stages to keep busy: a pipeline starts at four microbatches a stage.
        fits: Whether the batch can be cut into so many over the ranks; ignored if none can.

    Raises:
        UnsupportedError: The schedule cannot do the number that is forced, or any.
    """
    num_stages = 1 if layout is None else layout.num_stages
    if forced is not None:
        if layout is not None and num_stages > 1:
            layout.check(forced)
        return (forced,)
    samples = _samples(graph)
    dividing = [count for count in COUNTS[:-1] if samples % count == 0]
    fitting = [count for count in dividing if fits(count)] or dividing
    if layout is None or num_stages == 1:
        return tuple(fitting)
    possible = [count for count in fitting if layout.fits(count)]
    if not possible:
        layout.check(fitting[-1])
    enough = [count for count in possible if count >= 4 * num_stages]
    return tuple(enough or possible[-1:])


def in_time(spaces: Sequence[Mesh], microbatches: int) -> tuple[Mesh, ...]:
    """The meshes of stages with a time axis on which all run the same microbatches."""
    rows = common_rows(spaces)
    return tuple(space.with_time(microbatches, rows) for space in spaces)


def batch_misfit(graph: Graph, mesh: Mesh) -> str:
    """Why the batch cannot be cut over ``dp`` and into the mesh's microbatches; empty if it can."""
    ranks = max(batch_parts(mesh), mesh.rows)
    parts = ranks * mesh.microbatches
    for node in graph.sources(INPUT):
        dim = graph.batch_dims.get(node.target)
        samples = 0 if dim is None else node.outputs[0].shape[dim]
        divides = min(ranks, mesh.microbatches) > 1
        if dim is not None and mesh.shares and samples % parts:
            shares = " + ".join(str(n) for own in mesh.shares for n in own)
            return (
                f"cannot share the batch out as {shares} in {mesh.microbatches} microbatches: "
                f"input {node.target!r} has {samples} samples, not a multiple of {parts}; use such "
                "a batch or other parts"
            )
        if dim is not None and divides and samples % parts:
            return (
                f"cannot cut the batch into {mesh.microbatches} microbatches over dp={ranks}: "
                f"input {node.target!r} has {samples} samples, not a multiple of {parts}; use "
                "such a batch, dp=1 (any number of samples), or another hint.microbatches"
            )
    return ""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A mesh without a plan.

    Attributes:
        mesh: The mesh.
        proven: Whether there is none for certain.
        least_bytes: The least that was seen; ``moment`` where it is held.
        host_bytes: Of host memory, what hints ask for, where that is why.
    """

    mesh: Mesh
    proven: bool
    least_bytes: float
    moment: str = ""
    host_bytes: float = 0.0


def _prepare(
    analysis: Analysis,
    request: Request,
    settled: Settled,
    meshes: Sequence[Mesh],
    layout: Layout,
) -> _Lanes:
    """The problems of the meshes of all stages, not solved yet; one for stages that are alike."""
    first_ranks = [0, *itertools.accumulate(mesh.num_ranks for mesh in meshes)][:-1]
    cluster, taken = request.cluster, request.settled_plan
    kinds: dict[tuple[Mesh, tuple[int, ...]], list[int]] = {}
    for stage, (mesh, first) in enumerate(zip(meshes, first_ranks, strict=True)):
        runs = cluster.runs_between(first, first + mesh.num_ranks)
        kinds.setdefault((mesh, runs), []).append(stage)
    searches: dict[int, _Search] = {}
    for (mesh, runs), stages in kinds.items():
        restrictions = settled.restrictions
        if taken is not None:
            stored = _stored([c for s in stages for c in taken.chunks_of(s).values()], mesh)
            restrictions = replace(restrictions, stored=stored)
        device = slowest([cluster.devices[run].device for run in runs])
        if mesh.shares:
            fullest = first_ranks[stages[0]] + mesh.space.rank(mesh.space.fullest)
            # The others are simulated on their own devices, but for those of a pipeline.
            least = device.memory_bytes if len(meshes) > 1 else cluster.device(fullest).memory_bytes
            device = replace(cluster.device(fullest), memory_bytes=least)
        cost = NodeCost(device, mesh, axis_seconds(cluster, mesh, first_ranks[stages[0]]))
        states = StateBytes(
            per_element=request.optimizer.state_bytes,
            moments=request.optimizer.moments,
            update_bytes_per_s=update_bytes_per_s(device),
            may_leave=request.optimizer.host_bucket_elements is not None,
        )
        built = build_problem(
            analysis, mesh, cost, states, restrictions, num_stages=layout.num_stages
        )
        asked = restrictions.recompute or restrictions.offload or restrictions.offload_states
        forced = bool(asked)
        search = _Search(built, layout, cost, forced=forced, limit_of=settled.usable_bytes)
        searches.update(dict.fromkeys(stages, search))
    return _Lanes(tuple(searches[s] for s in range(len(meshes))), tuple(first_ranks))


def slowest(devices: Sequence[Device]) -> Device:
    """The device that equal parts of the work wait for, with the memory of the smallest."""
    found = min(devices, key=lambda device: max(device.peak_flops_per_s.values()))
    return replace(found, memory_bytes=min(device.memory_bytes for device in devices))


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The search of every stage, the same one for stages that are alike.

    Attributes:
        searches: Of every stage.
        first_ranks: Global number of the first rank of every stage.
    """

    searches: tuple[_Search, ...]
    first_ranks: tuple[int, ...]

    @property
    def kinds(self) -> tuple[_Search, ...]:
        """Every search once."""
        return tuple(dict.fromkeys(self.searches))

    @property
    def layout(self) -> Layout:
        return self.searches[0].layout

    @property
    def name(self) -> str:
        """Stages and meshes, in words."""
        meshes = [describe_mesh(kind.plain.mesh) for kind in self.searches]
        if len(self.kinds) > 1:
            return f"stages of {', '.join(meshes)}"
        return f"{len(meshes)} stages of {meshes[0]}" if len(meshes) > 1 else meshes[0]

    def estimate_s(self, time_limit_s: float) -> float:
        """Seconds of the step if memory did not bind and stages shared the work as it is fast."""
        idle = (len(self.searches) - 1) / self.searches[0].plain.mesh.microbatches
        return shared_s([kind.unbound_s(time_limit_s) for kind in self.searches]) * (1 + idle)


def shared_s(seconds: Sequence[float]) -> float:
    """Seconds of work that stages share, so that they take equally long, from those of each alone.

    No way to share it takes less: the stage that takes longest takes that at least.
    """
    if not all(seconds):
        return 0.0
    return seconds[0] / len(seconds) if len(set(seconds)) == 1 else 1 / sum(1 / s for s in seconds)


def _finish(
    analysis: Analysis, request: Request, search: _Lanes, time_limit_s: float, beat_s: float
) -> Candidate | _Failure:
    """Solve the meshes of all stages until what is lowered fits.

    A step without a pipeline is not lowered if the search models more than ``beat_s`` for it.
    """
    kinds, num_stages = search.kinds, len(search.searches)
    limits: dict[_Search, float | None] = dict.fromkeys(kinds)
    least = Least(float("inf"))
    best: Candidate | None = None
    for _ in range(ROUNDS if num_stages == 1 else PIPELINE_ROUNDS):
        solved = {kind: kind.within(limits[kind], time_limit_s) for kind in kinds}
        cramped = [k for k, (_, s) in solved.items() if not s.choice and limits[k] == k.first_limit]
        if num_stages > 1 and cramped and best is None:
            limits.update({kind: kind.allowed for kind in cramped})
            continue
        for kind, (found, solution) in solved.items():
            if not solution.choice and best is not None:
                return best
            if not solution.choice:
                if least.num_bytes == float("inf"):
                    least = least_bytes(found.problem, time_limit_s=time_limit_s)
                    least = replace(least, num_bytes=least.num_bytes / num_stages)
                return _Failure(
                    kind.plain.mesh,
                    solution.status == "infeasible",
                    least.num_bytes,
                    least.moment,
                    kind.host_asked(time_limit_s),
                )
        held = {kind: max(s.memory_bytes) / num_stages for kind, (_, s) in solved.items()}
        tight = [kind for kind in kinds if limits[kind] is None and held[kind] > kind.allowed]
        if tight:
            limits.update({kind: kind.first_limit for kind in tight})
            continue
        if num_stages == 1 and solved[kinds[0]][1].objective_s > beat_s:
            return _Failure(kinds[0].plain.mesh, False, held[kinds[0]])
        if num_stages > 1:
            candidate, used = _evaluate_stages(analysis, request, search, solved)
        else:
            (only,) = kinds
            candidate = evaluate(analysis, request, only.cost, *solved[only], only.limit_of)
            # The limit of the rank that is fullest may be another: in proportion to that.
            share = only.allowed / candidate.limit_bytes
            used = {only: math.ceil(candidate.memory.total_bytes * share)}
        over = [kind for kind in kinds if used[kind] > kind.allowed]
        fitting = [kind for kind in kinds if kind.fits_host(candidate.host_bytes)]
        if not over and len(fitting) == len(kinds):
            limited = any(limit is not None for limit in limits.values())
            now = replace(candidate, limited=limited)
            best = now if best is None or now.step_s < best.step_s else best
            if not [kind for kind in kinds if kind.hides_less(candidate)]:
                return best
        for kind in over:
            # The program needs more than the problem knows of: leave that much room.
            if used[kind] < least.num_bytes:
                found, solution = solved[kind]
                least = Least(used[kind], moment_of(found.problem, solution.memory_bytes))
            limit = limits[kind]
            last = kind.allowed if limit is None else limit
            room = MORE * max(0.0, used[kind] - held[kind])
            limits[kind] = min(kind.allowed - room, last - LESS * kind.allowed)
    if best is not None:
        return best
    return _Failure(kinds[0].plain.mesh, False, least.num_bytes, least.moment)


JOINT = 600
"""Strategies up to which recompute and sharding are solved over all of them at once."""

LEFT = 0.15
"""Part of what is kept that is reckoned to stay where the rest is recomputed."""


class _Search:
    """Solves one mesh under tighter and tighter memory limits.

    Without a limit nothing runs again, so the smaller problem is solved. Within one, sharding and
    recompute are chosen together: over all strategies where they are few, else over those of three
    solutions without recompute: that without a limit, that within it, and that within it if most
    activations were gone.
    """

    def __init__(
        self,
        built: Built,
        layout: Layout,
        cost: NodeCost,
        *,
        forced: bool,
        limit_of: Callable[[Device], int],
    ) -> None:
        self.plain = built
        self.layout = layout
        self.num_stages = layout.num_stages
        self.cost = cost
        self.forced = forced
        self.limit_of = limit_of
        self.allowed = float(limit_of(cost.device))
        self.host_limit = self.host_allowed = float(cost.device.host_memory_bytes)
        self.hides = 1.0
        self.unbound: Solution | None = None
        self.joint: Built | None = None

    @property
    def first_limit(self) -> float:
        """Bytes a rank may use by the problem at first, which knows stages on average alone."""
        return self.allowed * (1 - UNEVEN) if self.num_stages > 1 else self.allowed

    def hides_less(self, candidate: Candidate) -> bool:
        """Whether copies hide behind less compute than was reckoned with, which is noted."""
        found = candidate.simulation
        hidden_s = found.copy_s - found.copy_exposed_s
        hides = hidden_s / found.compute_s if found.compute_s else 0.0
        if found.copy_exposed_s < LESS * candidate.step_s or self.hides == 0:
            return False
        # Where that would hardly change anything, what is fastest without hiding has a try.
        self.hides = hides if hides < (1 - WORTH) * self.hides else 0.0
        return True

    def host_asked(self, time_limit_s: float) -> float:
        """Bytes of host memory a rank that hints ask for, if they are more than there are."""
        if not self.forced or self.joint is None or self.joint.problem.link is None:
            return 0.0
        link = replace(self.joint.problem.link, host_limit_bytes=math.inf)
        problem = replace(self.joint.problem, memory_limit_bytes=None, link=link)
        solution = solve(problem, time_limit_s=time_limit_s)
        used = away_bytes(problem, solution) / self.num_stages
        return used if used > self.host_allowed else 0.0

    def fits_host(self, used: float) -> bool:
        """Whether host memory holds so much a rank; if not, less is allowed from here on."""
        over = used - self.host_allowed
        if over > 0:
            self.host_limit -= max(over, LESS * self.host_allowed)
        return over <= 0

    def within(self, limit: float | None, time_limit_s: float) -> tuple[Built, Solution]:
        """The best solution, and the problem it is one of.

        Args:
            limit: Bytes a rank may use; None for any.
            time_limit_s: For the solver.
        """
        self.unbound_s(time_limit_s)
        assert self.unbound is not None
        if (limit is None and not self.forced) or not self.unbound.choice:
            return self.plain, self.unbound
        total = None if limit is None else limit * self.num_stages
        if self.joint is None:
            self.joint = with_reruns(self.plain, self._near(self.unbound, total, time_limit_s))
        link = self.joint.problem.link
        if link is not None:
            host = max(0.0, self.host_limit) * self.num_stages
            link = replace(link, host_limit_bytes=host, hides=self.hides)
        problem = replace(self.joint.problem, memory_limit_bytes=total, link=link)
        solution = solve(problem, time_limit_s=time_limit_s)
        if self.joint.num_strategies < self.plain.num_strategies:
            # Proven is only what holds without a limit.
            bound_s = min(self.unbound.bound_s, solution.objective_s)
            status = "feasible" if solution.status == "optimal" else solution.status
            solution = replace(solution, status=status, bound_s=bound_s)
        return self.joint, solution

    def unbound_s(self, time_limit_s: float) -> float:
        """Seconds of the whole step on this mesh alone, if memory did not bind."""
        if self.unbound is None:
            self.unbound = solve(self.plain.problem, time_limit_s=time_limit_s)
        return self.unbound.objective_s

    def _near(
        self, unbound: Solution, total: float | None, time_limit_s: float
    ) -> tuple[Solution, ...]:
        """Solutions between which the joint problem chooses; none for all strategies."""
        if self.plain.num_strategies <= JOINT:
            return ()
        if total is None or max(unbound.memory_bytes[:2]) <= total:
            return (unbound,)
        problem = replace(self.plain.problem, memory_limit_bytes=total, moments=())
        fewer = tuple(
            v if v.persistent else replace(v, kept_bytes=tuple(LEFT * b for b in v.kept_bytes))
            for v in problem.values
        )
        found = [
            solve(own, time_limit_s=time_limit_s, gap=NEAR)
            for own in (problem, replace(problem, values=fewer))
            if not fits(own, unbound)
        ]
        return (unbound, *(solution for solution in found if solution.choice))


NEAR = 1e-2
"""Relative gap of the solutions that only offer their strategies."""


def _stored(chunks: Sequence[StagePlan], mesh: Mesh) -> Mapping[str, Sharding]:
    """Stored shardings of chunks, for their mesh with or without the time axis."""
    num_axes = len(mesh.space.sizes)
    in_time = (WHOLE,) * (len(mesh.sizes) - num_axes)
    return {
        parameter.name: (*parameter.stored[:num_axes], *in_time)
        for chunk in chunks
        for parameter in chunk.parameters
    }


def evaluate(
    analysis: Analysis,
    request: Request,
    cost: NodeCost,
    built: Built,
    solution: Solution,
    limit_of: Callable[[Device], int] = lambda device: device.memory_bytes,
) -> Candidate:
    """Lower a solution for every distinct rank, and simulate what they run.

    The step is that of the slowest rank; the memory that of the rank that holds most of what its
    device lets it hold.
    """
    stage = decode(built, analysis, solution)
    found = _every_rank(analysis, request, cost, stage)
    slow, update_s = max(((s, u) for s, _, u, _ in found), key=lambda own: own[0].seconds + own[1])
    limits = [limit_of(device) for *_, device in found]
    memory = _fullest([memory for _, memory, _, _ in found], limits)
    tight = max(range(len(found)), key=lambda at: found[at][1].total_bytes / limits[at])
    return Candidate(
        mesh=built.mesh,
        built=built,
        solution=solution,
        pipeline=Pipeline((stage,), ()),
        costs=(cost,),
        schedule="1f1b",
        simulation=slow,
        memory=memory,
        limit_bytes=limits[tight],
        update_s=update_s,
        objective_s=solution.objective_s,
        bound_s=solution.bound_s,
        host_bytes=memory.host_bytes,
    )


def _fullest(memories: Sequence[Memory], limits: Sequence[float] = ()) -> Memory:
    """The memory of the rank that holds most, with the most that any has in host memory.

    Args:
        memories: Of the ranks.
        limits: What each may hold, where that differs: most is then most of that.
    """
    shares = list(limits) or [1.0] * len(memories)
    most = max(zip(memories, shares, strict=True), key=lambda own: own[0].total_bytes / own[1])[0]
    return replace(most, host_bytes=max(memory.host_bytes for memory in memories))


def _most_on_a_node(cluster: Cluster, stages: Sequence[tuple[int, int]]) -> float:
    """Host memory a rank, on average, on the node whose ranks use most.

    Args:
        cluster: Its nodes.
        stages: Ranks of every pipeline stage, in order, and bytes of each of its ranks.
    """
    each = cluster.devices_per_node
    by_rank = [size for ranks, size in stages for _ in range(ranks)]
    return max(sum(by_rank[at : at + each]) / each for at in range(0, len(by_rank), each))


def _every_rank(
    analysis: Analysis, request: Request, cost: NodeCost, stage: StagePlan
) -> list[tuple[Simulation, Memory, float, Device]]:
    """What a step takes on every distinct rank: simulation, memory, update; and its device.

    With few copies of repeated blocks; with more where those at the edges of a stretch differ, in
    the end with all. What goes to the host waits for what went before it, from block to block: then
    no stretch repeats.
    """
    for beside in () if stage.offloaded else (REACH, REACH + 1):
        try:
            return _ranks_of(analysis, request, cost, shorten(analysis, (stage,), beside=beside))
        except NotPeriodicError:
            pass
    return _ranks_of(analysis, request, cost, Short(analysis.graph, (stage,)))


def _ranks_of(
    analysis: Analysis, request: Request, cost: NodeCost, short: Short
) -> list[tuple[Simulation, Memory, float, Device]]:
    """What a step, shortened, takes on every distinct rank."""
    found = []
    (stage,) = short.stages
    away = states_on_host(stage)
    for coordinates in distinct_coordinates(short.graph, stage):
        device = cost.device
        if stage.mesh.shares:
            device = slowest(_devices_alike(request.cluster, stage.mesh, coordinates))
        lowered = lower(short.graph, analysis.rules, stage, coordinates, cost.collective_s)
        # All ranks order their collectives alike: as the first one's device would.
        program = overlap(lowered, prices(request.cluster.device(0), cost.collective_s))
        simulation = simulate_loop(program, prices(device, cost.collective_s), short.repeats)
        memory = predicted_memory(program, simulation, request.optimizer, short.repeats, away)
        update = update_of(program, request.optimizer, short.repeats, away)
        found.append((simulation, memory, update.seconds(device), device))
    return found


def _devices_alike(cluster: Cluster, mesh: Mesh, coordinates: Sequence[int]) -> list[Device]:
    """Devices of the ranks that take the same shares of the batch."""

    def taken(place: Sequence[int]) -> list[int]:
        axes = range(len(mesh.space.sizes))
        return [mesh.shares_of(axis)[place[axis]] for axis in axes if mesh.shares_of(axis)]

    ranks = range(mesh.num_ranks)
    return [cluster.device(r) for r in ranks if taken(mesh.coordinates(r)) == taken(coordinates)]


def _evaluate_stages(
    analysis: Analysis,
    request: Request,
    search: _Lanes,
    solved: Mapping[_Search, tuple[Built, Solution]],
) -> tuple[Candidate, Mapping[_Search, int]]:
    """Cut solutions into stages and simulate them under a schedule; most bytes of every kind."""
    layout = search.layout
    made = {
        own: Kind(decode(built, analysis, solution), own.cost)
        for own, (built, solution) in solved.items()
    }
    lanes = [
        Lane(made[own], first)
        for own, first in zip(search.searches, search.first_ranks, strict=True)
    ]
    pipeline = cut(analysis, lanes, layout, request.settled_plan)
    result = evaluate_pipeline(analysis, lanes, pipeline, layout, request.cluster)
    away = states_on_host(*pipeline.stages)
    memories, updates = [], []
    for stage in result.stages:
        update = update_of(stage.program, request.optimizer, away=away)
        memories.append(predicted_memory(stage.program, stage.peak, request.optimizer, away=away))
        updates.append(update.seconds(stage.cost.device))
    used: dict[_Search, int] = {}
    for own, memory in zip(search.searches, memories, strict=True):
        used[own] = max(used.get(own, 0), memory.total_bytes)
    limits = [own.allowed for own in search.searches]
    fullest = _fullest(memories, limits)
    microbatches = pipeline.stages[0].mesh.microbatches
    steps = [_whole_step(stage, microbatches) for stage in result.stages]
    slow = max(range(len(steps)), key=lambda s: steps[s].compute_s)
    tight = max(range(len(steps)), key=lambda s: memories[s].total_bytes / limits[s])
    built, solution = solved[search.searches[slow]]
    solutions = [solved[own][1] for own in search.searches]
    candidate = Candidate(
        mesh=built.mesh,
        built=built,
        solution=solution,
        pipeline=pipeline,
        costs=tuple(lanes[stage].kind.cost for stage in layout.lanes),
        schedule=layout.schedule,
        simulation=replace(steps[slow], seconds=result.seconds),
        memory=fullest,
        limit_bytes=int(limits[tight]),
        update_s=max(updates),
        objective_s=shared_s([one.objective_s for one in solutions]),
        bound_s=shared_s([one.bound_s for one in solutions]),
        host_bytes=_most_on_a_node(
            request.cluster,
            [
                (own.plain.mesh.num_ranks, memory.host_bytes)
                for own, memory in zip(search.searches, memories, strict=True)
            ],
        ),
    )
    return candidate, used


def _whole_step(stage: StageResult, microbatches: int) -> Simulation:
    """Sums over a step of one stage; its seconds are those it is busy."""
    parts = [
        (simulation, microbatches if section in LOOP else 1)
        for (section, _), simulation in stage.sections.items()
    ]
    return _summed(stage.peak, parts)


def simulate_loop(program: Program, priced: Prices, repeats: Repeats = ONCE) -> Simulation:
    """What a program of any number of microbatches takes.

    Two microbatches are written out: the second holds all that a later one holds, and what it adds
    to the seconds is what each of the others adds.
    """
    if program.microbatches == 1:
        return simulate(program, priced, repeats)
    once, twice = (simulate(unroll(program, in_order(times)), priced, repeats) for times in (1, 2))
    more = program.microbatches - 2
    return _summed(twice, ((twice, 1 + more), (once, -more)))


_SUMS = (
    "seconds",
    "compute_s",
    "communication_s",
    "copy_s",
    "exposed_s",
    "copy_exposed_s",
    "slowed_s",
    "host_s",
    "num_launched",
)


def _summed(memory: Simulation, parts: Sequence[tuple[Simulation, int]]) -> Simulation:
    """Simulations added up, each so many times, with the bytes of one."""
    totals = {
        name: sum(times * getattr(simulation, name) for simulation, times in parts)
        for name in _SUMS
    }
    return replace(
        memory,
        **totals,
        collectives=_summed_uses([(s.collectives, times) for s, times in parts]),
        copies=_summed_uses([(s.copies, times) for s, times in parts]),
    )


def _summed_uses(
    parts: Sequence[tuple[Sequence[CollectiveUse], int]],
) -> tuple[CollectiveUse, ...]:
    found: dict[tuple[str, int, str], CollectiveUse] = {}
    for uses, times in parts:
        for use in uses:
            key = (use.kind, use.axis, use.purpose)
            before = found.get(key, replace(use, count=0, tensor_bytes=0, seconds=0.0))
            found[key] = replace(
                use,
                count=before.count + times * use.count,
                tensor_bytes=before.tensor_bytes + times * use.tensor_bytes,
                seconds=before.seconds + times * use.seconds,
            )
    return tuple(found.values())


def predicted_memory(
    program: Program,
    simulation: Simulation,
    optimizer: OptimizerSpec,
    repeats: Repeats = ONCE,
    away: Collection[str] = (),
) -> Memory:
    """Bytes by kind at the peak: of the step, or of the update if that holds more.

    Args:
        program: Of one rank.
        simulation: Of the program.
        optimizer: What its state takes.
        repeats: Copies of blocks that the program lacks.
        away: Parameters whose state is in host memory.
    """
    entered = simulation.input_bytes
    update = update_of(program, optimizer, repeats, away)
    saved, finished = simulation.saved_bytes, simulation.gradient_bytes
    transient = simulation.peak_bytes - saved - finished
    if update.gradient_bytes + update.scratch_bytes > simulation.peak_bytes:
        saved, finished, transient = 0, update.gradient_bytes, update.scratch_bytes
    return Memory(
        parameters_bytes=entered.get("parameter", 0),
        gradients_bytes=finished,
        optimizer_bytes=update.state_bytes,
        saved_bytes=saved,
        transient_bytes=transient,
        inputs_bytes=sum(entered.get(kind, 0) for kind in (INPUT, CONSTANT, KEY)),
        buffers_bytes=entered.get("buffer", 0),
        host_bytes=simulation.host_bytes + update.host_state_bytes,
    )


def _nothing_fits(
    analysis: Analysis, settled: Settled, failures: Sequence[_Failure], cluster: Cluster
) -> InfeasibleError | SearchTimeoutError:
    least = min((f.least_bytes for f in failures), default=float("inf"))
    limit = min(settled.usable_bytes(run.device) for run in cluster.devices)
    if not all(f.proven or f.least_bytes < float("inf") for f in failures):
        return SearchTimeoutError(
            f"cannot find a plan within the time limit over {len(failures)} meshes; raise "
            "options.time_limit_s or fix degrees with hint.degrees"
        )
    asked = min((f.host_bytes for f in failures), default=0.0)
    if asked:
        host = min(run.device.host_memory_bytes for run in cluster.devices)
        return InfeasibleError(
            f"cannot offload what the hints ask for: it needs {bytes_text(asked)} of host memory a "
            f"rank, each has {bytes_text(host)}; name fewer modules in hint.offload, or use more "
            "ranks"
        )
    where = _place(analysis, min(failures, key=lambda f: f.least_bytes).moment)
    biggest = max(
        (n for n in analysis.graph.nodes if n.op == "parameter"),
        key=lambda n: n.outputs[0].num_bytes,
        default=None,
    )
    largest = "" if biggest is None else f", the largest parameter is {biggest.target!r}"
    return InfeasibleError(
        f"cannot fit the step into {bytes_text(limit)} a rank: the least found over "
        f"{len(failures)} meshes needs {bytes_text(least)}{where}{largest}; use more ranks, "
        "a smaller batch, or raise hint.memory_limit"
    )


SETS = 64
"""Sets of hints that are tried for one that conflicts with the limit, the smallest first."""


def _keep_conflict(
    analysis: Analysis, request: Request, settled: Settled, failures: Sequence[_Failure]
) -> InfeasibleError | None:
    """The smallest set of ``hint.keep`` that cannot be met within the memory, if they are why."""
    keep = settled.restrictions.keep
    single = settled.degrees is None or (settled.degrees.pp or 1) == 1
    if not keep or not single or request.settled_plan is not None:
        return None
    mesh = min(failures, key=lambda failure: failure.least_bytes).mesh
    layout = Layout(schedule=settled.schedule, num_stages=1, num_chunks=settled.chunks)
    limit = min(settled.usable_bytes(run.device) for run in request.cluster.devices)

    def needed(patterns: tuple[str, ...]) -> float:
        own = replace(settled, restrictions=replace(settled.restrictions, keep=patterns))
        plain = _prepare(analysis, request, own, (mesh,), layout).kinds[0].plain
        return least_bytes(with_reruns(plain).problem).num_bytes

    if needed(()) > limit:
        return None
    sets = (s for n in range(1, len(keep) + 1) for s in itertools.combinations(keep, n))
    for patterns in itertools.islice(sets, SETS):
        least = needed(patterns)
        if least > limit:
            hints = " and ".join(f"hint.keep({pattern!r})" for pattern in patterns)
            return InfeasibleError(
                f"cannot apply {hints} within {bytes_text(limit)} a rank: what they keep needs at "
                f"least {bytes_text(least)}, {bytes_text(least - limit)} more; drop one, or raise "
                "hint.memory_limit"
            )
    return None


def _place(analysis: Analysis, moment: str) -> str:
    """A moment of the step in words, as part of a sentence; empty if it is not known."""
    node = analysis.graph.by_name.get(moment)
    if node is None:
        return f" at {moment}" if moment else ""
    module = f" of module {node.source.module!r}" if node.source.module else ""
    return f" in the {node.phase.value}{module} ({node.op})"


def _plan(
    analysis: Analysis,
    request: Request,
    best: Candidate,
    found: Sequence[Candidate],
    tried: Sequence[tuple[str, float | None]],
    seconds: float,
) -> Plan:
    graph = analysis.graph
    bound = min(c.bound_s for c in found)
    objective = best.objective_s
    optimal = all(c.solution.status == "optimal" for c in found)
    return Plan(
        model=request.model,
        fingerprint=request.fingerprint,
        cluster=request.cluster.name,
        cluster_ranks=request.cluster.num_devices,
        batch={n.target: n.outputs[0] for n in graph.sources(INPUT)},
        hints=tuple(str(h) for h in request.hints),
        stages=best.pipeline.stages,
        transfers=best.pipeline.transfers,
        microbatches=best.mesh.microbatches,
        schedule=best.schedule,
        notes=(*_notes(analysis, best), *_without_effect(request.hints, best)),
        memory_limit_bytes=best.limit_bytes,
        prediction=_prediction(best, savings(analysis, best.costs, best.pipeline.stages)),
        search=SearchReport(
            status="optimal" if optimal else "feasible",
            objective_s=objective,
            bound_s=bound,
            gap=max(0.0, (objective - bound) / objective) if objective else 0.0,
            seconds=seconds,
            capture_s=request.capture_s,
            meshes=tuple(tried),
            num_nodes=len(graph.nodes),
            num_classes=len(analysis.folding.classes),
            num_strategies=best.built.num_strategies,
            num_variables=best.solution.num_variables,
        ),
        modules=_modules(graph),
    )


def _prediction(best: Candidate, saved: tuple[Saving, ...]) -> Prediction:
    simulation = best.simulation
    return Prediction(
        step_s=best.step_s,
        compute_s=simulation.compute_s,
        communication_s=simulation.communication_s,
        exposed_s=simulation.exposed_s,
        optimizer_s=best.update_s,
        memory=best.memory,
        collectives=tuple(
            CollectivePlan(
                kind=use.kind,
                axis=best.mesh.names[use.axis],
                purpose=use.purpose,
                count=use.count,
                tensor_bytes=use.tensor_bytes,
                predicted_s=use.seconds,
            )
            for use in simulation.collectives
        ),
        copies=tuple(
            CopyPlan(
                kind=use.kind,
                purpose=use.purpose,
                count=use.count,
                num_bytes=use.tensor_bytes,
                predicted_s=use.seconds,
            )
            for use in simulation.copies
        ),
        copy_exposed_s=simulation.copy_exposed_s,
        savings=saved,
    )


def _modules(graph: Graph) -> Mapping[str, str]:
    return {node.name: node.source.module for node in graph.nodes if node.source.module}


def _without_effect(hints: Sequence[Hint], best: Candidate) -> list[str]:
    """Hints about pipelines that the plan has no use for, and what to do."""
    if best.num_stages > 1:
        return []
    return [
        f"{given} has no effect: the plan has one stage; ask for more with hint.degrees(pp=...)"
        for given in hints
        if isinstance(given, Schedule)
    ]


def _notes(analysis: Analysis, best: Candidate) -> list[str]:
    """What a user should know of this plan."""
    notes = []
    whole_ops = sorted(
        {
            node.op
            for node in analysis.graph.nodes
            if node.name in analysis.rules
            and not analysis.rules[node.name].factors()
            and max((t.num_elements for t in node.outputs), default=0) > 1
            and node.name not in analysis.steady
        }
    )
    if whole_ops:
        notes.append(f"computed whole on every rank: {', '.join(whole_ops)}")
    for mesh in dict.fromkeys(stage.mesh for stage in best.pipeline.stages):
        here = [stage for stage in best.pipeline.stages if stage.mesh == mesh]
        for axis, ranks in enumerate(mesh.sizes):
            if ranks > 1 and not any(
                isinstance(sharding[axis], Split)
                for stage in here
                for node in stage.nodes
                for sharding in (*node.operands, *node.outputs)
            ):
                notes.append(
                    f"mesh axis {mesh.names[axis]!r} of {ranks} ranks splits nothing: its ranks "
                    "repeat each other's work"
                )
    early = summed_early(analysis, (n for s in best.pipeline.stages for n in s.nodes))
    if early:
        where = ", ".join(repr(module) if module else "the model" for module in sorted(early))
        notes.append(
            f"gradients of {where} are summed in {next(iter(early.values()))}: they go on through "
            "an op that cannot take the terms of a sum"
        )
    return notes
