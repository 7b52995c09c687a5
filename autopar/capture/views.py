"""Canonical forms of ops that move, cut or join dims."""

from __future__ import annotations

from autopar.capture.arguments import Refs, argument, as_int, as_ref, as_tuple, operand_type
from autopar.capture.simplify import Builder, Draft, Rewrite
from autopar.ir.graph import Arg, Const, Ref, TensorType


def view(builder: Builder, draft: Draft) -> Refs:
    """Any reshape: views of views are one view, a view to the same shape is none."""
    return (reshape(builder, draft, as_ref(draft.args[0]), draft.outputs[0].shape),)


def reshape(builder: Builder, draft: Draft, value: Ref, shape: tuple[int, ...]) -> Ref:
    """``value`` in another shape; ``draft`` lends phase and source."""
    maker = builder.maker(value)
    if maker.op == "aten.view.default":
        value = as_ref(maker.args[0])
    known = builder.type_of(value)
    if known.shape == shape:
        return value
    output = TensorType(shape, known.dtype)
    if maker.op == "aten.sum.dim_IntList" and _summed_shape(builder, maker) == shape:
        args = (*maker.args[:2], False)
        kept = Draft(maker.op, args, maker.kwargs, (output,), maker.phase, maker.source)
        return builder.keep(kept)[0]
    made = Draft("aten.view.default", (value, shape), (), (output,), draft.phase, draft.source)
    return builder.keep(made)[0]


def _summed_shape(builder: Builder, maker: Draft) -> tuple[int, ...]:
    """Shape of a sum if it did not keep the dims it sums."""
    shape = operand_type(builder, maker).shape
    return tuple(n for d, n in enumerate(shape) if d not in as_tuple(maker.args[1]))


def permute(builder: Builder, draft: Draft) -> Refs:
    """Any reordering of dims: permutes of permutes are one permute, or none."""
    value = as_ref(draft.args[0])
    rank = len(builder.type_of(value).shape)
    if draft.op == "aten.permute.default":
        order = tuple(as_int(d) % rank for d in as_tuple(draft.args[1]))
    elif draft.op == "aten.t.default":
        order = tuple(reversed(range(rank)))
    else:
        swapped = list(range(rank))
        if rank:
            a, b = (as_int(d) % rank for d in draft.args[1:3])
            swapped[a], swapped[b] = b, a
        order = tuple(swapped)
    maker = builder.maker(value)
    if maker.op == "aten.permute.default":
        before = as_tuple(maker.args[1])
        value, order = as_ref(maker.args[0]), tuple(as_int(before[d]) for d in order)
    if order == tuple(range(rank)):
        return (value,)
    draft.op, draft.args = "aten.permute.default", (value, order)
    return None


def expand(builder: Builder, draft: Draft) -> Refs:
    """Expands of expands are one expand; the shape is written out."""
    value, shape = as_ref(draft.args[0]), draft.outputs[0].shape
    maker = builder.maker(value)
    if maker.op == "aten.expand.default":
        value = as_ref(maker.args[0])
    if builder.type_of(value).shape == shape:
        return (value,)
    draft.args, draft.kwargs = (value, shape), ()
    return None


def cast_like(builder: Builder, draft: Draft, value: Ref, wanted: TensorType) -> Ref:
    """``value`` with the dtype and, by expanding, the shape of ``wanted``."""
    known = builder.type_of(value)
    if known.dtype != wanted.dtype:
        value = builder.derive(
            draft,
            "aten._to_copy.default",
            (value,),
            TensorType(known.shape, wanted.dtype),
            dtype=Const("dtype", wanted.dtype),
        )
    if known.shape != wanted.shape:
        value = builder.derive(draft, "aten.expand.default", (value, wanted.shape), wanted)
    return value


def slice_(builder: Builder, draft: Draft) -> Refs:
    """A slice written with its dim, start, end and step in range; none if it keeps all."""
    shape = operand_type(builder, draft).shape
    dim = as_int(argument(draft, 1, "dim", 0)) % len(shape)
    start, end = argument(draft, 2, "start"), argument(draft, 3, "end")
    step = as_int(argument(draft, 4, "step", 1))
    size = shape[dim]
    first, last, _ = slice(start, end, step).indices(size)
    last = max(first, last)
    if (first, last, step) == (0, size, 1):
        return (as_ref(draft.args[0]),)
    draft.args, draft.kwargs = (draft.args[0], dim, first, last, step), ()
    return None


