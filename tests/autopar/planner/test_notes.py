"""What a plan says of the step beside its tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import plan
from autopar.cluster import Cluster


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).sum(dim=(1, 3))


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten().sort().values.view_as(x)


def notes(model: nn.Module, x: Tensor) -> tuple[str, ...]:
    return plan(model, Cluster.local(2), x, loss=lambda m, given: m(given).square().sum()).notes


def test_attention_that_drops_weights_is_named_with_its_modules() -> None:
    found = notes(nn.Sequential(nn.Sequential(Heads())), torch.zeros(4, 6, 8))
    assert any(note.startswith("attention drops weights in 0.0, which") for note in found)
    assert not any("drops weights" in note for note in notes(nn.Linear(8, 8), torch.zeros(4, 8)))


def test_what_is_computed_whole_is_named_with_its_modules() -> None:
    layers = (nn.Sequential(nn.Linear(8, 8), Sorted()) for _ in range(3))
    found = notes(nn.Sequential(*layers), torch.zeros(4, 8))
    assert "computed whole on every rank: scatter, sort in 0-2.1" in found
