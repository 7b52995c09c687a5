"""Bad input: one clear error, the same on every rank, and no rank waits for another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import hint
from autopar.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    HintError,
    InfeasibleError,
    MissingRuleError,
    PlanError,
    UnsupportedError,
)
from autopar.plan.records import Plan
from tests.dist.training import HINTS, assert_same_training, one_process, parallel_run
from tests.oracles.models import llama, mlp, mlp_loss

TIMEOUT_S = 60.0


def compile_mlp(
    *hints: Any, model: nn.Module | None = None, loss: Any = mlp_loss, **more: Any
) -> Any:
    own, batch, _ = mlp()
    cluster = autopar.Cluster.local(dist.get_world_size())
    return autopar.compile(model or own, cluster, batch, loss=loss, hints=hints, **more)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return h if h.sum() > 0 else -h


class Sized(Branching):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return h[h > 0]


class Shuffling(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[:, torch.randperm(16)]


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def mean_loss(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).mean()  # type: ignore[no-any-return]


def square_loss(model: Any, batch: Any) -> Tensor:
    return (2 * model(batch["x"])).square().mean()  # type: ignore[no-any-return]


def contrastive(model: Any, batch: Any) -> Tensor:
    out = nn.functional.normalize(model(batch["x"]), dim=-1)
    return nn.functional.cross_entropy(out @ out.T, torch.arange(8))


def odd_op(model: Any, batch: Any) -> Tensor:
    if not hasattr(torch.ops.toy_bad, "odd"):
        made = torch.library.custom_op("toy_bad::odd", mutates_args=())(_odd)
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda ctx, g: g)
    return torch.ops.toy_bad.odd(model(batch["x"])).mean()  # type: ignore[no-any-return]


def _odd(x: Tensor) -> Tensor:
    return x.clone()


Case = tuple[Callable[[], Any], type[AutoparError], tuple[str, ...]]

CASES: dict[str, Case] = {
    "hint that matches nothing": (
        lambda: compile_mlp(hint.replicate("upp.*")),
        HintError,
        ("'upp.*'", "did you mean", "'up"),
    ),
    "degrees that do not multiply": (
        lambda: compile_mlp(hint.degrees(dp=2, tp=2)),
        HintError,
        ("dp=2 x tp=2", "2 ranks", "must multiply"),
    ),
    "stages that do not divide the ranks": (
        lambda: compile_mlp(hint.degrees(pp=3)),
        HintError,
        ("2 ranks", "3 stages"),
    ),
    "two degrees": (
        lambda: compile_mlp(hint.degrees(dp=2), hint.degrees(tp=1)),
        HintError,
        ("2 hint.degrees",),
    ),
    "text as a hint": (
        lambda: compile_mlp("dp=2"),
        HintError,
        ("'dp=2'", "autopar.hint"),
    ),
    "memory limit too small": (
        lambda: compile_mlp(hint.memory_limit("4KiB")),
        InfeasibleError,
        ("cannot fit", "4.10 kB a rank", "needs", "kB", "more ranks"),
    ),
    "loss with dims": (
        lambda: compile_mlp(loss=lambda model, batch: model(batch["x"])),
        CaptureError,
        ("[8, 16]", "0-d"),
    ),
    "loss without grad": (
        lambda: compile_mlp(loss=lambda model, batch: mean_loss(model, batch).detach()),
        CaptureError,
        ("does not require grad",),
    ),
    "branch on data": (
        lambda: compile_mlp(model=Branching(), loss=mean_loss),
        CaptureError,
        ("test_bad_input.py:",),
    ),
    "shape from data": (
        lambda: compile_mlp(model=Sized(), loss=mean_loss),
        CaptureError,
        ("test_bad_input.py:",),
    ),
    "random op that has no key": (
        lambda: compile_mlp(model=Shuffling(), loss=mean_loss),
        UnsupportedError,
        ("aten.randperm.default", "draws random numbers"),
    ),
    "op without a rule": (
        lambda: compile_mlp(loss=odd_op),
        MissingRuleError,
        ("toy_bad.odd", 'autopar.rule("toy_bad::odd"'),
    ),
    "world size of another cluster": (
        lambda: autopar.compile(mlp()[0], autopar.Cluster.local(3), mlp()[1], loss=mlp_loss),
        ClusterError,
        ("3", "2 processes"),
    ),
    "more stages than ops": (
        lambda: compile_mlp(
            hint.degrees(pp=2), model=Short(), loss=lambda model, batch: model.scale
        ),
        HintError,
        ("into 2 stages", "fewer stages"),
    ),
    "stage without parameters": (
        lambda: compile_mlp(hint.degrees(pp=2), model=Short(), loss=square_loss),
        UnsupportedError,
        ("into 2 stages", "hold no parameter", "fewer stages"),
    ),
    "more microbatches than samples": (
        lambda: compile_mlp(hint.microbatches(9)),
        HintError,
        ("9 microbatches", "8 samples", "at most 8"),
    ),
    "microbatches that do not divide the ranks' samples": (
        lambda: compile_mlp(hint.degrees(dp=2), hint.microbatches(3)),
        HintError,
        ("3 microbatches over dp=2", "8 samples"),
    ),
    "whole batch in mid-step": (
        lambda: compile_mlp(hint.microbatches(2), loss=contrastive),
        UnsupportedError,
        ("needs the whole batch",),
    ),
    "a row for every sample of microbatches": (
        lambda: compile_mlp(
            hint.microbatches(2),
            loss=lambda model, batch: (mean_loss(model, batch), {"out": model(batch["x"])}),
        ),
        UnsupportedError,
        ("2 microbatches", "'aten.add.Tensor' in module 'down'", "returned or read for the whole"),
    ),
    "unknown schedule": (
        lambda: compile_mlp(hint.degrees(pp=2), hint.schedule("1f1bb")),
        HintError,
        ("'1f1bb'", "did you mean '1f1b'"),
    ),
    "more chunks than ops": (
        lambda: compile_mlp(hint.degrees(pp=2), hint.schedule("interleaved", chunks=40)),
        HintError,
        ("2 stages of 40 chunks", "ops", "fewer stages or chunks"),
    ),
    "chunks where a stage has one": (
        lambda: compile_mlp(hint.degrees(pp=2), hint.schedule("1f1b", chunks=2)),
        UnsupportedError,
        ("'1f1b'", "2 chunks a stage", "'interleaved'"),
    ),
    "microbatches that are no whole rounds": (
        lambda: compile_mlp(
            hint.degrees(pp=2), hint.schedule("interleaved"), hint.microbatches(3)
        ),
        UnsupportedError,
        ("3 microbatches on 2 stages", "use 2 or 4 microbatches"),
    ),
    "expert degree": (
        lambda: compile_mlp(hint.degrees(ep=2)),
        UnsupportedError,
        ("ep=2",),
    ),
    "no such plan": (
        lambda: compile_mlp(plan="/nowhere/plan.json"),
        PlanError,
        ("/nowhere/plan.json",),
    ),
    "batch of an odd thing": (
        lambda: autopar.compile(mlp()[0], autopar.Cluster.local(2), {"x": object()}, loss=mlp_loss),
        AutoparError,
        ("'x'", "object"),
    ),
}
CASES |= {
    "ranks that are not there": (
        lambda: compile_mlp(hint.ranks(2, first=1)),
        HintError,
        ("2 ranks from rank 1", "ranks 0 to 1"),
    ),
    "degrees of fewer ranks": (
        lambda: compile_mlp(hint.degrees(dp=1, tp=1, cp=1, pp=1)),
        HintError,
        ("must multiply to 2", "hint.ranks(1)"),
    ),
    "hints beside a plan": (
        lambda: compile_mlp(hint.degrees(dp=2), plan=planned_mlp()),
        PlanError,
        ("hint.degrees(dp=2", "beside plan=", "autopar.plan(..., hints=...)"),
    ),
}
CASES |= {
    "hint.recompute of nothing": (
        lambda: compile_mlp(hint.recompute("layers.*.mpl")),
        HintError,
        ("layers.*.mpl", "did you mean"),
    ),
}
CASES |= {
    "hint.per_microbatch of nothing": (
        lambda: compile_mlp(hint.per_microbatch("nrom")),
        HintError,
        ("nrom", "did you mean 'norm'"),
    ),
}
CASES |= {
    "hint.offload where the host's memory is the device's": (
        lambda: compile_mlp(hint.offload("up")),
        HintError,
        ("hint.offload('up')", "frees nothing", "drop the hint"),
    ),
}


def planned_mlp() -> Plan:
    model, batch, loss = mlp()
    return autopar.plan(model, autopar.Cluster.local(2), batch, loss=loss)


def refused(name: str) -> tuple[str, str]:
    function, _, _ = CASES[name]
    with pytest.raises(AutoparError) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def assert_clear(message: str) -> None:
    """One line, lower case, no stop, and something to do."""
    assert "\n" not in message
    assert message[0].islower()
    assert not message.endswith(".")
    assert ";" in message or ":" in message


@pytest.mark.parametrize("name", CASES)
def test_is_refused_alike_on_every_rank(pool: Any, name: str) -> None:
    _, kind, words = CASES[name]
    found = pool(2).run(refused, name, timeout_s=TIMEOUT_S)
    messages = {message.removesuffix(" (on rank 0)") for _, message in found}
    assert len(messages) == 1, messages
    assert {own for own, _ in found} == {kind.__name__} or kind is AutoparError
    (message,) = messages
    assert_clear(message)
    for word in words:
        assert word in message, message


def plan_file(path: str, layout: str) -> None:
    parallel = compile_mlp(*HINTS[layout])
    if dist.get_rank() == 0:
        parallel.plan.save(path)
    dist.barrier()


def with_plan(path: str, model: str) -> str:
    built = {"mlp": mlp(), "bigger": mlp(12), "llama": llama()}[model]
    cluster = autopar.Cluster.local(dist.get_world_size())
    with pytest.raises(PlanError) as caught:
        autopar.compile(*built[:1], cluster, built[1], loss=built[2], plan=path)
    return str(caught.value)


def test_plans_that_do_not_fit_are_refused(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    pool(2).run(plan_file, str(path), "pp2mb2-1f1b")
    text = path.read_text()

    def message(model: str) -> str:
        first, second = pool(2).run(with_plan, str(path), model, timeout_s=TIMEOUT_S)
        assert first == second
        assert_clear(first)
        return str(first)

    assert "another batch" in message("bigger")
    assert "input" in message("llama")
    path.write_text(text[: len(text) // 2])
    assert "plan.json" in message("mlp")
    path.write_text("[]")
    assert "plan.json" in message("mlp")
    raw = json.loads(text)
    raw["schedule"] = "no such order"
    path.write_text(json.dumps(raw))
    assert "no such order" in message("mlp")
    raw = json.loads(text)
    raw["microbatches"] = 3
    path.write_text(json.dumps(raw))
    assert "3" in message("mlp")


@pytest.mark.parametrize(
    ("model", "layout", "samples"),
    [("mlp", "dp2", 5), ("llama", "dp2", 5), ("llama", "dp2", 1), ("bert", "zero3x2", 3)],
)
def test_a_batch_that_does_not_divide_is_exact(
    pool: Any, model: str, layout: str, samples: int
) -> None:
    found = pool(2).run(parallel_run, model, 2, HINTS[layout], samples)
    assert_same_training(found, one_process(model, samples))
