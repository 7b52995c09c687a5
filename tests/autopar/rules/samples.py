"""A sampler for every op in the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.capture import ops  # noqa: F401  (it defines autopar's own ops)
from autopar.capture.random import make_key
from autopar.rules import pointwise
from autopar.rules.factors import op_name
from tests.autopar.rules.draws import Draw, Sample, pointwise_sample

Sampler = Callable[[Draw], Sample]


def _each(names: str, sampler: Sampler) -> dict[str, Sampler]:
    return {op_name(name): sampler for name in names.split()}


def _tensor(draw: Draw, shape: Sequence[int]) -> Tensor:
    """Floats or, for exact sums, integers."""
    return draw.floats(*shape) if draw.integer(0, 2) else draw.integers(*shape, low=-9)


def _dim(draw: Draw, rank: int) -> int:
    return draw.integer(-rank, rank - 1)


def _some_dims(draw: Draw, rank: int) -> tuple[int, ...]:
    return tuple(d for d in range(rank) if draw.chance())


# Pointwise ops that need more than their schema says.


def _clamp(draw: Draw) -> Sample:
    low, high = draw.choice([(0, 1), (None, 0.5), (-1, None)])
    return Sample(draw.floats(*draw.shape()), low, high)


def _clamp_tensor(draw: Draw) -> Sample:
    shape = draw.shape()
    return Sample(draw.floats(*shape), -draw.floats(*draw.stretched(shape)).abs())


def _div_mode(draw: Draw) -> Sample:
    shape = draw.shape()
    mode = draw.choice([None, "floor", "trunc"])
    return Sample(_tensor(draw, shape), draw.integers(*shape, low=1), rounding_mode=mode)


def _div_scalar(draw: Draw) -> Sample:
    return Sample(_tensor(draw, draw.shape()), draw.choice([2, 0.5, -3]))


def _div_scalar_mode(draw: Draw) -> Sample:
    mode = draw.choice([None, "floor", "trunc"])
    return Sample(_tensor(draw, draw.shape()), draw.choice([2, -3]), rounding_mode=mode)


def _div(draw: Draw) -> Sample:
    shape = draw.shape()
    if draw.integer(0, 3) == 0:
        return Sample(draw.floats(*shape), 4)
    divisor = draw.floats(*draw.stretched(shape)).abs() + 0.5
    return Sample(_tensor(draw, shape), divisor)


def _sum_of_two(draw: Draw) -> Sample:
    """Two tensors, or one and a number; a factor of the second one or not."""
    shape = draw.shape()
    other = draw.choice([2, _tensor(draw, draw.stretched(shape)), _tensor(draw, shape)])
    if draw.chance():
        return Sample(_tensor(draw, shape), other)
    return Sample(_tensor(draw, shape), other, alpha=draw.choice([1, 3]))


def _product(draw: Draw) -> Sample:
    shape = draw.shape()
    other = draw.choice([3, _tensor(draw, draw.stretched(shape)), _tensor(draw, shape)])
    return Sample(_tensor(draw, draw.stretched(shape)), other)


def _where_scalar(draw: Draw, first: bool) -> Sample:
    shape = draw.shape()
    mask, number = draw.booleans(*shape), draw.choice([0, 0.0, 2])
    value = draw.floats(*shape)
    return Sample(mask, number, value) if first else Sample(mask, value, number)


def _fill_tensor(draw: Draw) -> Sample:
    shape = draw.shape()
    return Sample(draw.floats(*shape), draw.booleans(*draw.stretched(shape)), draw.floats())


def _to_copy(draw: Draw) -> Sample:
    wanted = draw.choice([torch.float64, torch.int64, torch.bool, torch.complex128])
    return Sample(_tensor(draw, draw.shape()), dtype=wanted)


def _to_dtype(draw: Draw) -> Sample:
    wanted = draw.choice([torch.float64, torch.int64, torch.bool])
    return Sample(_tensor(draw, draw.shape()), wanted)


_POINTWISE: dict[str, Sampler] = {
    **{op: (lambda draw, op=op: pointwise_sample(op, draw)) for op in pointwise.RULES},
    **_each("clamp clip", _clamp),
    **_each("clamp.Tensor clip.Tensor", _clamp_tensor),
    **_each("div.Tensor true_divide.Tensor", _div),
    **_each("div.Scalar", _div_scalar),
    **_each("div.Tensor_mode", _div_mode),
    **_each("div.Scalar_mode", _div_scalar_mode),
    **_each("add.Tensor sub.Tensor", _sum_of_two),
    **_each("mul.Tensor", _product),
    **_each("where.ScalarOther", lambda draw: _where_scalar(draw, False)),
    **_each("where.ScalarSelf", lambda draw: _where_scalar(draw, True)),
    **_each("masked_fill.Tensor", _fill_tensor),
    **_each("_to_copy", _to_copy),
    **_each("to.dtype", _to_dtype),
}

# Products.


def _matrices(text: str) -> Sampler:
    """Tensors whose dims are these letters, one size a letter."""

    def sample(draw: Draw) -> Sample:
        sizes = {name: draw.size(1, 2, 3, 4, 6) for name in sorted(set(text) - {" "})}
        make = draw.floats if draw.chance() else draw.integers
        return Sample(*(make(*(sizes[c] for c in part)) for part in text.split()))

    return sample


def _biased(text: str, out: str) -> Sampler:
    def sample(draw: Draw) -> Sample:
        sizes = {name: draw.size(1, 2, 3, 4, 6) for name in sorted(set(text) - {" "})}
        bias = draw.floats(*draw.stretched([sizes[c] for c in out]))
        parts = [draw.floats(*(sizes[c] for c in part)) for part in text.split()]
        scale = {"alpha": 2, "beta": 3} if draw.integer(0, 3) == 0 else {}
        return Sample(bias, *parts, **scale)

    return sample


def _grouped_mm(draw: Draw) -> Sample:
    """Small integers, which bfloat16 holds exactly; rows and columns as the kernel aligns them."""
    groups, t, k, n = 2, 16, draw.size(8, 32), 16
    kind = draw.choice([(2, 3), (3, 2), (2, 2), (3, 3)])

    def value(*shape: int) -> Tensor:
        return draw.integers(*shape, low=-2, high=3).to(torch.bfloat16)

    ends = torch.tensor([draw.choice([4, 8, 12]), t], dtype=torch.int32)
    if kind == (2, 3):
        return Sample(value(t, k), value(groups, k, n), ends)
    if kind == (3, 2):
        return Sample(value(groups, n, k), value(k, t), ends)
    if kind == (2, 2):
        return Sample(value(k, t), value(t, n), ends)
    return Sample(value(groups, t, k), value(groups, k, n))


def _routed(draw: Draw, experts: int) -> tuple[Tensor, Tensor]:
    """Rows, and where each goes."""
    t, k = draw.size(1, 4, 6), draw.size(1, 2, 4)
    return draw.floats(t, k), draw.integers(t, high=experts)


def _routed_linear(draw: Draw) -> Sample:
    experts, n = draw.size(1, 2, 3, 4), draw.size(1, 2, 4)
    rows, expert = _routed(draw, experts)
    return Sample(rows, draw.floats(experts, n, rows.shape[1]), expert)


def _routed_outer(draw: Draw) -> Sample:
    experts = draw.size(1, 2, 3, 4)
    rows, expert = _routed(draw, experts)
    return Sample(draw.floats(len(rows), draw.size(1, 2, 4)), rows, expert, experts)


def _distances(draw: Draw) -> Sample:
    lead, d = draw.shape(0, 1, most=4), draw.size(1, 2, 3)
    first, second = draw.size(1, 2, 4, 6), draw.size(1, 2, 3, 4)
    return Sample(draw.floats(*lead, first, d), draw.floats(*lead, second, d), 2.0, None)


def _distances_backward(draw: Draw) -> Sample:
    x, y, p, _ = _distances(draw).args
    found = torch.ops.aten._cdist_forward.default(x, y, p, None)
    return Sample(draw.floats(*found.shape), x, y, p, found)


def _pairs(draw: Draw) -> Sample:
    return Sample(draw.floats(draw.size(2, 3, 4), draw.size(1, 2, 3)), draw.choice([1.0, 2.0]))


def _pairs_backward(draw: Draw) -> Sample:
    x, p = _pairs(draw).args
    found = torch.ops.aten._pdist_forward.default(x, p)
    return Sample(draw.floats(*found.shape), x, p, found)


_PRODUCTS: dict[str, Sampler] = {
    **_each("mm", _matrices("mk kn")),
    **_each("bmm", _matrices("bmk bkn")),
    **_each("mv", _matrices("mk k")),
    **_each("dot vdot", _matrices("k k")),
    **_each("addmm", _biased("mk kn", "mn")),
    **_each("addmv", _biased("mk k", "m")),
    **_each("baddbmm", _biased("bmk bkn", "bmn")),
    **_each("_cdist_forward", _distances),
    **_each("_cdist_backward", _distances_backward),
    **_each("_pdist_forward", _pairs),
    **_each("_pdist_backward", _pairs_backward),
    **_each("_grouped_mm", _grouped_mm),
    **_each("autopar::routed_linear", _routed_linear),
    **_each("autopar::routed_outer", _routed_outer),
}

# Convolutions.


def _convolution(draw: Draw) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
    places = draw.choice([1, 2])
    groups = draw.size(1, 1, 2, 3, 4)
    c, o, n = draw.size(1, 2, 3), draw.size(1, 2, 4), draw.size(1, 2, 3, 4)
    transposed = draw.integer(0, 2) == 0
    stride, padding = draw.choice([1, 2]), draw.choice([0, 1])
    kernel = [draw.choice([1, 2, 3]) for _ in range(places)]
    x = draw.floats(n, groups * c, *(draw.choice([3, 5]) for _ in range(places)))
    first, second = (groups * c, o) if transposed else (groups * o, c)
    weight = draw.floats(first, second, *kernel)
    bias = draw.floats(groups * o) if draw.chance() else None
    every = [[value] * places for value in (stride, padding, 1)]
    return x, weight, bias, [*every, transposed, [0] * places, groups]


def _conv(draw: Draw) -> Sample:
    x, weight, bias, rest = _convolution(draw)
    return Sample(x, weight, bias, *rest)


def _conv_tbc(draw: Draw) -> Sample:
    b, c, o = draw.size(1, 2, 4), draw.size(1, 2, 3), draw.size(1, 2, 4)
    return Sample(draw.floats(5, b, c), draw.floats(3, c, o), draw.floats(o), 1)


def _conv_tbc_backward(draw: Draw) -> Sample:
    x, weight, bias, pad = _conv_tbc(draw).args
    return Sample(draw.floats(5, x.shape[1], weight.shape[2]), x, weight, bias, pad)


def _conv_backward(draw: Draw) -> Sample:
    x, weight, bias, rest = _convolution(draw)
    out = torch.ops.aten.convolution.default(x, weight, bias, *rest)
    mask = draw.choice([[True, True, True], [True, True, False], [False, True, True]])
    sizes = [out.shape[1]] if mask[2] else None
    return Sample(draw.floats(*out.shape), x, weight, sizes, *rest, mask)


_CONVOLUTIONS: dict[str, Sampler] = {
    **_each("convolution", _conv),
    **_each("conv_tbc", _conv_tbc),
    **_each("conv_tbc_backward", _conv_tbc_backward),
    **_each("convolution_backward", _conv_backward),
}

# Views and other movement.


def reshaped(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """Another shape of the same elements: dims merged, split, or both at odd places."""
    count = math.prod(shape)
    found: list[int] = []
    while count > 1 and len(found) < 4:
        size = draw.choice([d for d in range(1, count + 1) if count % d == 0])
        found.append(size)
        count //= size
    return (*found, count) if count > 1 or draw.chance() else tuple(found)


def _view(draw: Draw) -> Sample:
    shape = draw.shape(0, 4)
    return Sample(_tensor(draw, shape), list(reshaped(draw, shape)))


def _unsqueeze(draw: Draw) -> Sample:
    shape = draw.shape()
    return Sample(_tensor(draw, shape), draw.integer(-len(shape) - 1, len(shape)))


def _squeeze(draw: Draw) -> Sample:
    shape = tuple(draw.size(1, 2, 4) for _ in range(draw.integer(1, 4)))
    return Sample(_tensor(draw, shape))


def _squeeze_dim(draw: Draw) -> Sample:
    value = _squeeze(draw).args[0]
    return Sample(value, _dim(draw, value.ndim))


def _squeeze_dims(draw: Draw) -> Sample:
    value = _squeeze(draw).args[0]
    return Sample(value, list(_some_dims(draw, value.ndim)))


def _one(draw: Draw) -> Sample:
    return Sample(_tensor(draw, draw.shape()))


def _t(draw: Draw) -> Sample:
    return Sample(_tensor(draw, draw.shape(0, 2)))


def _transpose(draw: Draw) -> Sample:
    shape = draw.shape(1, 4)
    return Sample(_tensor(draw, shape), _dim(draw, len(shape)), _dim(draw, len(shape)))


def _permute(draw: Draw) -> Sample:
    shape = draw.shape(0, 4)
    order = torch.randperm(len(shape), generator=draw.generator).tolist()
    return Sample(_tensor(draw, shape), order)


def _expand(draw: Draw) -> Sample:
    shape = draw.shape(0, 4)
    kept = [-1 if draw.integer(0, 4) == 0 else size for size in shape]
    source = draw.stretched(shape)
    lead = len(shape) - len(source)
    wanted = [
        kept[i] if i >= lead and source[i - lead] == size else size for i, size in enumerate(shape)
    ]
    return Sample(_tensor(draw, source), wanted)


def _as_strided(draw: Draw) -> Sample:
    if draw.chance():
        shape = draw.shape(1, 3)
        dense = torch.empty(shape).stride()
        odd = [7 if size == 1 else stride for size, stride in zip(shape, dense, strict=True)]
        return Sample(draw.floats(*shape), list(shape), odd)
    return Sample(draw.floats(4, 3), [3, 4], [1, 3])


def _strided_scatter(draw: Draw) -> Sample:
    return Sample(draw.floats(12), draw.floats(3, 2), [3, 2], [4, 1], 0)


def _range(draw: Draw, size: int) -> tuple[Any, Any, int]:
    """Bounds of a slice: often pieces of equal size, sometimes anything."""
    piece = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    start = draw.integer(0, size // piece - 1) * piece
    end = draw.integer(start // piece + 1, size // piece) * piece
    if draw.integer(0, 3):
        return draw.choice([start, start - size]), draw.choice([end, end]), 1
    return draw.choice([None, 0, 1, -2]), draw.choice([None, size, 2**63 - 1]), draw.size(1, 2)


def _sliced(draw: Draw) -> tuple[tuple[int, ...], int, Any, Any, int]:
    shape = (*draw.shape(0, 1), draw.size(2, 4, 6, 8, 12), *draw.shape(0, 1))
    dim = _dim(draw, len(shape))
    return (shape, dim, *_range(draw, shape[dim]))


def _slice(draw: Draw) -> Sample:
    shape, *rest = _sliced(draw)
    return Sample(_tensor(draw, shape), *rest)


def _slice_scatter(draw: Draw) -> Sample:
    shape, *rest = _sliced(draw)
    value = draw.floats(*shape)
    part = torch.ops.aten.slice.Tensor(value, *rest)
    return Sample(value, draw.floats(*part.shape), *rest)


def _slice_backward(draw: Draw) -> Sample:
    shape, dim, start, end, step = _sliced(draw)
    part = torch.ops.aten.slice.Tensor(draw.floats(*shape), dim, start, end, step)
    first = 0 if start is None else start
    last = shape[dim] if end is None else end
    return Sample(draw.floats(*part.shape), list(shape), dim, first, last, step)


def _selected(draw: Draw) -> tuple[tuple[int, ...], int, int]:
    shape = draw.shape(1, 3)
    dim = _dim(draw, len(shape))
    return shape, dim, draw.integer(-shape[dim], shape[dim] - 1)


def _select(draw: Draw) -> Sample:
    shape, dim, index = _selected(draw)
    return Sample(_tensor(draw, shape), dim, index)


def _select_scatter(draw: Draw) -> Sample:
    shape, dim, index = _selected(draw)
    value = draw.floats(*shape)
    return Sample(value, draw.floats(*value.select(dim, index).shape), dim, index)


def _select_backward(draw: Draw) -> Sample:
    shape, dim, index = _selected(draw)
    part = draw.floats(*shape).select(dim, index)
    return Sample(draw.floats(*part.shape), list(shape), dim, index)


def _unbind(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample(_tensor(draw, shape), _dim(draw, len(shape)))


def _stack(draw: Draw) -> Sample:
    shape = draw.shape(0, 2)
    values = [draw.floats(*shape) for _ in range(draw.integer(1, 3))]
    return Sample(values, _dim(draw, len(shape) + 1))


def _cat(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    dim = _dim(draw, len(shape))
    piece = draw.size(1, 2, 3, 4)
    values = []
    for _ in range(draw.integer(1, 3)):
        own = list(shape)
        own[dim] = piece * draw.integer(1, 3)
        values.append(draw.floats(*own))
    if draw.integer(0, 4) == 0:
        values.insert(0, draw.floats(0))
    return Sample(values, dim)


def _split(draw: Draw) -> Sample:
    shape = (*draw.shape(0, 1), draw.size(2, 4, 6, 8, 12), *draw.shape(0, 1))
    dim = _dim(draw, len(shape))
    return Sample(_tensor(draw, shape), draw.integer(1, shape[dim]), dim)


def _split_sizes(draw: Draw) -> Sample:
    piece = draw.size(1, 2, 4)
    sizes = [piece * draw.integer(0 if piece > 1 else 1, 3) for _ in range(draw.integer(1, 3))]
    sizes.append(piece)
    shape = (*draw.shape(0, 1), sum(sizes), *draw.shape(0, 1))
    dim = len(shape) - 1 if shape[-1] == sum(sizes) else len(shape) - 2
    return Sample(_tensor(draw, shape), sizes, dim)


def _pad(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    count = draw.integer(1, len(shape))
    pads = [draw.choice([0, 0, 1, 2]) for _ in range(2 * count)]
    return Sample(draw.floats(*shape), pads, draw.choice([0, 0.0, 1.5]))


def _flip(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample(_tensor(draw, shape), list(_some_dims(draw, len(shape))))


def _roll(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    if draw.integer(0, 3) == 0:
        return Sample(_tensor(draw, shape), [1])
    dims = _some_dims(draw, len(shape)) or (0,)
    return Sample(_tensor(draw, shape), [draw.integer(-2, 2) for _ in dims], list(dims))


def _triangle(draw: Draw) -> Sample:
    shape = (*draw.shape(0, 1), draw.size(), draw.size())
    return Sample(_tensor(draw, shape), draw.integer(-3, 3))


def _repeat(draw: Draw) -> Sample:
    shape = draw.shape(0, 2, most=40)
    lead = draw.integer(0, 1)
    return Sample(_tensor(draw, shape), [draw.size(1, 2, 3, 4) for _ in range(lead + len(shape))])


def _interleave(draw: Draw) -> Sample:
    shape = draw.shape(1, 3, most=60)
    dim = None if draw.integer(0, 3) == 0 else _dim(draw, len(shape))
    return Sample(_tensor(draw, shape), draw.size(1, 2, 3), dim)


def _pixels(draw: Draw, up: bool) -> Sample:
    ratio, c, h, w = 2, draw.size(1, 2, 3), draw.size(1, 2, 4), draw.size(2, 3)
    lead = draw.shape(0, 1, most=4)
    shape = (*lead, c * ratio**2, h, w) if up else (*lead, c, h * ratio, w * ratio)
    return Sample(draw.floats(*shape), ratio)


def _diagonals(draw: Draw) -> tuple[tuple[int, ...], list[int]]:
    shape = draw.shape(2, 3)
    i = draw.integer(0, len(shape) - 1)
    j = draw.choice([d for d in range(len(shape)) if d != i])
    return shape, [draw.integer(-min(1, shape[i] - 1), min(1, shape[j] - 1)), i, j]


def _diagonal(draw: Draw) -> Sample:
    shape, rest = _diagonals(draw)
    return Sample(_tensor(draw, shape), *rest)


def _diagonal_backward(draw: Draw) -> Sample:
    shape, rest = _diagonals(draw)
    part = draw.floats(*shape).diagonal(*rest)
    return Sample(draw.floats(*part.shape), list(shape), *rest)


def _windows(draw: Draw) -> tuple[tuple[int, ...], list[int]]:
    shape = draw.shape(1, 3)
    dim = draw.integer(0, len(shape) - 1)
    return shape, [dim, draw.integer(1, shape[dim]), draw.integer(1, 2)]


def _unfold(draw: Draw) -> Sample:
    shape, rest = _windows(draw)
    return Sample(_tensor(draw, shape), *rest)


def _unfold_backward(draw: Draw) -> Sample:
    shape, rest = _windows(draw)
    part = draw.floats(*shape).unfold(*rest)
    return Sample(draw.floats(*part.shape), list(shape), *rest)


def _bit_view(draw: Draw) -> Sample:
    shape = (*draw.shape(0, 2), 4)
    return Sample(draw.floats(*shape), draw.choice([torch.int64, torch.int32]))


def _as_complex(draw: Draw) -> Sample:
    return Sample(draw.floats(*draw.shape(), 2))


def _as_real(draw: Draw) -> Sample:
    return Sample(draw.floats(*draw.shape(), dtype=torch.complex128))


_MOVEMENT: dict[str, Sampler] = {
    **_each("view _unsafe_view reshape", _view),
    **_each("unsqueeze", _unsqueeze),
    **_each("squeeze", _squeeze),
    **_each("squeeze.dim", _squeeze_dim),
    **_each("squeeze.dims", _squeeze_dims),
    **_each("alias detach lift_fresh lift_fresh_copy contiguous", _one),
    **_each("t", _t),
    **_each("transpose.int", _transpose),
    **_each("permute", _permute),
    **_each("expand", _expand),
    **_each("as_strided", _as_strided),
    **_each("as_strided_scatter", _strided_scatter),
    **_each("slice.Tensor", _slice),
    **_each("slice_scatter", _slice_scatter),
    **_each("slice_backward", _slice_backward),
    **_each("select.int", _select),
    **_each("select_scatter", _select_scatter),
    **_each("select_backward", _select_backward),
    **_each("unbind.int", _unbind),
    **_each("stack", _stack),
    **_each("cat", _cat),
    **_each("split.Tensor unsafe_split.Tensor", _split),
    **_each("split_with_sizes unsafe_split_with_sizes", _split_sizes),
    **_each("constant_pad_nd", _pad),
    **_each("flip", _flip),
    **_each("roll", _roll),
    **_each("tril triu", _triangle),
    **_each("repeat", _repeat),
    **_each("repeat_interleave.self_int", _interleave),
    **_each("pixel_shuffle", lambda draw: _pixels(draw, True)),
    **_each("pixel_unshuffle", lambda draw: _pixels(draw, False)),
    **_each("diagonal", _diagonal),
    **_each("diagonal_backward", _diagonal_backward),
    **_each("unfold", _unfold),
    **_each("unfold_backward", _unfold_backward),
    **_each("view.dtype", _bit_view),
    **_each("view_as_complex", _as_complex),
    **_each("view_as_real", _as_real),
}

# Reductions.


def _over(
    position: int, *, many: bool = True, make: Callable[..., Tensor] | None = None
) -> Sampler:
    """A reduction of dims at this position, kept or dropped."""

    def sample(draw: Draw) -> Sample:
        shape = draw.shape(1, 3)
        value = (make or _tensor)(draw, shape)
        dims = list(_some_dims(draw, len(shape))) or [0]
        middle = [1] * (position - 1)
        return Sample(value, *middle, dims if many else dims[0], draw.chance())

    return sample


def _real(draw: Draw, shape: Sequence[int]) -> Tensor:
    return draw.floats(*shape)


def _truths(draw: Draw, shape: Sequence[int]) -> Tensor:
    return draw.booleans(*shape)


def _sum_dims(draw: Draw) -> Sample:
    shape = draw.shape(0, 3)
    value = draw.choice([_tensor, _truths])(draw, shape)
    return Sample(value, list(_some_dims(draw, len(shape))), draw.chance())


def _boolean(draw: Draw) -> Sample:
    return Sample(draw.booleans(*draw.shape()))


def _real_one(draw: Draw) -> Sample:
    return Sample(draw.floats(*draw.shape()))


def _spread(draw: Draw) -> Sample:
    shape = (draw.size(2, 3), *draw.shape(0, 2))
    dims = sorted({0, *_some_dims(draw, len(shape))})
    return Sample(draw.floats(*shape), dims, correction=draw.choice([0, 1]), keepdim=draw.chance())


def _unbiased(draw: Draw) -> Sample:
    shape = (draw.size(2, 3), *draw.shape(0, 2))
    dims = sorted({0, *_some_dims(draw, len(shape))})
    return Sample(draw.floats(*shape), dims, draw.chance(), draw.chance())


def _norm(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample(draw.floats(*shape), 2, list(_some_dims(draw, len(shape))), draw.chance())


def _count(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample(draw.integers(*shape, high=2), list(_some_dims(draw, len(shape))))


def _nansum(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    value = draw.floats(*shape)
    value = value.masked_fill(draw.booleans(*shape), math.nan)
    return Sample(value, list(_some_dims(draw, len(shape))))


def _scan(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample(draw.floats(*shape), _dim(draw, len(shape)))


def _sort_stable(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample(draw.floats(*shape), stable=True, dim=_dim(draw, len(shape)))


def _topk(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    dim = _dim(draw, len(shape))
    return Sample(draw.floats(*shape), draw.integer(1, shape[dim]), dim)


def _cross(draw: Draw) -> Sample:
    shape = (draw.size(1, 2, 4), 3, draw.size(1, 2, 4))
    return Sample(draw.floats(*shape), draw.floats(*shape), dim=1)


def _softmax(draw: Draw) -> Sample:
    shape = draw.shape(0, 3)
    value = 3 * draw.floats(*shape)
    if value.ndim and draw.integer(0, 3) == 0:
        value[..., 1:] = -math.inf  # some ranks may hold nothing else
    return Sample(value, _dim(draw, max(len(shape), 1)), False)


def _softmax_backward(log: bool) -> Sampler:
    def sample(draw: Draw) -> Sample:
        shape = draw.shape(1, 3)
        dim = _dim(draw, len(shape))
        value = draw.floats(*shape)
        out = value.log_softmax(dim) if log else value.softmax(dim)
        return Sample(draw.floats(*shape), out, dim, torch.float64)

    return sample


def _gated(draw: Draw) -> tuple[tuple[int, ...], int]:
    shape = list(draw.shape(1, 3, most=60))
    dim = _dim(draw, len(shape))
    shape[dim] *= 2
    return tuple(shape), dim


def _glu(draw: Draw) -> Sample:
    shape, dim = _gated(draw)
    return Sample(draw.floats(*shape), dim)


def _glu_backward(draw: Draw) -> Sample:
    shape, dim = _gated(draw)
    value = draw.floats(*shape)
    return Sample(draw.floats(*torch.nn.functional.glu(value, dim).shape), value, dim)


def _histogram(draw: Draw) -> Sample:
    low, high = draw.choice([(0, 0), (-1, 2)])
    return Sample(draw.floats(*draw.shape(1, 2)), 5, low, high)


def _fourier(kind: str) -> Sampler:
    def sample(draw: Draw) -> Sample:
        shape = (draw.size(2, 3, 4), draw.size(2, 4), draw.size(2, 4))
        dims = draw.choice([[2], [1, 2], [0]])
        dtype = torch.float64 if kind == "r2c" else torch.complex128
        last = {"r2c": True, "c2c": False, "c2r": 2 * (shape[dims[-1]] - 1)}[kind]
        return Sample(draw.floats(*shape, dtype=dtype), dims, 0, last)

    return sample


def _stacked(draw: Draw, *rows: int) -> Tensor:
    """Some matrices; square ones are far from singular."""
    lead = draw.shape(0, 2, most=12)
    size = draw.size(1, 2, 3)
    columns = rows[0] if rows else size
    found = draw.floats(*lead, size, columns)
    return found if rows else found + 4 * torch.eye(size, dtype=found.dtype)


def _square(*rest: Any) -> Sampler:
    return lambda draw: Sample(_stacked(draw), *rest)


def _tall(*rest: Any) -> Sampler:
    return lambda draw: Sample(_stacked(draw, 2), *rest)


def _symmetric(*rest: Any) -> Sampler:
    def sample(draw: Draw) -> Sample:
        found = _stacked(draw)
        return Sample(found @ found.mT, *rest)

    return sample


def _triangle(draw: Draw) -> Tensor:
    found = _stacked(draw)
    return torch.linalg.cholesky(found @ found.mT)


def _right_side(draw: Draw, matrix: Tensor, columns: int = 2) -> Tensor:
    """As many rows as the matrix has, with its batch or one of ones."""
    lead = matrix.shape[:-2]
    if draw.integer(0, 3) == 0:
        lead = (1,) * len(lead)
    return draw.floats(*lead, matrix.shape[-1], columns)


def _solve(draw: Draw) -> Sample:
    matrix = _stacked(draw)
    columns = (2,) if draw.chance() else ()
    return Sample(matrix, draw.floats(*matrix.shape[:-1], *columns))


def _solve_triangular(draw: Draw) -> Sample:
    matrix = _triangle(draw)
    return Sample(matrix, _right_side(draw, matrix), upper=False)


def _lu_solve(draw: Draw) -> Sample:
    matrix = _stacked(draw)
    return Sample(*torch.linalg.lu_factor(matrix), _right_side(draw, matrix))


def _cholesky_solve(draw: Draw) -> Sample:
    matrix = _triangle(draw)
    return Sample(draw.floats(*matrix.shape[:-1], 2), matrix)


def _reflections(draw: Draw) -> Sample:
    vectors, scales = torch.geqrf(_stacked(draw))
    return Sample(vectors, scales)


def _diag_embed(draw: Draw) -> Sample:
    shape = draw.shape(1, 3, most=12)
    dims = draw.choice([(), (-2, -1), (-1, -2), (0, 1)])
    return Sample(_tensor(draw, shape), draw.integer(-1, 1), *dims)


def _diagonal_scatter(draw: Draw) -> Sample:
    whole = _tensor(draw, (draw.size(1, 2, 4), 3, 3))
    dims = draw.choice([(-2, -1), (1, 2), (0, 1)])
    return Sample(whole, _tensor(draw, whole.diagonal(0, *dims).shape), 0, *dims)


_LINEAR_ALGEBRA: dict[str, Sampler] = {
    **_each("_linalg_det _linalg_slogdet linalg_inv_ex linalg_matrix_exp", _square()),
    **_each("linalg_lu linalg_lu_factor_ex linalg_qr", _tall()),
    **_each("linalg_cholesky_ex", _symmetric()),
    **_each("_linalg_eigh", lambda draw: _symmetric("L", draw.chance())(draw)),
    **_each("linalg_eig", _square()),
    **_each("_linalg_svd", lambda draw: _tall(False, draw.chance())(draw)),
    **_each("linalg_pinv.atol_rtol_tensor", _tall()),
    **_each("linalg_householder_product", _reflections),
    **_each("cholesky_inverse", lambda draw: Sample(_triangle(draw))),
    **_each("_linalg_solve_ex", _solve),
    **_each("linalg_solve_triangular", _solve_triangular),
    **_each("linalg_lu_solve", _lu_solve),
    **_each("cholesky_solve", _cholesky_solve),
    **_each("diag_embed", _diag_embed),
    **_each("diagonal_scatter", _diagonal_scatter),
}


_REDUCTIONS: dict[str, Sampler] = {
    **_each("sum.dim_IntList", _sum_dims),
    **_each("amax amin", _over(1)),
    **_each("mean.dim logsumexp", _over(1, make=_real)),
    **_each("sum", _one),
    **_each("max min prod", _one),
    **_each("mean median", _real_one),
    **_each("any all", _boolean),
    **_each("any.dims all.dims", _over(1, make=_truths)),
    **_each("any.dim all.dim", _over(1, many=False, make=_truths)),
    **_each("prod.dim_int", _over(1, many=False)),
    **_each("argmax argmin max.dim min.dim median.dim mode", _over(1, many=False, make=_real)),
    **_each("kthvalue", _over(2, many=False, make=_real)),
    **_each("var.correction std.correction var_mean.correction std_mean.correction", _spread),
    **_each("linalg_vector_norm norm.ScalarOpt_dim", _norm),
    **_each("count_nonzero.dim_IntList", _count),
    **_each("nansum", _nansum),
    **_each("cumsum cumprod logcumsumexp cummax cummin sort argsort", _scan),
    **_each("var.dim std.dim", _unbiased),
    **_each("_safe_softmax", _scan),
    **_each("sort.stable", _sort_stable),
    **_each("topk", _topk),
    **_each("linalg_cross", _cross),
    **_each("_softmax _log_softmax", _softmax),
    **_each("_softmax_backward_data", _softmax_backward(False)),
    **_each("_log_softmax_backward_data", _softmax_backward(True)),
    **_each("glu", _glu),
    **_each("glu_backward", _glu_backward),
    **_each("histc", _histogram),
    **_each("_fft_r2c", _fourier("r2c")),
    **_each("_fft_c2c", _fourier("c2c")),
    **_each("_fft_c2r", _fourier("c2r")),
}

# Normalizations.


def _affine(draw: Draw, *shape: int) -> Tensor | None:
    return draw.floats(*shape) if draw.integer(0, 3) else None


def _mask(draw: Draw, *there: Any) -> list[bool]:
    """Gradients to give, of parameters that are there."""
    return (
        [True, *(value is not None for value in there)]
        if draw.integer(0, 3)
        else [value is not None for value in (True, *there)]
    )


def _layer_norm(draw: Draw) -> Sample:
    shape = draw.shape(2, 3)
    inner = shape[draw.integer(1, len(shape) - 1) :]
    weight, bias = _affine(draw, *inner), _affine(draw, *inner)
    return Sample(draw.floats(*shape), list(inner), weight, bias, 1e-5)


def _layer_norm_backward(draw: Draw) -> Sample:
    x, inner, weight, bias, eps = _layer_norm(draw).args
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, inner, weight, bias, eps)
    mask = [draw.chance(), weight is not None, bias is not None]
    mask[0] = mask[0] or not any(mask)
    grad = draw.floats(*x.shape)
    return Sample(grad, x, inner, mean, rstd, weight, bias, mask)


def _rms_norm(draw: Draw) -> Sample:
    shape = draw.shape(2, 3)
    inner = shape[draw.integer(1, len(shape) - 1) :]
    return Sample(draw.floats(*shape), list(inner), _affine(draw, *inner), 1e-5)


def _rms_norm_backward(draw: Draw) -> Sample:
    x, inner, weight, eps = _rms_norm(draw).args
    _, rstd = torch.ops.aten._fused_rms_norm.default(x, inner, weight, eps)
    grad = draw.floats(*x.shape)
    return Sample(grad, x, inner, rstd, weight, [True, weight is not None])


def _group_norm(draw: Draw) -> Sample:
    n, groups, c = draw.size(1, 2, 3, 4), draw.size(1, 2, 3, 4), draw.size(1, 2, 3)
    plane = draw.shape(1, 2, most=12)
    channels = groups * c
    weight, bias = _affine(draw, channels), _affine(draw, channels)
    x = draw.floats(n, channels, *plane)
    return Sample(x, weight, bias, n, channels, math.prod(plane), groups, 1e-5)


def _group_norm_backward(draw: Draw) -> Sample:
    x, weight, _, *rest = _group_norm(draw).args
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, weight, weight, *rest)
    affine = weight is not None
    mask = [True, affine, affine]
    return Sample(draw.floats(*x.shape), x, mean, rstd, weight, *rest[:4], mask)


def _batch_norm(draw: Draw, frozen: bool) -> Sample:
    n, c = draw.size(2, 3, 4), draw.size()
    x = draw.floats(n, c, *draw.shape(0, 2, most=8))
    running = draw.floats(c), draw.floats(c).abs() + 0.5
    rest = (0.1, 1e-5) if frozen else (draw.chance(), 0.1, 1e-5)
    return Sample(x, draw.floats(c), _affine(draw, c), *running, *rest)


def _weight_norm(draw: Draw) -> Sample:
    shape = draw.shape(2, 3)
    dim = draw.choice([0, len(shape) - 1])
    norm = [size if i == dim else 1 for i, size in enumerate(shape)]
    return Sample(draw.floats(*shape), draw.floats(*norm), dim)


def _weight_norm_backward(draw: Draw) -> Sample:
    v, g, dim = _weight_norm(draw).args
    _, norms = torch.ops.aten._weight_norm_interface.default(v, g, dim)
    return Sample(draw.floats(*v.shape), v, g, norms, dim)


_NORMALIZATIONS: dict[str, Sampler] = {
    **_each("native_layer_norm", _layer_norm),
    **_each("native_layer_norm_backward", _layer_norm_backward),
    **_each("_fused_rms_norm", _rms_norm),
    **_each("_fused_rms_norm_backward", _rms_norm_backward),
    **_each("_weight_norm_interface", _weight_norm),
    **_each("_weight_norm_interface_backward", _weight_norm_backward),
    **_each("native_group_norm", _group_norm),
    **_each("native_group_norm_backward", _group_norm_backward),
    **_each("_native_batch_norm_legit_functional", lambda draw: _batch_norm(draw, False)),
    **_each("_native_batch_norm_legit_no_training", lambda draw: _batch_norm(draw, True)),
}

# Planes.


def _image(draw: Draw, places: int, size: int = 4) -> Tensor:
    lead = (draw.size(1, 2, 3, 4), draw.size(1, 2, 3))
    return draw.floats(*lead, *(size,) * places)


def _pool(places: int) -> Sampler:
    return lambda draw: Sample(_image(draw, places), [2] * places, [2] * places)


def _max_pool_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, kernel, stride = _pool(places)(draw).args
        forward = getattr(torch.ops.aten, f"max_pool{places}d_with_indices").default
        out, indices = forward(x, kernel, stride)
        rest = (kernel, stride, [0] * places, [1] * places, False)
        return Sample(draw.floats(*out.shape), x, *rest, indices)

    return sample


def _avg_pool_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, kernel, stride = _pool(places)(draw).args
        grad = draw.floats(*x.shape[:2], *(2,) * places)
        return Sample(grad, x, kernel, stride, [0] * places, False, True, None)

    return sample


def _adaptive(places: int) -> Sampler:
    return lambda draw: Sample(_image(draw, places, 5), [draw.choice([1, 2, 3])] * places)


def _adaptive_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, size = _adaptive(places)(draw).args
        return Sample(draw.floats(*x.shape[:2], *size), x)

    return sample


def _adaptive_max_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, size = _adaptive(places)(draw).args
        forward = getattr(torch.ops.aten, f"adaptive_max_pool{places}d").default
        out, indices = forward(x, size)
        return Sample(draw.floats(*out.shape), x, indices)

    return sample


def _fractional(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x = _image(draw, places, 5)
        drawn = draw.floats(*x.shape[:2], places).sigmoid()
        if draw.chance():
            x, drawn = x[0], drawn[:1]
        return Sample(x, [2] * places, [3] * places, drawn)

    return sample


def _fractional_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, kernel, size, drawn = _fractional(places)(draw).args
        forward = getattr(torch.ops.aten, f"fractional_max_pool{places}d").default
        out, indices = forward(x, kernel, size, drawn)
        return Sample(draw.floats(*out.shape), x, kernel, size, indices)

    return sample


def _unpool(places: int, *options: Any) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, kernel, stride = _pool(places)(draw).args
        pool = getattr(torch.ops.aten, f"max_pool{places}d_with_indices").default
        return Sample(*pool(x, kernel, stride), list(x.shape[2:]), *options)

    return sample


def _resample(places: int, *options: Any) -> Sampler:
    return lambda draw: Sample(_image(draw, places), [6] * places, *options)


def _resample_backward(places: int, *options: Any) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x = _image(draw, places)
        grad = draw.floats(*x.shape[:2], *(6,) * places)
        return Sample(grad, [6] * places, list(x.shape), *options)

    return sample


def _border(places: int) -> Sampler:
    return lambda draw: Sample(_image(draw, places), [1, 2] * places)


def _border_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, pads = _border(places)(draw).args
        return Sample(draw.floats(*x.shape[:2], *(7,) * places), x, pads)

    return sample


def _im2col(draw: Draw) -> Sample:
    return Sample(_image(draw, 2), [2, 2], [1, 1], [0, 0], [1, 1])


def _col2im(draw: Draw) -> Sample:
    n, c = draw.size(1, 2, 3), draw.size(1, 2, 4)
    return Sample(draw.floats(n, c * 4, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])


def _grid(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x = _image(draw, places)
        size = (3, *(2,) * (places - 1))
        return Sample(x, draw.floats(x.shape[0], *size, places).tanh(), 0, 0, False)

    return sample


def _grid_backward(places: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        x, grid, *rest = _grid(places)(draw).args
        mask = draw.choice([[True, True], [False, True]])
        return Sample(draw.floats(*x.shape[:2], *grid.shape[1:-1]), x, grid, *rest, mask)

    return sample


def _affine_grid(draw: Draw, backward: bool = False) -> Sample:
    n, size = draw.size(1, 2, 3, 4), draw.choice([(2, 3), (2, 3, 2)])
    places = len(size)
    shape = (n, *size, places) if backward else (n, places, places + 1)
    return Sample(draw.floats(*shape), [n, 2, *size], draw.chance())


_PLANES: dict[str, Sampler] = {
    **_each("avg_pool1d", _pool(1)),
    **_each("adaptive_avg_pool1d", _adaptive(1)),
    **_each("upsample_nearest2d.vec", _resample(2, None)),
    **_each("upsample_bilinear2d.vec upsample_bicubic2d.vec", _resample(2, False, None)),
    **_each("max_pool2d_with_indices avg_pool2d", _pool(2)),
    **_each("max_pool3d_with_indices avg_pool3d", _pool(3)),
    **_each("max_pool2d_with_indices_backward", _max_pool_backward(2)),
    **_each("max_pool3d_with_indices_backward", _max_pool_backward(3)),
    **_each("avg_pool2d_backward", _avg_pool_backward(2)),
    **_each("avg_pool3d_backward", _avg_pool_backward(3)),
    **_each("_adaptive_avg_pool2d adaptive_max_pool2d", _adaptive(2)),
    **_each("_adaptive_avg_pool3d", _adaptive(3)),
    **_each("_adaptive_avg_pool2d_backward", _adaptive_backward(2)),
    **_each("_adaptive_avg_pool3d_backward", _adaptive_backward(3)),
    **_each("adaptive_max_pool3d", _adaptive(3)),
    **_each("adaptive_max_pool2d_backward", _adaptive_max_backward(2)),
    **_each("adaptive_max_pool3d_backward", _adaptive_max_backward(3)),
    **_each("fractional_max_pool2d", _fractional(2)),
    **_each("fractional_max_pool3d", _fractional(3)),
    **_each("fractional_max_pool2d_backward", _fractional_backward(2)),
    **_each("fractional_max_pool3d_backward", _fractional_backward(3)),
    **_each("max_unpool2d", _unpool(2)),
    **_each("max_unpool3d", _unpool(3, [2, 2, 2], [0, 0, 0])),
    **_each("_upsample_nearest_exact3d", _resample(3)),
    **_each("_upsample_nearest_exact3d_backward", _resample_backward(3)),
    **_each("upsample_nearest1d _upsample_nearest_exact1d", _resample(1)),
    **_each("upsample_linear1d", _resample(1, False)),
    **_each("upsample_nearest2d _upsample_nearest_exact2d", _resample(2)),
    **_each(
        "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        _resample(2, False),
    ),
    **_each("upsample_nearest3d", _resample(3)),
    **_each("upsample_trilinear3d", _resample(3, False)),
    **_each(
        "upsample_nearest1d_backward _upsample_nearest_exact1d_backward", _resample_backward(1)
    ),
    **_each("upsample_linear1d_backward", _resample_backward(1, False)),
    **_each(
        "upsample_nearest2d_backward _upsample_nearest_exact2d_backward", _resample_backward(2)
    ),
    **_each(
        "upsample_bilinear2d_backward upsample_bicubic2d_backward "
        "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
        _resample_backward(2, False),
    ),
    **_each("upsample_nearest3d_backward", _resample_backward(3)),
    **_each("upsample_trilinear3d_backward", _resample_backward(3, False)),
    **{
        op_name(f"{kind}_pad{places}d{backward}"): make(places)
        for kind in ("reflection", "replication")
        for places in (1, 2, 3)
        for backward, make in (("", _border), ("_backward", _border_backward))
    },
    **_each("im2col", _im2col),
    **_each("col2im", _col2im),
    **_each("grid_sampler_2d", _grid(2)),
    **_each("grid_sampler_3d", _grid(3)),
    **_each("grid_sampler_2d_backward", _grid_backward(2)),
    **_each("grid_sampler_3d_backward", _grid_backward(3)),
    **_each("affine_grid_generator", _affine_grid),
    **_each("affine_grid_generator_backward", lambda draw: _affine_grid(draw, backward=True)),
}

# Attention.


def _attention(draw: Draw) -> tuple[list[Any], list[Any]]:
    b, h, r = draw.size(1, 2, 3), draw.size(1, 2, 4), draw.size(1, 2, 3)
    s, d = draw.size(2, 3, 4, 6), draw.size(2, 3)
    t = draw.choice([s, 2, 4])
    e = draw.choice([d, 4])
    causal = draw.chance()
    q, k, v = draw.floats(b, h * r, s, d), draw.floats(b, h, t, d), draw.floats(b, h, t, e)
    full = (b, h * r, s, t)
    shape = (*(1 if draw.chance() else size for size in full[:3]), t)
    kind = draw.integer(0, 2)
    mask = None if kind == 0 else draw.floats(*shape) if kind == 1 else draw.booleans(*shape)
    return [q, k, v, mask], [causal, draw.choice([0.5, 1.0])]


def _attention_forward(draw: Draw) -> Sample:
    tensors, rest = _attention(draw)
    return Sample(*tensors, *rest)


def _float_mask(draw: Draw, tensors: Sequence[Any]) -> Tensor:
    """The mask, or another one where that has no gradient."""
    mask = tensors[3]
    if mask is not None and mask.dtype != torch.bool:
        return mask  # type: ignore[no-any-return]
    sizes = (1 if draw.chance() else size for size in tensors[0].shape[:3])
    return draw.floats(*sizes, tensors[1].shape[2])


def _attention_backward(masked: bool) -> Sampler:
    def sample(draw: Draw) -> Sample:
        tensors, rest = _attention(draw)
        if masked:
            tensors[3] = _float_mask(draw, tensors)
        out, lse = torch.ops.autopar.attention.default(*tensors, *rest)
        return Sample(draw.floats(*out.shape), *tensors, out, lse, *rest)

    return sample


_ATTENTION: dict[str, Sampler] = {
    **_each("autopar::attention", _attention_forward),
    **_each("autopar::attention_backward", _attention_backward(False)),
    **_each("autopar::attention_backward_mask", _attention_backward(True)),
}

# Lookups and scatters.


def _embedding(draw: Draw) -> Sample:
    rows = draw.size(2, 3, 5, 8, 12)
    index = draw.integers(*draw.shape(0, 2), high=rows)
    return Sample(draw.floats(rows, draw.size(1, 2, 4)), index, draw.choice([-1, 0, 1]))


def _embedding_backward(draw: Draw) -> Sample:
    weight, index, padding = _embedding(draw).args
    grad = draw.floats(*index.shape, weight.shape[1])
    by_count = draw.integer(0, 3) == 0
    return Sample(grad, index, weight.shape[0], padding, by_count)


def _lookup(draw: Draw, *, even: bool = False) -> tuple[Tensor, int, Tensor]:
    shape = draw.shape(1, 3, most=80)
    dim = _dim(draw, len(shape))
    sizes = [
        draw.size()
        if i == dim % len(shape)
        else s
        if even or draw.integer(0, 3)
        else draw.integer(1, s)
        for i, s in enumerate(shape)
    ]
    if even:
        sizes[dim] = 1
    return _tensor(draw, shape), dim, draw.integers(*sizes, high=shape[dim])


def _gather(draw: Draw) -> Sample:
    return Sample(*_lookup(draw))


def _onehot(draw: Draw) -> Sample:
    value, dim, index = _lookup(draw, even=True)
    return Sample(draw.floats(*index.shape), index, dim, value.shape[dim])


def _scattered(draw: Draw) -> tuple[Tensor, int, Tensor, Tensor]:
    """Indices along the dim without repeats, so that the order of writes does not matter."""
    value, dim, index = _lookup(draw)
    count = min(index.shape[dim], value.shape[dim])
    order = torch.rand(*index.shape, generator=draw.generator)
    full = [value.shape[dim] if i == dim % value.ndim else s for i, s in enumerate(index.shape)]
    order = torch.rand(full, generator=draw.generator).argsort(dim).narrow(dim, 0, count)
    shape = [s + 1 if draw.integer(0, 5) == 0 else s for s in order.shape]
    return value, dim, order, _tensor(draw, shape).to(value.dtype)


def _scatter_src(draw: Draw) -> Sample:
    return Sample(*_scattered(draw))


def _scatter_value(draw: Draw) -> Sample:
    return Sample(*_scattered(draw)[:3], 7)


def _scatter_reduce(draw: Draw) -> Sample:
    return Sample(*_scattered(draw), draw.choice(["sum", "amax", "prod"]))


def _scatter_add(draw: Draw) -> Sample:
    value, dim, index = _lookup(draw)
    shape = [s + 1 if draw.integer(0, 5) == 0 else s for s in index.shape]
    return Sample(value, dim, index, _tensor(draw, shape).to(value.dtype))


def _index_select(draw: Draw) -> Sample:
    value, dim, _ = _lookup(draw)
    shape = () if draw.integer(0, 4) == 0 else (draw.size(),)
    return Sample(value, dim, draw.integers(*shape, high=value.shape[dim]))


def _index_add(draw: Draw) -> Sample:
    value, dim, _ = _lookup(draw)
    count = draw.size()
    shape = [count if i == dim % value.ndim else s for i, s in enumerate(value.shape)]
    index = draw.integers(count, high=value.shape[dim])
    return Sample(value, dim, index, draw.floats(*shape).to(value.dtype), alpha=draw.choice([1, 2]))


def _rows_without_repeats(draw: Draw) -> tuple[Tensor, int, Tensor]:
    value, dim, _ = _lookup(draw)
    count = draw.integer(1, value.shape[dim])
    return value, dim, torch.randperm(value.shape[dim], generator=draw.generator)[:count]


def _index_copy(draw: Draw) -> Sample:
    value, dim, index = _rows_without_repeats(draw)
    return Sample(value, dim, index, value.index_select(dim, index) * 2)


def _index_fill(draw: Draw) -> Sample:
    return Sample(*_rows_without_repeats(draw), 3)


def _index_fill_tensor(draw: Draw) -> Sample:
    value, dim, index = _rows_without_repeats(draw)
    return Sample(value, dim, index, torch.tensor(3, dtype=value.dtype))


def _indexed(draw: Draw) -> tuple[Tensor, list[Tensor | None]]:
    shape = tuple(draw.size(2, 3, 4, 6) for _ in range(draw.integer(1, 3)))
    places = [i for i in range(len(shape)) if draw.chance()] or [0]
    index_shape = draw.shape(0, 2, most=12)
    indices: list[Tensor | None] = []
    for i in range(places[-1] + 1):
        own = draw.stretched(index_shape)
        size = shape[i]
        indices.append(draw.integers(*own, low=-size, high=size) if i in places else None)
    return draw.floats(*shape), indices


def _index(draw: Draw) -> Sample:
    value, indices = _indexed(draw)
    if draw.integer(0, 7) == 0:
        return Sample(value, [draw.booleans(value.shape[0])])
    return Sample(value, indices)


def _index_put(draw: Draw) -> Sample:
    value, indices = _indexed(draw)
    picked = torch.ops.aten.index.Tensor(value, indices)
    if draw.integer(0, 3):
        values = draw.floats(*draw.stretched(picked.shape))
        return Sample(value, indices, values, True)
    return Sample(value, indices, draw.floats(), False)


def _bucketize(draw: Draw) -> Sample:
    return Sample(draw.floats(*draw.shape()), draw.floats(5).sort().values)


def _searchsorted(draw: Draw) -> Sample:
    if draw.integer(0, 3) == 0:
        return Sample(draw.floats(2, 5).sort().values, draw.floats(2, 4))
    return Sample(draw.floats(5).sort().values, draw.floats(*draw.shape()))


def _isin(draw: Draw) -> Sample:
    return Sample(draw.integers(*draw.shape()), draw.integers(*draw.shape()))


def _take(draw: Draw) -> Sample:
    return Sample(draw.floats(3, 4), draw.integers(5, high=12))


def _masked_scatter(draw: Draw) -> Sample:
    return Sample(draw.floats(3, 4), draw.booleans(3, 4), draw.floats(12))


_LOOKUPS: dict[str, Sampler] = {
    **_each("embedding", _embedding),
    **_each("embedding_dense_backward", _embedding_backward),
    **_each("gather", _gather),
    **_each("autopar::onehot_scatter", _onehot),
    **_each("scatter.src", _scatter_src),
    **_each("scatter.value", _scatter_value),
    **_each("scatter_reduce.two", _scatter_reduce),
    **_each("scatter_add", _scatter_add),
    **_each("index_select", _index_select),
    **_each("index_add", _index_add),
    **_each("index_copy", _index_copy),
    **_each("index_fill.int_Scalar", _index_fill),
    **_each("index_fill.int_Tensor", _index_fill_tensor),
    **_each("index.Tensor", _index),
    **_each("_unsafe_index.Tensor", lambda draw: Sample(*_indexed(draw))),
    **_each("index_put _unsafe_index_put", _index_put),
    **_each("bucketize.Tensor", _bucketize),
    **_each("searchsorted.Tensor", _searchsorted),
    **_each("isin.Tensor_Tensor", _isin),
    **_each("take", _take),
    **_each("masked_scatter", _masked_scatter),
}

# Tensors from numbers.


def _sized(draw: Draw) -> Sample:
    return Sample(list(draw.shape()))


def _full(draw: Draw) -> Sample:
    return Sample(list(draw.shape()), draw.choice([1.5, 2, 0, 0.0]))


def _new(draw: Draw, *rest: Any) -> Sample:
    shape = draw.shape()
    other = list(shape) if draw.chance() else list(draw.shape())
    return Sample(_tensor(draw, shape), other, *rest)


def _arange(count: int) -> Sampler:
    def sample(draw: Draw) -> Sample:
        if draw.integer(0, 4) == 0:
            return Sample(
                *([], [0.0], [0.5])[count - 1][:count], 4.5, *([1.5] if count == 3 else [])
            )
        end, start, step = draw.integer(1, 12), draw.integer(-3, 0), draw.integer(1, 3)
        numbers = {1: (end,), 2: (start, end), 3: (start, end, step)}[count]
        dtype = draw.choice([torch.int64, torch.float64])
        return Sample(*numbers, dtype=dtype, device=torch.device("cpu"))

    return sample


_CREATION: dict[str, Sampler] = {
    **_each("zeros ones", _sized),
    **_each("full", _full),
    **_each("new_zeros new_ones", _new),
    **_each("new_full", lambda draw: _new(draw, 3)),
    **_each("arange", _arange(1)),
    **_each("arange.start", _arange(2)),
    **_each("arange.start_step", _arange(3)),
    **_each("scalar_tensor", lambda draw: Sample(2.5)),
    **_each("eye", lambda draw: Sample(draw.size())),
    **_each("eye.m", lambda draw: Sample(draw.size(), draw.size())),
    **_each("linspace", lambda draw: Sample(0, 1, draw.size())),
    **_each("tril_indices triu_indices", lambda draw: Sample(draw.size(), 4, 0)),
}

# Random ops: any key, stream and shape.


def _stream(draw: Draw) -> tuple[Tensor, str]:
    return make_key(draw.integer(-(2**63), 2**63 - 1), draw.integer(0, 9)), draw.choice(["a", "b"])


def _dropout(draw: Draw) -> Sample:
    p = draw.choice([0.3, 0.5, 1.0])
    return Sample(draw.floats(*draw.shape()), *_stream(draw), p)


def _drawn(draw: Draw) -> Sample:
    dtype = draw.choice([torch.float64, torch.float32])
    return Sample(*_stream(draw), draw.shape(), dtype, torch.device("cpu"))


def _drawn_integers(draw: Draw) -> Sample:
    low = draw.integer(-3, 3)
    ends = (low, low + draw.integer(1, 99))
    return Sample(*_stream(draw), draw.shape(), *ends, torch.int64, torch.device("cpu"))


def _attention_dropout_forward(draw: Draw) -> Sample:
    tensors, rest = _attention(draw)
    return Sample(*tensors, *rest, *_stream(draw), 0.4)


def _attention_dropout_backward(masked: bool) -> Sampler:
    def sample(draw: Draw) -> Sample:
        tensors, rest = _attention(draw)
        if masked:
            tensors[3] = _float_mask(draw, tensors)
        given = (*tensors, *rest, *_stream(draw), 0.4)
        out, lse = torch.ops.autopar.attention_dropout.default(*given)
        return Sample(draw.floats(*out.shape), *tensors, out, lse, *given[4:])

    return sample


_RANDOM: dict[str, Sampler] = {
    **_each("autopar::dropout", _dropout),
    **_each("autopar::random_uniform autopar::random_normal", _drawn),
    **_each("autopar::random_integers", _drawn_integers),
    **_each("autopar::attention_dropout", _attention_dropout_forward),
    **_each("autopar::attention_dropout_backward", _attention_dropout_backward(False)),
    **_each("autopar::attention_dropout_backward_mask", _attention_dropout_backward(True)),
}

SAMPLES: Mapping[str, Sampler] = {
    **_POINTWISE,
    **_PRODUCTS,
    **_CONVOLUTIONS,
    **_MOVEMENT,
    **_REDUCTIONS,
    **_LINEAR_ALGEBRA,
    **_NORMALIZATIONS,
    **_PLANES,
    **_ATTENTION,
    **_RANDOM,
    **_LOOKUPS,
    **_CREATION,
}


def sample_of(op: str, draw: Draw) -> Sample:
    return SAMPLES[op](draw)
