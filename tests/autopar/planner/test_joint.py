"""Sharding and memory chosen together against sharding first, memory second."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.sharding import Mesh
from autopar.options import OptimizerSpec
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import Built, build_problem
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster
from tests.oracles.hosts import hosted
from tests.oracles.models import gpt2, llama
from tests.oracles.sequential import joint, planned_on, sequential, sharded_first, unbound_bytes

TWO = Mesh(("a",), (2,))
BOTH = 1 + 1e-5
"""Both programs are solved to a gap of a millionth."""


@cache
def mlp(width: int, hidden: int, depth: int, batch: int) -> Analysis:
    layers = [
        m
        for _ in range(depth)
        for m in (nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    ]
    model, x = nn.Sequential(*layers), torch.randn(batch, width)
    return analyse(capture_step(model, x, lambda m, x: m(x).sum(), grad=True).graph)


def problem_of(analysis: Analysis, cluster: Cluster, mesh: Mesh = TWO) -> Built:
    cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e10)
    return build_problem(analysis, mesh, cost, updates, Restrictions())


@given(
    shape=st.sampled_from([(8, 32, 3, 64), (32, 64, 2, 8), (16, 16, 4, 32)]),
    link=st.sampled_from([0.0, 1e8, 1e10]),
    part=st.floats(0.75, 1.0),
)
@settings(max_examples=8, deadline=None)
def test_joint_is_never_slower_than_sharding_first(
    shape: tuple[int, int, int, int], link: float, part: float
) -> None:
    plain = problem_of(mlp(*shape), hosted(2, link) if link else Cluster.local(2))
    limit = part * unbound_bytes(plain)
    first, both = sequential(plain, limit), joint(plain, limit)
    assert both.objective_s <= first.objective_s * BOTH


@pytest.mark.parametrize("part", [0.9, 0.7, 0.5])
def test_joint_fits_where_sharding_first_does_not(part: float) -> None:
    """Wide layers of few samples: weights that are whole on each rank take most of the memory."""
    plain = problem_of(mlp(32, 64, 2, 8), Cluster.local(2))
    limit = part * unbound_bytes(plain)
    assert sequential(plain, limit).status == "infeasible"
    assert joint(plain, limit).status == "optimal"


def test_plans_are_faster_where_both_fit() -> None:
    """Copies to the host hide where the sharding leaves less to copy."""
    analysis = analyse(capture_step(*gpt2(layers=6, batch=8), grad=True).graph)
    cluster = hosted(2, 1e9)
    free = planned_on(analysis, cluster, TWO, float("inf"))
    assert free is not None
    limit = 0.6 * free.memory.total_bytes
    first = planned_on(analysis, cluster, TWO, limit, sharded_first)
    both = planned_on(analysis, cluster, TWO, limit)
    assert first is not None and both is not None
    assert both.step_s < 0.996 * first.step_s


@pytest.mark.large
def test_plans_are_never_slower_than_sharding_first() -> None:
    """Lowered and simulated; Llama's halves do not fit at all where sharding comes first."""
    cluster = hosted(2, 1e9)
    for built, part, fits in ((gpt2(layers=6, batch=8), 0.8, True), (llama(4), 0.7, False)):
        analysis = analyse(capture_step(*built, grad=True).graph)
        free = planned_on(analysis, cluster, TWO, float("inf"))
        assert free is not None
        limit = part * free.memory.total_bytes
        first = planned_on(analysis, cluster, TWO, limit, sharded_first)
        both = planned_on(analysis, cluster, TWO, limit)
        assert both is not None and (first is not None) == fits
        assert first is None or both.step_s <= first.step_s * (1 + 1e-9)


@pytest.mark.parametrize("parts", [(0.5, 0.6, 0.75, 0.9, 1.0)])
def test_more_memory_is_never_slower(parts: tuple[float, ...]) -> None:
    analysis = analyse(capture_step(*gpt2(layers=6, batch=8), grad=True).graph)
    assert_monotone(analysis, TWO, parts)


@pytest.mark.large
def test_where_a_tight_limit_fits_a_wider_one_does() -> None:
    """At half of the memory the average copy of a block fits, and no copy does."""
    analysis = analyse(capture_step(*gpt2(layers=6, batch=8), grad=True).graph)
    assert_monotone(analysis, Mesh(("a", "b"), (2, 2)), (0.4, 0.45, 0.5, 0.55, 0.6))


def assert_monotone(analysis: Analysis, mesh: Mesh, parts: tuple[float, ...]) -> None:
    cluster = Cluster.local(mesh.num_ranks)
    free = planned_on(analysis, cluster, mesh, float("inf"))
    assert free is not None
    found = [planned_on(analysis, cluster, mesh, p * free.memory.total_bytes) for p in parts]
    steps = [float("inf") if plan is None else plan.step_s for plan in found]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(steps))
    assert steps[0] < float("inf")
