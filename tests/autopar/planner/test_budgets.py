"""A step within more memory is never slower than one within less."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles import models
from tests.oracles.budgets import Budget, Slower, slower, within_parts
from tests.oracles.hosts import hosted
from tests.oracles.models import Built

EVERY = tuple(range(950, 299, -50))


MODELS: Mapping[str, Callable[[], Built]] = models.MODELS | {
    "gpt2": functools.partial(models.gpt2, layers=4, batch=8),
    "t5": models.t5,
}


@functools.cache
def analysed(name: str) -> Analysis:
    return analyse(capture_step(*MODELS[name](), grad=True).graph)


def cluster_of(ranks: int, link: float) -> Cluster:
    return hosted(ranks, link) if link else Cluster.local(ranks)


def violations(name: str, cluster: Cluster, parts: tuple[int, ...]) -> list[Slower]:
    found = within_parts(analysed(name), cluster, parts, hint.microbatches(1))
    assert len({budget.step_s for budget in found}) > 1
    return list(slower(found))


def test_what_is_slower_than_within_less_memory_is_told() -> None:
    steps = ((300, 3.0), (400, 2.0), (500, 2.1), (600, float("inf")), (700, 2.0))
    found = list(slower([Budget(*own) for own in steps]))
    assert [(own.part, own.other) for own in found] == [(500, 400), (600, 400)]
    assert found[0].by == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("link", "parts"), [(0.0, (900, 500)), (1e9, (650, 600)), (12e9, (850, 600, 350))]
)
def test_more_memory_is_never_slower(link: float, parts: tuple[int, ...]) -> None:
    assert not violations("gpt2", cluster_of(1, link), parts)


@pytest.mark.large
@pytest.mark.parametrize("link", [0.0, 1e9, 12e9])
@pytest.mark.parametrize("name", MODELS)
def test_no_budget_of_one_rank_is_slower(name: str, link: float) -> None:
    assert not violations(name, cluster_of(1, link), EVERY)


@pytest.mark.large
@pytest.mark.parametrize("link", [1e9, 12e9])
def test_no_budget_of_two_ranks_is_slower(link: float) -> None:
    """Within less than half of the memory a pipeline is faster than one stage that shards."""
    assert not violations("gpt2", cluster_of(2, link), EVERY)
