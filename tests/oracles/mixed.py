"""Mixed precision by hand, in one process: a stored copy, casts, gradients through them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class ByHand(nn.Module):
    """A model whose calls read casts of its stored parameters, and cast its inputs.

    Attributes:
        stored: Parameters by name, tied ones under their first name.
    """

    def __init__(self, model: nn.Module, stored: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self._model = copy.deepcopy(model)
        self._compute = compute
        self.stored: dict[str, Tensor] = {}
        for name, p in self._model.named_parameters():
            own = p.detach().to(stored).clone()
            self.stored[name] = own.requires_grad_(p.requires_grad)
        first = {id(p): name for name, p in reversed(list(self._model.named_parameters()))}
        self._names = {
            name: first[id(p)] for name, p in self._model.named_parameters(remove_duplicate=False)
        }
        self._casts: dict[str, Tensor] = {}

    def cast(self) -> None:
        """Make the casts of one step."""
        self._casts = {name: p.to(self._compute) for name, p in self.stored.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self._compute) if floating else value

        values = {name: self._casts[owner] for name, owner in self._names.items()}
        args = tuple(cast(value) for value in args)
        kwargs = {key: cast(value) for key, value in kwargs.items()}
        return functional_call(self._model, values, args, kwargs, tie_weights=False)


def by_hand(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any],
    stored: torch.dtype = torch.float32,
    compute: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Mapping[str, Tensor | None]]:
    """Loss and gradients of one process."""
    program = ByHand(model, stored, compute)
    program.cast()
    value = loss(program, batch)
    value.backward()
    return value.detach(), {name: p.grad for name, p in program.stored.items()}
