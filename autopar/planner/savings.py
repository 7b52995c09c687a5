"""What each recomputed node and each offloaded value saves, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.cost.node import NodeCost, local_bytes
from autopar.ir.graph import Phase, Ref
from autopar.plan.records import Saving, StagePlan
from autopar.search.analysis import Analysis


def savings(
    analysis: Analysis, costs: Sequence[NodeCost], stages: Sequence[StagePlan]
) -> tuple[Saving, ...]:
    """One entry for every decision of a plan's stages, in their order.

    Args:
        analysis: The step.
        costs: Prices nodes, on every stage's devices.
        stages: The stages.
    """
    late = {
        analysis.root(ref).root
        for node in analysis.graph.nodes
        if node.phase is Phase.BACKWARD and Ref(node.name) not in analysis.aliases
        for ref in node.operands
    }
    return tuple(
        saving
        for cost, stage in zip(costs, stages, strict=True)
        for made in (_recomputed(analysis, cost, stage, late), _offloaded(analysis, cost, stage))
        for saving in made
    )


def _recomputed(
    analysis: Analysis, cost: NodeCost, stage: StagePlan, late: set[Ref]
) -> Iterator[Saving]:
    again = set(stage.recomputed)
    more = Counter(name for names in stage.forgotten.values() for name in names)
    for plan in stage.nodes:
        if plan.name not in again:
            continue
        node = analysis.graph.by_name[plan.name]
        types = analysis.operand_types(node)
        yield Saving(
            name=plan.name,
            saved_bytes=sum(
                local_bytes(kind, sharding)
                for index, (kind, sharding) in enumerate(
                    zip(node.outputs, plan.outputs, strict=True)
                )
                if Ref(plan.name, index) in late
            ),
            seconds=(1 + more[plan.name])
            * cost.seconds(node, analysis.rules[plan.name], types, plan.operands, plan.outputs),
        )


def _offloaded(analysis: Analysis, cost: NodeCost, stage: StagePlan) -> Iterator[Saving]:
    own = {plan.name for plan in stage.nodes}
    for value in stage.offloaded:
        name, _, index = value.partition(":")
        if name not in own:
            continue
        kind = analysis.graph.by_name[name].outputs[int(index or 0)]
        size = sum(local_bytes(kind, sharding) for sharding in stage.kept[value])
        moved = 2 * size * stage.mesh.microbatches
        yield Saving(
            name=value,
            saved_bytes=size,
            seconds=moved / cost.device.host_link_bytes_per_s,
        )
