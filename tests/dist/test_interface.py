"""What users write around a compiled model: each way equals one process, or is refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader

import autopar
from autopar import hint
from autopar.errors import AutoparError, PlanError, UnsupportedError
from autopar.ir.sharding import WHOLE
from autopar.runtime import groups
from tests.dist.pool import Pool
from tests.dist.training import HINTS, adamw, assert_close, whole
from tests.oracles.models import mlp, mlp_loss
from tests.oracles.pipeline import eager

LAYOUTS = ("dp2", "tp2", "zero3x2", "dp2mb2", "pp2mb2-zb-v")


def compiled(
    layout: str = "auto", batch_size: int = 8, *, loss: Any = mlp_loss, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """The MLP on all ranks of this pool, and its batch."""
    model, batch, _ = mlp(batch_size)
    cluster = autopar.Cluster.local(dist.get_world_size())
    options.setdefault("hints", HINTS[layout])
    return autopar.compile(model, cluster, batch, loss=loss, **options), batch


def gradients(parallel: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in parallel.named_parameters() if p.grad is not None}


def assert_gradients(found: dict[str, Tensor], batch_size: int = 8, factor: float = 1.0) -> None:
    """They are (a stage's part of) those of one process, times a factor."""
    _, expected, _ = eager(*mlp(batch_size))
    assert found
    for name, gradient in found.items():
        wanted = expected[name]
        assert wanted is not None
        assert_close(gradient, factor * wanted, 1e-5, name)


def short_batches(hints: Sequence[Any]) -> None:
    """Batches at the end of an epoch that are too small for the microbatches asked for."""
    parallel, _ = compiled(batch_size=8, hints=hints)
    for size in (6, 3, 1):
        parallel.zero_grad()
        model, batch, loss = mlp(size)
        found = parallel(batch)
        found.backward()
        expected, _, _ = eager(model, batch, loss)
        assert_close(found.detach(), expected, 1e-5, "loss")
        assert_gradients(gradients(parallel), size)


@pytest.mark.parametrize("layout", ["dp2", "pp2-1f1b", "pp2-interleaved"])
def test_a_last_batch_takes_fewer_microbatches(pool: Any, layout: str) -> None:
    degrees, _, schedule = layout.partition("-")
    asked = {"dp2": hint.degrees(dp=2, tp=1), "pp2": hint.degrees(pp=2, dp=1, tp=1)}[degrees]
    pool(2).run(short_batches, (asked, hint.microbatches(4), hint.schedule(schedule or "1f1b")))


def without_batch(layout: str) -> None:
    model, batch, loss = mlp()
    cluster = autopar.Cluster.local(dist.get_world_size())
    parallel = autopar.compile(model, cluster, loss=loss, hints=HINTS[layout])
    with pytest.raises(UnsupportedError, match=r"call parallel.prepare\(batch\)"):
        parallel.parameters().__next__()
    parallel(batch).backward()
    assert_gradients(gradients(parallel))
    again = autopar.compile(model, cluster, loss=loss, hints=HINTS[layout])
    again.prepare({name: value.to("meta") for name, value in batch.items()})
    again(batch).backward()
    assert_gradients(gradients(again))


@pytest.mark.parametrize("layout", ["dp2", "pp2mb2-zb-v"])
def test_the_first_batch_or_prepare_makes_the_plan(pool: Any, layout: str) -> None:
    pool(2).run(without_batch, layout)


def backwards(layout: str) -> None:
    parallel, batch = compiled(layout)
    (2 * parallel(batch)).backward()
    assert_gradients(gradients(parallel), factor=2)
    for _ in range(4):
        (parallel(batch) / 4).backward()
    assert_gradients(gradients(parallel), factor=3)
    parallel.zero_grad()
    del_me = parallel(batch)
    del del_me
    parallel(batch).backward()
    assert_gradients(gradients(parallel))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_of_a_multiple_and_accumulation(pool: Any, layout: str) -> None:
    pool(2).run(backwards, layout)


def modes(layout: str) -> None:
    parallel, batch = compiled(layout)
    model, _, loss = mlp()
    expected = float(loss(model, batch))
    parallel(batch).backward()
    parallel.zero_grad()
    parallel.eval()
    assert not parallel.up.training
    quiet = parallel(batch)
    assert not quiet.requires_grad
    assert float(quiet) == pytest.approx(expected, rel=1e-5)
    parallel.train()
    with torch.no_grad():
        assert float(parallel(batch)) == pytest.approx(expected, rel=1e-5)
    assert all(p.grad is None for p in parallel.parameters())
    shorter = {name: value[:4] for name, value in batch.items()}
    parallel(shorter).backward()
    model.zero_grad()
    loss(model, shorter).backward()
    for name, gradient in gradients(parallel).items():
        assert_close(gradient, model.get_parameter(name).grad, 1e-5, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eval_no_grad_and_another_batch_size(pool: Any, layout: str) -> None:
    pool(2).run(modes, layout)


def freezing(layout: str) -> None:
    parallel, batch = compiled(layout)
    parallel(batch).backward()
    parallel.zero_grad()
    frozen = [p for n, p in parallel.named_parameters() if n.startswith(("up.", "norm."))]
    for parameter in frozen:
        parameter.requires_grad_(False)
    parallel(batch).backward()
    assert all(p.grad is None for p in frozen)
    assert_gradients(gradients(parallel))
    for parameter in frozen:
        parameter.requires_grad_(True)
    parallel.zero_grad()
    parallel(batch).backward()
    assert all(p.grad is not None for p in frozen)
    assert_gradients(gradients(parallel))


@pytest.mark.parametrize("layout", ["dp2", "zero3x2"])
def test_freezing_after_compilation(pool: Any, layout: str) -> None:
    pool(2).run(freezing, layout)


def freezing_a_stage() -> tuple[str, float]:
    groups.SETTLE_S = 2.0
    parallel, batch = compiled("pp2mb2-zb-v")
    parallel(batch).backward()
    for name, parameter in parallel.named_parameters():
        if name.startswith("up."):
            parameter.requires_grad_(False)
    start = time.monotonic()
    with pytest.raises(AutoparError) as caught:
        parallel(batch)
    return str(caught.value), time.monotonic() - start


def test_freezing_a_part_of_a_compiled_pipeline_is_refused() -> None:
    fresh = Pool(2)
    try:
        (first, _), (second, seconds) = fresh.run(freezing_a_stage, timeout_s=60)
    finally:
        fresh.close()
    assert "cannot freeze parameter 'up.weight' of a compiled pipeline" in first
    assert "rank 0 failed" in second
    assert "cannot freeze parameter 'up.weight'" in second
    assert seconds < groups.NAMING_S


def frozen_before(layout: str) -> None:
    model, batch, loss = mlp()
    model.up.requires_grad_(False)
    cluster = autopar.Cluster.local(dist.get_world_size())
    parallel = autopar.compile(model, cluster, batch, loss=loss, hints=HINTS[layout])
    parallel(batch).backward()
    found = gradients(parallel)
    assert all(not n.startswith("up.") for n in found)
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(found))
    assert any(counts)
    # A stage may hold what is frozen alone.
    if found:
        assert_gradients(found)
    before = {n: whole(p) for n, p in parallel.named_parameters() if n.startswith("up.")}
    adamw(parallel.parameters()).step()
    for name, value in before.items():
        assert torch.equal(whole(parallel.get_parameter(name)), value)


@pytest.mark.parametrize("layout", ["auto", "pp2mb2-zb-v"])
def test_frozen_parameters_stay(pool: Any, layout: str) -> None:
    pool(2).run(frozen_before, layout)


def frozen_stage(first: bool) -> tuple[float, float, bool, int]:
    """Usual lines around a model of which one of two stages is frozen: the norms, and more."""

    def frozen() -> tuple[nn.Module, Any, Any]:
        model, batch, loss = mlp()
        model.requires_grad_(False)
        (model.down if first else model.up).requires_grad_(True)
        return model, batch, loss

    model, batch, loss = frozen()
    hints = HINTS["pp2mb2-1f1b"]
    parallel = autopar.compile(model, autopar.Cluster.local(2), batch, loss=loss, hints=hints)
    optimizer = adamw([p for p in parallel.parameters() if p.requires_grad])
    one, _, _ = frozen()
    reference = adamw([p for p in one.parameters() if p.requires_grad])
    for _ in range(2):
        parallel(batch).backward()
        loss(one, batch).backward()
        norm = autopar.clip_grad_norm_([p for p in parallel.parameters() if p.requires_grad], 0.1)
        expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        assert_close(norm, expected, 1e-5, "norm")
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    held = {n: p for n, p in parallel.named_parameters() if p.to_local().numel()}
    for name, parameter in held.items():
        assert_close(whole(parameter), one.get_parameter(name), 1e-4, name)
    # Names that no stage but the other has.
    parallel(batch).backward()
    named = [p for n, p in held.items() if p.requires_grad]
    again = autopar.clip_grad_norm_(named, 1.0)
    get_state_dict(parallel, optimizer)
    return float(norm), float(again), bool(named), len(held)


@pytest.mark.parametrize("first", [True, False])
def test_a_stage_of_frozen_parameters_takes_part(pool: Any, first: bool) -> None:
    (norm, again, *mine), (other, too, *others) = pool(2).run(frozen_stage, first, timeout_s=60)
    assert norm == other > 0
    assert again == too > 0
    assert [mine[0], others[0]] == [not first, first]
    assert mine[1] and others[1]


def loss_and_more(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    error = out - batch["y"]
    return error.square().mean(), {"absolute": error.abs().mean(), "largest": error.abs().amax()}


def more_results(layout: str) -> None:
    parallel, batch = compiled(layout, loss=loss_and_more)
    model, _, _ = mlp()
    expected, wanted = loss_and_more(model, batch)
    loss, found = parallel(batch)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert set(found) == set(wanted)
    for name, value in found.items():
        assert not value.requires_grad
        assert float(value) == pytest.approx(float(wanted[name]), rel=1e-5)
    loss.backward()
    assert_gradients(gradients(parallel))


@pytest.mark.parametrize("layout", ["dp2", "tp2", "dp2mb2", "pp2mb2-zb-v"])
def test_a_loss_with_a_dict(pool: Any, layout: str) -> None:
    pool(2).run(more_results, layout)


def refusals(layout: str) -> list[str]:
    parallel, batch = compiled(layout)
    messages = []

    def refused(function: Any) -> None:
        with pytest.raises(UnsupportedError) as caught:
            function()
        messages.append(str(caught.value))

    weight = next(parallel.parameters())
    loss = parallel(batch)
    refused(lambda: parallel(batch))
    refused(lambda: torch.autograd.grad(loss, [weight]))
    loss.backward(retain_graph=True)
    refused(loss.backward)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler.scale(parallel(batch)).backward()
    refused(lambda: scaler.step(optimizer))
    parallel.zero_grad()
    parallel(batch).backward()
    assert_gradients(gradients(parallel))
    return messages


@pytest.mark.parametrize("layout", ["dp2", "pp2mb2-zb-v"])
def test_what_cannot_be_exact_is_refused_on_every_rank(pool: Any, layout: str) -> None:
    words = ["a second training step", "selected gradients", "backward twice", "GradScaler"]
    for messages in pool(2).run(refusals, layout):
        for message, word in zip(messages, words, strict=True):
            assert word in message


class Rows:
    """A dataset of 22 samples."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.x, self.y = torch.randn(2, 22, 16, generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def dealt(layout: str) -> list[list[int]]:
    parallel, _ = compiled(layout)
    rows = Rows()
    slices = {rank: parallel.batch_slices(rank) for rank in range(dist.get_world_size())}
    read = {s["x"].start for s in slices.values()}
    assert 0 in read
    sampler = parallel.sampler(rows, shuffle=True, seed=4)
    drawn = []
    model, _, loss = mlp()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = sampler.order()
        for number, part in enumerate(DataLoader(rows, batch_sampler=sampler)):
            indices = order[8 * number : 8 * number + 8]
            expected = loss(model, {"x": rows.x[indices], "y": rows.y[indices]})
            found = parallel(parallel.shard(part))
            assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
            drawn.append(indices)
            del found
    return drawn


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2mb2-zb-v"])
def test_a_data_loader_deals_out_global_batches(pool: Any, layout: str) -> None:
    first, second = pool(2).run(dealt, layout)
    assert first == second
    assert len(first) == 4
    assert first[:2] != first[2:]


def hinted(hints: Sequence[hint.Hint]) -> dict[str, Any]:
    parallel, batch = compiled(hints=hints)
    parallel(batch).backward()
    assert_gradients(gradients(parallel))
    plan = parallel.plan
    return {
        "text": str(plan),
        "stored": {n: p.to_local().shape for n, p in parallel.named_parameters()},
        "hints": plan.hints,
        "limit": plan.memory_limit_bytes,
        "memory": plan.prediction.memory.total_bytes,
    }


def test_hints_shape_the_plan(pool: Any) -> None:
    free = pool(2).run(hinted, ())[0]
    split = pool(2).run(hinted, (hint.degrees(dp=1, tp=2), hint.shard("mid.weight", 0, "tp")))[0]
    kept = pool(2).run(hinted, (hint.degrees(dp=2, tp=1, zero=3), hint.replicate("up*")))[0]
    assert split["hints"]
    assert kept["stored"]["up.weight"] == (32, 16)
    assert kept["stored"]["mid.weight"] == (16, 32)
    limit = int(0.8 * free["memory"])
    tight = pool(2).run(hinted, (hint.memory_limit(limit),))[0]
    assert tight["limit"] == limit
    assert tight["memory"] <= limit < free["memory"]


def saved_plan(path: str, layout: str) -> None:
    parallel, _ = compiled(layout)
    if dist.get_rank() == 0:
        parallel.plan.save(path)
    dist.barrier()


def given_plan(path: str) -> dict[str, Any]:
    parallel, batch = compiled(hints=(), plan=path)
    parallel(batch).backward()
    assert_gradients(gradients(parallel))
    parallel.eval()
    with torch.no_grad():
        parallel(batch)
    return {"stages": parallel.plan.num_stages, "seconds": parallel.plan.search.seconds}


@pytest.mark.parametrize("layout", ["tp2", "dp2mb2", "pp2mb2-zb-v"])
def test_a_saved_plan_runs_again(pool: Any, tmp_path: Path, layout: str) -> None:
    path = tmp_path / "plan.json"
    pool(2).run(saved_plan, str(path), layout)
    first, second = pool(2).run(given_plan, str(path))
    assert first == second
    assert first["stages"] == (2 if layout.startswith("pp2") else 1)


def refused_plan(path: str) -> str:
    with pytest.raises(PlanError) as caught:
        compiled(hints=(), plan=path)
    return str(caught.value)


def test_an_edited_plan_is_refused(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    pool(2).run(saved_plan, str(path), "tp2")
    plan = autopar.Plan.load(path)
    (stage,) = plan.stages
    index = next(i for i, n in enumerate(stage.nodes) if n.name == "mm_1")
    edited = replace(stage.nodes[index], operands=((WHOLE,), (WHOLE,)))
    nodes = (*stage.nodes[:index], edited, *stage.nodes[index + 1 :])
    replace(plan, stages=(replace(stage, nodes=nodes),)).save(path)
    first, second = pool(2).run(refused_plan, str(path))
    assert first == second
    assert "'aten.mm.default' of module 'mid'" in first
    assert "undo the edit" in first


def trained(layout: str, folder: str, steps: int = 2) -> dict[str, Any]:
    """Train from a checkpoint, if there is one, and save."""
    parallel, batch = compiled(layout)
    optimizer = adamw(parallel.parameters())
    if Path(folder, "old").exists():
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        dcp.load(
            {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/old"
        )
        set_state_dict(
            parallel,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )
    for _ in range(steps):
        parallel(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/new")
    return {
        **{n: whole(p) for n, p in parallel.named_parameters()},
        **{
            f"{n} {key}": whole(value)
            for n, p in parallel.named_parameters()
            for key, value in optimizer.state[p].items()
        },
    }


def test_checkpoints_go_through_another_plan_to_the_bit(pool: Any, tmp_path: Path) -> None:
    first = pool(2).run(trained, "dp2", str(tmp_path))[0]
    (tmp_path / "new").rename(tmp_path / "old")
    (wide,) = {len(found) for found in pool(4).run(trained, "zero3x4", str(tmp_path), 0)}
    assert wide == len(first)
    (tmp_path / "old").rename(tmp_path / "older")
    (tmp_path / "new").rename(tmp_path / "old")
    for found in pool(2).run(trained, "tp2", str(tmp_path), 0):
        assert set(found) == set(first)
        for name, value in first.items():
            assert torch.equal(found[name], value), name


def test_checkpoints_of_a_pipeline_load_into_one_stage(pool: Any, tmp_path: Path) -> None:
    stages = pool(2).run(trained, "pp2mb2-zb-v", str(tmp_path))
    first = {name: value for found in stages for name, value in found.items()}
    (tmp_path / "new").rename(tmp_path / "old")
    found = pool(2).run(trained, "zero3x2", str(tmp_path), 0)[0]
    for name, value in first.items():
        assert torch.equal(found[name], value), name


def loaded(layout: str, path: str) -> None:
    parallel, batch = compiled(layout)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    autopar.load(parallel, path)
    parallel(batch).backward()
    assert_gradients(gradients(parallel))


@pytest.mark.parametrize("layout", ["tp2", "pp2mb2-zb-v"])
def test_safetensors_are_loaded(pool: Any, tmp_path: Path, layout: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(dict(mlp()[0].state_dict()), path)
    pool(2).run(loaded, layout, str(path))


def on_meta(layout: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    _, batch, _ = mlp()
    parallel = autopar.compile(
        model,
        autopar.Cluster.local(dist.get_world_size()),
        (batch["x"],),
        loss=lambda model, batch: model(*batch).square().mean(),
        hints=HINTS[layout],
        options=autopar.Options(seed=11),
    )
    return {name: whole(p) for name, p in parallel.named_parameters()}


@pytest.mark.parametrize("layout", ["zero3x2", "pp2mb2-zb-v"])
def test_a_model_on_meta_is_initialized_as_in_one_process(pool: Any, layout: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    model.to_empty(device="cpu")
    torch.manual_seed(11)
    for module in model:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    found: dict[str, Tensor] = {}
    for rank in pool(2).run(on_meta, layout):
        found |= rank
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, value in found.items():
        assert torch.equal(value, model.get_parameter(name)), name


def _custom() -> None:
    """Define ``toy::scaled``, an opaque op with a backward, once."""
    if hasattr(torch.ops.toy, "scaled"):
        return

    @torch.library.custom_op("toy::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * 3

    @torch.library.custom_op("toy::scaled_backward", mutates_args=())
    def scaled_backward(g: Tensor) -> Tensor:
        return g * 3

    scaled.register_fake(torch.empty_like)
    scaled_backward.register_fake(torch.empty_like)
    scaled.register_autograd(lambda ctx, g: torch.ops.toy.scaled_backward(g))


def scaled_loss(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.mse_loss(torch.ops.toy.scaled(model(batch["x"])), batch["y"])


def custom_op(text: str) -> str:
    _custom()
    rules = tuple(autopar.rule(f"toy::{name}", text) for name in ("scaled", "scaled_backward"))
    with pytest.raises(AutoparError, match="toy::scaled"):
        compiled("dp2", loss=scaled_loss)
    parallel, batch = compiled("dp2", loss=scaled_loss, options=autopar.Options(rules=rules))
    parallel(batch).backward()
    model = mlp()[0]
    scaled_loss(model, batch).backward()
    for name, gradient in gradients(parallel).items():
        assert_close(gradient, model.get_parameter(name).grad, 1e-5, name)
    return str(parallel.plan)


def test_a_custom_op_runs_by_the_user_s_rule(pool: Any) -> None:
    assert "toy" not in pool(2).run(custom_op, "b m -> b m")[0]
    assert "toy.scaled" in pool(2).run(custom_op, "whole")[0]
