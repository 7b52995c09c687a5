"""Canonical forms: one op for what torch says in several ways, and no op for what does nothing.

Each entry of `REWRITES` gets the builder and an op, and returns the values that replace its
outputs, or None to keep it. Strides do not exist in a graph, so copies that only change them go.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.simplify import CPU, Builder, Draft, Rewrite
from autopar.errors import UnsupportedError
from autopar.ir.graph import Arg, Const, Ref, TensorType

Refs = tuple[Ref, ...] | None


def _ref(arg: Arg) -> Ref:
    assert isinstance(arg, Ref), arg
    return arg


def _int(arg: Arg) -> int:
    assert isinstance(arg, int), arg
    return arg


def _arg(draft: Draft, position: int, name: str, default: Arg = None) -> Arg:
    """An argument that may be positional or named."""
    if position < len(draft.args):
        return draft.args[position]
    return dict(draft.kwargs).get(name, default)


def _same(builder: Builder, draft: Draft) -> Refs:
    """Ops that hand on their operand."""
    return (_ref(draft.args[0]),)


def _operand_type(builder: Builder, draft: Draft) -> TensorType:
    return builder.type_of(_ref(draft.args[0]))


def view(builder: Builder, draft: Draft) -> Refs:
    """Any reshape: views of views are one view, a view to the same shape is none."""
    return (reshape(builder, draft, _ref(draft.args[0]), draft.outputs[0].shape),)


def reshape(builder: Builder, draft: Draft, value: Ref, shape: tuple[int, ...]) -> Ref:
    """``value`` in another shape; ``draft`` lends phase and source."""
    maker = builder.maker(value)
    if maker.op == "aten.view.default":
        value = _ref(maker.args[0])
    known = builder.type_of(value)
    if known.shape == shape:
        return value
    output = TensorType(shape, known.dtype)
    made = Draft("aten.view.default", (value, shape), (), (output,), draft.phase, draft.source)
    return builder.keep(made)[0]


def permute(builder: Builder, draft: Draft) -> Refs:
    """Any reordering of dims: permutes of permutes are one permute, or none."""
    value = _ref(draft.args[0])
    rank = len(builder.type_of(value).shape)
    if draft.op == "aten.permute.default":
        order = tuple(_int(d) % rank for d in _tuple(draft.args[1]))
    elif draft.op == "aten.t.default":
        order = tuple(reversed(range(rank)))
    else:
        swapped = list(range(rank))
        if rank:
            a, b = (_int(d) % rank for d in draft.args[1:3])
            swapped[a], swapped[b] = b, a
        order = tuple(swapped)
    maker = builder.maker(value)
    if maker.op == "aten.permute.default":
        before = _tuple(maker.args[1])
        value, order = _ref(maker.args[0]), tuple(_int(before[d]) for d in order)
    if order == tuple(range(rank)):
        return (value,)
    draft.op, draft.args = "aten.permute.default", (value, order)
    return None


def _tuple(arg: Arg) -> tuple[Arg, ...]:
    assert isinstance(arg, tuple), arg
    return arg


def expand(builder: Builder, draft: Draft) -> Refs:
    """Expands of expands are one expand; the shape is written out."""
    value, shape = _ref(draft.args[0]), draft.outputs[0].shape
    maker = builder.maker(value)
    if maker.op == "aten.expand.default":
        value = _ref(maker.args[0])
    if builder.type_of(value).shape == shape:
        return (value,)
    draft.args, draft.kwargs = (value, shape), ()
    return None


def to_copy(builder: Builder, draft: Draft) -> Refs:
    """Only a change of dtype is a copy."""
    if _operand_type(builder, draft).dtype == draft.outputs[0].dtype:
        return (_ref(draft.args[0]),)
    draft.op = "aten._to_copy.default"
    draft.args = draft.args[:1]
    draft.kwargs = (("dtype", Const("dtype", draft.outputs[0].dtype)),)
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
    shape = _operand_type(builder, draft).shape
    dim = _int(_arg(draft, 1, "dim", 0)) % len(shape)
    start, end = _arg(draft, 2, "start"), _arg(draft, 3, "end")
    step = _int(_arg(draft, 4, "step", 1))
    size = shape[dim]
    first, last, _ = slice(start, end, step).indices(size)
    last = max(first, last)
    if (first, last, step) == (0, size, 1):
        return (_ref(draft.args[0]),)
    draft.args, draft.kwargs = (draft.args[0], dim, first, last, step), ()
    return None


def select(builder: Builder, draft: Draft) -> Refs:
    """Dim and index are not negative."""
    shape = _operand_type(builder, draft).shape
    dim = _int(draft.args[1]) % len(shape)
    draft.args = (draft.args[0], dim, _int(draft.args[2]) % shape[dim])
    return None


def unbind(builder: Builder, draft: Draft) -> Refs:
    """One select for each output."""
    rank = len(_operand_type(builder, draft).shape)
    dim = _int(_arg(draft, 1, "dim", 0)) % rank
    return tuple(
        builder.derive(draft, "aten.select.int", (draft.args[0], dim, index), output)
        for index, output in enumerate(draft.outputs)
    )


def stack(builder: Builder, draft: Draft) -> Refs:
    """A concatenation of views with one more dim."""
    output = draft.outputs[0]
    dim = _int(_arg(draft, 1, "dim", 0)) % len(output.shape)
    shape = (*output.shape[:dim], 1, *output.shape[dim + 1 :])
    parts = tuple(reshape(builder, draft, _ref(v), shape) for v in _tuple(draft.args[0]))
    return (builder.derive(draft, "aten.cat.default", (parts, dim), output),)


def cat(builder: Builder, draft: Draft) -> Refs:
    """Empty operands go; a concatenation of one value is that value."""
    output = draft.outputs[0]
    values = [_ref(v) for v in _tuple(draft.args[0])]
    dim = _int(_arg(draft, 1, "dim", 0)) % max(len(output.shape), 1)
    kept = [v for v in values if 0 not in builder.type_of(v).shape]
    if not kept:
        return None
    if len(kept) == 1:
        return (cast_like(builder, draft, kept[0], output),)
    draft.args, draft.kwargs = (tuple(kept), dim), ()
    return None


def sum_(builder: Builder, draft: Draft) -> Refs:
    """The dims are written out, sorted and not negative."""
    shape = _operand_type(builder, draft).shape
    rank = len(shape)
    dims = None if draft.op == "aten.sum.default" else _arg(draft, 1, "dim")
    keep = draft.op != "aten.sum.default" and bool(_arg(draft, 2, "keepdim", False))
    summed = tuple(sorted(_int(d) % max(rank, 1) for d in _tuple(dims))) if dims else ()
    summed = summed if rank and summed else tuple(range(rank))
    if all(shape[d] == 1 for d in summed):
        value = cast_like(
            builder, draft, _ref(draft.args[0]), TensorType(shape, draft.outputs[0].dtype)
        )
        return (reshape(builder, draft, value, draft.outputs[0].shape),)
    draft.op, draft.args = "aten.sum.dim_IntList", (draft.args[0], summed, keep)
    draft.kwargs = tuple(item for item in draft.kwargs if item[0] == "dtype")
    return None


def filled(value: float | bool | None, position: int = 0) -> Rewrite:
    """A tensor of one number, whatever it is made like.

    Args:
        value: The number; None if it is the argument at ``position``.
        position: Where the number is.
    """

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        output = draft.outputs[0]
        number = _arg(draft, position, "fill_value") if value is None else value
        if isinstance(number, Ref):
            return (cast_like(builder, draft, number, output),)
        assert isinstance(number, (bool, int, float)), number
        return (full(builder, draft, number, output),)

    return rewrite


def full(builder: Builder, draft: Draft, number: float | bool, output: TensorType) -> Ref:
    """A tensor of one number, which is written as its dtype has it."""
    if output.dtype == "bool":
        number = bool(number)
    elif output.is_floating:
        number = float(number)
    else:
        number = int(number)
    dtype = Const("dtype", output.dtype)
    made = Draft(
        "aten.full.default",
        (output.shape, number),
        (("device", CPU), ("dtype", dtype)),
        (output,),
        draft.phase,
        draft.source,
    )
    return builder.keep(made)[0]


def copy(builder: Builder, draft: Draft) -> Refs:
    """What a functional ``copy_`` leaves: the other tensor in the first one's shape and dtype."""
    return (cast_like(builder, draft, _ref(draft.args[1]), draft.outputs[0]),)


