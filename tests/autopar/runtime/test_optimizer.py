"""Optimizers on the parameters of a compiled model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from autopar.errors import UnsupportedError
from tests.autopar.runtime.programs import Linear, batch, parallel_linear

STEPS = 3


def trained(sizes: tuple[int, ...], zero: bool) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = parallel_linear(sizes, zero=zero)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(STEPS):
            parallel(batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return parallel.get_parameter("weight").full_tensor().detach()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("sizes", "zero"), [((1,), False), ((2,), True), ((2, 2), False)])
def test_training_equals_one_process(pool: Any, sizes: tuple[int, ...], zero: bool) -> None:
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(STEPS):
        model(**batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    found = pool(torch.Size(sizes).numel()).run(trained, sizes, zero)
    for weight in found:
        torch.testing.assert_close(weight, model.weight.detach())
        assert torch.equal(weight, found[0])


def watched() -> None:
    parallel = parallel_linear((1,))
    parallel(batch()).backward()
    sgd = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="SGD takes 140 bytes on this rank .* counted on 280"):
        sgd.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgd.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    adam = torch.optim.Adam(parallel.parameters())
    sgd.zero_grad()
    scaler.scale(parallel(batch())).backward()
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(adam)
    for name in list(sgd.defaults):
        del sgd.param_groups[0][name]
    with pytest.raises(UnsupportedError, match=r"lacks .*lr.*flatten_optimizer_state_dict=True"):
        sgd.step()
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_state_bytes_and_scalers_are_watched(pool: Any) -> None:
    pool(1).run(watched)
