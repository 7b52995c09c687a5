"""``autopar::attention_dropout``: attention whose weights are dropped out.

As `attention`, and: weight ``[b, hq, s, t]`` of the whole is multiplied by 0 or ``1 / (1 - p)``,
as `random_kernels` says of its number. The factors are drawn again in the backward, so only the
output and the log-sum-exp are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.capture import attention_kernels as kernels
from autopar.capture.library import LIBRARY, define, give_shapes, implement
from autopar.capture.random_kernels import dropout_factors

_RANDOM = "Tensor key, str stream, float p, int[] place=[], int microbatch=0"
_BACKWARD = (
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse,"
    f" bool causal, float scale, {_RANDOM}) -> (Tensor dq, Tensor dk, Tensor dv"
)
define(
    "attention_dropout(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale,"
    f" {_RANDOM}) -> (Tensor out, Tensor lse)"
)
define("attention_dropout_backward" + _BACKWARD + ")")
define("attention_dropout_backward_mask" + _BACKWARD + ", Tensor dmask)")


BLOCK_ELEMENTS = 1 << 24
"""Weights made at once, at least those of one sample."""


def _blocks(q: Tensor, k: Tensor, random: Sequence[Any]) -> Iterator[tuple[slice, Tensor]]:
    """Some samples, and what each of their weights is multiplied by, until all have been."""
    samples, *sizes = (*q.shape[:3], k.shape[2])
    each = math.prod(sizes)
    count = max(1, BLOCK_ELEMENTS // max(each, 1))
    dtype = kernels.lse_dtype(q.dtype)
    for first in range(0, samples, count):
        last = min(first + count, samples)
        only = (first * each, last * each)
        factors = dropout_factors(samples * each, only, dtype, q.device, *random)
        yield slice(first, last), factors.view(last - first, *sizes)


def _rows(mask: Tensor | None, samples: slice) -> Tensor | None:
    """A mask of some samples."""
    return mask if mask is None or mask.shape[0] == 1 else mask[samples]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    key: Tensor,
    stream: str,
    p: float,
    place: Sequence[int] = (),
    microbatch: int = 0,
) -> tuple[Tensor, Tensor]:
    out, lse = _fake_forward(q, k, v)
    for own, factors in _blocks(q, k, (key, stream, p, place, microbatch)):
        tensors = (q[own], k[own], v[own], _rows(mask, own))
        out[own], lse[own] = kernels.math_forward(*tensors, causal, scale, factors)
    return out, lse


def _backward_to(
    dmask: Tensor | None,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    key: Tensor,
    stream: str,
    p: float,
    place: Sequence[int] = (),
    microbatch: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; that of the mask is added to ``dmask``."""
    dq, dk, dv = _fake_backward(grad_out, q, k, v)
    for own, factors in _blocks(q, k, (key, stream, p, place, microbatch)):
        tensors = (grad_out[own], q[own], k[own], v[own], _rows(mask, own), out[own], lse[own])
        found = kernels.math_backward(*tensors, causal, scale, factors)
        dq[own], dk[own], dv[own] = found[:3]
        rows = _rows(dmask, own)
        if rows is not None:
            rows.add_(found[3].sum_to_size(rows.shape))
    return dq, dk, dv


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_to(None, *args)


def _backward_mask(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask: Tensor = args[4]
    dmask = torch.zeros(mask.shape, dtype=args[6].dtype, device=mask.device)
    return (*_backward_to(dmask, *args), dmask.to(mask.dtype))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    lse = q.new_empty((b, h, s), dtype=kernels.lse_dtype(q.dtype))
    return q.new_empty((b, h, s, v.shape[-1])), lse


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_backward_mask(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_fake_backward(grad_out, q, k, v), mask.new_empty(mask.shape))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, key, *ctx.random = inputs
    ctx.save_for_backward(q, k, v, mask, *output, key)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, key = ctx.saved_tensors
    args = (grad_out, *tensors, ctx.causal, ctx.scale, key, *ctx.random)
    rest = [None] * (3 + len(ctx.random))
    if ctx.needs_input_grad[3]:
        return (*torch.ops.autopar.attention_dropout_backward_mask(*args), *rest)
    return (*torch.ops.autopar.attention_dropout_backward(*args), None, *rest)


for _device in ("CPU", "CUDA"):
    implement("attention_dropout", _forward, _device)
    implement("attention_dropout_backward", _backward, _device)
    implement("attention_dropout_backward_mask", _backward_mask, _device)
give_shapes("attention_dropout", _fake_forward)
give_shapes("attention_dropout_backward", _fake_backward)
give_shapes("attention_dropout_backward_mask", _fake_backward_mask)
torch.library.register_autograd(
    "autopar::attention_dropout", _gradients, setup_context=_setup, lib=LIBRARY
)