def arange(builder: Builder, draft: Draft) -> Refs:
    """Start, end and step are written out."""
    numbers = [a for a in draft.args if isinstance(a, (int, float))]
    start, end, step = {
        1: lambda n: (0, n[0], 1),
        2: lambda n: (n[0], n[1], 1),
        3: lambda n: (n[0], n[1], n[2]),
    }[len(numbers)](numbers)
    draft.op, draft.args = "aten.arange.start_step", (start, end, step)
    draft.kwargs = (("device", CPU), ("dtype", Const("dtype", draft.outputs[0].dtype)))
    return None


def factory(builder: Builder, draft: Draft) -> Refs:
    """Other ops without a tensor operand say their device and dtype."""
    draft.kwargs = (("device", CPU), ("dtype", Const("dtype", draft.outputs[0].dtype)))
    return None


def renamed(op: str) -> Rewrite:
    """The same op under its usual name."""

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        draft.op = op
        return builder.emit(draft)

    return rewrite


def power(builder: Builder, draft: Draft) -> Refs:
    """``x ** 1`` is x."""
    exponent = draft.args[1]
    same = _operand_type(builder, draft) == draft.outputs[0]
    return (_ref(draft.args[0]),) if exponent == 1 and same else None


def scaled(builder: Builder, draft: Draft) -> Refs:
    """``x * 1`` and ``x / 1`` are x, where that changes neither dtype nor shape."""
    draft.op = draft.op.replace(".Scalar", ".Tensor")
    number = draft.args[1]
    if isinstance(number, Ref) or isinstance(draft.args[0], (int, float)):
        return None
    same = _operand_type(builder, draft) == draft.outputs[0]
    return (_ref(draft.args[0]),) if number == 1 and same else None


