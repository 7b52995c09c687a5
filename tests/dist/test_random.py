"""Models that draw train on real processes as one keyed process does; the step is part of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import autopar
from autopar import hint
from autopar.capture.keyed import keyed
from tests.dist.training import HINTS, assert_same_training, one_process, parallel_run
from tests.oracles.models import DRAWING, drawing

DEFAULT = {("drawing", 2, "tp2"), ("gpt2 dropout", 2, "pp2mb2-interleaved")}
"""What every run tries; the others are large."""

STAGES = ("pp2mb2-1f1b", "pp2mb2-interleaved", "pp2mb2-zb-v")
LAYOUTS = {
    1: ("auto",),
    2: ("dp2", "tp2", "zero3x2", "dp2mb2", *STAGES),
    4: ("dp2tp2", "pp2tp2mb2-zb-h1"),
}


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [
        pytest.param(
            model,
            ranks,
            layout,
            marks=() if (model, ranks, layout) in DEFAULT else pytest.mark.large,
        )
        for ranks, layouts in LAYOUTS.items()
        for model in DRAWING
        for layout in layouts
        if (model, layout) != ("drawing", "pp2mb2-interleaved")  # one chunk holds no parameter
    ],
)
def test_trains_as_one_keyed_process_does(pool: Any, model: str, ranks: int, layout: str) -> None:
    found = pool(ranks).run(parallel_run, model, ranks, HINTS[layout])
    assert_same_training(found, one_process(model))


def compiled(hints: tuple[hint.Hint, ...] = (), seed: int = 4) -> tuple[Any, Any]:
    model, batch, loss = drawing()
    cluster = autopar.Cluster.local(torch.distributed.get_world_size())
    options = autopar.Options(seed=seed)
    made = autopar.compile(model, cluster, batch, loss=loss, hints=hints, options=options)
    return made, batch


def losses(path: str) -> dict[str, Any]:
    """Of steps, of calls without a backward, and of steps behind a saved one."""
    parallel, batch = compiled(HINTS["dp2"])
    first = [float(parallel(batch).detach()) for _ in range(3)]
    dcp.save(parallel.state_dict(), checkpoint_id=path)
    with torch.no_grad():
        first.append(float(parallel(batch)))
    first.append(float(parallel(batch).detach()))
    assert parallel.num_steps == 5
    resumed, _ = compiled(HINTS["tp2"])
    autopar.load(resumed, path)
    assert resumed.num_steps == 3
    again = [float(resumed(batch).detach()) for _ in range(2)]
    parallel.eval()
    quiet = [float(parallel(batch)) for _ in range(2)]
    other = float(compiled(HINTS["dp2"], seed=5)[0](batch).detach())
    return {"first": first, "again": again, "quiet": quiet, "other": other}


def test_the_step_advances_with_every_call_and_is_saved(pool: Any, tmp_path: Path) -> None:
    found, second = pool(2).run(losses, str(tmp_path))
    assert found == second
    model, batch, loss = drawing()
    wanted = []
    for step in range(5):
        with keyed(model, 4, step):
            wanted.append(float(loss(model, batch).detach()))
    assert found["first"] == pytest.approx(wanted, rel=1e-5)
    assert found["again"] == pytest.approx(wanted[3:], rel=1e-5)
    assert len({round(value, 4) for value in [*found["first"], found["other"]]}) == 6


def gradients_of_two(layout: str) -> dict[str, torch.Tensor]:
    """Two calls whose gradients add up."""
    parallel, batch = compiled(HINTS[layout])
    for _ in range(2):
        parallel(batch).backward()
    return {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}


def test_accumulated_calls_draw_different_numbers(pool: Any) -> None:
    found, _ = pool(2).run(gradients_of_two, "dp2mb2")
    model, batch, loss = drawing()
    for step in range(2):
        with keyed(model, 4, step):
            value = loss(model, batch)
        value.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
