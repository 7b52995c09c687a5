"""What solutions take once they are lowered: seconds and bytes of every distinct rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost
from autopar.ir.graph import CONSTANT, INPUT, KEY, SOURCE_OPS, Node, Phase
from autopar.ir.sharding import Mesh
from autopar.lower.overlap import overlap
from autopar.lower.program import LOOP, Program
from autopar.lower.ranks import distinct_coordinates
from autopar.lower.simulate import ON_HOST, CollectiveUse, Prices, Simulation, prices, simulate
from autopar.lower.spmd import lower
from autopar.lower.stretch import ONCE, NotPeriodicError, Repeats
from autopar.lower.unroll import looped
from autopar.options import OptimizerSpec
from autopar.plan.records import Memory, StagePlan
from autopar.planner.lanes import Lanes, MeshSearch, shared_s, slowest
from autopar.planner.layout import Layout
from autopar.planner.pipeline import Kind, Lane, cut
from autopar.planner.request import Candidate, Request
from autopar.planner.shorten import Short, shorten
from autopar.planner.staged import (
    LoweredPipeline,
    PipelineResult,
    StageResult,
    lower_pipeline,
)
from autopar.planner.update import states_on_host, update_of
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from autopar.search.copies import REACH
from autopar.search.decode import decode
from autopar.search.problem import Solution
from autopar.search.stages import Pipeline
from cost_models.cluster import Cluster, Device


def evaluate(
    analysis: Analysis,
    request: Request,
    cost: NodeCost,
    built: Built,
    solution: Solution,
    limit_of: Callable[[Device], int] = lambda device: device.memory_bytes,
) -> Candidate:
    """Lower a solution for every distinct rank, and simulate what they run."""
    stage = decode(built, analysis, solution)
    return evaluate_stage(analysis, request, cost, built, solution, stage, limit_of)


def evaluate_stage(
    analysis: Analysis,
    request: Request,
    cost: NodeCost,
    built: Built,
    solution: Solution,
    stage: StagePlan,
    limit_of: Callable[[Device], int],
) -> Candidate:
    """The same of a stage that was made of a solution.

    The step is that of the slowest rank; the memory that of the rank that holds most of what its
    device lets it hold. Where copies on their way hold too much, or nothing hides them, they get
    the room that memory leaves, if what they take then fits and is faster.
    """
    own = _Solved(analysis, request, cost, built, solution, limit_of)
    ranks, taken = _every_rank(own, stage)
    found = own.candidate(stage, taken)
    over = found.memory.total_bytes > found.limit_bytes
    exposed = found.simulation.copy_exposed_s >= FASTER * found.step_s
    if not stage.copies or not (over or exposed):
        return found
    # Bytes that are free at the peak where nothing is on its way.
    room = min(t.limit_bytes - t.memory.total_bytes for t in own.taken(ranks, room_bytes=0))
    if room < 0:
        return found
    roomy = own.candidate(replace(stage, copy_room_bytes=room), own.taken(ranks, room_bytes=room))
    if roomy.memory.total_bytes > roomy.limit_bytes or not (over or roomy.step_s < found.step_s):
        return found
    if not over or roomy.simulation.copy_exposed_s == 0:
        return roomy
    return replace(roomy, crowded_bytes=found.memory.total_bytes - found.limit_bytes + room)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's program before its collectives and copies are spread.

    Attributes:
        program: The program.
        device: The rank's, which prices it.
        repeats: Copies of blocks that it lacks.
        away: Parameters whose state is in host memory.
    """

    program: Program
    device: Device
    repeats: Repeats
    away: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """What a step takes on a rank, and the bytes that it may hold."""

    simulation: Simulation
    memory: Memory
    update_s: float
    limit_bytes: int

    @property
    def step_s(self) -> float:
        return self.simulation.seconds + self.update_s


