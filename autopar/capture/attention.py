"""The one attention op of captured graphs, ``autopar::attention``, and its backward.

``scaled_dot_product_attention`` reaches the dispatcher as different ops on CPU, CUDA and meta, and
falls apart into a softmax where no fused kernel fits. Captured graphs hold this op instead, the
same everywhere; the kernel is chosen when it runs.

Shapes: ``q [b, hq, s, d]``, ``k [b, hkv, t, d]``, ``v [b, hkv, t, dv]``, ``mask`` broadcastable to
``[b, hq, s, t]`` with four dims, bool (true: attend) or floating (added to the scores), ``out
[b, hq, s, dv]``, ``lse [b, hq, s]`` (float32, float64 for float64). ``hkv`` divides ``hq``: query
head i reads key head ``i // (hq // hkv)``. ``causal`` lets position i of s attend to positions
``<= i`` of t; together with a mask, both hold. A row that may attend to nothing gives 0, with an
``lse`` of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.capture import attention_kernels as kernels
from autopar.capture.library import LIBRARY, define, give_shapes, implement

define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale)"
    " -> (Tensor out, Tensor lse)"
)
_BACKWARD = (
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse,"
    " bool causal, float scale) -> (Tensor dq, Tensor dk, Tensor dv"
)
define("attention_backward" + _BACKWARD + ")")
define("attention_backward_mask" + _BACKWARD + ", Tensor dmask)")


def _backward_mask(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dscores = kernels.math_backward(grad_out, q, k, v, mask, out, lse, causal, scale)
    return dq, dk, dv, dscores.sum_to_size(mask.shape).to(mask.dtype)


def _rows_first(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Empty ``[b, h, s, d]`` laid out as ``[b, s, h, d]``, as fused kernels do."""
    b, h, s, d = shape
    return like.new_empty((b, s, h, d)).transpose(1, 2)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    out = _rows_first(q, (b, h, s, v.shape[-1]))
    return out, q.new_empty((b, h, s), dtype=kernels.lse_dtype(q.dtype))


def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_rows_first(t, tuple(t.shape)) for t in (q, k, v))
    return dq, dk, dv


def _fake_backward_mask(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = _fake_backward(grad_out, q, k, v, mask, out, lse, causal, scale)
    return dq, dk, dv, mask.new_empty(mask.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, causal, scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.causal, ctx.scale = causal, scale


def _gradients(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    args = (grad_out, q, k, v, mask, out, lse, ctx.causal, ctx.scale)
    if ctx.needs_input_grad[3]:
        return (*torch.ops.autopar.attention_backward_mask(*args), None, None)
    return (*torch.ops.autopar.attention_backward(*args), None, None, None)


implement("attention", kernels.cpu_forward, "CPU")
implement("attention", kernels.cuda_forward, "CUDA")
implement("attention_backward", kernels.cpu_backward, "CPU")
implement("attention_backward", kernels.cuda_backward, "CUDA")
implement("attention_backward_mask", _backward_mask, "CPU")
implement("attention_backward_mask", _backward_mask, "CUDA")
give_shapes("attention", _fake_forward)
give_shapes("attention_backward", _fake_backward)
give_shapes("attention_backward_mask", _fake_backward_mask)
torch.library.register_autograd("autopar::attention", _gradients, setup_context=_setup, lib=LIBRARY)
