"""Training in a pool and in one process, and what must be equal between them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar import hint
from autopar.capture.keyed import keyed
from autopar.plan.serialize import from_json
from tests.oracles.models import DRAWING, MODELS, Built, convolutions, penalised, twice, unet

STEPS = 5
SEED = 17
MAX_NORM = 1.0

HINTS: dict[str, tuple[hint.Hint, ...]] = {
    "auto": (),
    "dp2": (hint.degrees(dp=2, tp=1),),
    "tp2": (hint.degrees(dp=1, tp=2),),
    "zero3x2": (hint.degrees(dp=2, tp=1, zero=3),),
    "dp4": (hint.degrees(dp=4, tp=1),),
    "tp4": (hint.degrees(dp=1, tp=4),),
    "dp2tp2": (hint.degrees(dp=2, tp=2),),
    "zero3x4": (hint.degrees(dp=4, tp=1, zero=3),),
    "zero3x2tp2": (hint.degrees(dp=2, tp=2, zero=3),),
    "dp2mb2": (hint.degrees(dp=2, tp=1), hint.microbatches(2)),
}
HINTS |= {
    f"pp2{others}mb{count}-{name}": (
        hint.degrees(pp=2, **degrees),
        hint.microbatches(count),
        hint.schedule(name),
    )
    for others, degrees in {
        "": {"dp": 1, "tp": 1},
        "dp2": {"dp": 2, "tp": 1},
        "tp2": {"dp": 1, "tp": 2},
    }.items()
    for count in (1, 2, 3)  # three of five samples are uneven
    for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    if name != "interleaved" or count == 2  # whole rounds of both stages
}

UNLIKE: dict[str, hint.Degrees] = {
    "2+1+1": hint.degrees(dp=(2, 1, 1)),
    "tp2+1+1": hint.degrees(tp=(2, 1, 1)),
    "1+dp2+1": hint.degrees(dp=(1, 2, 1)),
    "dp2+tp2": hint.degrees(dp=(2, 1), tp=(1, 2)),
    "zero3x2+tp2": hint.degrees(dp=(2, 1), tp=(1, 2), zero=3),
    "dp3+1": hint.degrees(dp=(3, 1)),
    "4+2+1+1": hint.degrees(dp=(4, 2, 1, 1)),
}
"""Stages of unlike meshes, by what is added up."""


OTHERS = {"unet": unet, "penalised": penalised, "convolutions": convolutions, "twice": twice}
"""Models of some tests alone."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose eps is far above rounding.

    GPT-2's key bias adds the same to all scores of a row, so its gradient is exactly zero in
    theory and rounding noise in practice; with the default eps of 1e-8 AdamW makes a whole step of
    the sign of that noise, between two runs of one process too.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def whole(value: Any) -> Tensor:
    """A copy of the whole tensor of what may be a DTensor."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return torch.as_tensor(value).detach().clone()


def piece(parameter: Any) -> tuple[tuple[tuple[int, int], ...], Tensor]:
    """Which piece of a parameter this rank holds, and the piece."""
    here = parameter.device_mesh.get_coordinate()
    key = tuple(
        (axis, here[axis] if here else -1)
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard)
    )
    return key, parameter.to_local().detach().clone()


def train(model: nn.Module, step: Any, clip: Any) -> dict[str, Any]:
    """Losses, norms, first gradients, last parameters and buffers of a few steps."""
    optimizer = adamw(model.parameters())
    found: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(STEPS):
        loss = step()
        loss.backward()
        if number == 0:
            found["gradients"] = {
                name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
            }
        found["norms"].append(float(whole(clip())))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss.detach()))
    found["parameters"] = {name: whole(p) for name, p in model.named_parameters()}
    found["buffers"] = {name: whole(b) for name, b in model.named_buffers()}
    return found


def build(name: str, samples: int | None = None) -> Built:
    """A model of the oracles, with that many samples, no two of them alike."""
    model, batch, loss = (MODELS | DRAWING | OTHERS)[name]()
    if samples is not None:
        batch = {
            key: torch.cat([v.roll(n, -1) for n in range(-(-samples // len(v)))])[:samples]
            for key, v in batch.items()
        }
    return model, batch, loss


@functools.cache
def one_process(name: str, samples: int | None = None) -> dict[str, Any]:
    """The reference."""
    model, batch, loss = build(name, samples)
    numbers = itertools.count()

    def step() -> Tensor:
        with keyed(model, SEED, next(numbers)):
            return loss(model, batch)

    return train(
        model,
        step,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    )


def parallel_run(
    name: str,
    world_size: int,
    hints: Sequence[hint.Hint],
    samples: int | None = None,
    plan: str | None = None,
    cluster: autopar.Cluster | None = None,
) -> dict[str, Any]:
    """The same on this rank of a pool; ``plan`` is the text of a plan to follow.

    Planned for a cluster that is described, or for the processes that there are.
    """
    model, batch, loss = build(name, samples)
    parallel = autopar.compile(
        model,
        cluster or autopar.Cluster.local(world_size),
        batch,
        loss=loss,
        hints=hints,
        plan=None if plan is None else from_json(plan),
        options=autopar.Options(seed=SEED),
    )
    found = train(
        parallel,
        lambda: parallel(batch),
        lambda: autopar.clip_grad_norm_(parallel, MAX_NORM),
    )
    found["pieces"] = {name: piece(p) for name, p in parallel.named_parameters()}
    found["stages"] = parallel.plan.num_stages
    found["ranks"] = [len(ranks) for ranks in parallel.plan.ranks_of_stages]
    found["microbatches"] = parallel.plan.microbatches
    return found


def assert_same_training(ranks: Sequence[dict[str, Any]], one: dict[str, Any]) -> None:
    """The rule of exactness, and that replicas are equal to the bit."""
    for rank in ranks:
        for mine, wanted in zip(rank["losses"], one["losses"], strict=True):
            assert abs(mine - wanted) <= 1e-5 * max(1.0, abs(wanted)), (mine, wanted)
        for mine, wanted in zip(rank["norms"], one["norms"], strict=True):
            assert abs(mine - wanted) <= 1e-5 * wanted, ("norm", mine, wanted)
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["norms"] == ranks[0]["norms"]
        for name, gradient in rank["gradients"].items():
            assert_close(gradient, one["gradients"][name], 1e-5, name)
        for name, parameter in rank["parameters"].items():
            assert_close(parameter, one["parameters"][name], 1e-4, name)
        assert set(rank["buffers"]) == set(one["buffers"])
        for name, buffer in rank["buffers"].items():
            assert_close(buffer.double(), one["buffers"][name].double(), 1e-4, name)
    for kind in ("gradients", "parameters"):
        assert {name for rank in ranks for name in rank[kind]} == set(one[kind])
    held: dict[Any, Tensor] = {}
    for rank in ranks:
        for name, (key, value) in rank["pieces"].items():
            assert torch.equal(held.setdefault((name, key), value), value), name


def assert_close(mine: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    """``max|a - b| <= tolerance * max(max|b|, 0.1)``."""
    assert mine.shape == wanted.shape, name
    error = float((mine - wanted).abs().max()) if wanted.numel() else 0.0
    allowed = tolerance * max(float(wanted.abs().max()), 0.1)
    assert error <= allowed, f"{name}: {error:.2e} of {allowed:.2e}"
