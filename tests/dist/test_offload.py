"""Activations, optimizer state and parameters in host memory on real processes.

Nothing changes to the bit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar import hint
from autopar.capture import capture_step
from autopar.errors import UnsupportedError
from autopar.ir.graph import PARAMETER, Graph
from autopar.optim import AdamW
from autopar.plan.records import Plan, StagePlan
from autopar.runtime.measure import LiveBytes
from autopar.search.analysis import analyse
from autopar.search.recompute import recompute_of
from tests.dist.training import HINTS, whole
from tests.oracles.hosts import hosted
from tests.oracles.models import MODELS

STEPS = 3


@functools.cache
def graph() -> Graph:
    return capture_step(*MODELS["gpt2"](), grad=True).graph


def offloaded(plan: Plan) -> Plan:
    """The plan with all that may leave in host memory, but for the parameters."""
    analysis = analyse(graph())
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
    saved: dict[str, Any] = {}
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
        saved = saved or optimizer.state_dict()
        again = type(optimizer)(parallel.parameters())
        again.load_state_dict(saved)
        for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
            assert all(torch.equal(whole(one[name]), whole(other[name])) for name in one)
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


def streamed(plan: Plan) -> Plan:
    """The plan with all that may leave and all parameters at home in host memory."""
    away = offloaded(plan)
    sources = {node.target: node.name for node in graph().sources(PARAMETER)}

    def home(stage: StagePlan) -> StagePlan:
        own = {sources[p.name] for p in stage.parameters}
        return replace(
            stage,
            parameters=tuple(replace(p, on_host=True) for p in stage.parameters),
            kept={value: () if value in own else kept for value, kept in stage.kept.items()},
        )

    return replace(away, stages=tuple(map(home, away.stages)))


OPTIMIZERS: dict[str, Any] = {
    "device": torch.optim.AdamW,
    "brought": AdamW,
    "there": torch.optim.AdamW,
}
"""Where the update runs: all on the device, what is on the host brought there, or on the host."""


def trained_from_home(ranks: int, layout: str) -> dict[str, Any]:
    """Losses, gradients and parameters with parameters on the device and on the host."""
    found: dict[str, Any] = {}
    plan: Plan | None = None
    for place, make in OPTIMIZERS.items():
        model, batch, loss = MODELS["gpt2"]()
        with LiveBytes() as count:
            parallel = autopar.compile(
                model,
                hosted(ranks, 1e9),
                batch,
                loss=loss,
                optimizer=AdamW,
                hints=STREAMED[layout],
                plan=None if plan is None else streamed(plan),
            )
            plan = plan or parallel.plan
            before = count.host_bytes
            optimizer = make(parallel.parameters(), lr=1e-2)
            losses, gradients = [], {}
            for _ in range(STEPS):
                value = parallel(batch)
                value.backward()
                gradients = {name: whole(p.grad) for name, p in parallel.named_parameters()}
                autopar.clip_grad_norm_(parallel, 1.0)
                delivered = count.host_bytes
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.detach().clone())
        found[place] = {
            "losses": losses,
            "gradients": gradients,
            "parameters": {name: whole(p) for name, p in parallel.named_parameters()},
            "bytes": sum(p.to_local().nbytes for p in parallel.parameters()),
            "held": (before, delivered, count.host_bytes),
        }
        parallel.load_state_dict(parallel.state_dict())
        with torch.no_grad():
            found[place]["losses"].append(parallel(batch).clone())
    return found


STREAMED = {name: HINTS[name] for name in ("dp2mb2", "zero3x2", "pp2mb2-1f1b")}
STREAMED["zero3x2mb2"] = (*HINTS["zero3x2"], hint.microbatches(2))


@pytest.mark.parametrize(
    "layout",
    [
        "zero3x2mb2",
        "pp2mb2-1f1b",
        *(pytest.param(name, marks=pytest.mark.large) for name in ("dp2mb2", "zero3x2")),
    ],
)
def test_parameters_at_home_on_the_host_change_nothing_to_the_bit(pool: Any, layout: str) -> None:
    for rank in pool(2).run(trained_from_home, 2, layout):
        device = rank["device"]
        assert device["held"] == (0, 0, 0)
        for place in ("brought", "there"):
            host = rank[place]
            assert all(map(torch.equal, device["losses"], host["losses"]))
            for what in ("gradients", "parameters"):
                for name, value in device[what].items():
                    assert torch.equal(value, host[what][name]), (place, what, name)
        # Parameters; their gradients and states beside them; states only if they were brought.
        size = rank["brought"]["bytes"]
        assert rank["brought"]["held"] == (size, 4 * size, 3 * size)
        assert rank["there"]["held"] == (size, 2 * size, size)
