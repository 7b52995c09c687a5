"""Stages of unlike meshes on real processes: they train as one process does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import autopar
from autopar import hint
from tests.dist.test_interface import assert_gradients, compiled, gradients, loss_and_more
from tests.dist.training import (
    UNLIKE,
    adamw,
    assert_close,
    assert_same_training,
    one_process,
    parallel_run,
    whole,
)
from tests.oracles.models import mlp
from tests.oracles.slow import slow_network

DEFAULT = {
    ("gpt2", "2+1+1", 2, "1f1b", 8),
    ("llama", "dp2+tp2", 4, "zb-h1", 8),
    ("unet", "zero3x2+tp2", 2, "gpipe", 8),
}
"""What every run tries; the others are large."""

CASES = [
    *itertools.product(
        ("gpt2", "llama", "unet"),
        ("2+1+1", "1+dp2+1", "dp2+tp2", "zero3x2+tp2"),
        (1, 2, 4),
        ("1f1b", "gpipe", "zb-h1"),
        (8,),
    ),
    *itertools.product(("llama", "unet"), ("4+2+1+1",), (1, 2), ("1f1b", "zb-v"), (8,)),
    # In one microbatch, a stage of the small GPT-2 would hold no parameter, which is refused.
    *itertools.product(("gpt2",), ("4+2+1+1",), (2,), ("1f1b", "zb-v"), (8,)),
    *itertools.product(("gpt2", "llama"), ("tp2+1+1",), (3,), ("1f1b", "gpipe", "zb-h1"), (5,)),
    *itertools.product(("gpt2", "llama"), ("dp3+1", "2+1+1"), (1,), ("1f1b",), (5,)),
]
"""Model, stages, microbatches, schedule, samples; of 5, parts and microbatches are uneven."""


def ranks_of(stages: str) -> int:
    return {"4+2+1+1": 8}.get(stages, 4)


@pytest.mark.parametrize(
    ("model", "stages", "microbatches", "schedule", "samples"),
    [pytest.param(*c, marks=() if c in DEFAULT else pytest.mark.large) for c in CASES],
)
def test_unlike_stages_train_as_one_process_does(
    pool: Any, model: str, stages: str, microbatches: int, schedule: str, samples: int
) -> None:
    hints = (UNLIKE[stages], hint.microbatches(microbatches), hint.schedule(schedule))
    found = pool(ranks_of(stages)).run(parallel_run, model, ranks_of(stages), hints, samples)
    assert {rank["stages"] for rank in found} == {UNLIKE[stages].pp}
    assert {rank["microbatches"] for rank in found} == {microbatches}
    assert_same_training(found, one_process(model, samples))


def test_sizes_that_are_chosen_train_as_one_process_does(pool: Any) -> None:
    hints, cluster = (hint.microbatches(2),), slow_network(4)
    found = pool(4).run(parallel_run, "convolutions", 4, hints, None, None, cluster)
    assert {tuple(rank["ranks"]) for rank in found} == {(3, 1)}
    assert_same_training(found, one_process("convolutions"))


def used(folder: str) -> list[str]:
    """What users write around a compiled model."""
    hints = (UNLIKE["dp2+tp2"], hint.microbatches(2))
    parallel, batch = compiled(hints=hints, loss=loss_and_more)
    model, _, loss = mlp()
    expected, wanted = loss_and_more(model, batch)
    for factor in (2, 1):
        value, more = parallel(batch)
        (factor * value).backward()
        assert float(value.detach()) == pytest.approx(float(expected), rel=1e-5)
        assert {name: float(v) for name, v in more.items()} == pytest.approx(
            {name: float(v.detach()) for name, v in wanted.items()}, rel=1e-5
        )
    assert_gradients(gradients(parallel), factor=3)

    parallel.zero_grad()
    slices = [parallel.batch_slices(rank)["x"] for rank in range(dist.get_world_size())]
    assert [(s.start, s.stop) for s in slices] == [(0, 4), (4, 8), (0, 8), (0, 8)]
    own = slices[dist.get_rank()]
    part = {name: value[own] for name, value in batch.items()}
    parallel(parallel.shard(part))[0].backward()
    assert_gradients(gradients(parallel))

    parallel.eval()
    with torch.no_grad():
        assert float(parallel(batch)[0]) == pytest.approx(float(expected), rel=1e-5)
    parallel.train()
    shorter = {name: value[:4] for name, value in batch.items()}
    parallel.zero_grad()
    parallel(shorter)[0].backward()
    model.zero_grad()
    loss(model, shorter).backward()
    for name, gradient in gradients(parallel).items():
        assert_close(gradient, model.get_parameter(name).grad, 1e-5, name)

    optimizer = adamw(parallel.parameters())
    optimizer.step()
    states = get_state_dict(parallel, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    parallel.plan.save(f"{folder}/plan.json") if dist.get_rank() == 0 else None
    return [name for name, _ in parallel.named_parameters()]


def loaded(folder: str) -> tuple[float, float]:
    """Loss of a checkpoint under the saved plan, and under a plan without a pipeline."""
    losses = []
    for given in ({"plan": f"{folder}/plan.json", "hints": ()}, {"layout": "auto"}):
        parallel, batch = compiled(**given, loss=loss_and_more)
        autopar.load(parallel, folder)
        parallel.eval()
        with torch.no_grad():
            losses.append(float(parallel(batch)[0]))
    first, second = losses
    return first, second


def test_what_users_write_around_unlike_stages(pool: Any, tmp_path: Path) -> None:
    held = pool(4).run(used, str(tmp_path))
    assert held[0] == held[1] and held[2] == held[3]
    assert sorted(held[0] + held[2]) == sorted(name for name, _ in mlp()[0].named_parameters())
    (losses,) = set(pool(4).run(loaded, str(tmp_path)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def clipped() -> float:
    parallel, batch = compiled(hints=(UNLIKE["2+1+1"],))
    parallel(batch)[()].backward()
    total = autopar.clip_grad_norm_(parallel, 1e-3)
    model, _, loss = mlp()
    loss(model, batch).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None
        assert_close(whole(parameter.grad), model.get_parameter(name).grad, 1e-5, name)
    return float(total)


def test_the_norm_counts_every_stage_once(pool: Any) -> None:
    assert len(set(pool(4).run(clipped))) == 1


SHARED: dict[str, tuple[hint.Degrees, hint.Shares]] = {
    "5-2-1-0": (hint.degrees(dp=4), hint.shares(5, 2, 1, 0)),
    "0-1-3-4 zero3": (hint.degrees(dp=4, zero=3), hint.shares(0, 1, 3, 4)),
    "1-3 x tp2": (hint.degrees(dp=2, tp=2), hint.shares(1, 3)),
    "1-0-3 + 1": (hint.degrees(dp=(3, 1)), hint.shares(1, 0, 3)),
}
"""Replicas that take unequal parts of the batch."""

SHARED_DEFAULT = {("gpt2", "5-2-1-0", 1), ("llama", "1-0-3 + 1", 2)}


@pytest.mark.parametrize(
    ("model", "shares", "microbatches"),
    [
        pytest.param(*case, marks=() if case in SHARED_DEFAULT else pytest.mark.large)
        for case in itertools.product(("gpt2", "llama", "bert", "unet"), SHARED, (1, 2))
    ],
)
def test_unequal_replicas_train_as_one_process_does(
    pool: Any, model: str, shares: str, microbatches: int
) -> None:
    hints = (*SHARED[shares], hint.microbatches(microbatches))
    samples = microbatches * sum(SHARED[shares][1].parts)
    found = pool(4).run(parallel_run, model, 4, hints, samples)
    assert_same_training(found, one_process(model, samples))


def dealt_unequally() -> list[tuple[int, int]]:
    parallel, batch = compiled(hints=SHARED["5-2-1-0"])
    slices = [parallel.batch_slices(rank)["x"] for rank in range(4)]
    part = {name: batch[name][own] for name, own in parallel.batch_slices().items()}
    some = any(len(value) for value in part.values())
    parallel(parallel.shard(part if some else None)).backward()
    assert_gradients(gradients(parallel))
    parallel.eval()
    shorter = {name: value[:4] for name, value in batch.items()}
    model, _, loss = mlp()
    with torch.no_grad():
        assert float(parallel(shorter)) == pytest.approx(float(loss(model, shorter)), rel=1e-5)
    return [(s.start, s.stop) for s in slices]


def test_a_rank_without_samples_needs_no_part_of_the_batch(pool: Any) -> None:
    for slices in pool(4).run(dealt_unequally):
        assert slices == [(0, 5), (5, 7), (7, 8), (8, 8)]
