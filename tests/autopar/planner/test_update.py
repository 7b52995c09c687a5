"""What the update makes for a moment is in the plan's bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import hint
from autopar.errors import InfeasibleError
from autopar.options import Transients
from autopar.runtime.measure import LiveBytes
from autopar.runtime.optimizer import transients_of
from tests.oracles.hosts import hosted

VOCABULARY, WIDTH, SAMPLES = 4000, 32, 8

MAKES: dict[str, functools.partial[Any]] = {
    "loop": functools.partial(torch.optim.AdamW, foreach=False),
    "multi-tensor": functools.partial(torch.optim.AdamW, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "no momentum": functools.partial(torch.optim.SGD, weight_decay=0.1, foreach=True),
}


class Embedded(nn.Module):
    """Much to update and little to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.embedding(ids)).square().mean()  # type: ignore[no-any-return]


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(SAMPLES)}


def test_what_an_update_makes_does_not_depend_on_defaults_of_torch() -> None:
    probed = functools.partial(torch.optim.AdamW, lr=0.25)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            assert transients_of(probed, "cuda") == Transients(every=1.0)
            assert transients_of(probed, "cpu") == Transients(each=2.0, left=1.0)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", MAKES)
def test_a_step_with_its_update_holds_what_is_predicted(name: str) -> None:
    with LiveBytes() as count:
        parallel = autopar.compile(
            Embedded(), autopar.Cluster.local(1), batch(), optimizer=MAKES[name]
        )
        optimizer = MAKES[name](parallel.parameters())
        for _ in range(2):
            before = count.live_bytes
            count.peak_bytes = before
            parallel(batch()).backward()
            optimizer.step()
            most = count.peak_bytes - before
            optimizer.zero_grad()
    held = sum(parameter.to_local().nbytes for parameter in parallel.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    held += sum(value.to_local().nbytes for value in states if value.ndim)
    predicted = parallel.plan.prediction.memory.total_bytes
    assert held + most == pytest.approx(predicted, rel=1e-3)


def test_state_leaves_where_what_the_update_makes_does_not_fit() -> None:
    size = 4 * sum(parameter.numel() for parameter in Embedded().parameters())
    # Parameters, gradients and two moments fit; a fifth tensor does not.
    limit = hint.memory_limit(int(4.5 * size))
    away = {}
    for transients in (Transients(), Transients(every=1.0), Transients(each=1.0)):
        spec = autopar.OptimizerSpec(moments=2, host_bucket_elements=512, transients=transients)
        plan = autopar.plan(Embedded(), hosted(1, 1e9), batch(), optimizer=spec, hints=[limit])
        assert plan.prediction.memory.total_bytes <= plan.memory_limit_bytes
        away[transients] = {p.name for p in plan.stage.parameters if p.state_on_host or p.on_host}
    nothing, *others = away.values()
    assert not nothing and all(others)


def test_an_update_that_does_not_fit_is_named() -> None:
    size = 4 * sum(parameter.numel() for parameter in Embedded().parameters())
    hints = [hint.memory_limit(int(4.5 * size))]
    make, one = MAKES["multi-tensor"], autopar.Cluster.local(1)
    with pytest.raises(InfeasibleError, match="the update"):
        autopar.plan(Embedded(), one, batch(), optimizer=make, hints=hints)
    autopar.plan(Embedded(), one, batch(), optimizer=MAKES["fused"], hints=hints)


def test_bytes_of_an_optimizer_of_ones_own_are_counted() -> None:
    """``step_transient_bytes`` is what the update needs beside."""
    held = []
    for transient in (0.0, 12.0):
        spec = autopar.OptimizerSpec(state_bytes=8, step_transient_bytes=transient)
        plan = autopar.plan(Embedded(), autopar.Cluster.local(1), batch(), optimizer=spec)
        held.append(plan.prediction.memory.total_bytes)
    elements = sum(parameter.numel() for parameter in Embedded().parameters())
    assert held[1] == (4 + 4 + 8 + 12) * elements + 8 * SAMPLES > held[0]
