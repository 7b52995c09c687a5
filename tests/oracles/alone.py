"""Models with values that need the whole batch, and one process that takes microbatches instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracles.models import Built


class Balance(nn.Module):
    """How unevenly tokens go to experts: the mean share of each times its mean probability."""

    def forward(self, logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1).flatten(0, 1)
        chosen = F.one_hot(probabilities.argmax(-1), logits.shape[-1]).to(probabilities.dtype)
        return logits.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum()


class Experts(nn.Module):
    """A mixture of experts whose router is to keep them busy alike."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 3)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 3)
        self.aux_loss = Balance()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        hidden = F.gelu(torch.einsum("bsw,ewh->bseh", x, self.up))
        made = torch.einsum("bseh,ehw->bsew", hidden, self.down)
        return x + (made * logits.softmax(-1)[..., None]).sum(2), self.aux_loss(logits)


class Mixture(nn.Module):
    """Two blocks of experts between an embedding and a head; their aux losses are added."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x, aux = self.embed(ids), torch.zeros(())
        for block in self.blocks:
            x, own = block(x)
            aux = aux + own
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + 0.3 * aux


class Norms(nn.Module):
    """A residual block of convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4, momentum=0.3)
        self.short = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = F.relu(self.bn2(self.conv2(h)) + self.short(x))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


def call(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)  # type: ignore[no-any-return]


def mixture() -> Built:
    torch.manual_seed(21)
    # Samples of few kinds of tokens each, so that no two microbatches are alike.
    ids = torch.randint(0, 4, (8, 6)) + torch.arange(8)[:, None]
    return Mixture(), (ids,), call


def norms() -> Built:
    torch.manual_seed(22)
    x = torch.randn(8, 3, 4, 4) + torch.linspace(-2, 2, 8).view(8, 1, 1, 1)
    return Norms(), (x, torch.randint(0, 5, (8,))), call


ALONE: dict[str, tuple[Callable[[], Built], tuple[str, ...]]] = {
    "mixture": (mixture, ("*.aux_loss",)),
    "norms": (norms, ("bn*", "short.1")),
}
"""How a model is built, and what of it needs the whole batch."""


def apart(model: nn.Module, paths: Iterable[str], count: int) -> nn.Module:
    """The model with modules that run on one part of the batch after the other.

    Written for what `ALONE` holds: one operand, whose dim 0 counts samples, as does that of the
    result unless it is a number.
    """
    for path in paths:
        module = model.get_submodule(path)
        module.forward = functools.partial(_in_parts, module, count)
    return model


def _in_parts(module: nn.Module, count: int, x: Tensor) -> Any:
    made = [type(module).forward(module, part) for part in x.chunk(count)]
    return torch.cat(made) if made[0].ndim else sum(made) / count
