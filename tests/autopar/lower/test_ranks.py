"""The rank that is simulated stands for those that take longest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.capture import capture_step
from autopar.cost.kernel import QUERIES
from autopar.cost.node import NodeCost, axis_seconds, own_part
from autopar.ir.sharding import Mesh, Partial, Split
from autopar.lower.ranks import distinct_coordinates, slowest_coordinates
from autopar.lower.simulate import Prices, prices, seconds_of, simulate
from autopar.lower.spmd import lower
from autopar.plan.records import StagePlan
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.models import unet
from tests.oracles.random_plans import random_stage


class Attending(torch.nn.Module):
    """Causal attention of a sequence."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.read = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.read(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True
        )


def splits_queries(stage: StagePlan) -> bool:
    return any(
        isinstance(plan.outputs[0][0], Split) and plan.outputs[0][0].dim == QUERIES
        for plan in stage.nodes
        if plan.name.startswith("attention")
    )


def queries_apart(
    model: torch.nn.Module, length: int
) -> tuple[Analysis, StagePlan, NodeCost, Prices]:
    """A step of an attention on four ranks that split its queries, and what prices it."""
    x = torch.randn(2, length, 32)
    analysis = analyse(capture_step(model, x, lambda m, b: m(b).sum(), grad=True).graph)
    mesh, cluster = Mesh(("a",), (4,)), Cluster.local(4)
    cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    stages = (random_stage(analysis, mesh, seed) for seed in range(40))
    stage = next(stage for stage in stages if splits_queries(stage))
    return analysis, stage, cost, prices(cluster.device(0), cost.collective_s)


@pytest.mark.parametrize("length", [96, 95])
def test_the_last_rank_of_causal_queries_stands_for_the_others(length: int) -> None:
    analysis, stage, cost, priced = queries_apart(Attending(), length)
    graph = analysis.graph

    def compute_s(rank: int) -> float:
        program = lower(graph, analysis.rules, stage, (rank,), cost.collective_s)
        return simulate(program, priced).compute_s

    taken = [compute_s(rank) for rank in range(4)]
    assert max(taken) > taken[0]
    chosen = [at for (at,) in distinct_coordinates(graph, stage)]
    assert max(taken[at] for at in chosen) == max(taken)
    last = 3 if length == 96 else 2
    assert slowest_coordinates(graph, [stage]) == (last,)


@pytest.mark.parametrize("masked", [False, True])
def test_the_search_prices_causal_queries_as_the_last_rank_runs_them(masked: bool) -> None:
    model = Attending(dropout=0.5 if masked else 0.0)
    analysis, stage, cost, priced = queries_apart(model, 96)
    graph = analysis.graph
    program = lower(graph, analysis.rules, stage, (3,), cost.collective_s)
    ran = seconds_of(program, priced)
    for plan in stage.nodes:
        node = graph.by_name[plan.name]
        if "attention" not in node.op:
            continue
        own = (i for i in program.instructions if i.origin == node.name and i.op == node.op)
        types, rule = analysis.operand_types(node), analysis.rules[node.name]
        searched_s = cost.seconds(node, rule, types, plan.operands, plan.outputs)
        assert searched_s == pytest.approx(sum(ran[i.name] for i in own))


def test_without_causal_queries_the_first_rank_stands_for_the_others() -> None:
    model, batch, loss = unet()
    analysis = analyse(capture_step(model, batch, loss, grad=True).graph)
    shared = Mesh(("dp",), (2,), roles=("dp",), shares=((1, 3),))
    stage = random_stage(analysis, Mesh(("a",), (2,)), 0)
    assert slowest_coordinates(analysis.graph, [stage]) == (0,)
    assert slowest_coordinates(analysis.graph, [replace(stage, mesh=shared)]) == (1,)


def test_a_convolution_of_some_input_channels_computes() -> None:
    model, batch, loss = unet()
    analysis = analyse(capture_step(model, batch, loss, grad=True).graph)
    mesh = Mesh(("a",), (2,))
    cost = NodeCost(Cluster.local(2).device(0), mesh, axis_seconds(Cluster.local(2), mesh))
    partial = 0
    for seed in range(3):
        stage = random_stage(analysis, mesh, seed)
        plans = {plan.name: plan for plan in stage.nodes}
        program = lower(analysis.graph, analysis.rules, stage, (0,), cost.collective_s)
        for instruction in program.instructions:
            plan = plans.get(instruction.origin)
            node = None if plan is None else analysis.graph.by_name[plan.name]
            if plan is None or node is None or instruction.op != node.op:
                continue
            rule = analysis.rules[plan.name]
            own = own_part(rule.flops, mesh, (*plan.operands, *plan.outputs), (0,))
            assert instruction.flops == own
            partial += (
                node.op == "aten.convolution.default"
                and isinstance(plan.outputs[0][0], Partial)
                and isinstance(plan.operands[0][0], Split)
            )
    assert partial
