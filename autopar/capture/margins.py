"""Margin losses over classes, recorded as ops whose dims can be split.

Each element's loss is a sum over classes of how far a class comes within the margin of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.capture.decompose import MEAN, SUM, mean

aten = torch.ops.aten


def _rows(values: Tensor) -> Tensor:
    """One sample as a batch of one."""
    return values.reshape(1, -1) if values.ndim < 2 else values


def _joined(each: Tensor, like: Tensor, reduction: int) -> Tensor:
    """The loss of every sample, reduced."""
    if reduction == MEAN:
        return mean(each)
    return each.sum() if reduction == SUM or like.ndim < 2 else each


def _each(grad: Tensor, x: Tensor, reduction: int) -> Tensor:
    """The gradient of every sample's loss over the number of its classes, ``[samples, 1]``."""
    samples, classes = _rows(x).shape
    spread = grad / samples if reduction == MEAN else grad
    return spread.reshape(-1, 1) / classes


def _is_class(target: Tensor, classes: int) -> Tensor:
    """Which class is a sample's target, ``[samples, classes]``."""
    return torch.arange(classes, device=target.device) == target.unsqueeze(1)


def multi_margin_loss(
    x: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """The mean over classes of how far they come within the margin of the target, to the p."""
    near = _near(_rows(x), target.reshape(-1), margin)
    near = near if p == 1 else near * near
    if weight is not None:
        near = near * weight.index_select(0, target.reshape(-1)).unsqueeze(1)
    return _joined(near.sum(1) / near.shape[1], x, reduction)


def _near(x: Tensor, target: Tensor, margin: float) -> Tensor:
    """How far every class but the target comes within the margin of it."""
    away = margin - x.gather(1, target.unsqueeze(1)) + x
    return torch.where(_is_class(target, x.shape[1]), away.new_zeros(()), away.clamp(min=0))


def multi_margin_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    p: float,
    margin: float,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    flat = target.reshape(-1)
    near = _near(_rows(x), flat, margin)
    slope = (near > 0).to(x.dtype) if p == 1 else 2 * near
    if weight is not None:
        slope = slope * weight.index_select(0, flat).unsqueeze(1)
    slope = slope * _each(grad, x, reduction)
    own = _is_class(flat, slope.shape[1])
    return torch.where(own, -slope.sum(1, keepdim=True), slope).reshape(x.shape)


def _listed(target: Tensor) -> Tensor:
    """Which entries of lists of classes count: those before the first negative one."""
    return (target < 0).to(torch.int64).cumsum(1) == 0


def _targets(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which entries count, the classes there (0 elsewhere), which classes are a target."""
    listed = _listed(target)
    classes = torch.where(listed, target, target.new_zeros(()))
    hits = torch.zeros_like(x).scatter_add(1, classes, listed.to(x.dtype))
    return listed, classes, hits > 0


def _pairs(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How far every other class is within 1 of every listed one, ``[samples, entries, classes]``.

    And the classes of the entries.
    """
    listed, classes, is_target = _targets(x, target)
    away = 1 - x.gather(1, classes).unsqueeze(2) + x.unsqueeze(1)
    counts = listed.unsqueeze(2) & ~is_target.unsqueeze(1)
    return torch.where(counts, away.clamp(min=0), away.new_zeros(())), classes


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The sum over listed classes and others, over the classes; and which classes are listed."""
    rows, lists = _rows(x), _rows(target)
    pairs, _ = _pairs(rows, lists)
    loss = _joined(pairs.sum((1, 2)) / rows.shape[1], x, reduction)
    return loss, _targets(rows, lists)[2].to(x.dtype).reshape(target.shape)


def multilabel_margin_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    pairs, classes = _pairs(_rows(x), _rows(target))
    slope = (pairs > 0).to(x.dtype) * _each(grad, x, reduction).unsqueeze(2)
    others = slope.sum(1)
    return others.scatter_add(1, classes, -slope.sum(2)).reshape(x.shape)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.multi_margin_loss.default: multi_margin_loss,
    aten.multi_margin_loss_backward.default: multi_margin_loss_backward,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_loss_backward,
}
