"""Modules computed from each microbatch alone, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import hint
from autopar.plan.serialize import from_json, to_json
from tests.dist.training import MAX_NORM, assert_close, train, whole
from tests.oracles.alone import ALONE, apart

CASES = {
    ("norms", 2): (hint.degrees(dp=2),),
    ("mixture", 4): (hint.degrees(pp=2),),
    ("norms", 4): (hint.degrees(pp=2),),
    ("mixture", 2): (hint.degrees(dp=2, zero=3),),
}
DEFAULT = (("mixture", 2), ("norms", 4))
"""What every run tries; the others are large."""


def trained(name: str, count: int) -> dict[str, Any]:
    """A training run of this rank, from a plan that went through a file."""
    build, patterns = ALONE[name]
    model, batch, loss = build()
    hints = (*CASES[name, count], hint.microbatches(count), *map(hint.per_microbatch, patterns))
    cluster = autopar.Cluster.local(2)
    made = autopar.plan(model, cluster, batch, loss=loss, hints=hints)
    hinted = autopar.compile(build()[0], cluster, batch, loss=loss, hints=hints)
    parallel = autopar.compile(model, cluster, batch, loss=loss, plan=from_json(to_json(made)))
    found = train(
        parallel,
        lambda: parallel(batch),
        lambda: autopar.clip_grad_norm_(parallel, MAX_NORM),
    )
    found["buffers"] = {path: whole(b) for path, b in parallel.named_buffers()}
    found["same"] = hinted.plan.per_microbatch == parallel.plan.per_microbatch != ()
    with torch.no_grad():
        parallel.eval()
        found["evaluated"] = float(parallel(batch))
    return found


@pytest.mark.parametrize(
    ("name", "count"),
    [pytest.param(*c, marks=() if c in DEFAULT else pytest.mark.large) for c in CASES],
)
def test_training_is_that_of_one_process(pool: Any, name: str, count: int) -> None:
    model, batch, loss = ALONE[name][0]()
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d) or path.endswith("aux_loss")
    ]
    apart(model, paths, count)
    one = train(
        model,
        lambda: loss(model, batch),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    )
    buffers = dict(model.named_buffers())
    evaluated = float(loss(model.eval(), batch).detach())
    ranks = pool(2).run(trained, name, count)
    for rank in ranks:
        assert rank["same"]
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-5)
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-4)
        for key, allowed in (("gradients", 1e-5), ("parameters", 1e-4)):
            for path, value in rank[key].items():
                assert_close(value, one[key][path], allowed, path)
        for path, value in rank["buffers"].items():
            assert_close(value.double(), buffers[path].double(), 1e-4, path)
    assert {path for rank in ranks for path in rank["gradients"]} == set(one["gradients"])
