"""Storage views (``as_strided``) and indexing as views, where they are that."""

from __future__ import annotations

from autopar.capture.arguments import Refs, argument, as_int, as_ref, as_tuple, operand_type
from autopar.capture.fills import full
from autopar.capture.simplify import CPU, Builder, Draft
from autopar.capture.views import cast_like, reshape
from autopar.errors import UnsupportedError
from autopar.ir.graph import Arg, Const, Ref, TensorType


def as_strided(builder: Builder, draft: Draft) -> Refs:
    """What a storage view shows, read as a view or picked by index from the flat storage."""
    known, output = operand_type(builder, draft), draft.outputs[0]
    size, stride, offset = _storage_view(draft, 1)
    value = _in_storage_order(builder, draft, as_ref(draft.args[0]), _strides(draft))
    if offset == 0 and size_in_order(size, stride) and output.num_elements == known.num_elements:
        return (reshape(builder, draft, value, output.shape),)
    flat = reshape(builder, draft, value, (known.num_elements,))
    places = _places(builder, draft, size, stride, offset)
    return (builder.derive(draft, "aten.index.Tensor", (flat, (places,)), output),)


def as_strided_scatter(builder: Builder, draft: Draft) -> Refs:
    """A write through a storage view, as a view of what is written or by index."""
    output = draft.outputs[0]
    size, stride, offset = _storage_view(draft, 2)
    source = as_ref(draft.args[1])
    order = _order(_strides(draft), output.shape)
    stored = tuple(output.shape[d] for d in order)
    count = builder.type_of(source).num_elements
    if offset == 0 and size_in_order(size, stride) and count == output.num_elements:
        value = reshape(builder, draft, source, stored)
    else:
        value = _in_storage_order(builder, draft, as_ref(draft.args[0]), _strides(draft))
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
    size = tuple(as_int(n) for n in as_tuple(draft.args[at]))
    stride = tuple(as_int(n) for n in as_tuple(draft.args[at + 1]))
    return size, stride, as_int(argument(draft, at + 2, "storage_offset") or 0)


def _strides(draft: Draft) -> tuple[int, ...]:
    return tuple(as_int(n) for n in as_tuple(dict(draft.kwargs)["operand_stride"]))


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


def index(builder: Builder, draft: Draft) -> Refs:
    """Indexing every dim by all of its positions only reorders dims."""
    value, output = as_ref(draft.args[0]), draft.outputs[0]
    shape = builder.type_of(value).shape
    indices = as_tuple(draft.args[1])
    rank = len(output.shape) - (len(shape) - len(indices))
    places = [run_of(builder, i, n, rank) for i, n in zip(indices, shape, strict=False)]
    found = [place for place in places if place is not None]
    if len(found) < len(places) or len(set(found)) < len(found):
        return None
    rest = range(len(indices), len(shape))
    order = (*sorted(range(len(found)), key=lambda d: found[d]), *rest)
    moved = TensorType(tuple(shape[d] for d in order), output.dtype)
    made = builder.derive(draft, "aten.permute.default", (value, order), moved)
    made = reshape(builder, draft, made, _without(output.shape, found, rank))
    return (cast_like(builder, draft, made, output),)


def run_of(builder: Builder, index: Arg, size: int, rank: int) -> int | None:
    """The output dim along which an index runs through 0 to ``size``; None if it does not."""
    if not isinstance(index, Ref):
        return None
    shape = builder.type_of(index).shape
    maker = builder.maker(index)
    if maker.op == "aten.view.default":
        maker = builder.maker(as_ref(maker.args[0]))
    if maker.op != "aten.arange.start_step" or maker.args != (0, size, 1):
        return None
    long = [d for d, n in enumerate(shape) if n != 1]
    if len(long) > 1 or (not long and size != 1):
        return None
    return rank - len(shape) + (long[0] if long else len(shape) - 1)


def _without(shape: tuple[int, ...], places: list[int], rank: int) -> tuple[int, ...]:
    """The output's shape with the dims that no index runs along set to one."""
    return tuple(n if d in places or d >= rank else 1 for d, n in enumerate(shape))
