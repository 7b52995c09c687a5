"""Functions of torch that reach ATen in a form that cannot be split, in one that can."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_embedding_bag, _gaussian_nll_loss = F.embedding_bag, F.gaussian_nll_loss
_histc: Callable[..., Tensor] = torch.histc


def embedding_bag(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """As of torch: rows of a table joined by bags, each looked up and then joined.

    What torch refuses it is left to refuse.
    """
    if input.ndim != (2 if offsets is None else 1) or mode not in ("sum", "mean", "max"):
        return _embedding_bag(
            input,
            weight,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
    rows = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counts = input != padding_idx % weight.shape[0]
    if offsets is None:
        return _joined(rows, counts, mode)
    return _joined_by_offset(rows, counts, offsets, include_last_offset, mode)


def _joined(rows: Tensor, counts: Tensor, mode: str) -> Tensor:
    """Rows ``[bags, entries, width]`` joined over the entries that count."""
    here, none = counts.unsqueeze(-1), rows.new_zeros(())
    if mode == "max":
        if not rows.shape[1]:
            return rows.sum(1)
        largest = torch.where(here, rows, rows.new_full((), -torch.inf)).amax(1)
        return torch.where(here.any(1), largest, none)
    return _averaged(torch.where(here, rows, none).sum(1), counts.sum(1), mode)


def _joined_by_offset(
    rows: Tensor, counts: Tensor, offsets: Tensor, with_last: bool, mode: str
) -> Tensor:
    """Rows ``[entries, width]`` joined over the entries from each offset to the next."""
    positions = torch.arange(rows.shape[0], device=rows.device)
    bags = torch.searchsorted(offsets.to(positions.dtype), positions, right=True) - 1
    num_bags, here = len(offsets) - with_last, counts.unsqueeze(-1)
    size = (len(offsets), rows.shape[1])  # the last offset may begin what is in no bag
    if mode == "max":
        least = rows.new_full((), -torch.inf)
        index = bags.unsqueeze(-1).expand(rows.shape)
        begun = least.expand(size).clone()
        largest = begun.scatter_reduce(0, index, torch.where(here, rows, least), "amax")
        found = torch.where(largest == least, rows.new_zeros(()), largest)
    else:
        kept = torch.where(here, rows, rows.new_zeros(()))
        total = rows.new_zeros(size).index_add(0, bags, kept)
        number = positions.new_zeros(len(offsets)).index_add(0, bags, counts.to(positions.dtype))
        found = _averaged(total, number, mode)
    return found[:num_bags]


def _averaged(total: Tensor, number: Tensor, mode: str) -> Tensor:
    return total / number.clamp(min=1).unsqueeze(-1) if mode == "mean" else total


def gaussian_nll_loss(
    input: Tensor,  # noqa: A002  (torch's name)
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """As of torch, where a negative variance makes the loss NaN rather than an error.

    Whether one is negative is not known before the step runs.
    """
    if not isinstance(var, Tensor) or reduction not in ("mean", "sum", "none"):
        return _gaussian_nll_loss(input, target, var, full, eps, reduction)
    one_a_row = var.shape != input.shape and var.shape == input.shape[:-1]
    var = var.unsqueeze(-1) if one_a_row else var
    var = torch.where(var < 0, var.new_full((), torch.nan), var)
    # The gradient passes where the variance is raised to eps, too.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def histc(
    input: Tensor,  # noqa: A002  (torch's name)
    bins: int = 100,
    min: float = 0,  # noqa: A002
    max: float = 0,  # noqa: A002
) -> Tensor:
    """As of torch, where bins are one wide: how often each was met, as a sum that splits."""
    if bins != max - min:
        return _histc(input, bins, min, max)
    flat = input.reshape(-1)
    place = torch.where(flat == max, flat - 1, flat) - min
    every = torch.arange(bins, device=input.device, dtype=input.dtype)
    return (place.floor().unsqueeze(1) == every).to(input.dtype).sum(0)


FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    _embedding_bag: embedding_bag,
    _gaussian_nll_loss: gaussian_nll_loss,
    _histc: histc,
}
"""What to call in place of functions of torch."""
