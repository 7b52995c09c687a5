"""Values of a model's tensors: those it has, or, on meta, those its initialization gives.

The reference is one process that makes every tensor on meta with ``to_empty(device="cpu")``, seeds
torch and runs the initialization. A tied parameter is filled under each of its names, as
``to_empty`` unties it; its first name's value counts, as when the model is built for real. In a
model partly on meta, what is not on meta keeps its values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.draws import Recipe, make, recipes

Init = Callable[[nn.Module], None]
Rows = Callable[[str], Sequence[int] | None]

MAX_WHOLE_ELEMENTS = 1_000_000_000
"""Elements on meta up to which every rank makes the whole model and keeps its part; above, numbers
are drawn by name and index (see `draws`)."""

_SENTINEL = 91
"""What integers hold before the initialization; floats hold NaN, booleans a fixed pattern."""


def _all_rows(name: str) -> None:
    """Every row is wanted."""


def initialized(
    model: nn.Module,
    aliases: Mapping[str, str],
    init: Init | None,
    seed: int,
    rows: Rows = _all_rows,
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of every parameter and buffer, tied ones once, by first name.

    A model with more than ``MAX_WHOLE_ELEMENTS`` on meta is made one tensor at a time.

    Args:
        model: Left as it is.
        aliases: Second names of tied tensors to the first.
        init: Fills a copy of a model on meta; by default `default_init`.
        seed: Seed of what it draws.
        rows: Which indices along dim 0 of a tensor are wanted, None for all; others may hold
            anything.

    Raises:
        AutoparError: Nothing fills a tensor on meta.
    """
    tensors: dict[str, Any] = dict(_tensors(model))
    names = [name for name, tensor in tensors.items() if tensor.is_meta]
    if init is None and sum(tensors[n].numel() for n in names) > MAX_WHOLE_ELEMENTS:
        tensors |= recipes(model, default_init)
    elif names:
        made = _materialized(model)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            (init or default_init)(made)
        filled = dict(_tensors(made))
        tensors |= {name: filled[name] for name in names if name in filled}
        unfilled = [n for n in names if n not in aliases and _is_unfilled(tensors[n])]
        if unfilled:
            raise AutoparError(_unfilled_message(unfilled, init))
    for name, found in tensors.items():
        if name not in aliases:
            yield name, make(name, found, seed, rows(name)) if isinstance(found, Recipe) else found


def default_init(model: nn.Module) -> None:
    """Initialize as transformers does, or by every module's ``reset_parameters``.

    Submodules come before the module that holds them, as in construction; a transformers model
    inside a plain one is left to transformers.
    """
    if hasattr(model, "_init_weights") and hasattr(model, "init_weights"):
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        cast(Any, model).init_weights()
        return
    for child in model.children():
        default_init(child)
    reset = getattr(model, "reset_parameters", None) or getattr(model, "_reset_parameters", None)
    if callable(reset):
        reset()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, under every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _materialized(model: nn.Module) -> nn.Module:
    """A copy in which sentinels on the CPU stand where meta tensors were."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                fresh = nn.Parameter(_sentinels(parameter), parameter.requires_grad)
                module._parameters[name] = fresh
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _sentinels(buffer)
    return made


def _sentinels(like: Tensor) -> Tensor:
    if like.dtype is torch.bool:
        return _pattern(like.numel()).reshape(like.shape).clone()
    filler = float("nan") if like.is_floating_point() or like.is_complex() else _SENTINEL
    return torch.full(like.shape, filler, dtype=like.dtype, device="cpu")


def _pattern(length: int) -> Tensor:
    """Booleans without a period that an initialization could have."""
    index = torch.arange(length)
    return (index * index * 7 + index // 3) % 5 < 2


def _is_unfilled(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor._version:  # a short sentinel may be the right value
        return False
    if tensor.dtype is torch.bool:
        return torch.equal(tensor.flatten(), _pattern(tensor.numel()))
    return bool((tensor == _SENTINEL).all())


def _unfilled_message(names: list[str], init: Init | None) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    what = "the init function" if init else "no module's initialization"
    verb = "leaves it" if init else "fills it; it stays"
    return (
        f"cannot initialize {shown}{more} of a model on meta: {what} {verb} undefined; pass "
        "init=function(model) that fills every parameter and buffer, or build the model on the cpu"
    )