@dataclass(frozen=True, slots=True)
class _Solved:
    """A solution and what it is lowered with, as of `evaluate`."""

    analysis: Analysis
    request: Request
    cost: NodeCost
    built: Built
    solution: Solution
    limit_of: Callable[[Device], int]

    def ranks(self, short: Short) -> list[_Rank]:
        """Every distinct rank of a step, shortened."""
        (stage,) = short.stages
        cost, found = self.cost, []
        for coordinates in distinct_coordinates(short.graph, stage):
            device = cost.device
            if stage.mesh.shares:
                device = slowest(_devices_alike(self.request.cluster, stage.mesh, coordinates))
            rules = self.analysis.rules
            program = lower(short.graph, rules, stage, coordinates, cost.collective_s)
            found.append(_Rank(program, device, short.repeats, states_on_host(stage)))
        return found

    def taken(self, ranks: Sequence[_Rank], room_bytes: int | None = None) -> list[_Taken]:
        """What a step takes on each rank, with so much room for copies on their way."""
        seconds, optimizer = self.cost.collective_s, self.request.optimizer
        # All ranks order their collectives alike: as the first one's device would.
        first = prices(self.request.cluster.device(0), seconds)
        found = []
        for rank in ranks:
            program = overlap(replace(rank.program, copy_room_bytes=room_bytes), first)
            simulation = simulate_loop(program, prices(rank.device, seconds), rank.repeats)
            memory = predicted_memory(program, simulation, optimizer, rank.repeats, rank.away)
            update = update_of(program, optimizer, rank.repeats, rank.away)
            found.append(
                _Taken(
                    simulation=simulation,
                    memory=memory,
                    update_s=update.seconds(rank.device),
                    limit_bytes=self.limit_of(rank.device),
                )
            )
        return found

    def candidate(self, stage: StagePlan, taken: Sequence[_Taken]) -> Candidate:
        """The plan and what its ranks take."""
        slow = max(taken, key=lambda rank: rank.step_s)
        limits = [rank.limit_bytes for rank in taken]
        memory = _fullest([rank.memory for rank in taken], limits)
        tight = max(taken, key=lambda rank: rank.memory.total_bytes / rank.limit_bytes)
        return Candidate(
            mesh=self.built.mesh,
            built=self.built,
            solution=self.solution,
            pipeline=Pipeline((stage,), ()),
            costs=(self.cost,),
            schedule="1f1b",
            simulation=slow.simulation,
            memory=memory,
            limit_bytes=tight.limit_bytes,
            update_s=slow.update_s,
            objective_s=self.solution.objective_s,
            bound_s=self.solution.bound_s,
            host_bytes=memory.host_bytes,
            fullest_node=_fullest_node(self.analysis, tight.simulation, tight.memory),
        )


def _fullest_node(analysis: Analysis, simulation: Simulation, memory: Memory) -> str:
    """The captured node at which a rank holds most, or before which it runs others again."""
    held = memory.saved_bytes + memory.gradients_bytes + memory.transient_bytes
    if held > simulation.peak_bytes:
        return ""
    nodes = analysis.graph.by_name
    own = (name for name, phase in simulation.peak_origins if _runs_in(nodes.get(name), phase))
    return next(own, "")


def _runs_in(node: Node | None, phase: Phase) -> bool:
    return node is not None and node.phase is phase and node.op not in SOURCE_OPS


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


def _every_rank(own: _Solved, stage: StagePlan) -> tuple[list[_Rank], list[_Taken]]:
    """Every distinct rank of a step, and what it takes there.

    With few copies of repeated blocks; with more where those at the edges of a stretch differ, in
    the end with all. What goes to the host waits for what went before it, from block to block, and
    what is forgotten differs from block to block: then no stretch repeats.
    """
    for beside in () if stage.copies or stage.forgotten else (REACH, REACH + 1):
        with suppress(NotPeriodicError):
            ranks = own.ranks(shorten(own.analysis, (stage,), beside=beside))
            return ranks, own.taken(ranks)
    ranks = own.ranks(Short(own.analysis.graph, (stage,)))
    return ranks, own.taken(ranks)


def _devices_alike(cluster: Cluster, mesh: Mesh, coordinates: Sequence[int]) -> list[Device]:
    """Devices of the ranks that take the same shares of the batch."""

    def taken(place: Sequence[int]) -> list[int]:
        axes = range(len(mesh.space.sizes))
        return [mesh.shares_of(axis)[place[axis]] for axis in axes if mesh.shares_of(axis)]

    ranks = range(mesh.num_ranks)
    return [cluster.device(r) for r in ranks if taken(mesh.coordinates(r)) == taken(coordinates)]


def evaluate_stages(
    analysis: Analysis,
    request: Request,
    search: Lanes,
    solved: Mapping[MeshSearch, tuple[Built, Solution]],
) -> tuple[Candidate, Mapping[MeshSearch, int]]:
    """Cut solutions into stages and simulate them under a schedule; most bytes of every kind."""
    lanes = lanes_of(analysis, search, solved)
    layouts = (search.layout, *search.others)
    pipeline = cut(analysis, lanes, layouts, request.cluster, request.settled_plan)
    found, by_stage = evaluate_pipeline(analysis, request, search, solved, (lanes, pipeline))
    used: dict[MeshSearch, int] = {}
    for own, num_bytes in zip(search.searches, by_stage, strict=True):
        used[own] = max(used.get(own, 0), num_bytes)
    return found, used


def evaluate_pipeline(
    analysis: Analysis,
    request: Request,
    search: Lanes,
    solved: Mapping[MeshSearch, tuple[Built, Solution]],
    stages: tuple[Sequence[Lane], Pipeline],
) -> tuple[Candidate, tuple[int, ...]]:
    """Lower a pipeline and simulate it under a schedule; bytes of a rank of every stage.

    Of other schedules of the same chunks that are faster, the fastest that fits is taken.

    Args:
        analysis: The step.
        request: What was asked.
        search: Meshes and schedules.
        solved: For every mesh, what the report tells of.
        stages: Ranks of every stage, and the pipeline.
    """
    layout, (lanes, pipeline) = search.layout, stages
    lowered = lower_pipeline(analysis, lanes, pipeline, layout, request.cluster)
    first_s = lowered.step_s(layout)
    faster = {
        other: seconds
        for other in search.others
        if other.fits(lowered.microbatches)
        and (seconds := lowered.step_s(other)) < (1 - FASTER) * first_s
    }
    for other in sorted(faster, key=lambda other: faster[other]):
        found, used = _staged(request, search, solved, (pipeline, lowered, other))
        pairs = zip(search.searches, used, strict=True)
        if all(num_bytes <= own.allowed for own, num_bytes in pairs):
            return found, used
    return _staged(request, search, solved, (pipeline, lowered, layout))


