"""``autopar::onehot_scatter``: the gradient of a pick along one dim, as one functional op.

``onehot_scatter(src, index, dim, size)`` is zero but at ``index`` along ``dim``, where it is
``src``: the backward of ``gather(x, dim, index)`` when ``index`` has size one there. It is what
the backward of a cross-entropy writes, and the class dim of its output may be split by comparing
``index`` with the local range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.capture.library import define, give_shapes, implement

define("onehot_scatter(Tensor src, Tensor index, int dim, int size) -> Tensor")


def _shape(src: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(src.shape)
    shape[dim] = size
    return tuple(shape)


def _scatter(src: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    zeros = torch.zeros(_shape(src, dim, size), dtype=src.dtype, device=src.device)
    return zeros.scatter_(dim, index, src)


def _fake(src: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    return src.new_empty(_shape(src, dim, size))


implement("onehot_scatter", _scatter, "CompositeExplicitAutograd")
give_shapes("onehot_scatter", _fake)
