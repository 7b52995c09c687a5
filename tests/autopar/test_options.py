"""What is given to `compile` and `plan` beside model and batch, checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import hint
from autopar.errors import AutoparError

NAN = float("nan")

GIVEN: dict[str, Any] = {
    "OptimizerSpec(state_bytes": lambda: autopar.OptimizerSpec(state_bytes=NAN),
    "OptimizerSpec(moments": lambda: autopar.OptimizerSpec(moments=-1),
    "OptimizerSpec(host_bucket": lambda: autopar.OptimizerSpec(host_bucket_elements=0),
    "Options(memory_fraction": lambda: autopar.Options(memory_fraction=2.0),
    "Options(time_limit_s": lambda: autopar.Options(time_limit_s=NAN),
    "Options(timeout_s": lambda: autopar.Options(timeout_s="1"),  # type: ignore[arg-type]
    "hints=[hint.keep('0')]": lambda: planned(hints=hint.keep("0")),
    "a SGD as optimizer=": lambda: planned(optimizer=torch.optim.SGD(model().parameters(), 0.1)),
    "a str as optimizer=": lambda: planned(optimizer="adamw"),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def planned(cluster: autopar.Cluster | None = None, **options: Any) -> autopar.Plan:
    def loss(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return made(x).square().mean()  # type: ignore[no-any-return]

    where = cluster or autopar.Cluster.local(1)
    return autopar.plan(model(), where, torch.zeros(4, 4), loss=loss, **options)


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_no_such_thing_is_refused_by_name(name: str) -> None:
    with pytest.raises(AutoparError) as caught:
        GIVEN[name]()
    assert name in str(caught.value)


def test_a_limit_beyond_a_devices_memory_is_that_memory() -> None:
    cluster = autopar.Cluster.local(1)
    plan = planned(cluster, hints=[hint.memory_limit("1000TB")])
    assert plan.memory_limit_bytes == cluster.device(0).memory_bytes
