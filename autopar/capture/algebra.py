"""Canonical forms of arithmetic: sums, and ops that compute nothing or less than they say."""

from __future__ import annotations

import math

from autopar.capture.arguments import Refs, argument, as_int, as_ref, as_tuple, operand_type
from autopar.capture.simplify import Builder, Draft
from autopar.capture.views import cast_like, reshape
from autopar.ir.graph import Ref, TensorType


def sum_(builder: Builder, draft: Draft) -> Refs:
    """The dims are written out, sorted and not negative."""
    shape = operand_type(builder, draft).shape
    rank = len(shape)
    dims = None if draft.op == "aten.sum.default" else argument(draft, 1, "dim")
    keep = draft.op != "aten.sum.default" and bool(argument(draft, 2, "keepdim", False))
    summed = tuple(sorted(as_int(d) % max(rank, 1) for d in as_tuple(dims))) if dims else ()
    summed = summed if rank and summed else tuple(range(rank))
    if all(shape[d] == 1 for d in summed):
        value = cast_like(
            builder, draft, as_ref(draft.args[0]), TensorType(shape, draft.outputs[0].dtype)
        )
        return (reshape(builder, draft, value, draft.outputs[0].shape),)
    draft.op, draft.args = "aten.sum.dim_IntList", (draft.args[0], summed, keep)
    draft.kwargs = tuple(item for item in draft.kwargs if item[0] == "dtype")
    return None


def power(builder: Builder, draft: Draft) -> Refs:
    """``x ** 1`` is x."""
    exponent = draft.args[1]
    same = operand_type(builder, draft) == draft.outputs[0]
    return (as_ref(draft.args[0]),) if exponent == 1 and same else None


def scaled(builder: Builder, draft: Draft) -> Refs:
    """``x * 1`` and ``x / 1`` are x, where that changes neither dtype nor shape."""
    draft.op = draft.op.replace(".Scalar", ".Tensor")
    first, second = draft.args[:2]
    if isinstance(first, Ref) and not isinstance(second, Ref):
        same = builder.type_of(first) == draft.outputs[0]
        if second == 1 and same:
            return (first,)
    elif isinstance(first, Ref) and isinstance(second, Ref) and draft.op == "aten.mul.Tensor":
        for one, other in ((first, second), (second, first)):
            if _is_one(builder, one) and builder.type_of(other) == draft.outputs[0]:
                return (other,)
        _scale_the_small(builder, draft, first, second)
    return narrowed(builder, draft)


def _is_one(builder: Builder, value: Ref) -> bool:
    maker = builder.maker(value)
    if maker.op == "aten.expand.default":
        maker = builder.maker(as_ref(maker.args[0]))
    return maker.op == "aten.full.default" and maker.args[1] == 1


def _scale_the_small(builder: Builder, draft: Draft, first: Ref, second: Ref) -> None:
    """``a * (b * 2.0)`` is ``(a * 2.0) * b``, which is less work where a is smaller.

    Only by powers of two, which round nothing: the derivative of a square.
    """
    for other, large in ((first, second), (second, first)):
        small = _before_expand(builder, other)
        maker, kind = builder.maker(large), builder.type_of(small)
        if maker.op != "aten.mul.Tensor" or not isinstance(maker.args[1], float):
            continue
        base = as_ref(maker.args[0])
        exact = math.frexp(maker.args[1])[0] == 0.5
        fits = kind.dtype == builder.type_of(base).dtype == draft.outputs[0].dtype
        if exact and fits and kind.num_elements < builder.type_of(base).num_elements:
            less = builder.derive(draft, "aten.mul.Tensor", (small, maker.args[1]), kind)
            draft.args = (less, base)
            return


def both(builder: Builder, draft: Draft) -> Refs:
    """``True and x`` is x."""
    a, b = (as_ref(arg) for arg in draft.args)
    for value, other in ((a, b), (b, a)):
        maker = builder.maker(value)
        true = maker.op == "aten.full.default" and maker.args[1] is True
        if true and builder.type_of(other).dtype == "bool":
            return (cast_like(builder, draft, other, draft.outputs[0]),)
    return None


def added(builder: Builder, draft: Draft) -> Refs:
    """``x + 0`` is x; a sum of slices' gradients that lie side by side is a concatenation."""
    draft.op = draft.op.replace(".Scalar", ".Tensor")
    same = isinstance(draft.args[0], Ref) and operand_type(builder, draft) == draft.outputs[0]
    if same and type(draft.args[1]) in (int, float) and draft.args[1] == 0:
        return (as_ref(draft.args[0]),)
    if draft.op == "aten.add.Tensor" and not draft.kwargs:
        return _side_by_side(builder, draft) or narrowed(builder, draft)
    return narrowed(builder, draft)


def _side_by_side(builder: Builder, draft: Draft) -> Refs:
    """Two slices put back into zeros and added: joined, then put back where they begin."""
    if not all(isinstance(arg, Ref) for arg in draft.args):
        return None
    makers = [builder.maker(as_ref(arg)) for arg in draft.args]
    if any(maker.op != "aten.slice_backward.default" for maker in makers):
        return None
    low, high = sorted(makers, key=lambda maker: as_int(maker.args[3]))
    if low.args[1:3] != high.args[1:3] or low.args[4] != high.args[3]:
        return None
    if (low.args[5], high.args[5]) != (1, 1):
        return None
    shape, dim = draft.outputs[0].shape, as_int(low.args[2])
    first, last = as_int(low.args[3]), as_int(high.args[4])
    joined = TensorType((*shape[:dim], last - first, *shape[dim + 1 :]), draft.outputs[0].dtype)
    parts = ((as_ref(low.args[0]), as_ref(high.args[0])), dim)
    value = builder.derive(draft, "aten.cat.default", parts, joined)
    if joined == draft.outputs[0]:
        return (value,)
    args = (value, shape, dim, first, last, 1)
    return (builder.derive(draft, "aten.slice_backward.default", args, draft.outputs[0]),)


def narrowed(builder: Builder, draft: Draft) -> Refs:
    """Arithmetic on an expanded value happens before the expansion, or broadcasts by itself.

    Autograd expands the gradient of a sum to the size of what was summed before it does anything
    else with it; done in this order, nothing of that size is written.
    """
    output = draft.outputs[0]
    values = [arg for arg in draft.args if isinstance(arg, Ref)]
    if len({builder.type_of(value).dtype for value in values} | {output.dtype}) > 1:
        return None
    args = tuple(
        _before_expand(builder, arg) if isinstance(arg, Ref) else arg for arg in draft.args
    )
    if args == draft.args:
        return None
    draft.args = args
    shape = _broadcast([builder.type_of(arg).shape for arg in args if isinstance(arg, Ref)])
    if shape == output.shape:
        return None
    draft.outputs = (TensorType(shape, output.dtype),)
    narrow = builder.keep(draft)[0]
    return (cast_like(builder, draft, narrow, output),)


def _before_expand(builder: Builder, value: Ref) -> Ref:
    maker = builder.maker(value)
    return as_ref(maker.args[0]) if maker.op == "aten.expand.default" else value


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of a pointwise op on operands of these shapes."""
    found = [1] * max(len(shape) for shape in shapes)
    for shape in shapes:
        for back, size in enumerate(reversed(shape), start=1):
            found[-back] = size if found[-back] == 1 else found[-back]
    return tuple(found)
