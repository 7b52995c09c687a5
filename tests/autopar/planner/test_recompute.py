"""Plans within memory: what is recomputed, that it fits, and that it stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar import hint
from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.errors import HintError, InfeasibleError
from autopar.hint import Hint
from autopar.ir.sharding import Mesh
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.evaluate import evaluate
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import build_problem
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster
from tests.oracles.models import gpt2
from tests.oracles.pipeline import assert_exact, programs_of

BUILT = gpt2(layers=6, batch=8)


@pytest.fixture(scope="module")
def captured() -> tuple[Analysis, Any]:
    model, batch, loss = BUILT
    found = capture_step(model, batch, loss, grad=True)
    return analyse(found.graph), found


def planned(analysis: Analysis, ranks: int, *hints: Hint) -> Plan:
    hints = (hint.microbatches(1), *hints)
    cluster = Cluster.local(ranks)
    return make_plan(analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=hints))


@pytest.mark.parametrize("part", [0.9, 0.6])
@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_within_less_memory_are_exact_and_fit(
    captured: tuple[Analysis, Any], ranks: int, part: float
) -> None:
    analysis, found = captured
    free = planned(analysis, ranks)
    assert not free.stage.recomputed
    limit = int(part * free.prediction.memory.total_bytes)
    tight = planned(analysis, ranks, hint.degrees(pp=1), hint.memory_limit(limit))
    assert tight.stage.recomputed
    assert tight.prediction.memory.total_bytes <= limit
    assert tight.prediction.step_s >= free.prediction.step_s * (1 - 1e-9)
    programs = programs_of(analysis, tight.stage, axis_seconds(Cluster.local(ranks), tight.mesh))
    assert_exact(*BUILT, analysis, programs, found)


def test_too_little_memory_says_the_least_that_would_do(captured: tuple[Analysis, Any]) -> None:
    with pytest.raises(InfeasibleError, match=r"1 mesh tried, .* the least found needs"):
        planned(captured[0], 1, hint.memory_limit("100kB"))


def blocks_of(analysis: Analysis, names: tuple[str, ...]) -> set[str]:
    return {analysis.graph.by_name[name].source.module.split(".mlp")[0] for name in names}


def test_hints_say_what_is_recomputed(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    plan = planned(analysis, 1, hint.recompute("*.mlp"))
    modules = {analysis.graph.by_name[n].source.module for n in plan.stage.recomputed}
    assert modules and all(".mlp" in module for module in modules)


def test_a_hint_on_one_block_holds_for_it_alone(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    plan = planned(analysis, 1, hint.recompute("*.h.1.mlp"))
    assert blocks_of(analysis, plan.stage.recomputed) == {"transformer.h.1"}


def test_what_a_hint_keeps_is_not_recomputed(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    free = planned(analysis, 1)
    limit = hint.memory_limit(int(0.9 * free.prediction.memory.total_bytes))
    anywhere = planned(analysis, 1, limit)
    modules = {analysis.graph.by_name[n].source.module for n in anywhere.stage.recomputed}
    assert any("mlp" in module for module in modules)
    kept = planned(analysis, 1, limit, hint.keep("*.mlp"))
    modules = {analysis.graph.by_name[n].source.module for n in kept.stage.recomputed}
    assert modules and not any("mlp" in module for module in modules)


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ((hint.recompute("*.mpl"),), "no module that runs in the forward matches; did you mean"),
        ((hint.recompute("*.mlp"), hint.keep("*.h.*")), "one forgets its activations"),
    ],
)
def test_wrong_hints_are_refused(
    captured: tuple[Analysis, Any], hints: tuple[Hint, ...], words: str
) -> None:
    with pytest.raises(HintError, match=words):
        planned(captured[0], 1, *hints)


def test_frozen_layers_in_front_save_nothing() -> None:
    """What no trainable parameter is upstream of is neither kept nor recomputed."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    found = capture_step(model, torch.ones(4, 8), lambda m, x: m(x).sum(), grad=True)
    plan = planned(analyse(found.graph), 1, hint.recompute("0"))
    assert not plan.stage.recomputed


@pytest.mark.parametrize("mesh", ["one", "free", "microbatches", "dp of microbatches"])
def test_the_problem_knows_what_the_program_holds(
    captured: tuple[Analysis, Any], mesh: str
) -> None:
    """At the end of the forward, in the backward, and what microbatches add up."""
    analysis, _ = captured
    chosen = {
        "one": Mesh(("a",), (1,)),
        "free": Mesh(("a",), (2,)),
        "microbatches": Mesh(("a",), (1,)).with_time(4),
        "dp of microbatches": Mesh(("dp",), (2,), roles=("dp",)).with_time(2),
    }[mesh]
    cluster = Cluster.local(chosen.num_ranks)
    cost = NodeCost(cluster.device(0), chosen, axis_seconds(cluster, chosen))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    built = build_problem(analysis, chosen, cost, updates, Restrictions())
    solution = solve(built.problem)
    request = Request(model="m", fingerprint="f", cluster=cluster)
    used = evaluate(analysis, request, cost, built, solution).memory.total_bytes
    assert max(solution.memory_bytes) == pytest.approx(used, rel=0.01)
