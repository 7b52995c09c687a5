"""Plans that leave ranks idle, on real processes: all ranks get what one process computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch import Tensor
from torch.utils.data import DataLoader

import autopar
from autopar import hint
from autopar.errors import RuntimeFailure
from autopar.runtime import groups
from tests.dist.pool import Pool
from tests.dist.test_interface import compiled
from tests.dist.training import (
    assert_close,
    assert_same_training,
    one_process,
    parallel_run,
    whole,
)
from tests.oracles.models import mlp

LAYOUTS: dict[str, tuple[hint.Hint, ...]] = {
    "2 of 4": (hint.ranks(2), hint.degrees(dp=2, tp=1), hint.microbatches(2)),
    "last 2 of 4": (hint.ranks(2, 2), hint.degrees(dp=1, tp=2)),
    "1 of 4": (hint.ranks(1, 1),),
    "zero3 on 3 of 4": (hint.ranks(3), hint.degrees(dp=3, tp=1, zero=3)),
    "2+1 of 4": (hint.ranks(3), hint.degrees(dp=(2, 1)), hint.microbatches(2)),
    "1+1+1 from 1": (
        hint.ranks(3, 1),
        hint.degrees(pp=3, dp=1, tp=1),
        hint.microbatches(4),
        hint.schedule("zb-h1"),
    ),
}
IDLE = {
    "2 of 4": (2, 3),
    "last 2 of 4": (0, 1),
    "1 of 4": (0, 2, 3),
    "zero3 on 3 of 4": (3,),
    "2+1 of 4": (3,),
    "1+1+1 from 1": (0,),
}
SAMPLES = {"zero3 on 3 of 4": 6}
DEFAULT = {("unet", "2+1 of 4")}
CASES = [(model, layout) for model in ("gpt2", "unet") for layout in LAYOUTS]


def run(model: str, layout: str, samples: int) -> dict[str, Any]:
    """Training on this rank, without the pieces that an idle rank does not hold."""
    found = parallel_run(model, 4, LAYOUTS[layout], samples)
    if dist.get_rank() in IDLE[layout]:
        for kind in ("gradients", "parameters"):
            assert all(value.numel() == 0 for value in found[kind].values())
            found[kind] = {}
        found["pieces"] = {}
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*c, marks=() if c in DEFAULT else pytest.mark.large) for c in CASES],
)
def test_idle_ranks_train_as_one_process_does(pool: Any, model: str, layout: str) -> None:
    samples = SAMPLES.get(layout, 8)
    found = pool(4).run(run, model, layout, samples)
    assert_same_training(found, one_process(model, samples))


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The samples of a batch, twice."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = {name: torch.cat([value, value]) for name, value in batch.items()}

    def __len__(self) -> int:
        return len(self.batch["x"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


def used(folder: str, layout: str) -> tuple[int, int]:
    """What users write around a compiled model; elements and samples this rank has."""
    parallel, batch = compiled(hints=LAYOUTS[layout])
    idle = dist.get_rank() in IDLE[layout]
    model, _, loss = mlp()
    expected = float(loss(model, batch).detach())
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for part in DataLoader(Samples(batch), batch_sampler=parallel.sampler(Samples(batch))):
        value = parallel(parallel.shard(part))
        (value / 2).backward()
        assert float(value.detach()) == pytest.approx(expected, rel=1e-5)
    loss(model, batch).backward()
    norm = autopar.clip_grad_norm_([p for p in parallel.parameters() if p.grad is not None], 0.1)
    assert float(norm) == pytest.approx(
        float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)), rel=1e-5
    )
    for name, parameter in [] if idle else parallel.named_parameters():
        assert_close(whole(parameter.grad), model.get_parameter(name).grad, 1e-5, name)
    optimizer.step()
    optimizer.zero_grad()

    parallel.eval()
    after = {name: value[:4] for name, value in batch.items()}
    with torch.no_grad():
        shorter = float(parallel(after))
    own = parallel.batch_slices()
    part = {name: after[name][taken] for name, taken in own.items()}
    with torch.no_grad():
        assert float(parallel(parallel.shard(None if idle else part))) == shorter
    states = get_state_dict(parallel, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    if dist.get_rank() == 0:
        parallel.plan.save(f"{folder}/plan.json")
    dist.barrier()

    for given in ({"plan": f"{folder}/plan.json", "hints": ()}, {"layout": "dp4"}):
        again, _ = compiled(**given)
        autopar.load(again, folder)
        restored = torch.optim.AdamW(again.parameters(), lr=1e-2)
        states = get_state_dict(again, restored)
        saved = dict(zip(("model", "optimizer"), states, strict=True))
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            again, restored, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        again.load_state_dict(again.state_dict())
        again.eval()
        with torch.no_grad():
            assert float(again(after)) == pytest.approx(shorter, rel=1e-5)
    elements = sum(p.to_local().numel() for p in parallel.parameters() if p.ndim)
    return elements, sum(s.stop - s.start for s in own.values())


@pytest.mark.parametrize("layout", ["2 of 4", pytest.param("2+1 of 4", marks=pytest.mark.large)])
def test_what_users_write_around_a_plan_with_idle_ranks(
    pool: Any, tmp_path: Path, layout: str
) -> None:
    found = pool(4).run(used, str(tmp_path), layout)
    for rank, (elements, samples) in enumerate(found):
        assert (elements == 0) == (rank in IDLE[layout])
        assert samples == 0 if rank in IDLE[layout] else samples > 0


def frozen() -> None:
    parallel, batch = compiled(hints=LAYOUTS["last 2 of 4"])
    parallel(batch).backward()
    parallel.zero_grad()
    for name, parameter in parallel.named_parameters():
        parameter.requires_grad_(not name.startswith("up."))
    parallel(batch).backward()
    assert {n for n, p in parallel.named_parameters() if p.grad is None} == {
        n for n, p in parallel.named_parameters() if n.startswith("up.")
    }


def test_parameters_are_frozen_on_idle_ranks_too(pool: Any) -> None:
    pool(4).run(frozen)


@pytest.fixture
def fresh_pool() -> Iterator[Pool]:
    """A pool of its own: what runs in it breaks it."""
    made = Pool(3)
    yield made
    made.close()


def with_a_dead_rank(dead: int) -> str:
    """The error of a step in which a rank ends, on the others."""
    groups.SETTLE_S = 2.0
    parallel, batch = compiled(hints=(hint.ranks(2), hint.degrees(dp=2, tp=1)))
    parallel(batch).backward()
    if dist.get_rank() == dead:
        os._exit(3)
    with pytest.raises(RuntimeFailure) as caught:
        for _ in range(2):  # what was sent to a rank may look delivered once
            parallel(batch).backward()
    return str(caught.value)


@pytest.mark.large
@pytest.mark.parametrize("dead", [1, 2])
def test_no_rank_waits_for_one_that_died(fresh_pool: Pool, dead: int) -> None:
    outcomes = fresh_pool.outcomes(with_a_dead_rank, dead, timeout_s=60)
    for rank, (ok, found, text) in enumerate(outcomes):
        assert ok == (rank != dead), text
        if ok:
            assert f"rank {dead} gave no sign of life" in found or "failed in" in found, found