def positive_dims(position: int, rank_of: int | None = None) -> Rewrite:
    """A dim, or a tuple of dims, that is not negative.

    Args:
        position: Where the dims are.
        rank_of: Position of the shape that the dims count; None for that of operand 0.
    """

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        if position < len(draft.args):
            if rank_of is None:
                rank = len(_operand_type(builder, draft).shape)
            else:
                rank = len(_tuple(draft.args[rank_of]))
            args = list(draft.args)
            args[position] = _positive(args[position], max(rank, 1))
            draft.args = tuple(args)
        return None

    return rewrite


def _positive(dims: Arg, rank: int) -> Arg:
    if isinstance(dims, tuple):
        return tuple(_positive(d, rank) for d in dims)
    return dims % rank if isinstance(dims, int) else dims


def slice_backward(builder: Builder, draft: Draft) -> Refs:
    """Dim, start, end and step are in range."""
    shape = tuple(_int(size) for size in _tuple(draft.args[1]))
    dim = _int(draft.args[2]) % len(shape)
    where = slice(_int(draft.args[3]), _int(draft.args[4]), _int(draft.args[5]))
    first, last, step = where.indices(shape[dim])
    draft.args = (draft.args[0], shape, dim, first, max(first, last), step)
    return None


def slice_scatter(builder: Builder, draft: Draft) -> Refs:
    """Dim, start, end and step are written out, in range; writing all is the source alone."""
    shape = draft.outputs[0].shape
    dim = _int(_arg(draft, 2, "dim", 0)) % len(shape)
    start, end = _arg(draft, 3, "start"), _arg(draft, 4, "end")
    step = _int(_arg(draft, 5, "step", 1))
    first, last, _ = slice(start, end, step).indices(shape[dim])
    if (first, last, step) == (0, shape[dim], 1):
        return (cast_like(builder, draft, _ref(draft.args[1]), draft.outputs[0]),)
    draft.args, draft.kwargs = (*draft.args[:2], dim, first, max(first, last), step), ()
    return None


