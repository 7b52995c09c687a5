"""Activations and optimizer state in host memory on real processes: nothing changes to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.capture import capture_step
from autopar.errors import UnsupportedError
from autopar.optim import AdamW
from autopar.plan.records import Plan, StagePlan
from autopar.runtime.measure import LiveBytes
from autopar.search.analysis import analyse
from autopar.search.recompute import recompute_of
from tests.dist.training import HINTS, whole
from tests.oracles.hosts import hosted
from tests.oracles.models import MODELS

STEPS = 3


def offloaded(plan: Plan) -> Plan:
    """The plan with all that may leave in host memory."""
    analysis = analyse(capture_step(*MODELS["gpt2"](), grad=True).graph)
    may = recompute_of(analysis, in_loop=plan.microbatches > 1, allowed=True).may_leave

    def away(stage: StagePlan) -> StagePlan:
        return replace(
            stage,
            parameters=tuple(replace(p, state_on_host=True) for p in stage.parameters),
            offloaded=tuple(value for value in stage.kept if may(value.partition(":")[0])),
        )

    found = replace(plan, stages=tuple(map(away, plan.stages)))
    assert all(stage.offloaded for stage in found.stages)
    return found


def trained(ranks: int, layout: str) -> dict[str, Any]:
    """Losses and parameters with nothing and with everything in host memory."""
    found: dict[str, Any] = {}
    plan: Plan | None = None
    for place in ("device", "host"):
        model, batch, loss = MODELS["gpt2"]()
        parallel = autopar.compile(
            model,
            hosted(ranks, 1e9),
            batch,
            loss=loss,
            optimizer=AdamW,
            hints=HINTS[layout],
            plan=None if plan is None else offloaded(plan),
        )
        plan = parallel.plan
        plain = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        optimizer = plain if place == "device" else AdamW(parallel.parameters(), lr=1e-2)
        losses = []
        with LiveBytes() as count:
            for _ in range(STEPS):
                value = parallel(batch)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.detach().clone())
        state = sum(2 * p.to_local().nbytes for p in parallel.parameters())
        found[place] = {
            "losses": losses,
            "parameters": {name: whole(p) for name, p in parallel.named_parameters()},
            "held": (count.host_bytes, state, count.host_peak_bytes),
        }
    parallel(batch).backward()
    with pytest.raises(UnsupportedError, match=r"in host memory.*use autopar\.optim\.AdamW"):
        torch.optim.AdamW(parallel.parameters()).step()
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "dp2mb2"), (2, "zero3x2"), (2, "pp2mb2-1f1b")]
)
def test_host_memory_changes_nothing_to_the_bit(pool: Any, ranks: int, layout: str) -> None:
    for rank in pool(ranks).run(trained, ranks, layout):
        device, host = rank["device"], rank["host"]
        assert all(map(torch.equal, device["losses"], host["losses"]))
        for name, value in device["parameters"].items():
            assert torch.equal(value, host["parameters"][name]), name
        held, state, most = host["held"]
        assert held == state < most
        assert device["held"][0] == device["held"][2] == 0