FASTER = 1e-3
"""Least part of the step for which another schedule of the same chunks, or more room, is tried."""


def _staged(
    request: Request,
    search: Lanes,
    solved: Mapping[MeshSearch, tuple[Built, Solution]],
    done: tuple[Pipeline, LoweredPipeline, Layout],
) -> tuple[Candidate, tuple[int, ...]]:
    """What a lowered pipeline is under a schedule, and bytes of a rank of every stage."""
    pipeline, lowered, layout = done
    limits = [own.allowed for own in search.searches]
    taken = measured(request, pipeline, lowered.under(layout), limits)
    built, solution = solved[search.searches[taken.slowest]]
    solutions = [solved[own][1] for own in search.searches]
    candidate = Candidate(
        mesh=built.mesh,
        built=built,
        solution=solution,
        pipeline=pipeline,
        costs=tuple(search.searches[stage].cost for stage in layout.lanes),
        schedule=layout.schedule,
        simulation=taken.simulation,
        memory=taken.memory,
        limit_bytes=taken.limit_bytes,
        update_s=taken.update_s,
        objective_s=shared_s([one.objective_s for one in solutions]),
        bound_s=shared_s([one.bound_s for one in solutions]),
        host_bytes=taken.host_bytes,
    )
    return candidate, taken.used


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a lowered pipeline takes.

    Attributes:
        slowest: The stage that computes longest.
        simulation: As of `Candidate`, like what follows.
        used: Bytes of a rank of every stage.
    """

    slowest: int
    simulation: Simulation
    memory: Memory
    limit_bytes: int
    update_s: float
    host_bytes: float
    used: tuple[int, ...]


def measured(
    request: Request, pipeline: Pipeline, result: PipelineResult, limits: Sequence[float]
) -> Measured:
    """What a lowered pipeline takes, and holds of what the ranks of each stage may."""
    away = states_on_host(*pipeline.stages)
    memories, updates = [], []
    for stage in result.stages:
        update = update_of(stage.program, request.optimizer, away=away)
        memories.append(predicted_memory(stage.program, stage.peak, request.optimizer, away=away))
        updates.append(update.seconds(stage.cost.device))
    microbatches = pipeline.stages[0].mesh.microbatches
    steps = [_whole_step(stage, microbatches) for stage in result.stages]
    slow = max(range(len(steps)), key=lambda s: steps[s].compute_s)
    tight = max(range(len(steps)), key=lambda s: memories[s].total_bytes / limits[s])
    ranks = [stage.program.mesh.num_ranks for stage in result.stages]
    return Measured(
        slowest=slow,
        simulation=replace(steps[slow], seconds=result.seconds()),
        memory=_fullest(memories, limits),
        limit_bytes=int(limits[tight]),
        update_s=result.seconds(updates) - result.seconds(),
        host_bytes=_most_on_a_node(
            request.cluster,
            [(n, memory.host_bytes) for n, memory in zip(ranks, memories, strict=True)],
        ),
        used=tuple(memory.total_bytes for memory in memories),
    )


def lanes_of(
    analysis: Analysis, search: Lanes, solved: Mapping[MeshSearch, tuple[Built, Solution]]
) -> tuple[Lane, ...]:
    """The ranks of every stage with the plan of the whole step on its mesh."""
    made = {
        own: Kind(decode(built, analysis, solution), own.cost)
        for own, (built, solution) in solved.items()
    }
    return tuple(
        Lane(made[own], first)
        for own, first in zip(search.searches, search.first_ranks, strict=True)
    )


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
    to the seconds is what each of the others adds. It may also hide what the first left idle, as
    the host is further ahead behind it; that is not there to be hidden again, so that another one
    adds no less than it computes, and no less than the host takes to issue it.
    """
    if program.microbatches == 1:
        return simulate(program, priced, repeats)
    once, twice = (simulate(looped(program, times), priced, repeats) for times in (1, 2))
    return _summed(twice, ((twice, 1), (_added(once, twice, priced), program.microbatches - 2)))


def _added(once: Simulation, twice: Simulation, priced: Prices) -> Simulation:
    """What a microbatch adds, of simulations of one and of two."""
    added = _summed(twice, ((twice, 1), (once, -1)))
    idle = {name: max(0.0, getattr(added, name)) for name in _IDLE}
    busy_s = added.compute_s + sum(idle.values())
    issued_s = added.num_launched * priced.host_op_s
    idle["host_s"] += max(0.0, issued_s - busy_s)
    return replace(added, **idle, seconds=max(busy_s, issued_s))


_IDLE = ("slowed_s", "exposed_s", "host_s")
"""What a program takes beside its kernels."""


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
        host_bytes=simulation.host_bytes + update.host_state_bytes + entered.get(ON_HOST, 0),
    )
