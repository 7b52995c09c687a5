"""Samples that the ranks or microbatches do not divide, in sequences as in rows."""

from __future__ import annotations

import random

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import HintError
from autopar.ir.sharding import Mesh, Split
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.dist.training import build
from tests.oracles.pipeline import assert_exact, programs_of
from tests.oracles.random_plans import random_stage


def planned(name: str, samples: int, *hints: hint.Hint) -> Plan:
    captured = capture_step(*build(name, samples), grad=True)
    request = Request(model=name, fingerprint="", cluster=Cluster.local(2), hints=hints)
    return make_plan(analyse(captured.graph), request)


@pytest.mark.parametrize(
    "hints",
    [
        (hint.degrees(dp=2, tp=1),),
        (hint.degrees(pp=2), hint.microbatches(3)),
    ],
)
def test_five_sequences_are_split_by_samples(hints: tuple[hint.Hint, ...]) -> None:
    plan = planned("llama", 5, *hints)
    axis = len(plan.mesh.sizes) - 1
    chunk = -(-5 // plan.mesh.sizes[axis])
    heavy = [
        node
        for stage in plan.stages
        for node in stage.nodes
        if "mlp" in plan.modules.get(node.name, "") and "mm" in node.name
    ]
    assert heavy
    for node in heavy:
        splits = [s[axis] for s in node.operands if isinstance(s[axis], Split)]
        assert {split.block for split in splits} == {chunk * 8}, node


@pytest.mark.parametrize(("samples", "count"), [(5, 2), (6, 2)])
def test_microbatches_of_uneven_shares_are_refused(samples: int, count: int) -> None:
    with pytest.raises(HintError, match=rf"{samples} samples, not a multiple of {2 * count}"):
        planned("mlp", samples, hint.degrees(dp=2, tp=1), hint.microbatches(count))


def exact(name: str, samples: int, sizes: tuple[int, ...], seed: int) -> None:
    built = build(name, samples)
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    stage = random_stage(analysis, Mesh(tuple("abc"[: len(sizes)]), sizes), seed)
    draw = random.Random(seed)
    prices: dict[tuple[str, int], float] = {}

    def collective_s(kind: str, _: int, axis: int) -> float:
        return prices.setdefault((kind, axis), draw.random() + 0.01)

    assert_exact(*built, analysis, programs_of(analysis, stage, collective_s), captured)


@pytest.mark.parametrize(("name", "sizes"), [("gpt2", (2,)), ("bert", (3,))])
def test_random_plans_of_five_sequences_are_exact(name: str, sizes: tuple[int, ...]) -> None:
    exact(name, 5, sizes, seed=0)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (2, 3)])
@pytest.mark.parametrize("samples", [3, 5, 7])
@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2", "bert"])
def test_many_random_plans_of_odd_batches_are_exact(
    name: str, samples: int, sizes: tuple[int, ...], seed: int
) -> None:
    exact(name, samples, sizes, seed)
