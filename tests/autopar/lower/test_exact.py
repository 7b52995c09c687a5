"""Programs of all ranks, run in lockstep, equal one process: forced and random plans."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.hint import Hint
from autopar.ir.sharding import Mesh
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS, Built, mixtral, mlp
from tests.oracles.pipeline import assert_exact, programs_of
from tests.oracles.random_plans import random_stage

FORCED: dict[str, tuple[int, tuple[Hint, ...]]] = {
    "auto": (2, ()),
    "dp2": (2, (hint.degrees(dp=2, tp=1),)),
    "dp3": (3, (hint.degrees(dp=3, tp=1),)),
    "tp2": (2, (hint.degrees(dp=1, tp=2),)),
    "tp4": (4, (hint.degrees(dp=1, tp=4),)),
    "dp2tp2": (4, (hint.degrees(dp=2, tp=2),)),
    "zero3": (4, (hint.degrees(dp=4, zero=3),)),
    "zero0": (2, (hint.degrees(dp=2, zero=0),)),
    "cp2": (2, (hint.degrees(dp=1, tp=1, cp=2),)),
}


def captured(built: Built) -> tuple[Analysis, Any]:
    model, batch, loss = built
    found = capture_step(model, batch, loss, grad=True)
    return analyse(found.graph), found


@pytest.mark.parametrize("layout", FORCED)
@pytest.mark.parametrize("name", MODELS)
def test_forced_plans_are_exact(name: str, layout: str) -> None:
    built = MODELS[name]()
    if layout == "cp2" and name == "mlp":
        pytest.skip("no sequence dim")
    analysis, found = captured(built)
    ranks, hints = FORCED[layout]
    cluster = Cluster.local(ranks)
    plan = make_plan(analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=hints))
    programs = programs_of(analysis, plan.stage, axis_seconds(cluster, plan.mesh))
    assert_exact(*built, analysis, programs, found)


def exact_under_random_prices(built: Built, sizes: tuple[int, ...], seed: int) -> None:
    analysis, found = captured(built)
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    stage = random_stage(analysis, mesh, seed)
    draw = random.Random(seed)
    prices: dict[tuple[str, int], float] = {}

    def collective_s(kind: str, _: int, axis: int) -> float:
        return prices.setdefault((kind, axis), draw.random() + 0.01)

    assert_exact(*built, analysis, programs_of(analysis, stage, collective_s), found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_plans_from_random_objectives_are_exact(
    name: str, sizes: tuple[int, ...], seed: int
) -> None:
    exact_under_random_prices(MODELS[name](), sizes, seed)


@pytest.mark.parametrize("sizes", [(2,), (3,), pytest.param((2, 2), marks=pytest.mark.large)])
def test_experts_are_exact_however_tokens_and_experts_are_split(sizes: tuple[int, ...]) -> None:
    exact_under_random_prices(mixtral(layers=1), sizes, seed=0)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(3, 15))
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2), (2, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_many_plans_from_random_objectives_are_exact(
    name: str, sizes: tuple[int, ...], seed: int
) -> None:
    exact_under_random_prices(MODELS[name](), sizes, seed)


@pytest.mark.parametrize("batch_size", [5, 7])
def test_a_batch_that_does_not_divide_is_exact(batch_size: int) -> None:
    built = mlp(batch_size)
    analysis, found = captured(built)
    cluster = Cluster.local(4)
    request = Request(
        model="m", fingerprint="f", cluster=cluster, hints=(hint.degrees(dp=2, tp=2),)
    )
    plan = make_plan(analysis, request)
    programs = programs_of(analysis, plan.stage, axis_seconds(cluster, plan.mesh))
    assert_exact(*built, analysis, programs, found)
