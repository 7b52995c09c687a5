"""The search on captured models: folding, reproducibility, never worse than a forced plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import hint
from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.hint import Hint
from autopar.ir.sharding import WHOLE, Mesh, Split
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.plan.serialize import to_json
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import build_problem
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS, llama


def analysed(name: str, *, folded: bool = True) -> Analysis:
    model, batch, loss = MODELS[name]()
    return analyse(capture_step(model, batch, loss, grad=True).graph, folded=folded)


def planned(analysis: Analysis, ranks: int, *hints: Hint) -> Plan:
    cluster = Cluster.local(ranks)
    return make_plan(analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=hints))


def objective_s(analysis: Analysis, mesh: Mesh, limit_bytes: float | None = None) -> float:
    cluster = Cluster.preset("a100")
    cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    built = build_problem(
        analysis, mesh, cost, updates, Restrictions(), memory_limit_bytes=limit_bytes
    )
    solution = solve(built.problem, gap=1e-7)
    assert solution.status == "optimal"
    return solution.objective_s


def test_folded_equals_unfolded() -> None:
    mesh = Mesh(("a",), (8,))
    model, batch, loss = llama(layers=4)
    graph = capture_step(model, batch, loss, grad=True).graph
    folded, flat = analyse(graph), analyse(graph, folded=False)
    assert len(folded.folding.classes) < 0.6 * len(flat.folding.classes)
    assert objective_s(folded, mesh) == pytest.approx(objective_s(flat, mesh), rel=1e-6)


def test_depth_adds_no_classes() -> None:
    sizes = []
    for layers in (4, 8):
        model, batch, loss = llama(layers)
        sizes.append(
            len(analyse(capture_step(model, batch, loss, grad=True).graph).folding.classes)
        )
    assert sizes[0] == sizes[1]


def test_depth_adds_no_classes_of_buffers_nor_of_what_they_become() -> None:
    sizes = []
    for blocks in (4, 8):
        layers = ((nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(blocks))
        model, batch = nn.Sequential(*itertools.chain(*layers)), torch.zeros(4, 8)
        graph = capture_step(model, batch, lambda m, x: m(x).sum(), grad=True).graph
        assert len(graph.mutations) == 3 * blocks
        found = analyse(graph)
        sizes.append((len(found.folding.classes), len(found.read)))
    assert sizes[0] == sizes[1]


def test_depth_adds_no_classes_of_blocks_that_drop_ever_more() -> None:
    sizes = []
    for blocks in (4, 8):
        layers = ((nn.Linear(8, 8), nn.Dropout(0.05 * (1 + k))) for k in range(blocks))
        model, batch = nn.Sequential(*itertools.chain(*layers)), torch.zeros(4, 8)
        graph = capture_step(model, batch, lambda m, x: m(x).sum(), grad=True).graph
        sizes.append(len(analyse(graph).folding.classes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2"])
def test_never_worse_than_a_forced_plan(name: str) -> None:
    analysis = analysed(name)
    best = planned(analysis, 4).search.objective_s
    forced = [
        hint.degrees(dp=4),
        hint.degrees(tp=4, dp=1),
        hint.degrees(dp=2, tp=2),
        hint.degrees(dp=4, zero=3),
        hint.degrees(dp=4, zero=0),
    ]
    for degrees in forced:
        assert best <= planned(analysis, 4, degrees).search.objective_s * (1 + 1e-6), degrees


def test_forced_plans_do_what_their_name_says() -> None:
    analysis = analysed("llama")
    replicated = planned(analysis, 2, hint.degrees(dp=2, zero=0)).stage
    assert all(p.stored == (WHOLE,) for p in replicated.parameters)
    sharded = planned(analysis, 2, hint.degrees(dp=2, zero=3)).stage
    assert all(isinstance(p.stored[0], Split) for p in sharded.parameters)
    matmuls = [n for n in sharded.nodes if n.name.startswith("mm")]
    assert all(any(isinstance(s[0], Split) for s in n.operands) for n in matmuls)
    tensor = planned(analysis, 2, hint.degrees(tp=2, dp=1)).stage
    weights = [p for p in tensor.parameters if "proj" in p.name]
    assert weights
    assert all(all(isinstance(u[0], Split) for u in p.used) for p in weights)


def test_zero_three_gathers_again_in_the_backward_and_zero_two_does_not() -> None:
    analysis = analysed("mlp")

    def gathers(stage: int) -> int:
        plan = planned(analysis, 2, hint.degrees(dp=2, zero=stage))
        return sum(
            c.count
            for c in plan.prediction.collectives
            if c.kind == "all_gather" and c.purpose == "parameters"
        )

    assert gathers(3) > gathers(2) > gathers(0) == 0


def test_every_run_gives_the_same_plan() -> None:
    plans = [planned(analysed("gpt2"), 4) for _ in range(2)]
    decided = [to_json(replace(p, search=replace(p.search, seconds=0.0))) for p in plans]
    assert decided[0] == decided[1]


def test_less_memory_never_makes_a_faster_plan() -> None:
    analysis, mesh = analysed("llama"), Mesh(("a",), (4,))
    free = objective_s(analysis, mesh)
    last = free
    for limit in (400_000, 300_000, 250_000):
        now = objective_s(analysis, mesh, limit)
        assert now >= last - 1e-12
        last = now
    assert last > free
