"""Pipelines: plans of the whole step cut into stages, and what their schedule takes.

The step is planned over the mesh of every stage (once for stages that are alike), its forward is
cut where the chunks take equally long, each on its own devices, and little crosses, and every
chunk's program is simulated section by section; the schedule's timeline gives the step, and the
loop written out in the order of a stage's row gives its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.cost.node import NodeCost
from autopar.errors import HintError, UnsupportedError
from autopar.ir.graph import DTYPE_BYTES, PARAMETER, Ref
from autopar.lower.chunks import lower_chunks, on_one_rank
from autopar.lower.overlap import overlap
from autopar.lower.program import Message, Program, ProgramInput, Section
from autopar.lower.rows import memory_turns, turns_of
from autopar.lower.simulate import Simulation, prices, simulate
from autopar.lower.spmd import Crossing
from autopar.lower.unroll import unroll, with_refs
from autopar.plan.records import Plan, StagePlan
from autopar.planner.cuts import CutHint, least_starts
from autopar.schedules.makespan import ChunkTime
from autopar.schedules.makespan import simulate as simulate_schedule
from autopar.schedules.table import Size, schedule_named
from autopar.search.analysis import Analysis
from autopar.search.stages import Pipeline, balanced_cuts, bounded_cuts, forward_order, split_lanes
from cost_models.cluster import Cluster
from cost_models.collectives import collective_s, pair_link

SLACK = 0.02
"""Of the longest stage: what a cut may cost for fewer bytes to cross."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What stages that are alike have in common.

    Attributes:
        whole: A plan of the whole step on the mesh of such a stage.
        cost: Prices nodes and collectives on its devices.
    """

    whole: StagePlan
    cost: NodeCost


@dataclass(frozen=True, slots=True)
class Lane:
    """A stage's ranks: what kind they are, and the global number of the first."""

    kind: Kind
    first_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What one stage of a pipeline takes.

    Attributes:
        cost: What prices it.
        program: Of its first rank, with all its chunks.
        sections: Simulation of every section of every chunk, for one microbatch.
        peak: Simulation of the written-out loop, for its memory.
    """

    cost: NodeCost
    program: Program
    sections: Mapping[tuple[Section, int], Simulation]
    peak: Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """What a pipeline takes.

    Attributes:
        seconds: Of the step, without the update.
        stages: Of every stage.
    """

    seconds: float
    stages: tuple[StageResult, ...]


def cut(
    analysis: Analysis,
    lanes: Sequence[Lane],
    layout: Layout,
    settled: Plan | None = None,
) -> Pipeline:
    """Plans of the whole step, cut into the chunks of a pipeline.

    Args:
        analysis: The step.
        lanes: The ranks of every stage.
        layout: Stages, chunks and schedule.
        settled: A plan whose chunks hold the parameters already; they stay where they are.

    Raises:
        HintError: There are fewer ops than chunks, or hints cannot be met.
        UnsupportedError: No cut leaves every parameter on its settled chunk.
    """
    order = forward_order(analysis)
    held = layout.lanes
    if len(held) > len(order):
        chunks = "" if layout.num_chunks == 1 else f" of {layout.num_chunks} chunks"
        raise HintError(
            f"cannot cut {len(order)} ops into {layout.num_stages} stages{chunks}: every piece "
            f"needs one; use fewer stages{chunks and ' or chunks'}"
        )
    wholes = [replace(lane.kind.whole, first_rank=lane.first_rank) for lane in lanes]
    by_kind = {
        kind: _seconds_by_forward(analysis, kind, order)
        for kind in dict.fromkeys(lane.kind for lane in lanes)
    }
    seconds = [by_kind[lanes[stage].kind] for stage in held]
    least = None if settled is not None else least_starts(analysis, layout.hints, held)
    if least is None and len(by_kind) == 1:
        found: tuple[int, ...] | None = balanced_cuts(seconds[0], len(held))
    else:
        anywhere = [[0] * (len(order) + 1)] * len(held)
        found = bounded_cuts(seconds, anywhere if least is None else least)
    assert found is not None, "hints that cannot be met were refused"
    cuts = _narrowed(_crossing_bytes(analysis, order), seconds, found, least)
    if settled is None:
        return split_lanes(analysis, wholes, cuts, held)
    owners = {p.name: n for n, stage in enumerate(settled.stages) for p in stage.parameters}
    read = _first_reads(analysis, order)
    moved = []
    for number, position in enumerate(cuts, start=1):
        low = max((at + 1 for name, at in read.items() if owners[name] < number), default=1)
        high = min((at for name, at in read.items() if owners[name] >= number), default=len(order))
        moved.append(min(max(position, low), high))
    return _with_owners(split_lanes(analysis, wholes, moved, held), wholes, owners, read)


def _first_reads(analysis: Analysis, order: Sequence[str]) -> Mapping[str, int]:
    """Position of the first forward node that reads each parameter, itself or what is made of it.

    What is made of parameters alone runs where it is read.
    """
    place = {name: position for position, name in enumerate(order)}
    graph = analysis.graph
    first: dict[str, int] = {}
    for node in reversed(graph.nodes):
        at = place.get(node.name)
        if at is None:
            continue
        roots = [analysis.root(ref).root.node for ref in node.operands]
        if node.name not in analysis.looped and not any(root in place for root in roots):
            at = first.get(node.name, at)
        for root in roots:
            first[root] = min(first.get(root, at), at)
    return {
        node.target: first[node.name] for node in graph.sources(PARAMETER) if node.name in first
    }


def _with_owners(
    pipeline: Pipeline,
    wholes: Sequence[StagePlan],
    owners: Mapping[str, int],
    read: Mapping[str, int],
) -> Pipeline:
    """The pipeline with every parameter on its settled stage, which must be the one that reads it.

    Raises:
        UnsupportedError: Another stage reads a parameter first.
    """
    for number, stage in enumerate(pipeline.stages):
        for parameter in stage.parameters:
            if parameter.name in read and owners[parameter.name] != number:
                raise UnsupportedError(
                    f"cannot run this batch or mode on the pipeline: stage {number} would be the "
                    f"first to read parameter {parameter.name!r}, which stage "
                    f"{owners[parameter.name]} holds; compile a module of its own for it"
                )
    own = {whole.first_rank: whole.parameters for whole in wholes}
    stages = tuple(
        replace(
            stage,
            parameters=tuple(p for p in own[stage.first_rank] if owners[p.name] == number),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=stages)


def _seconds_by_forward(analysis: Analysis, kind: Kind, order: Sequence[str]) -> list[float]:
    """Seconds of every forward node with the backward of its module and line."""
    place = {name: position for position, name in enumerate(order)}
    by_source: dict[object, int] = {}
    graph = analysis.graph
    for name in order:
        by_source[graph.by_name[name].source] = place[name]
    found = [0.0] * len(order)
    for plan in kind.whole.nodes:
        node = graph.by_name[plan.name]
        at = place.get(node.name, by_source.get(node.source))
        if at is None:
            continue
        types = analysis.operand_types(node)
        rule = analysis.rules[node.name]
        found[at] += kind.cost.seconds(node, rule, types, plan.operands, plan.outputs)
    return found


def _narrowed(
    crossing: Sequence[int],
    seconds: Sequence[Sequence[float]],
    cuts: Sequence[int],
    least: Sequence[Sequence[int]] | None,
) -> tuple[int, ...]:
    """The cuts moved, within the slack and what hints ask for, to where fewest bytes cross."""
    count = len(crossing) - 1
    found = list(cuts)

    def longest() -> float:
        pieces = pairwise([0, *found, count])
        return max(sum(own[a:b]) for own, (a, b) in zip(seconds, pieces, strict=True))

    def met() -> bool:
        pieces = enumerate(pairwise([0, *found, count]))
        return least is None or all(a >= least[chunk][b] for chunk, (a, b) in pieces)

    even_s = 1 / sum(1 / max(sum(own), _LEAST_S) for own in seconds)
    allowed = longest() + SLACK * even_s
    for index in range(len(found)):
        low = found[index - 1] + 1 if index else 1
        high = found[index + 1] if index + 1 < len(found) else count
        start = found[index]
        best = start
        for position in range(low, high):
            found[index] = position
            if crossing[position] < crossing[best] and met() and longest() <= allowed:
                best = position
        found[index] = best
    return tuple(found)


_LEAST_S = 1e-30
"""Instead of no seconds at all, where speeds are compared."""


def _crossing_bytes(analysis: Analysis, order: Sequence[str]) -> list[int]:
    """For every position, bytes made before it in the forward and read from it on."""
    place = {name: position for position, name in enumerate(order)}
    last: dict[Ref, int] = {}
    for name in order:
        for ref in analysis.graph.by_name[name].operands:
            last[analysis.root(ref).root] = place[name]
    found = [0] * (len(order) + 1)
    for root, until in last.items():
        if root.node in place:
            for position in range(place[root.node] + 1, until + 1):
                found[position] += analysis.graph.type_of(root).num_bytes
    return found


def evaluate_pipeline(
    analysis: Analysis,
    lanes: Sequence[Lane],
    pipeline: Pipeline,
    layout: Layout,
    cluster: Cluster,
) -> PipelineResult:
    """Lower and simulate every stage under a schedule.

    Args:
        analysis: The step.
        lanes: The ranks of every stage.
        pipeline: The chunks.
        layout: Stages, chunks and schedule.
        cluster: For the links between stages.
    """
    spec = schedule_named(layout.schedule)
    microbatches = pipeline.stages[0].mesh.microbatches
    rows = spec.generate(layout.num_stages, layout.num_chunks, microbatches)
    turns = turns_of(layout.schedule, layout.num_stages, layout.num_chunks, microbatches)
    crossing = Crossing(
        transfers=pipeline.transfers,
        meshes=tuple(stage.mesh for stage in pipeline.stages),
        splits_backward=spec.splits_backward,
    )
    results = []
    by_chunk: dict[int, tuple[Program, Mapping[Section, Simulation]]] = {}
    for stage, row in enumerate(turns):
        held = {n: pipeline.stages[n] for n, own in enumerate(layout.lanes) if own == stage}
        cost = lanes[stage].kind.cost
        priced = prices(cost.device, cost.collective_s)
        programs = lower_chunks(
            analysis.graph,
            analysis.rules,
            held,
            cost.mesh.fullest,
            cost.collective_s,
            crossing,
        )
        for number, program in zip(sorted(held), programs, strict=True):
            ready = overlap(program, priced)
            sections = {s: simulate(section_program(ready, s), priced) for s in Section}
            by_chunk[number] = ready, sections
        together = ready
        if len(programs) > 1:
            together = on_one_rank(analysis.graph, programs, held, priced)
        results.append(
            StageResult(
                cost=cost,
                program=together,
                sections={(s, n): by_chunk[n][1][s] for n in held for s in Section},
                peak=simulate(unroll(together, memory_turns(row)), priced),
            )
        )
    chunks = [by_chunk[number] for number in range(len(by_chunk))]
    first = [lanes[stage].first_rank for stage in layout.lanes]
    programs_of = [program for program, _ in chunks]
    sends = [
        collective_s(
            "send", _border_bytes(programs_of, at), pair_link(cluster, *first[at : at + 2])
        )
        for at in range(len(chunks) - 1)
    ]
    times = [_chunk_time(sections) for _, sections in chunks]
    timeline = simulate_schedule(rows, times, sends)
    outside = (Section.PROLOGUE, Section.EPILOGUE)
    around = max(
        sum(own.seconds for (section, _), own in r.sections.items() if section in outside)
        for r in results
    )
    return PipelineResult(seconds=timeline.makespan_s + around, stages=tuple(results))


def _chunk_time(sections: Mapping[Section, Simulation]) -> ChunkTime:
    """Seconds of a chunk for one microbatch."""
    weight_s = sections[Section.WEIGHT_GRADIENT].seconds
    return ChunkTime(
        forward_s=sections[Section.FORWARD].seconds,
        backward_s=sections[Section.BACKWARD].seconds + weight_s,
        weight_s=weight_s,
    )


def _border_bytes(programs: Sequence[Program], chunk: int) -> int:
    """Most bytes that a rank sends, or gets, from a chunk to the next one for one microbatch.

    Args:
        programs: Of the first rank of every chunk.
        chunk: Before the border.
    """
    return max(
        _moved_bytes(programs[chunk].sends, chunk + 1),
        _moved_bytes(programs[chunk + 1].receives, chunk),
    )


def _moved_bytes(messages: Sequence[Message], peer: int) -> int:
    return sum(
        part.num_elements * DTYPE_BYTES[m.local_type.dtype]
        for m in messages
        if m.peer == peer and m.section is Section.FORWARD
        for part in m.parts
    )


def section_program(program: Program, section: Section) -> Program:
    """One section as a program of its own; what it reads of others enters it."""
    chosen = tuple(i for i in program.instructions if i.section is section)
    made = {Ref(i.name, n): kind for i in program.instructions for n, kind in enumerate(i.outputs)}
    made |= {m.ref: m.local_type for m in program.receives}
    own = {i.name for i in chosen}
    entered = {Ref(item.name) for item in program.inputs}
    extra: dict[Ref, ProgramInput] = {}
    rename: dict[Ref, Ref] = {}
    for instruction in chosen:
        for ref in instruction.operands:
            if ref.node in own or ref in entered or ref in extra:
                continue
            name = f"{ref.node}#{ref.index}"
            kind = made[ref]
            rename[ref] = Ref(name)
            extra[ref] = ProgramInput(
                name=name,
                kind="between",
                target=name,
                global_type=kind,
                sharding=(),
                local_type=kind,
            )
    renamed = tuple(with_refs(i, rename) for i in chosen)
    return replace(
        program,
        inputs=(*program.inputs, *extra.values()),
        instructions=renamed,
        loss=None,
        aux=(),
        gradients={},
        mutations={},
        sends=(),
        receives=(),
        microbatches=1,
    )
