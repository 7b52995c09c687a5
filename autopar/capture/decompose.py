"""Ops recorded as other ops, so that nothing averages and no rule needs to know a special case.

An op that averages over samples would need to know how many there are in all, which a shard
cannot; a sum and a count can be split. Every function here is numerically the op it replaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for the reductions of a loss."""

_HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which torch's kernels sum values of this dtype."""
    return torch.float32 if dtype in _HALF else dtype


def _all_dims(tensor: Tensor, dims: Sequence[int] | None) -> list[int]:
    if not dims:
        return list(range(tensor.ndim))
    return [d % max(tensor.ndim, 1) for d in dims] if tensor.ndim else []


def _count(tensor: Tensor, dims: Sequence[int]) -> int:
    return math.prod(tensor.shape[d] for d in dims)


def mean(
    tensor: Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A sum divided by the count, summed in the dtype torch accumulates in."""
    wanted = dtype or tensor.dtype
    high = accumulation_dtype(wanted)
    over = _all_dims(tensor, dims)
    total = aten.sum.dim_IntList(tensor.to(high), over, keepdim) if over else tensor.to(high)
    return (total / _count(tensor, over)).to(wanted)


def _mean_default(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean(tensor, dtype=dtype)


def var_mean(
    tensor: Tensor,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Variance and mean: the mean first, then the squares of what differs from it."""
    over = _all_dims(tensor, dims)
    high = tensor.to(accumulation_dtype(tensor.dtype))
    count = _count(tensor, over)
    middle = aten.sum.dim_IntList(high, over, True) / count if over else high
    away = high - middle
    squares = away * away
    total = aten.sum.dim_IntList(squares, over, keepdim) if over else squares
    degrees = max(count - (1 if correction is None else correction), 0)
    flat = middle if keepdim or not over else middle.squeeze(over)
    if degrees == 0:
        variance = total / torch.zeros((), dtype=total.dtype, device=total.device)
    else:
        variance = total / degrees
    return variance.to(tensor.dtype), flat.to(tensor.dtype)


def _var(tensor: Tensor, dims: Sequence[int] | None = None, **options: Any) -> Tensor:
    return var_mean(tensor, dims, **options)[0]


def _std(tensor: Tensor, dims: Sequence[int] | None = None, **options: Any) -> Tensor:
    return var_mean(tensor, dims, **options)[0].sqrt()


def _std_mean(
    tensor: Tensor, dims: Sequence[int] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    variance, middle = var_mean(tensor, dims, **options)
    return variance.sqrt(), middle


def _reduced(values: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return mean(values)
    return values.sum() if reduction == SUM else values


def _spread(grad: Tensor, like: Tensor, reduction: int) -> Tensor:
    """The gradient of every element's loss from that of the reduced loss."""
    return grad / like.numel() if reduction == MEAN else grad


def mse_loss(pred: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    away = pred - target
    return _reduced(away * away, reduction)


def mse_loss_backward(grad: Tensor, pred: Tensor, target: Tensor, reduction: int) -> Tensor:
    away = pred - target
    return away * 2.0 * _spread(grad, away, reduction)


def smooth_l1_loss(
    pred: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0
) -> Tensor:
    away = (pred - target).abs()
    if beta == 0.0:
        return _reduced(away, reduction)
    near = away * away * (0.5 / beta)
    return _reduced(torch.where(away < beta, near, away - 0.5 * beta), reduction)


def smooth_l1_loss_backward(
    grad: Tensor, pred: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    away = pred - target
    slope = away.sign() if beta == 0.0 else (away / beta).clamp(-1.0, 1.0)
    return slope * _spread(grad, away, reduction)


def huber_loss(pred: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    away = (pred - target).abs()
    near = away * away * 0.5
    far = (away - 0.5 * delta) * delta
    return _reduced(torch.where(away <= delta, near, far), reduction)


def huber_loss_backward(
    grad: Tensor, pred: Tensor, target: Tensor, reduction: int, delta: float
) -> Tensor:
    away = pred - target
    return away.clamp(-delta, delta) * _spread(grad, away, reduction)


def binary_cross_entropy(
    pred: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    hit = target * pred.log().clamp(min=-100.0)
    missed = (1 - target) * (1 - pred).log().clamp(min=-100.0)
    loss = -(hit + missed)
    return _reduced(loss if weight is None else loss * weight, reduction)


def binary_cross_entropy_backward(
    grad: Tensor,
    pred: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    slope = (pred - target) / ((1 - pred) * pred).clamp(min=1e-12)
    each = slope if weight is None else slope * weight
    return each * _spread(grad, pred, reduction)


def binary_cross_entropy_with_logits(
    pred: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    log_sigmoid = aten.log_sigmoid_forward(pred)[0]
    if pos_weight is None:
        loss = (1 - target) * pred - log_sigmoid
    else:
        loss = (1 - target) * pred - ((pos_weight - 1) * target + 1) * log_sigmoid
    return _reduced(loss if weight is None else loss * weight, reduction)


def soft_margin_loss(pred: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduced((-pred * target).exp().log1p(), reduction)


def soft_margin_loss_backward(grad: Tensor, pred: Tensor, target: Tensor, reduction: int) -> Tensor:
    slope = -target * (-pred * target).sigmoid()
    return slope * _spread(grad, pred, reduction)


def nll_loss_forward(
    logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The picked log-probabilities of valid targets, summed and divided by their count."""
    dim = 1 if logp.ndim > 1 else 0
    high = accumulation_dtype(logp.dtype)
    valid, safe = _targets(target, ignore_index)
    picked = aten.gather.default(logp, dim, safe.unsqueeze(dim)).squeeze(dim)
    loss = -picked if weight is None else -picked * _weights(weight, safe)
    loss = torch.where(valid, loss, _zero(loss))
    total = _total(valid, safe, weight, high)
    if reduction == NONE:
        return loss, _zero(loss)
    summed = loss.to(high).sum()
    return (summed / total if reduction == MEAN else summed).to(logp.dtype), total


def nll_loss_backward(
    grad: Tensor,
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    """Minus the gradient at every valid target's class, zero elsewhere."""
    dim = 1 if logp.ndim > 1 else 0
    valid, safe = _targets(target, ignore_index)
    each = -(grad / total) if reduction == MEAN else -grad
    if weight is not None:
        each = each * _weights(weight, safe)
    each = each.to(logp.dtype)
    each = torch.where(valid, each, _zero(each)).expand(target.shape)
    picks = (each.unsqueeze(dim), safe.unsqueeze(dim))
    scattered: Tensor = torch.ops.autopar.onehot_scatter(*picks, dim, logp.shape[dim])
    return scattered


def _targets(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which targets count, and the targets with 0 in place of those that do not."""
    valid = target != ignore_index
    return valid, torch.where(valid, target, _zero(target))


def _weights(weight: Tensor, safe: Tensor) -> Tensor:
    picked: Tensor = aten.index_select.default(weight, 0, safe.reshape(-1))
    return picked.view(safe.shape)


def _total(valid: Tensor, safe: Tensor, weight: Tensor | None, high: torch.dtype) -> Tensor:
    """What a mean divides by; counted in integers, since half-precision counts are wrong."""
    if weight is None:
        return valid.sum().to(high)
    picked = _weights(weight, safe)
    return torch.where(valid, picked, _zero(picked)).to(high).sum()


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled_sum(added, aten.mm.default(a, b), beta, alpha)


def addmv(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled_sum(added, aten.mv.default(a, b), beta, alpha)


def baddbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled_sum(added, aten.bmm.default(a, b), beta, alpha)


def addr(
    given: Tensor, column: Tensor, row: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(given, column.unsqueeze(1) * row, beta, alpha)


def addbmm(
    given: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled_sum(given, torch.einsum("bmk,bkn->mn", left, right), beta, alpha)


def _scaled_sum(added: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (added if beta == 1 else added * beta)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalization by the batch's statistics as sums and counts; the running ones are updated."""
    high = accumulation_dtype(x.dtype)
    shape = [1, -1] + [1] * (x.ndim - 2)
    wide = x.to(high)
    if not training:
        assert running_mean is not None and running_var is not None
        middle, invstd = running_mean.to(high), (running_var.to(high) + eps).rsqrt()
        saved = (_empty(x), _empty(x))
    else:
        over = [d for d in range(x.ndim) if d != 1]
        count = _count(x, over)
        middle = aten.sum.dim_IntList(wide, over) / count
        away = wide - middle.view(shape)
        squares = aten.sum.dim_IntList(away * away, over)
        invstd = (squares / count + eps).rsqrt()
        saved = (middle, invstd)
        if running_mean is not None:
            running_mean.copy_(middle * momentum + running_mean * (1 - momentum))
        if running_var is not None:
            unbiased = squares / (count - 1)
            running_var.copy_(unbiased * momentum + running_var * (1 - momentum))
    out = (wide - middle.view(shape)) * invstd.view(shape)
    out = out if weight is None else out * weight.view(shape)
    out = out if bias is None else out + bias.view(shape)
    return out.to(x.dtype), *saved


def trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum over some dims of a product of three, each without the dims it is expanded by."""
    terms = zip((first, second, third), (expand_first, expand_second, expand_third), strict=True)
    rank = first.ndim + len(expand_first)
    names = "abcdefghijklmnopqrstuvwxyz"[:rank]
    given = ["".join(names[d] for d in range(rank) if d not in over) for _, over in terms]
    kept = "".join(names[d] for d in range(rank) if d not in summed)
    pair = "".join(d for d in names if d in given[0] + given[2] and d in given[1] + kept)
    outer = torch.einsum(f"{given[0]},{given[2]}->{pair}", first, third)
    return torch.einsum(f"{pair},{given[1]}->{kept}", outer, second)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal().sum()


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, *places = x.shape
    apart = x.reshape(batch, groups, channels // groups, *places)
    return apart.transpose(1, 2).reshape(x.shape)


def _rot90(x: Tensor, times: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    if times % 4 == 2:
        return x.flip((first, second))
    if times % 4 == 0:
        return x.clone()
    return x.flip(second if times % 4 == 1 else first).transpose(first, second)


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = () if dim is None else (dim,)
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def _empty(like: Tensor) -> Tensor:
    return torch.zeros((0,), dtype=like.dtype, device=like.device)


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    high = accumulation_dtype(x.dtype)
    over = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    wide, g = x.to(high), grad.to(high)
    if training:
        assert save_mean is not None and save_invstd is not None
        middle, invstd = save_mean.to(high), save_invstd.to(high)
    else:
        assert running_mean is not None and running_var is not None
        middle, invstd = running_mean.to(high), (running_var.to(high) + eps).rsqrt()
    normal = (wide - middle.view(shape)) * invstd.view(shape)
    grad_bias = aten.sum.dim_IntList(g, over)
    grad_weight = aten.sum.dim_IntList(g * normal, over)
    scale = invstd if weight is None else invstd * weight
    grad_x = g
    if training:
        count = _count(x, over)
        grad_x = g - (grad_bias / count).view(shape) - normal * (grad_weight / count).view(shape)
    dtype = x.dtype if weight is None else weight.dtype
    return (
        (grad_x * scale.view(shape)).to(x.dtype) if wanted[0] else None,
        grad_weight.to(dtype) if wanted[1] else None,
        grad_bias.to(dtype) if wanted[2] else None,
    )


def _bn_forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm(x, *rest)


def _number(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """A copy of a number, which is what ``vmap`` makes of one that meets a 0-d tensor."""
    return NotImplemented if isinstance(x, Tensor) else torch.full((), x, dtype=dtype)


def _bn_stateless(
    x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._to_copy.default: _number,
    aten.mean.default: _mean_default,
    aten.mean.dim: mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.var_mean.correction: var_mean,
    aten.std_mean.correction: _std_mean,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten.smooth_l1_loss.default: smooth_l1_loss,
    aten.smooth_l1_loss_backward.default: smooth_l1_loss_backward,
    aten.huber_loss.default: huber_loss,
    aten.huber_loss_backward.default: huber_loss_backward,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten.binary_cross_entropy_backward.default: binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    aten.soft_margin_loss.default: soft_margin_loss,
    aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss_forward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    aten.addmm.default: addmm,
    aten.addmv.default: addmv,
    aten.baddbmm.default: baddbmm,
    aten.addbmm.default: addbmm,
    aten.addr.default: addr,
    aten._trilinear.default: trilinear,
    aten.trace.default: _trace,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.rot90.default: _rot90,
    aten.aminmax.default: _aminmax,
    aten.native_batch_norm.default: _bn_forward,
    aten._native_batch_norm_legit.default: _bn_forward,
    aten._native_batch_norm_legit.no_stats: _bn_stateless,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