def masked_fill(builder: Builder, draft: Draft) -> Refs:
    """A choice between the number and the operand."""
    output, value = draft.outputs[0], draft.args[2]
    kind = TensorType((), output.dtype)
    if isinstance(value, Ref):
        filler = cast_like(builder, draft, value, kind)
    else:
        assert isinstance(value, (bool, int, float)), value
        filler = full(builder, draft, value, kind)
    args = (draft.args[1], filler, draft.args[0])
    return (builder.derive(draft, "aten.where.self", args, output),)


def repeat(builder: Builder, draft: Draft) -> Refs:
    """A view with a dim of one before each dim, expanded and merged."""
    known, output = _operand_type(builder, draft), draft.outputs[0]
    times = tuple(_int(n) for n in _tuple(draft.args[1]))
    shape = (1,) * (len(times) - len(known.shape)) + known.shape
    apart = tuple(size for n in shape for size in (1, n))
    wide = tuple(size for n, r in zip(shape, times, strict=True) for size in (r, n))
    value = reshape(builder, draft, _ref(draft.args[0]), apart)
    value = cast_like(builder, draft, value, TensorType(wide, known.dtype))
    return (reshape(builder, draft, value, output.shape),)


def as_strided(builder: Builder, draft: Draft) -> Refs:
    """What a storage view shows, read as a view or picked by index from the flat storage."""
    known, output = _operand_type(builder, draft), draft.outputs[0]
    size, stride, offset = _storage_view(draft, 1)
    value = _in_storage_order(builder, draft, _ref(draft.args[0]), _strides(draft))
    if offset == 0 and size_in_order(size, stride) and output.num_elements == known.num_elements:
        return (reshape(builder, draft, value, output.shape),)
    flat = reshape(builder, draft, value, (known.num_elements,))
    places = _places(builder, draft, size, stride, offset)
    return (builder.derive(draft, "aten.index.Tensor", (flat, (places,)), output),)


def as_strided_scatter(builder: Builder, draft: Draft) -> Refs:
    """A write through a storage view, as a view of what is written or by index."""
    output = draft.outputs[0]
    size, stride, offset = _storage_view(draft, 2)
    source = _ref(draft.args[1])
    order = _order(_strides(draft), output.shape)
    stored = tuple(output.shape[d] for d in order)
    count = builder.type_of(source).num_elements
    if offset == 0 and size_in_order(size, stride) and count == output.num_elements:
        value = reshape(builder, draft, source, stored)
    else:
        value = _in_storage_order(builder, draft, _ref(draft.args[0]), _strides(draft))
        flat = TensorType((output.num_elements,), output.dtype)
        args: tuple[Arg, ...] = (
            reshape(builder, draft, value, flat.shape),
            (_places(builder, draft, size, stride, offset),),
            source,
        )
        value = builder.derive(draft, "aten.index_put.default", args, flat)
        value = reshape(builder, draft, value, stored)
    back = tuple(order.index(d) for d in range(len(order)))
    return (builder.derive(draft, "aten.permute.default", (value, back), output),)


