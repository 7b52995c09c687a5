"""Mixed precision on real processes: master weights, their states, their checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import autopar
from tests.autopar.capture.eager import load_case
from tests.dist.training import HINTS, whole

STEPS = 6


def compiled(ranks: int, layout: str, precision: Any = "bf16") -> tuple[Any, Any]:
    case = load_case("g15")
    model, batch, loss = case.build()
    parallel = autopar.compile(
        model,
        autopar.Cluster.local(ranks),
        batch,
        loss=loss,
        precision=precision,
        optimizer=torch.optim.AdamW,
        hints=HINTS[layout],
    )
    return parallel, batch


def trained(ranks: int, layout: str) -> dict[str, Any]:
    parallel, batch = compiled(ranks, layout)
    started = {name: whole(p) for name, p in parallel.named_parameters()}
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=load_case("g15").LR, weight_decay=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STEPS):
            parallel(batch).backward()
            grads = {str(p.grad.dtype) for p in parallel.parameters()}
            optimizer.step()
            optimizer.zero_grad()
    states = {
        (key, str(value.dtype))
        for own in optimizer.state.values()
        for key, value in own.items()
        if value.ndim
    }
    trains = float(parallel(batch).detach())
    parallel.eval()
    with torch.no_grad():
        evaluates = float(parallel(batch))
    memory = parallel.plan.prediction.memory
    held = sum(p.to_local().nbytes for p in parallel.parameters())
    return {
        "started": started,
        "parameters": {name: whole(p) for name, p in parallel.named_parameters()},
        "gradients": grads,
        "states": states,
        "losses": (trains, evaluates),
        "held": (held, memory.parameters_bytes, memory.optimizer_bytes),
    }


@pytest.mark.parametrize(("ranks", "layout"), [(1, "auto"), (2, "dp2"), (2, "zero3x2"), (2, "tp2")])
def test_master_weights_move_by_small_steps(pool: Any, ranks: int, layout: str) -> None:
    case = load_case("g15")
    model, _, _ = case.build()
    wanted = case.reference_run(STEPS)
    for rank in pool(ranks).run(trained, ranks, layout):
        assert rank["gradients"] == {"torch.float32"}
        assert rank["states"] == {("exp_avg", "torch.float32"), ("exp_avg_sq", "torch.float32")}
        trains, evaluates = rank["losses"]
        assert abs(trains - evaluates) <= 1e-2 * abs(trains)
        held, parameters, optimizer = rank["held"]
        assert held <= parameters and optimizer == 2 * parameters
        for name, start in model.named_parameters():
            assert torch.equal(rank["started"][name], start.detach().float()), name
            found = rank["parameters"][name]
            assert found.dtype == torch.float32
            assert float((found - wanted[name]).abs().max()) <= 2e-3, name
        moved = (rank["parameters"]["norm.weight"] - 1.0).abs().mean()
        assert 0.5 * STEPS * case.LR <= float(moved) <= 1.01 * STEPS * case.LR


def saved_and_loaded(folder: str) -> dict[str, Any]:
    parallel, batch = compiled(2, "zero3x2")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    parallel(batch).backward()
    optimizer.step()
    dcp.save(parallel.state_dict(), checkpoint_id=folder)
    before = {name: whole(p) for name, p in parallel.named_parameters()}
    other, _ = compiled(2, "tp2")
    autopar.load(other, folder)
    after = {name: whole(p) for name, p in other.named_parameters()}
    plain = load_case("g15").build()[0].state_dict()
    other.load_state_dict(plain)
    return {"before": before, "after": after, "plain": {n: whole(p) for n, p in other.named_parameters()}}


def test_checkpoints_hold_the_master_weights(pool: Any, tmp_path: Path) -> None:
    for rank in pool(2).run(saved_and_loaded, str(tmp_path / "saved")):
        for name, value in rank["before"].items():
            assert value.dtype == torch.float32
            assert torch.equal(rank["after"][name], value), name
        own = load_case("g15").build()[0]
        for name, value in own.named_parameters():
            assert torch.equal(rank["plain"][name], value.detach().float()), name


def drawn(precision: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    parallel = autopar.compile(
        model,
        autopar.Cluster.local(2),
        torch.zeros(4, 6, device="meta"),
        loss=lambda m, x: m(x).float().square().mean(),
        precision=precision,
        hints=HINTS["dp2"],
        options=autopar.Options(seed=3),
    )
    return {name: whole(p) for name, p in parallel.named_parameters()}


def test_models_on_meta_draw_in_their_own_dtype(pool: Any) -> None:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model:
        layer.reset_parameters()
    for rank in pool(2).run(drawn, "bf16"):
        for name, value in model.named_parameters():
            assert rank[name].dtype == torch.float32
            assert torch.equal(rank[name], value.detach().float()), name


def state_of_bf16() -> tuple[int, int]:
    parallel, batch = compiled(1, "auto", None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(batch).backward()
        optimizer.step()
    found = sum(v.to_local().nbytes for s in optimizer.state.values() for v in s.values() if v.ndim)
    return found, parallel.plan.prediction.memory.optimizer_bytes


def test_planned_states_of_a_bf16_model_are_those_torch_makes(pool: Any) -> None:
    found, planned = pool(1).run(state_of_bf16)[0]
    assert found == planned


def refused() -> str:
    try:
        compiled(1, "auto", "zero_paper")
    except autopar.AutoparError as error:
        return str(error)
    return ""


def test_a_precision_that_no_optimizer_can_hold_is_refused(pool: Any) -> None:
    assert "cannot keep the state of parameter 'norm.weight'" in pool(1).run(refused)[0]
