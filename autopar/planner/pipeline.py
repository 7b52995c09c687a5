"""Pipelines: plans of the whole step, cut into stages.

The step is planned over the mesh of every stage (once for stages that are alike), and its forward
is cut where its outline is fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost
from autopar.errors import HintError, UnsupportedError
from autopar.plan.records import Plan, StagePlan
from autopar.planner.layout import Layout
from autopar.planner.outline import Ranks, Seconds, course_of, outline
from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import rows_of
from autopar.search.analysis import Analysis
from autopar.search.stages import Pipeline, split_lanes
from cost_models.cluster import Cluster

FORWARD, WEIGHT = 1 / 3, 1 / 3
"""Parts of a microbatch's seconds, where only their sum is known: products have two in the
backward, one of them for the gradient of a parameter."""


@functools.cache
def filled_s(layout: Layout, count: int, forward: float, send_share: float) -> float:
    """Makespan of a schedule, for a microbatch of one second a stage.

    Args:
        layout: Stages, chunks and schedule.
        count: Microbatches.
        forward: Part of the second that is the forward.
        send_share: Seconds of a message.
    """
    rows = rows_of(layout.schedule, layout.num_stages, layout.num_chunks, count)
    each = 1 / layout.num_chunks
    time = ChunkTime(forward * each, (1 - forward) * each, WEIGHT * each)
    return simulate(rows, [time] * len(layout.lanes), send_share).makespan_s


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


def cut(
    analysis: Analysis,
    lanes: Sequence[Lane],
    layouts: Sequence[Layout],
    cluster: Cluster,
    settled: Plan | None = None,
) -> Pipeline:
    """Plans of the whole step, cut into the chunks of a pipeline.

    Args:
        analysis: The step.
        lanes: The ranks of every stage.
        layouts: Stages and chunks, under the schedules that may be taken.
        cluster: For the links between stages.
        settled: A plan whose chunks hold the parameters already; they stay where they are.

    Raises:
        HintError: There are fewer ops than chunks, or hints cannot be met.
        UnsupportedError: No cut leaves every parameter on its settled chunk, or a stage would own
            none.
    """
    course, layout = course_of(analysis), layouts[0]
    held = layout.lanes
    order = course.order
    if len(held) > len(order):
        chunks = "" if layout.num_chunks == 1 else f" of {layout.num_chunks} chunks"
        raise HintError(
            f"cannot cut {len(order)} ops into {layout.num_stages} stages{chunks}: every piece "
            f"needs one; use fewer stages{chunks and ' or chunks'}"
        )
    wholes = [replace(lane.kind.whole, first_rank=lane.first_rank) for lane in lanes]
    by_kind = {
        kind: seconds_by_forward(analysis, kind)
        for kind in dict.fromkeys(lane.kind for lane in lanes)
    }
    cuts = outline(
        course,
        [by_kind[lane.kind] for lane in lanes],
        layouts if settled is None else [replace(layout, hints=())],
        wholes[0].mesh.microbatches,
        Ranks(
            cluster=cluster,
            first=tuple(lane.first_rank for lane in lanes),
            count=tuple(whole.mesh.num_ranks for whole in wholes),
        ),
    ).cuts
    if settled is None:
        made = split_lanes(analysis, wholes, cuts, held)
        if stage_without_parameter(made.stages) is None:
            return made
        raise UnsupportedError(
            f"cannot cut the model into {len(lanes)} stages: one would hold no parameter, so that "
            "its ranks have nothing to train; use fewer stages"
        )
    owners = {p.name: n for n, stage in enumerate(settled.stages) for p in stage.parameters}
    read = course.first_reads
    moved = []
    for number, position in enumerate(cuts, start=1):
        low = max((at + 1 for name, at in read.items() if owners[name] < number), default=1)
        high = min((at for name, at in read.items() if owners[name] >= number), default=len(order))
        moved.append(min(max(position, low), high))
    return _with_owners(split_lanes(analysis, wholes, moved, held), wholes, owners, read)


def stage_without_parameter(chunks: Sequence[StagePlan]) -> int | None:
    """The first stage of a pipeline that owns no parameter, by the chunks of all stages."""
    owned: dict[int, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.first_rank):
        owned[chunk.first_rank] = owned.get(chunk.first_rank, 0) + len(chunk.parameters)
    return next((n for n, count in enumerate(owned.values()) if not count), None)


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


def seconds_by_forward(analysis: Analysis, kind: Kind) -> Seconds:
    """Seconds of the step on the ranks of a stage, where they belong in the forward.

    What runs again takes them twice.
    """
    found = {}
    again = frozenset(kind.whole.recomputed)
    for plan in kind.whole.nodes:
        node = analysis.graph.by_name[plan.name]
        types = analysis.operand_types(node)
        rule = analysis.rules[node.name]
        once_s = kind.cost.seconds(node, rule, types, plan.operands, plan.outputs)
        found[node.name] = once_s * (1 + (node.name in again))
    return course_of(analysis).seconds(found)
