"""State in host memory: the same parameters to the bit, the bytes where they should be."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autopar import optim
from autopar.errors import UnsupportedError
from autopar.optim import AdamW
from autopar.runtime.host import Copies
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


def test_a_piece_is_updated_while_the_next_comes_and_the_last_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes go both ways at once: no update waits for the piece in front of it to have left."""
    did: list[tuple[str, int]] = []
    counts: Counter[str] = Counter()
    number: dict[int, tuple[str, int]] = {}

    class Noted(Copies):
        def to_device(self, value: torch.Tensor) -> torch.Tensor:
            return self._noted("comes", super().to_device(value))

        def to_host(
            self, value: torch.Tensor, room: torch.Tensor | None = None, *, dense: bool = False
        ) -> torch.Tensor:
            return self._noted("leaves", super().to_host(value, room, dense=dense))

        def wait(self, value: torch.Tensor) -> torch.Tensor:
            what, piece = number.pop(id(value))
            did.append((f"has {what}", piece))
            return super().wait(value)

        def _noted(self, what: str, room: torch.Tensor) -> torch.Tensor:
            # Two moments a piece.
            number[id(room)] = (what, counts[what] // 2)
            did.append(number[id(room)])
            counts[what] += 1
            return room

    def updated(group: Any, items: Any) -> None:
        did.append(("updated", counts["updated"]))
        counts["updated"] += 1
        update(group, items)

    update = optim._update
    monkeypatch.setattr(optim, "Copies", Noted)
    monkeypatch.setattr(optim, "_update", updated)
    weight = nn.Parameter(torch.zeros(40))
    mark_home(weight, state_on_host=True)
    weight.grad = torch.ones(40)
    AdamW([weight], bucket_elements=12).step()
    last = 4
    assert counts["updated"] == last + 1
    order = {event: at for at, event in enumerate(did)}
    for piece in range(last + 1):
        now = order["updated", piece]
        assert order["has comes", piece] < now < order["leaves", piece]
        if piece < last:
            assert order["comes", piece + 1] < now < order["has leaves", piece - 1 if piece else 0]
        if 2 <= piece < last:
            assert order["has leaves", piece - 2] < order["comes", piece + 1]


def test_the_device_holds_two_buckets_of_state_at_most() -> None:
    found = model()
    for parameter in found.parameters():
        mark_home(parameter, state_on_host=True)
    optimizer = AdamW(found.parameters(), bucket_elements=200)
    train(found, optimizer, 1)
    total = sum(p.numel() for p in found.parameters())
    with LiveBytes() as count:
        optimizer.step()
    # torch's kernel has temporaries of its own: at most three tensors of a piece.
    assert 16 * 199 <= count.peak_bytes <= (16 + 12) * 200 + 64 < 8 * total
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
    assert 32 * 199 <= count.peak_bytes <= (32 + 12) * 200 + 64
    assert count.live_bytes == 0


def test_what_it_does_not_do_is_refused() -> None:
    parameters = list(model().parameters())
    with pytest.raises(UnsupportedError, match="amsgrad=True"):
        AdamW([{"params": parameters, "amsgrad": True}])
    own, saved = AdamW(parameters), torch.optim.AdamW(parameters, amsgrad=True).state_dict()
    with pytest.raises(UnsupportedError, match="amsgrad=True"):
        own.load_state_dict(saved)
    with pytest.raises(UnsupportedError, match="0 as bucket_elements"):
        AdamW(parameters, bucket_elements=0)


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
