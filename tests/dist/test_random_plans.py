"""Plans from random objectives on real processes: any legal plan must be exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.capture import capture_step
from autopar.ir.sharding import Mesh
from autopar.plan.serialize import to_json
from autopar.search.analysis import analyse
from tests.dist.training import assert_same_training, build, one_process, parallel_run
from tests.oracles.models import MODELS
from tests.oracles.random_plans import random_stage


def random_plan(name: str, samples: int | None, sizes: tuple[int, ...], seed: int) -> str:
    """Text of a plan whose every decision is random."""
    model, batch, loss = build(name, samples)
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    searched = autopar.plan(model, autopar.Cluster.local(mesh.num_ranks), batch, loss=loss)
    captured = capture_step(model, batch, loss, grad=True)
    stage = random_stage(analyse(captured.graph), mesh, seed)
    return to_json(replace(searched, stages=(stage,), transfers=(), microbatches=1))


def trains(pool: Any, name: str, samples: int | None, sizes: tuple[int, ...], seed: int) -> None:
    text = random_plan(name, samples, sizes, seed)
    ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    found = pool(ranks).run(parallel_run, name, ranks, (), samples, text)
    assert_same_training(found, one_process(name, samples))


@pytest.mark.parametrize(
    ("name", "samples", "sizes", "seed"),
    [
        ("mlp", 5, (2, 2), 0),
        ("llama", None, (2,), 1),
        ("gpt2", 5, (2, 2), 2),
        ("bert", 3, (2,), 3),
    ],
)
def test_random_plans_train_as_one_process_does(
    pool: Any, name: str, samples: int | None, sizes: tuple[int, ...], seed: int
) -> None:
    trains(pool, name, samples, sizes, seed)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(4, 12))
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("samples", [None, 5])
@pytest.mark.parametrize("name", MODELS)
def test_many_random_plans_train_as_one_process_does(
    pool: Any, name: str, samples: int | None, sizes: tuple[int, ...], seed: int
) -> None:
    trains(pool, name, samples, sizes, seed)
