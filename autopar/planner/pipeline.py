"""Pipelines: a plan of the whole step cut into stages, and what its schedule takes.

The step is planned over the mesh of one stage, its forward is cut where the stages take equally
long and little crosses, and every stage's program is simulated section by section; the schedule's
timeline gives the step, and the loop written out in the order of the stage's row gives its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.cost.node import NodeCost
from autopar.errors import UnsupportedError
from autopar.ir.graph import PARAMETER, Ref
from autopar.lower.overlap import overlap
from autopar.lower.program import Message, Program, ProgramInput, Section
from autopar.lower.simulate import Prices, Simulation, simulate
from autopar.lower.spmd import Crossing, lower
from autopar.lower.unroll import Turn, unroll, with_refs
from autopar.plan.records import Plan, StagePlan
from autopar.schedules.actions import Kind, Row
from autopar.schedules.makespan import ChunkTime
from autopar.schedules.makespan import simulate as simulate_schedule
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from autopar.search.stages import Pipeline, balanced_cuts, forward_order, split_stages
from cost_models.cluster import Cluster
from cost_models.collectives import axis_link, collective_s

SLACK = 0.02
"""Of the longest stage: what a cut may cost for fewer bytes to cross."""

_SECTIONS = {Kind.FORWARD: Section.FORWARD, Kind.BACKWARD: Section.BACKWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What one stage of a pipeline takes.

    Attributes:
        program: Of its first rank.
        sections: Simulation of every section, for one microbatch.
        peak: Simulation of the written-out loop, for its memory.
    """

    program: Program
    sections: Mapping[Section, Simulation]
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
    cost: NodeCost,
    whole: StagePlan,
    num_stages: int,
    settled: Plan | None = None,
) -> Pipeline:
    """The plan of the whole step, cut into stages.

    Args:
        analysis: The step.
        cost: Prices its nodes.
        whole: The plan of the whole step.
        num_stages: Number of stages.
        settled: A plan whose stages hold the parameters already; they stay where they are.

    Raises:
        HintError: There are fewer ops than stages.
        UnsupportedError: No cut leaves every parameter on its settled stage.
    """
    order = forward_order(analysis)
    seconds = _seconds_by_forward(analysis, cost, whole, order)
    cuts = _narrowed(analysis, order, seconds, balanced_cuts(seconds, num_stages))
    if settled is None:
        return split_stages(analysis, whole, cuts)
    owners = {p.name: n for n, stage in enumerate(settled.stages) for p in stage.parameters}
    read = _first_reads(analysis, order)
    found = []
    for number, position in enumerate(cuts, start=1):
        low = max((at + 1 for name, at in read.items() if owners[name] < number), default=1)
        high = min((at for name, at in read.items() if owners[name] >= number), default=len(order))
        found.append(min(max(position, low), high))
    return _with_owners(split_stages(analysis, whole, found), owners, read)


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
    pipeline: Pipeline, owners: Mapping[str, int], read: Mapping[str, int]
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
    everything = [parameter for stage in pipeline.stages for parameter in stage.parameters]
    stages = tuple(
        replace(stage, parameters=tuple(p for p in everything if owners[p.name] == number))
        for number, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=stages)


def _seconds_by_forward(
    analysis: Analysis, cost: NodeCost, whole: StagePlan, order: Sequence[str]
) -> list[float]:
    """Seconds of every forward node with the backward of its module and line."""
    place = {name: position for position, name in enumerate(order)}
    by_source: dict[object, int] = {}
    graph = analysis.graph
    for name in order:
        by_source[graph.by_name[name].source] = place[name]
    found = [0.0] * len(order)
    for plan in whole.nodes:
        node = graph.by_name[plan.name]
        at = place.get(node.name, by_source.get(node.source))
        if at is None:
            continue
        types = analysis.operand_types(node)
        rule = analysis.rules[node.name]
        found[at] += cost.seconds(node, rule, types, plan.operands, plan.outputs)
    return found


def _narrowed(
    analysis: Analysis, order: Sequence[str], seconds: Sequence[float], cuts: Sequence[int]
) -> tuple[int, ...]:
    """The cuts moved, within the slack, to where fewest bytes cross."""
    crossing = _crossing_bytes(analysis, order)
    found = list(cuts)

    def longest() -> float:
        bounds = [0, *found, len(order)]
        return max(sum(seconds[a:b]) for a, b in pairwise(bounds))

    allowed = longest() + SLACK * sum(seconds) / (len(cuts) + 1)
    for index in range(len(found)):
        low = found[index - 1] + 1 if index else 1
        high = found[index + 1] if index + 1 < len(found) else len(order)
        start = found[index]
        best = start
        for position in range(low, high):
            found[index] = position
            if crossing[position] < crossing[best] and longest() <= allowed:
                best = position
        found[index] = best
    return tuple(found)


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
    cost: NodeCost,
    priced: Prices,
    pipeline: Pipeline,
    schedule_name: str,
    cluster: Cluster,
) -> PipelineResult:
    """Lower and simulate every stage under a schedule.

    Args:
        analysis: The step.
        cost: Prices nodes and collectives inside a stage.
        priced: Prices instructions.
        pipeline: The stages.
        schedule_name: Of ``autopar.schedules``.
        cluster: For the links between stages.
    """
    mesh = pipeline.stages[0].mesh
    rows = schedule_named(schedule_name).generate(len(pipeline.stages), 1, mesh.microbatches)
    results = []
    for number, stage in enumerate(pipeline.stages):
        crossing = Crossing(number, pipeline.transfers)
        program = overlap(
            lower(
                analysis.graph,
                analysis.rules,
                stage,
                (0,) * len(mesh.sizes),
                cost.collective_s,
                crossing,
            )
        )
        sections = {s: simulate(section_program(program, s), priced) for s in Section}
        written_out = unroll(program, turns(rows[number]))
        results.append(
            StageResult(program=program, sections=sections, peak=simulate(written_out, priced))
        )
    times = [
        ChunkTime(
            forward_s=r.sections[Section.FORWARD].seconds,
            backward_s=r.sections[Section.BACKWARD].seconds,
        )
        for r in results
    ]
    link = axis_link(cluster, (len(pipeline.stages), mesh.num_ranks), 0)
    sends = [
        collective_s("send", _sent_bytes(r.program.sends, number + 1), link)
        for number, r in enumerate(results[:-1])
    ]
    timeline = simulate_schedule(rows, times, sends)
    around = max(
        r.sections[Section.PROLOGUE].seconds + r.sections[Section.EPILOGUE].seconds for r in results
    )
    return PipelineResult(seconds=timeline.makespan_s + around, stages=tuple(results))


def _sent_bytes(sends: Sequence[Message], stage: int) -> int:
    return sum(
        m.local_type.num_bytes for m in sends if m.stage == stage and m.section is Section.FORWARD
    )


def turns(row: Row) -> tuple[Turn, ...]:
    """Sections and microbatches of a stage's row, up to where its memory repeats.

    Behind the first backward every forward follows a backward: what is live repeats, so the row is
    followed until two backwards are done.
    """
    found: list[Turn] = []
    backwards = 0
    for action in row:
        found.append((_SECTIONS[action.kind], action.microbatch))
        backwards += action.kind is Kind.BACKWARD
        if backwards == 2:
            break
    return tuple(found)


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
