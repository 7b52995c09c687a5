"""State in host memory: the same parameters to the bit, the bytes where they should be."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.optim import AdamW
from autopar.runtime.measure import LiveBytes
from autopar.runtime.optimizer import mark_home

STEPS = 4


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 50), nn.Linear(50, 23), nn.Linear(23, 1)).to(dtype)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for number in range(steps):
        draw = torch.Generator().manual_seed(number)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, 100, 1 << 20])
def test_host_state_gives_torchs_parameters_to_the_bit(bucket: int, dtype: torch.dtype) -> None:
    wanted, found = model(dtype), model(dtype)
    for number, parameter in enumerate(found.parameters()):
        mark_home(parameter, state_on_host=number % 3 == 1, on_host=number % 3 == 2)
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    reference = torch.optim.AdamW(wanted.parameters(), **options)  # type: ignore[arg-type]
    own = AdamW(found.parameters(), bucket_elements=bucket, **options)  # type: ignore[arg-type]
    steps = 1 if bucket == 1 else STEPS
    train(wanted, reference, steps)
    train(found, own, steps)
    for one, other in zip(wanted.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(reference.state.values(), own.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_device_holds_two_buckets_of_state_at_most() -> None:
    found = model()
    for parameter in found.parameters():
        mark_home(parameter, state_on_host=True)
    optimizer = AdamW(found.parameters(), bucket_elements=200)
    train(found, optimizer, 1)
    total = sum(p.numel() for p in found.parameters())
    with LiveBytes() as count:
        optimizer.step()
    # torch's kernel has temporaries of its own: at most three tensors of a bucket.
    assert 16 * 200 <= count.peak_bytes <= (16 + 12) * 200 + 64 < 8 * total
    assert count.live_bytes == 0
    with LiveBytes() as count:
        other = AdamW(found.parameters(), bucket_elements=200)
        other.step()
    assert count.host_bytes == 8 * total


def test_parameters_at_home_on_the_host_come_in_buckets_with_their_gradients() -> None:
    found = model()
    for parameter in found.parameters():
        mark_home(parameter, on_host=True)
    optimizer = AdamW(found.parameters(), bucket_elements=200)
    train(found, optimizer, 1)
    with LiveBytes() as count:
        optimizer.step()
    # As above, with parameter and gradient: 16 bytes an element of two buckets.
    assert 32 * 200 <= count.peak_bytes <= (32 + 12) * 200 + 64
    assert count.live_bytes == 0


def test_a_state_dict_goes_to_torchs_adamw_and_back() -> None:
    first, second = model(), model()
    for parameter in first.parameters():
        mark_home(parameter, state_on_host=True)
    own = AdamW(first.parameters(), lr=1e-2, bucket_elements=64)
    train(first, own)
    second.load_state_dict(first.state_dict())
    plain = torch.optim.AdamW(second.parameters(), lr=1e-2)
    plain.load_state_dict(copy.deepcopy(own.state_dict()))
    third = copy.deepcopy(first)
    for parameter in third.parameters():
        mark_home(parameter, state_on_host=True)
    again = AdamW(third.parameters(), lr=1e-2)
    with LiveBytes() as count:
        again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert count.host_bytes == 8 * sum(p.numel() for p in third.parameters())
    train(second, plain)
    train(third, again)
    for one, other in zip(second.parameters(), third.parameters(), strict=True):
        assert torch.equal(one, other)
