"""``autopar::routed_linear``: every row times the matrix of the expert that it goes to.

Grouped products sort the rows of the whole batch by expert, and what is sorted cannot be split by
samples. This op keeps rows where they are: each rank sorts the rows that it has, inside.

``routed_linear(rows [t, k], weight [e, n, k], expert [t]) -> [t, n]`` gives zeros for a row whose
expert is none of ``0 .. e - 1``: it is another rank's. Its gradients are the same op with the
matrices transposed, and ``routed_outer(left [t, n], right [t, k], expert [t], experts) ->
[e, n, k]``, sums of outer products by expert. On CUDA both are grouped products in bfloat16 where
sizes are multiples of eight; else one product an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.library import LIBRARY, define, give_shapes, implement

UNIT = 8
"""Elements that sizes of grouped products in bfloat16 are multiples of."""

define("routed_linear(Tensor rows, Tensor weight, Tensor expert) -> Tensor")
define("routed_outer(Tensor left, Tensor right, Tensor expert, int experts) -> Tensor")


def _by_expert(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows in the order of their experts, those of none last; and where each expert's end."""
    inside = (expert >= 0) & (expert < experts)
    ranked, order = torch.where(inside, expert, experts).sort(stable=True)
    every = torch.arange(experts, device=expert.device, dtype=expert.dtype)
    return order, torch.searchsorted(ranked, every, right=True)


def _groups(order: Tensor, ends: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Experts with the rows that go to them."""
    begin = 0
    for number, end in enumerate(ends.tolist()):
        yield number, order[begin:end]
        begin = end


def _is_grouped(*given: Tensor) -> bool:
    """Whether grouped products take these."""
    return all(
        t.is_cuda and t.dtype == torch.bfloat16 and not any(size % UNIT for size in t.shape[-2:])
        for t in given
    )


def _linear(rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    order, ends = _by_expert(expert, weight.shape[0])
    out = rows.new_zeros((rows.shape[0], weight.shape[1]))
    if _is_grouped(rows, weight):
        made = F.grouped_mm(rows[order], weight.transpose(1, 2), offs=ends.to(torch.int32))
        held = torch.arange(len(order), device=order.device) < ends[-1]
        out[order] = torch.where(held.unsqueeze(1), made, made.new_zeros(()))
        return out
    for number, own in _groups(order, ends):
        out[own] = rows[own] @ weight[number].t()
    return out


def _outer(left: Tensor, right: Tensor, expert: Tensor, experts: int) -> Tensor:
    order, ends = _by_expert(expert, experts)
    if _is_grouped(left, right):
        return F.grouped_mm(left[order].t(), right[order], offs=ends.to(torch.int32))
    out = left.new_zeros((experts, left.shape[1], right.shape[1]))
    for number, own in _groups(order, ends):
        out[number] = left[own].t() @ right[own]
    return out


def _fake_linear(rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


def _fake_outer(left: Tensor, right: Tensor, expert: Tensor, experts: int) -> Tensor:
    return left.new_empty((experts, left.shape[1], right.shape[1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, expert = ctx.saved_tensors
    of_rows, of_weight, _ = ctx.needs_input_grad
    ops = torch.ops.autopar
    return (
        ops.routed_linear(grad, weight.transpose(1, 2), expert) if of_rows else None,
        ops.routed_outer(grad, rows, expert, weight.shape[0]) if of_weight else None,
        None,
    )


implement("routed_linear", _linear, "CPU")
implement("routed_linear", _linear, "CUDA")
implement("routed_outer", _outer, "CPU")
implement("routed_outer", _outer, "CUDA")
give_shapes("routed_linear", _fake_linear)
give_shapes("routed_outer", _fake_outer)
torch.library.register_autograd(
    "autopar::routed_linear", _gradients, setup_context=_setup, lib=LIBRARY
)
