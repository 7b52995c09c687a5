"""Kernels behind ``autopar::attention``: the definition, and torch's fused ones where they fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_EFFICIENT_LSE_ALIGN = 32
"""The CUDA memory-efficient kernel keeps a multiple of this many rows of log-sum-exp."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp of queries of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to be added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def causal_mask(rows: int, columns: int, device: torch.device) -> Tensor:
    """``[rows, columns]``, true where a causal query may attend."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril_()


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Masked scores ``[b, hkv, group, s, t]``."""
    scores = _grouped(q, k.shape[1]) @ k.unsqueeze(2).transpose(-1, -2) * scale
    if mask is not None:
        shown = mask.expand(*mask.shape[:1], *q.shape[1:2], *mask.shape[2:])
        scores = scores + _grouped(additive_mask(shown, scores.dtype), k.shape[1])
    if causal:
        hidden = ~causal_mask(q.shape[2], k.shape[2], q.device)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """Heads ``[b, hq, ...]`` as ``[b, groups, hq / groups, ...]``."""
    return tensor.reshape(tensor.shape[0], groups, tensor.shape[1] // groups, *tensor.shape[2:])


def math_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in the precision of ``lse``.

    ``factors`` ``[b, hq, s, t]`` are what a dropout multiplies the weights by.
    """
    high = lse_dtype(q.dtype)
    scores = _scores(q.to(high), k.to(high), mask, causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    weights = (scores - lse.unsqueeze(-1)).exp()
    if factors is not None:
        weights = weights * _grouped(factors, k.shape[1])
    out = (weights @ v.to(high).unsqueeze(2)).flatten(1, 2)
    return out.to(q.dtype), lse.flatten(1, 2)


def math_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the scores, which is ``[b, hq, s, t]``."""
    high, groups = lse_dtype(q.dtype), k.shape[1]
    weights = (
        _scores(q.to(high), k.to(high), mask, causal, scale) - _grouped(lse, groups).unsqueeze(-1)
    ).exp()
    grad = _grouped(grad_out.to(high), groups)
    dweights = grad @ v.to(high).unsqueeze(2).transpose(-1, -2)
    if factors is None:
        kept, delta = weights, (grad * _grouped(out.to(high), groups)).sum(-1, keepdim=True)
    else:
        own = _grouped(factors, groups)
        dweights, kept = dweights * own, weights * own
        # All keys are here, so this is what the output gives, without its rounding.
        delta = (weights * dweights).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    dq = (dscores @ k.to(high).unsqueeze(2)).flatten(1, 2) * scale
    dk = (dscores.transpose(-1, -2) @ _grouped(q.to(high), groups)).sum(2) * scale
    dv = (kept.transpose(-1, -2) @ grad).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dscores.flatten(1, 2)


def _dense_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a dense last dim, as fused kernels want them."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether torch's CPU flash kernel computes this."""
    square = not causal or q.shape[2] == k.shape[2]
    return q.shape[-1] == v.shape[-1] and min(*q.shape, *k.shape) > 0 and square


def _cpu_mask(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """One additive mask for the CPU flash kernel: its causal flag is not used with a mask."""
    if mask is None:
        return None
    added = additive_mask(mask, q.dtype)
    if causal:
        added = added.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    return added.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention on the CPU: torch's flash kernel where it fits."""
    if not _cpu_flash(q, k, v, causal):
        return math_forward(q, k, v, mask, causal, scale)
    q, k, v = _dense_rows(q, k, v)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k,
        v,
        0.0,
        causal and mask is None,
        attn_mask=_cpu_mask(q, k, mask, causal),
        scale=scale,
    )
    return out, lse


def cpu_backward(
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
    """Gradients of q, k and v by the kernel that `cpu_forward` uses."""
    if not _cpu_flash(q, k, v, causal):
        return math_backward(grad_out, q, k, v, mask, out, lse, causal, scale)[:3]
    grad_out, q, k, v, out = _dense_rows(grad_out, q, k, v, out)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        0.0,
        causal and mask is None,
        attn_mask=_cpu_mask(q, k, mask, causal),
        scale=scale,
    )
    return dq, dk, dv


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether the CUDA flash kernel computes this (it needs an Ampere or later)."""
    width = q.shape[-1]
    return (
        mask is None
        and q.dtype in _FLASH_DTYPES
        and width == v.shape[-1]
        and width % 8 == 0
        and width <= 256
        and min(*q.shape, *k.shape) > 0
        and (not causal or q.shape[2] == k.shape[2])
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _cuda_efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether the CUDA memory-efficient kernel computes this."""
    align = 8 if q.dtype in _FLASH_DTYPES else 4
    dense = q.shape[-1] % align == 0 and v.shape[-1] % align == 0
    square = not causal or q.shape[2] == k.shape[2]
    return dense and q.dtype != torch.float64 and min(*q.shape, *k.shape) > 0 and square


def _cuda_bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as an additive bias whose rows are aligned, which the kernel needs."""
    if mask is None:
        return None
    columns = k.shape[2]
    room = -columns % 16
    added = torch.nn.functional.pad(
        additive_mask(mask, q.dtype).expand(*mask.shape[:3], columns), (0, room)
    )
    return added[..., :columns].expand(q.shape[0], q.shape[1], q.shape[2], columns)


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention on CUDA: flash, else memory-efficient, else by definition."""
    q, k, v = _dense_rows(q, k, v)
    if _cuda_flash(q, k, v, mask, causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse
    if _cuda_efficient(q, k, v, causal):
        heads = q.shape[1]
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q,
            _repeat_heads(k, heads),
            _repeat_heads(v, heads),
            _cuda_bias(q, k, mask),
            True,
            0.0,
            causal,
            scale=scale,
        )
        return out, lse[..., : q.shape[2]]
    return math_forward(q, k, v, mask, causal, scale)


def cuda_backward(
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
    """Gradients of q, k and v by the kernel that `cuda_forward` uses."""
    grad_out, q, k, v, out = _dense_rows(grad_out, q, k, v, out)
    unseeded = torch.zeros((), dtype=torch.int64, device=q.device)
    rows, columns = q.shape[2], k.shape[2]
    if _cuda_flash(q, k, v, mask, causal):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            rows,
            columns,
            0.0,
            causal,
            unseeded,
            unseeded,
            scale=scale,
        )
        return dq, dk, dv
    if _cuda_efficient(q, k, v, causal):
        heads, groups = q.shape[1], k.shape[1]
        padded = torch.nn.functional.pad(lse, (0, -rows % _EFFICIENT_LSE_ALIGN), value=math.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            q,
            _repeat_heads(k, heads),
            _repeat_heads(v, heads),
            _cuda_bias(q, k, mask),
            out,
            padded,
            unseeded,
            unseeded,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return dq, _grouped(dk, groups).sum(2), _grouped(dv, groups).sum(2)
    return math_backward(grad_out, q, k, v, mask, out, lse, causal, scale)[:3]