def _storage_view(draft: Draft, at: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    size = tuple(_int(n) for n in _tuple(draft.args[at]))
    stride = tuple(_int(n) for n in _tuple(draft.args[at + 1]))
    return size, stride, _int(_arg(draft, at + 2, "storage_offset") or 0)


def _strides(draft: Draft) -> tuple[int, ...]:
    return tuple(_int(n) for n in _tuple(dict(draft.kwargs)["operand_stride"]))


def size_in_order(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether these strides are those of a contiguous tensor; dims of one do not count."""
    expected = 1
    for n, step in reversed(list(zip(size, stride, strict=True))):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _order(stride: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dims from outermost in storage to innermost."""
    dims = range(len(shape))
    return tuple(sorted(dims, key=lambda d: (-stride[d], -shape[d], d)))


def _in_storage_order(builder: Builder, draft: Draft, value: Ref, stride: tuple[int, ...]) -> Ref:
    """The value with its dims in the order of its storage."""
    known = builder.type_of(value)
    order = _order(stride, known.shape)
    stored = TensorType(tuple(known.shape[d] for d in order), known.dtype)
    if not size_in_order(stored.shape, tuple(stride[d] for d in order)):
        raise UnsupportedError(
            f"cannot capture {draft.op!r} in {draft.source}: it reads the memory around a tensor "
            "that is part of a larger one; use slicing, unfold or indexing instead"
        )
    return builder.derive(draft, "aten.permute.default", (value, order), stored)


def _places(
    builder: Builder, draft: Draft, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Ref:
    """Index into the flat storage of every element of a storage view."""
    total = full(builder, draft, offset, TensorType((), "int64"))
    shape: tuple[int, ...] = ()
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        line = TensorType((n,), "int64")
        run = builder.derive(
            draft,
            "aten.arange.start_step",
            (0, n, 1),
            line,
            device=CPU,
            dtype=Const("dtype", "int64"),
        )
        steps = builder.derive(draft, "aten.mul.Tensor", (run, step), line)
        spread = reshape(builder, draft, steps, (n, *(1,) * (len(size) - dim - 1)))
        left = reshape(builder, draft, total, (*shape, *(1,) * (len(size) - dim)))
        shape = (*shape, n)
        whole = TensorType((*shape, *(1,) * (len(size) - dim - 1)), "int64")
        total = builder.derive(draft, "aten.add.Tensor", (left, spread), whole)
    return total


def both(builder: Builder, draft: Draft) -> Refs:
    """``True and x`` is x."""
    a, b = (_ref(arg) for arg in draft.args)
    for value, other in ((a, b), (b, a)):
        maker = builder.maker(value)
        if maker.op == "aten.full.default" and maker.args[1] is True:
            if builder.type_of(other).dtype == "bool":
                return (cast_like(builder, draft, other, draft.outputs[0]),)
    return None


def index(builder: Builder, draft: Draft) -> Refs:
    """Indexing every dim by all of its positions only reorders dims."""
    value, output = _ref(draft.args[0]), draft.outputs[0]
    shape = builder.type_of(value).shape
    indices = _tuple(draft.args[1])
    rank = len(output.shape) - (len(shape) - len(indices))
    places = [_run_of(builder, i, n, rank) for i, n in zip(indices, shape, strict=False)]
    found = [place for place in places if place is not None]
    if len(found) < len(places) or len(set(found)) < len(found):
        return None
    rest = range(len(indices), len(shape))
    order = (*sorted(range(len(found)), key=lambda d: found[d]), *rest)
    moved = TensorType(tuple(shape[d] for d in order), output.dtype)
    made = builder.derive(draft, "aten.permute.default", (value, order), moved)
    made = reshape(builder, draft, made, _without(output.shape, found, rank))
    return (cast_like(builder, draft, made, output),)


def _run_of(builder: Builder, index: Arg, size: int, rank: int) -> int | None:
    """The output dim along which an index runs through 0 to ``size``; None if it does not."""
    if not isinstance(index, Ref):
        return None
    shape = builder.type_of(index).shape
    maker = builder.maker(index)
    if maker.op == "aten.view.default":
        maker = builder.maker(_ref(maker.args[0]))
    if maker.op != "aten.arange.start_step" or maker.args != (0, size, 1):
        return None
    long = [d for d, n in enumerate(shape) if n != 1]
    if len(long) > 1 or (not long and size != 1):
        return None
    return rank - len(shape) + (long[0] if long else len(shape) - 1)


def _without(shape: tuple[int, ...], places: list[int], rank: int) -> tuple[int, ...]:
    """The output's shape with the dims that no index runs along set to one."""
    return tuple(n if d in places or d >= rank else 1 for d, n in enumerate(shape))


def added(builder: Builder, draft: Draft) -> Refs:
    """``x + 0`` and ``x - 0`` are x, where that changes neither dtype nor shape."""
    draft.op = draft.op.replace(".Scalar", ".Tensor")
    same = isinstance(draft.args[0], Ref) and _operand_type(builder, draft) == draft.outputs[0]
    number = draft.args[1]
    return (_ref(draft.args[0]),) if same and type(number) in (int, float) and number == 0 else None


_DIM_SECOND = (
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten.all.dim",
    "aten.amax.default",
    "aten.amin.default",
    "aten.any.dim",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.cummax.default",
    "aten.cumprod.default",
    "aten.cumsum.default",
    "aten.flip.default",
    "aten.gather.default",
    "aten.index_add.default",
    "aten.index_select.default",
    "aten.logcumsumexp.default",
    "aten.logsumexp.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.prod.dim_int",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
    "aten.sort.default",
    "aten.unfold.default",
)
"""Ops whose dims are their second argument."""
_DIM_THIRD = (
    "aten.roll.default",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.topk.default",
)
"""Ops whose dims are their third argument."""

REWRITES: Mapping[str, Rewrite] = {
    "aten.detach.default": _same,
    "aten.alias.default": _same,
    "aten.lift_fresh.default": _same,
    "aten.lift_fresh_copy.default": _same,
    "aten.lift.default": _same,
    "aten.clone.default": _same,
    "aten.contiguous.default": _same,
    "aten.resolve_conj.default": _same,
    "aten.resolve_neg.default": _same,
    "aten.view.default": view,
    "aten._unsafe_view.default": view,
    "aten.reshape.default": view,
    "aten._reshape_copy.default": view,
    "aten._reshape_alias.default": view,
    "aten.view_copy.default": view,
    "aten.unsqueeze.default": view,
    "aten.squeeze.default": view,
    "aten.squeeze.dim": view,
    "aten.squeeze.dims": view,
    "aten.permute.default": permute,
    "aten.t.default": permute,
    "aten.transpose.int": permute,
    "aten.expand.default": expand,
    "aten._to_copy.default": to_copy,
    "aten.slice.Tensor": slice_,
    "aten.select.int": select,
    "aten.unbind.int": unbind,
    "aten.stack.default": stack,
    "aten.cat.default": cat,
    "aten.sum.default": sum_,
    "aten.sum.dim_IntList": sum_,
    "aten.unsafe_split.Tensor": renamed("aten.split.Tensor"),
    "aten.unsafe_split_with_sizes.default": renamed("aten.split_with_sizes.default"),
    "aten.zeros.default": filled(0.0),
    "aten.zeros_like.default": filled(0.0),
    "aten.new_zeros.default": filled(0.0),
    "aten.zero.default": filled(0.0),
    "aten.empty.memory_format": filled(0.0),
    "aten.empty_strided.default": filled(0.0),
    "aten.empty_like.default": filled(0.0),
    "aten.new_empty.default": filled(0.0),
    "aten.new_empty_strided.default": filled(0.0),
    "aten.ones.default": filled(1.0),
    "aten.ones_like.default": filled(1.0),
    "aten.new_ones.default": filled(1.0),
    "aten.full.default": filled(None, 1),
    "aten.full_like.default": filled(None, 1),
    "aten.new_full.default": filled(None, 2),
    "aten.scalar_tensor.default": filled(None, 0),
    "aten.fill.Scalar": filled(None, 1),
    "aten.fill.Tensor": filled(None, 1),
    "aten.copy.default": copy,
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.eye.default": factory,
    "aten.eye.m": factory,
    "aten.linspace.default": factory,
    "aten.tril_indices.default": factory,
    "aten.triu_indices.default": factory,
    "aten.add.Scalar": added,
    "aten.add.Tensor": added,
    "aten.sub.Scalar": added,
    "aten.sub.Tensor": added,
    "aten.mul.Scalar": scaled,
    "aten.mul.Tensor": scaled,
    "aten.div.Scalar": scaled,
    "aten.div.Tensor": scaled,
    "aten.pow.Tensor_Scalar": power,
    "aten.bitwise_and.Tensor": both,
    "aten.logical_and.default": both,
    "aten.index.Tensor": index,
    "aten.slice_backward.default": slice_backward,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_backward.default": positive_dims(2, rank_of=1),
    "aten.select_scatter.default": positive_dims(2),
    "aten.masked_fill.Scalar": masked_fill,
    "aten.masked_fill.Tensor": masked_fill,
    "aten.repeat.default": repeat,
    "aten.as_strided.default": as_strided,
    "aten.as_strided_scatter.default": as_strided_scatter,
    "aten._conj.default": renamed("aten.conj_physical.default"),
    "aten._softmax_backward_data.default": positive_dims(2),
    "aten._log_softmax_backward_data.default": positive_dims(2),
    **{op: positive_dims(1) for op in _DIM_SECOND},
    **{op: positive_dims(2) for op in _DIM_THIRD},
}
