"""``autopar::attention_dropout``: attention whose weights are dropped out.

As `attention`, and: weight ``[b, hq, s, t]`` of the whole is multiplied by 0 or ``1 / (1 - p)``,
as `random_kernels` says of its number. The factors are drawn again in the backward, so only the
output and the log-sum-exp are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.capture import attention_kernels as kernels
from autopar.capture import random_kernels
from autopar.capture.library import LIBRARY, define, give_shapes, implement

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


def _factors(
    q: Tensor, k: Tensor, key: Tensor, stream: str, p: float, place: Sequence[int], microbatch: int
) -> Tensor:
    """What each weight is multiplied by."""
    shape = (*q.shape[:3], k.shape[2])
    ones = torch.ones(shape, dtype=kernels.lse_dtype(q.dtype), device=q.device)
    return random_kernels.dropout(ones, key, stream, p, place, microbatch)


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
    factors = _factors(q, k, key, stream, p, place, microbatch)
    return kernels.math_forward(q, k, v, mask, causal, scale, factors)


def _backward_all(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factors = _factors(q, k, key, stream, p, place, microbatch)
    return kernels.math_backward(grad_out, q, k, v, mask, out, lse, causal, scale, factors)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_all(*args)[:3]


def _backward_mask(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dscores = _backward_all(*args)
    mask: Tensor = args[4]
    return dq, dk, dv, dscores.sum_to_size(mask.shape).to(mask.dtype)


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
