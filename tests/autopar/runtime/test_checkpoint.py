"""Checkpoints of `torch.distributed.checkpoint` and safetensors, from one plan into another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.checkpoint import load
from autopar.runtime.executor import ParallelModule
from tests.autopar.runtime.programs import Linear, batch, parallel_linear

# 2 ranks split the weight; 4 ranks hold it whole, or split it over one axis of two.
LAYOUTS = [((4,), True), ((2, 2), True), ((4,), False)]


def whole(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).clone()
        for name, v in values.items()
        if isinstance(v, torch.Tensor)
    }


def optimizer_of(parallel: ParallelModule) -> torch.optim.Optimizer:
    # Torch's state dict functions want state of every parameter, and one here never gets any.
    return torch.optim.AdamW([parallel.get_parameter("weight")], lr=1e-2)


def moments(parallel: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state[parallel.get_parameter("weight")]
    return whole(state)


def train_and_save(path: str) -> Any:
    parallel = parallel_linear((2,), zero=True)
    optimizer = optimizer_of(parallel)
    for _ in range(3):
        parallel(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    dcp.save(parallel.state_dict(), checkpoint_id=path + "_model")
    return whole(parallel.state_dict()), moments(parallel, optimizer)


def load_and_save(path: str, again: str, sizes: tuple[int, ...], zero: bool) -> Any:
    parallel = parallel_linear(sizes, zero=zero)
    optimizer = optimizer_of(parallel)
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    both = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(both, checkpoint_id=path)
    set_state_dict(
        parallel,
        optimizer,
        model_state_dict=both["model"],
        optim_state_dict=both["optimizer"],
    )
    assert parallel.num_steps == 3
    dcp.save(both, checkpoint_id=again)
    return whole(parallel.state_dict()), moments(parallel, optimizer)


def assert_same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS)
def test_model_and_optimizer_move_between_plans_to_the_bit(
    pool: Any, tmp_path: Path, sizes: Any, zero: bool
) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    saved = pool(2).run(train_and_save, there)[0]
    assert set(saved[0]) == {"weight", "tied.weight", "unused", "calls", "_extra_state"}
    for found in pool(4).run(load_and_save, there, back, sizes, zero):
        assert_same(found, saved)
    for found in pool(2).run(load_and_save, back, there + "2", (2,), True):
        assert_same(found, saved)


def load_model(path: str, sizes: tuple[int, ...], zero: bool) -> Any:
    parallel = parallel_linear(sizes, zero=zero)
    load(parallel, path)
    return whole(parallel.state_dict()), parallel.num_steps


def plain_optimizer_state(path: str, sizes: tuple[int, ...], save: bool) -> Any:
    parallel = parallel_linear(sizes, zero=True)
    optimizer = optimizer_of(parallel)
    parallel(batch()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    if save:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
        optimizer.load_state_dict(state)
    return moments(parallel, optimizer)


def test_plain_optimizer_state_moves_too(pool: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "optimizer")
    saved = pool(2).run(plain_optimizer_state, path, (2,), True)[0]
    for found in pool(4).run(plain_optimizer_state, path, (4,), False):
        assert_same([found], [saved])


def test_load_reads_any_plan_s_checkpoint(pool: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "there")
    saved, _ = pool(2).run(train_and_save, path)[0]
    for source in (path, path + "_model"):
        for found, steps in pool(4).run(load_model, source, (2, 2), True):
            assert steps == 3
            assert_same([found], [saved])


def test_load_reads_safetensors(pool: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Linear()
    with torch.no_grad():
        model.weight.add_(1)
    one = {"weight": model.weight.detach(), "unused": torch.ones(3), "calls": torch.tensor(4.0)}
    save_file(one, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        for found, _ in pool(2).run(load_model, str(path), (2,), True):
            assert torch.equal(found["weight"], one["weight"])
            assert torch.equal(found["tied.weight"], one["weight"])
            assert float(found["calls"]) == 4.0


def load_errors(folder: str) -> list[str]:
    from safetensors.torch import save_file

    parallel = parallel_linear((2,), zero=True)
    made = Path(folder)
    if dist.get_rank() == 0:
        save_file({"weight": torch.ones(2, 2)}, made / "few.safetensors")
        other = {"weight": torch.ones(2, 2), "unused": torch.ones(3), "calls": torch.ones(())}
        save_file(other, made / "other.safetensors")
        (made / "empty").mkdir()
    dist.barrier()
    messages = []
    for name in ("few.safetensors", "other.safetensors", "empty"):
        with pytest.raises(AutoparError) as caught:
            load(parallel, made / name)
        messages.append(str(caught.value))
    with pytest.raises(RuntimeError, match="missing"):
        parallel.load_state_dict({"weight": torch.ones(5, 7)})
    parallel.load_state_dict({"tied.weight": torch.ones(5, 7)}, strict=False)
    assert bool((parallel.get_parameter("weight").full_tensor() == 1).all())  # type: ignore[attr-defined]
    return messages


def test_what_cannot_be_loaded_is_named(pool: Any, tmp_path: Path) -> None:
    for few, other, empty in pool(2).run(load_errors, str(tmp_path)):
        assert "'unused' the first" in few
        assert "'weight': the saved shape is [2, 2], the model's [5, 7]" in other
        assert "neither a folder of torch.distributed.checkpoint nor" in empty
