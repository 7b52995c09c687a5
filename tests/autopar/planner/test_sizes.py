"""Stages of unlike sizes on equal devices, chosen without hints: never slower than hinted ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import AutoparError
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.stages import Pipeline
from cost_models.cluster import Cluster
from tests.oracles.models import convolutions
from tests.oracles.pipeline import assert_pipeline_exact
from tests.oracles.slow import slow_network

RANKS = 4


def ethernet(gigabytes: float) -> Cluster:
    """V100s that one slow network joins."""
    return Cluster.from_yaml(
        f"""
        name: machines
        devices: [{{kind: V100-32GB, count: {RANKS}}}]
        levels: [{{name: ethernet, size: {RANKS}, latency: 25 us, bandwidth: {gigabytes} GB/s}}]
        """
    )


NETS = {
    "deep head": ({"layers": 9, "hidden": 4096, "dense": 7}, 1.25),
    "wide head": ({"layers": 11, "hidden": 8192, "dense": 2}, 0.6),
}
"""Convolutions with few parameters, then dense layers with most of them; GB/s of the network."""


@functools.cache
def analysed(name: str) -> Analysis:
    sizes, _ = NETS[name]
    with torch.device("meta"):
        model, batch, loss = convolutions(
            width=64, image=32, side=8, classes=1000, samples=192, **sizes
        )
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def planned(analysis: Analysis, cluster: Cluster, *hints: hint.Hint) -> Plan:
    request = Request(model="m", fingerprint="f", cluster=cluster, hints=hints)
    return make_plan(analysis, request)


def shapes(total: int) -> Iterator[tuple[int, ...]]:
    """Ways to deal ranks out to stages that follow each other."""
    for count in range(1, total + 1):
        for borders in itertools.combinations(range(1, total), count - 1):
            yield tuple(b - a for a, b in itertools.pairwise((0, *borders, total)))


def sizes_of(plan: Plan) -> tuple[int, ...]:
    return tuple(len(ranks) for ranks in plan.ranks_of_stages)


@pytest.mark.large
@pytest.mark.parametrize("name", NETS)
def test_no_sizes_that_hints_ask_for_are_faster(name: str) -> None:
    """Of all ways to deal replicas out to stages, all schedules and microbatches."""
    analysis, cluster = analysed(name), ethernet(NETS[name][1])
    plan = planned(analysis, cluster)
    assert len(set(sizes_of(plan))) > 1
    steps = {(RANKS,): planned(analysis, cluster, hint.degrees(pp=1)).prediction.step_s}
    for shape in shapes(RANKS):
        with suppress(AutoparError):
            hinted = planned(analysis, cluster, hint.degrees(dp=shape))
            steps[shape] = min(hinted.prediction.step_s, steps.get(shape, float("inf")))
    assert {(4,), (2, 2), (3, 1), (2, 1, 1), (1, 1, 1, 1)} <= set(steps)
    assert plan.prediction.step_s <= (1 + 1e-9) * min(steps.values()), steps
    alike = [own for shape, own in steps.items() if len(set(shape)) == 1]
    assert plan.prediction.step_s < 0.95 * min(alike)


def test_unlike_sizes_are_chosen_where_all_others_are_slower_and_are_exact() -> None:
    built = convolutions()
    captured = capture_step(*built, grad=True)
    analysis, cluster, count = analyse(captured.graph), slow_network(RANKS), hint.microbatches(2)
    plan = planned(analysis, cluster, count)
    assert sizes_of(plan) == (3, 1)
    for alike in (hint.degrees(pp=1), hint.degrees(dp=(2, 2)), hint.degrees(pp=4)):
        other = planned(analysis, cluster, alike, count)
        assert len(set(sizes_of(other))) == 1
        assert plan.prediction.step_s < 0.7 * other.prediction.step_s
    pipeline = Pipeline(plan.stages, plan.transfers)
    assert_pipeline_exact(*built, analysis, pipeline, captured, plan.schedule)
