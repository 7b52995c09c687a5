"""Ops that cannot be captured exactly, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

Refusal = Callable[..., str]
"""Why an op with these arguments is refused and what to do, ``""`` if it is not."""


def refusal_of(op: Any) -> Refusal | None:
    """What may refuse an op; None if nothing does."""
    if torch.Tag.nondeterministic_seeded in op.tags and op not in _SOMETIMES_RANDOM:
        return _random
    return _REFUSALS.get(op)


def _random(*args: Any) -> str:
    return (
        "it draws random numbers in a way that has no form that is the same under every plan; use "
        "dropout, rand, randn, randint, bernoulli, normal_ or uniform_, or draw outside of the step"
    )


def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> str:
    if scale_grad_by_freq:
        return "scale_grad_by_freq needs the counts of the whole batch; set it to False"
    if sparse:
        return "sparse gradients are not supported; set sparse=False"
    return ""


def _renormalized(*args: Any) -> str:
    return "max_norm writes to the table in the forward; normalize it after the optimizer's step"


def _resized(*args: Any) -> str:
    return (
        "it resizes a tensor in place; make a new tensor instead (nn.LocalResponseNorm in place of "
        "nn.CrossMapLRN2d)"
    )


_SOMETIMES_RANDOM = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Tagged as random for a dropout that they take; attention with dropout is an op of its own."""

_REFUSALS: Mapping[Any, Refusal] = {
    aten.embedding.default: _embedding,
    aten.embedding_renorm_.default: _renormalized,
    aten.resize_.default: _resized,
    aten.resize_as_.default: _resized,
}
