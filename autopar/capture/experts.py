"""Experts of transformers, which it computes in several ways, in one that splits by samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""``forward(experts, hidden [t, d], index [t, k], weights [t, k])``, of an experts module."""


@contextmanager
def routed_experts() -> Iterator[None]:
    """Have experts of transformers compute by `routed_linear`, whatever way they are set to.

    All ways give the same numbers up to their rounding. Experts that are themselves split over
    processes are left alone.
    """
    module: Any = sys.modules.get("transformers.integrations.moe")
    kind = getattr(module, "ExpertsInterface", None)
    if kind is None:
        yield
        return
    choose = kind.get_interface

    def chosen(interface: Any, name: str, default: Forward) -> Forward:
        given = choose(interface, name, default)

        def forward(experts: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
            own = given if experts._is_expert_parallel else _forward
            return own(experts, *args, **kwargs)

        return forward

    kind.get_interface = chosen
    try:
        yield
    finally:
        kind.get_interface = choose


def _forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As transformers' own, with every token in its place; names are those of its arguments."""
    tokens, width = hidden_states.shape
    count = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    rows = hidden_states.unsqueeze(1).expand(tokens, count, width).reshape(-1, width)
    if experts.has_gate:
        made = experts._apply_gate(_product(experts, "gate_up_proj", rows, chosen))
    else:
        made = experts.act_fn(_product(experts, "up_proj", rows, chosen))
    made = _product(experts, "down_proj", made, chosen)
    if experts.has_post_expert_norm:
        made = experts.post_expert_norm(made)
    weighted: Tensor = made * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, count, width).sum(1).to(hidden_states.dtype)


def _product(experts: Any, name: str, rows: Tensor, chosen: Tensor) -> Tensor:
    weight: Tensor = getattr(experts, name)
    if experts.is_transposed:
        weight = weight.transpose(1, 2)
    made: Tensor = torch.ops.autopar.routed_linear(rows, weight, chosen)
    return made + getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else made