def select(builder: Builder, draft: Draft) -> Refs:
    """Dim and index are not negative."""
    shape = operand_type(builder, draft).shape
    dim = as_int(draft.args[1]) % len(shape)
    draft.args = (draft.args[0], dim, as_int(draft.args[2]) % shape[dim])
    return None


def unbind(builder: Builder, draft: Draft) -> Refs:
    """One select for each output."""
    rank = len(operand_type(builder, draft).shape)
    dim = as_int(argument(draft, 1, "dim", 0)) % rank
    return tuple(
        builder.derive(draft, "aten.select.int", (draft.args[0], dim, index), output)
        for index, output in enumerate(draft.outputs)
    )


def stack(builder: Builder, draft: Draft) -> Refs:
    """A concatenation of views with one more dim."""
    output = draft.outputs[0]
    dim = as_int(argument(draft, 1, "dim", 0)) % len(output.shape)
    shape = (*output.shape[:dim], 1, *output.shape[dim + 1 :])
    parts = tuple(reshape(builder, draft, as_ref(v), shape) for v in as_tuple(draft.args[0]))
    return (builder.derive(draft, "aten.cat.default", (parts, dim), output),)


def cat(builder: Builder, draft: Draft) -> Refs:
    """Empty operands go; a concatenation of one value is that value."""
    output = draft.outputs[0]
    values = [as_ref(v) for v in as_tuple(draft.args[0])]
    dim = as_int(argument(draft, 1, "dim", 0)) % max(len(output.shape), 1)
    kept = [v for v in values if 0 not in builder.type_of(v).shape]
    if not kept:
        return None
    if len(kept) == 1:
        return (cast_like(builder, draft, kept[0], output),)
    draft.args, draft.kwargs = (tuple(kept), dim), ()
    return None


def repeat(builder: Builder, draft: Draft) -> Refs:
    """A view with a dim of one before each dim, expanded and merged."""
    known, output = operand_type(builder, draft), draft.outputs[0]
    times = tuple(as_int(n) for n in as_tuple(draft.args[1]))
    shape = (1,) * (len(times) - len(known.shape)) + known.shape
    apart = tuple(size for n in shape for size in (1, n))
    wide = tuple(size for n, r in zip(shape, times, strict=True) for size in (r, n))
    value = reshape(builder, draft, as_ref(draft.args[0]), apart)
    value = cast_like(builder, draft, value, TensorType(wide, known.dtype))
    return (reshape(builder, draft, value, output.shape),)


def slice_backward(builder: Builder, draft: Draft) -> Refs:
    """Dim, start, end and step are in range."""
    shape = tuple(as_int(size) for size in as_tuple(draft.args[1]))
    dim = as_int(draft.args[2]) % len(shape)
    where = slice(as_int(draft.args[3]), as_int(draft.args[4]), as_int(draft.args[5]))
    first, last, step = where.indices(shape[dim])
    draft.args = (draft.args[0], shape, dim, first, max(first, last), step)
    return None


def slice_scatter(builder: Builder, draft: Draft) -> Refs:
    """Dim, start, end and step are written out, in range; writing all is the source alone."""
    shape = draft.outputs[0].shape
    dim = as_int(argument(draft, 2, "dim", 0)) % len(shape)
    start, end = argument(draft, 3, "start"), argument(draft, 4, "end")
    step = as_int(argument(draft, 5, "step", 1))
    first, last, _ = slice(start, end, step).indices(shape[dim])
    if (first, last, step) == (0, shape[dim], 1):
        return (cast_like(builder, draft, as_ref(draft.args[1]), draft.outputs[0]),)
    draft.args, draft.kwargs = (*draft.args[:2], dim, first, max(first, last), step), ()
    return None


def positive_dims(position: int, rank_of: int | None = None) -> Rewrite:
    """A dim, or a tuple of dims, that is not negative.

    Args:
        position: Where the dims are.
        rank_of: Position of the shape that the dims count; None for that of operand 0.
    """

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        if position < len(draft.args):
            if rank_of is None:
                rank = len(operand_type(builder, draft).shape)
            else:
                rank = len(as_tuple(draft.args[rank_of]))
            args = list(draft.args)
            args[position] = _positive(args[position], max(rank, 1))
            draft.args = tuple(args)
        return None

    return rewrite


def _positive(dims: Arg, rank: int) -> Arg:
    if isinstance(dims, tuple):
        return tuple(_positive(d, rank) for d in dims)
    return dims % rank if isinstance(dims, int) else dims
