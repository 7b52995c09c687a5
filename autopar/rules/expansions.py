"""Local programs of ops whose reduced or looked-up dim is split.

Each emits the ops of one rank. A masked lookup reads what the rank holds and gives zero for the
rest, so its result is a term of a sum. A softmax over a split dim joins the log-sum-exps of all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.ir.graph import Arg, Const, Ref, TensorType, replace_refs
from autopar.rules.local import Emitter, LocalOp

Expansion = Callable[[Emitter, LocalOp], None]

_HALF = ("float16", "bfloat16")


def compute_dtype(dtype: str) -> str:
    """Dtype in which kernels accumulate values of ``dtype``."""
    return "float32" if dtype in _HALF else dtype


def cast(emit: Emitter, value: Ref, kind: TensorType, dtype: str) -> Ref:
    """The value in another dtype; itself if it has it."""
    if kind.dtype == dtype:
        return value
    out = TensorType(kind.shape, dtype)
    return emit.call("aten._to_copy.default", (value,), out, {"dtype": Const("dtype", dtype)})


def with_size(kind: TensorType, dim: int, size: int) -> TensorType:
    """The type with another size of one dim."""
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)


def as_bool(kind: TensorType) -> TensorType:
    return TensorType(kind.shape, "bool")


def outside_range(
    emit: Emitter, index: Ref, kind: TensorType, start: int, size: int
) -> tuple[Ref, Ref]:
    """Indices counted from ``start``, and where they miss ``[start, start + size)``."""
    local = emit.call("aten.sub.Tensor", (index, start), kind)
    low = emit.call("aten.lt.Scalar", (local, 0), as_bool(kind))
    high = emit.call("aten.ge.Scalar", (local, size), as_bool(kind))
    return local, emit.call("aten.bitwise_or.Tensor", (low, high), as_bool(kind))


def masked_index(
    emit: Emitter, index: Ref, kind: TensorType, start: int, size: int
) -> tuple[Ref, Ref]:
    """Indices into the rank's range, zero where they miss it, and where that is."""
    local, outside = outside_range(emit, index, kind, start, size)
    return emit.call("aten.masked_fill.Scalar", (local, outside, 0), kind), outside


def zero_where(emit: Emitter, value: Ref, mask: Ref, kind: TensorType) -> Ref:
    return emit.call("aten.masked_fill.Scalar", (value, mask, 0), kind)


def bias_once(product: str) -> Expansion:
    """A product plus a bias (operand 0), where the product is partial: one rank adds it."""

    def expand(emit: Emitter, op: LocalOp) -> None:
        bias, first, second = op.values
        out = op.output_type()
        value = emit.call(product, (first, second), out)
        if op.is_first(op.axes_on(1, len(op.operand_types[1].shape) - 1)):
            value = emit.call("aten.add.Tensor", (value, bias), out)
        emit.result(value)

    return expand


def embedding(emit: Emitter, op: LocalOp) -> None:
    """Rows that another rank holds are zero."""
    weight, index = op.values
    kind, out = op.operand_type(1), op.output_type()
    rows = op.operand_shape(0)[0]
    safe, outside = masked_index(emit, index, kind, op.start(0, 0), rows)
    value = emit.call("aten.embedding.default", (weight, safe), out)
    column = TensorType((*kind.shape, 1), "bool")
    mask = emit.call("aten.unsqueeze.default", (outside, len(kind.shape)), column)
    emit.result(zero_where(emit, value, mask, out))


def embedding_backward(emit: Emitter, op: LocalOp) -> None:
    """Gradients of rows held elsewhere, and of the padding row, go to a spare row that is cut."""
    grad, index = op.values
    kind, out = op.operand_type(1), op.output_type()
    rows = out.shape[0]
    spare = with_size(out, 0, rows + 1)
    padding, by_count = op.node.args[3], op.node.args[4]
    local, outside = outside_range(emit, index, kind, op.output_start(0, 0), rows)
    if isinstance(padding, int) and padding >= 0:
        padded = emit.call("aten.eq.Scalar", (index, padding), as_bool(kind))
        outside = emit.call("aten.bitwise_or.Tensor", (outside, padded), as_bool(kind))
    moved = emit.call("aten.masked_fill.Scalar", (local, outside, rows), kind)
    args: tuple[Arg, ...] = (grad, moved, rows + 1, rows, by_count)
    full = emit.call("aten.embedding_dense_backward.default", args, spare)
    emit.result(emit.call("aten.slice.Tensor", (full, 0, 0, rows, 1), out))


def gather(emit: Emitter, op: LocalOp) -> None:
    """Elements that another rank holds are zero."""
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    kind, out = op.operand_type(1), op.output_type()
    safe, outside = masked_index(
        emit, op.values[1], kind, op.start(0, dim), op.operand_shape(0)[dim]
    )
    value = emit.call("aten.gather.default", (op.values[0], dim, safe), out)
    emit.result(zero_where(emit, value, outside, out))


def _dim(op: LocalOp, position: int, rank: int) -> int:
    dim = op.node.args[position]
    assert isinstance(dim, int)
    return dim % rank


def index_select(emit: Emitter, op: LocalOp) -> None:
    """Rows that another rank holds are zero."""
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    kind, out = op.operand_type(1), op.output_type()
    safe, outside = masked_index(
        emit, op.values[1], kind, op.start(0, dim), op.operand_shape(0)[dim]
    )
    value = emit.call("aten.index_select.default", (op.values[0], dim, safe), out)
    mask = _beside(emit, outside, as_bool(kind), len(out.shape) - 1 - dim)
    emit.result(zero_where(emit, value, mask, out))


def _beside(emit: Emitter, mask: Ref, kind: TensorType, behind: int) -> Ref:
    """A mask followed by dims of size one, so that it broadcasts over the dims behind."""
    if behind == 0:
        return mask
    shape = kind.shape + (1,) * behind
    return emit.call("aten.reshape.default", (mask, shape), TensorType(shape, kind.dtype))


def _base(emit: Emitter, op: LocalOp, added: Sequence[tuple[int, int]]) -> Ref:
    """Operand 0 on the first rank of the axes that split what is added, zeros on the others."""
    axes = {axis for index, dim in added for axis in op.axes_on(index, dim)}
    if op.is_first(sorted(axes)):
        return op.values[0]
    return emit.call("aten.zeros_like.default", (op.values[0],), op.operand_type(0))


def scatter_add(emit: Emitter, op: LocalOp) -> None:
    """Elements that belong to another rank's rows are added as zeros."""
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    index, source = op.values[1], op.values[2]
    if op.axes_on(0, dim):
        kind, rows = op.operand_type(1), op.operand_shape(0)[dim]
        index, outside = masked_index(emit, index, kind, op.start(0, dim), rows)
        source = zero_where(emit, source, outside, op.operand_type(2))
    base = _base(emit, op, [(1, dim)])
    emit.result(emit.call(op.node.op, (base, dim, index, source), op.output_type()))


def index_add(emit: Emitter, op: LocalOp) -> None:
    """Rows that belong to another rank are added as zeros."""
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    index, source = op.values[1], op.values[2]
    if op.axes_on(0, dim):
        kind, rows = op.operand_type(1), op.operand_shape(0)[dim]
        index, outside = masked_index(emit, index, kind, op.start(0, dim), rows)
        behind = len(op.operand_types[2].shape) - 1 - dim
        mask = _beside(emit, outside, as_bool(kind), behind)
        source = zero_where(emit, source, mask, op.operand_type(2))
    base = _base(emit, op, [(1, 0)])
    args = (base, dim, index, source)
    emit.result(emit.call(op.node.op, args, op.output_type(), op.kwargs()))


def index(places: Sequence[int], first: int, rank: int) -> Expansion:
    """``x[...]`` where some indexed dims are split; index dims come ``first`` in the result.

    Args:
        places: Dims of x that have an index, in order; the indices are operands 1 on.
        first: Dims of the result before the index dims.
        rank: Dims of all indices broadcast together.
    """

    def expand(emit: Emitter, op: LocalOp) -> None:
        out = op.output_type()
        indices, outside = _local_indices(emit, op, places)
        value = emit.call(op.node.op, (op.values[0], indices), out)
        behind = len(out.shape) - first - rank
        mask = _beside(emit, *outside, behind)
        emit.result(zero_where(emit, value, mask, out))

    return expand


def index_put(places: Sequence[int], first: int, rank: int) -> Expansion:
    """``x[...] += values`` where some indexed dims or some values are split."""

    def expand(emit: Emitter, op: LocalOp) -> None:
        last = len(op.values) - 1
        values, indices = op.values[last], op.args()[1]
        if any(op.axes_on(0, place) for place in places):
            indices, outside = _local_indices(emit, op, places)
            whole = len(op.node.outputs[0].shape) - len(places) + rank
            mask = _beside(emit, *outside, whole - first - rank)
            shape = outside[1].shape + (1,) * (whole - first - rank)
            values = _zero_values(emit, values, op.operand_type(last), mask, shape)
        split = [(i, d) for i in range(1, last) for d in range(len(op.operand_types[i].shape))]
        base = _base(emit, op, split)
        args = (base, indices, values, True)
        emit.result(emit.call(op.node.op, args, op.output_type()))

    return expand


def _zero_values(
    emit: Emitter, values: Ref, kind: TensorType, mask: Ref, shape: tuple[int, ...]
) -> Ref:
    """Values zero where a mask of this shape says so; both are broadcast."""
    rank = max(len(shape), len(kind.shape))
    pairs = zip(
        (1,) * (rank - len(shape)) + shape,
        (1,) * (rank - len(kind.shape)) + kind.shape,
        strict=True,
    )
    out = TensorType(tuple(a if b == 1 else b for a, b in pairs), kind.dtype)
    return emit.call("aten.masked_fill.Scalar", (values, mask, 0), out)


def _local_indices(
    emit: Emitter, op: LocalOp, places: Sequence[int]
) -> tuple[Arg, tuple[Ref, TensorType]]:
    """The list of indices, local where their dim is split, and where any lies elsewhere."""
    local: list[Ref] = []
    mask: tuple[Ref, TensorType] | None = None
    for operand, place in enumerate(places, start=1):
        value, kind = op.values[operand], op.operand_type(operand)
        if op.axes_on(0, place):
            size = op.operand_types[0].shape[place]
            value = emit.call("aten.remainder.Scalar", (value, size), kind)
            start, rows = op.start(0, place), op.operand_shape(0)[place]
            value, outside = masked_index(emit, value, kind, start, rows)
            mask = _either(emit, mask, (outside, as_bool(kind)))
        local.append(value)
    assert mask is not None
    listed = op.node.args[1]
    assert isinstance(listed, tuple)
    return replace_refs(listed, iter(local)), mask


def _either(
    emit: Emitter, first: tuple[Ref, TensorType] | None, second: tuple[Ref, TensorType]
) -> tuple[Ref, TensorType]:
    """Where one of two masks holds, broadcast."""
    if first is None:
        return second
    a, b = first[1].shape, second[1].shape
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    out = TensorType(tuple(y if x == 1 else x for x, y in pairs), "bool")
    return emit.call("aten.bitwise_or.Tensor", (first[0], second[0]), out), out


def mean(position: int) -> Expansion:
    """The local sum divided by the global count, over the dims at this argument (or all)."""

    def expand(emit: Emitter, op: LocalOp) -> None:
        kind, out = op.operand_types[0], op.output_type()
        total = replace_name(op.node.op, "sum")
        over = op.node.args[position] if position < len(op.node.args) else None
        dims = over if isinstance(over, tuple) and over else tuple(range(len(kind.shape)))
        count = math.prod(kind.shape[d] for d in dims if isinstance(d, int))
        value = emit.call(total, op.args(), out, op.kwargs())
        emit.result(emit.call("aten.div.Tensor", (value, count), out))

    return expand


def replace_name(op: str, name: str) -> str:
    """``aten.sum.dim_IntList`` of ``aten.mean.dim``: the same arguments, another op."""
    return f"aten.{name}.default" if op.endswith(".default") else f"aten.{name}.dim_IntList"


def logsumexp(emit: Emitter, op: LocalOp) -> None:
    """Log-sum-exp over split dims."""
    kind = op.operand_type(0)
    over = op.node.args[1]
    assert isinstance(over, tuple)
    dims = tuple(d % len(kind.shape) for d in over if isinstance(d, int)) or tuple(
        range(len(kind.shape))
    )
    value = _joined_logsumexp(emit, op, op.values[0], kind, dims)
    emit.result(emit.call("aten.reshape.default", (value, op.output_shape()), op.output_type()))


def onehot_scatter(emit: Emitter, op: LocalOp) -> None:
    """Rows whose index lies elsewhere stay zero."""
    src, index = op.values
    out, kind = op.output_type(), op.operand_type(1)
    dim = _dim(op, 2, len(out.shape))
    size = out.shape[dim]
    safe, outside = masked_index(emit, index, kind, op.output_start(0, dim), size)
    held = zero_where(emit, src, outside, op.operand_type(0))
    emit.result(emit.call(op.node.op, (held, safe, dim, size), out))


def routed(emit: Emitter, op: LocalOp) -> None:
    """Rows whose expert another rank holds give zeros."""
    rows, weight, expert = op.values
    local = emit.call("aten.sub.Tensor", (expert, op.start(1, 0)), op.operand_type(2))
    emit.result(emit.call(op.node.op, (rows, weight, local), op.output_type()))


def routed_outer(emit: Emitter, op: LocalOp) -> None:
    """Rows whose expert another rank holds count for none."""
    left, right, expert = op.values
    out = op.output_type()
    local = emit.call("aten.sub.Tensor", (expert, op.output_start(0, 0)), op.operand_type(2))
    emit.result(emit.call(op.node.op, (left, right, local, out.shape[0]), out))


def softmax(emit: Emitter, op: LocalOp) -> None:
    """Softmax over a split dim: the exponential of the log-softmax."""
    value, kind = _log_softmax(emit, op)
    value = emit.call("aten.exp.default", (value,), kind)
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def log_softmax(emit: Emitter, op: LocalOp) -> None:
    """Log-softmax over a split dim: the log-sum-exp of all ranks is taken off."""
    value, kind = _log_softmax(emit, op)
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def _log_softmax(emit: Emitter, op: LocalOp) -> tuple[Ref, TensorType]:
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    given = op.operand_type(0)
    kind = TensorType(given.shape, compute_dtype(op.node.outputs[0].dtype))
    value = cast(emit, op.values[0], given, kind.dtype)
    lse = _joined_logsumexp(emit, op, value, kind, (dim,))
    return emit.call("aten.sub.Tensor", (value, lse), kind), kind


def _joined_logsumexp(
    emit: Emitter, op: LocalOp, value: Ref, kind: TensorType, dims: tuple[int, ...]
) -> Ref:
    """Log-sum-exp over dims of operand 0, kept with size one: local ones, joined.

    A rank whose elements are all minus infinity adds nothing.
    """
    axes = sorted({axis for dim in dims for axis in op.axes_on(0, dim)})
    row = TensorType(tuple(1 if i in dims else s for i, s in enumerate(kind.shape)), kind.dtype)
    own = emit.call("aten.logsumexp.default", (value, dims, True), row)
    top = emit.all_reduce(own, axes, "max")
    away = emit.call("aten.sub.Tensor", (own, top), row)
    share = emit.call("aten.exp.default", (away,), row)
    total = emit.all_reduce(share, axes)
    log = emit.call("aten.log.default", (total,), row)
    return emit.call("aten.add.Tensor", (log, top), row)


def softmax_backward(emit: Emitter, op: LocalOp) -> None:
    """``out * grad - out * sum(out * grad)``."""
    dim = _dim(op, 2, len(op.operand_types[0].shape))
    kind = _compute_type(op)
    grad, out = (cast(emit, op.values[i], op.operand_type(i), kind.dtype) for i in range(2))
    product = emit.call("aten.mul.Tensor", (grad, out), kind)
    total = _joined_sum(emit, op, product, kind, dim)
    value = emit.call("aten.addcmul.default", (product, out, total), kind, {"value": -1})
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def log_softmax_backward(emit: Emitter, op: LocalOp) -> None:
    """``grad - exp(out) * sum(grad)``."""
    dim = _dim(op, 2, len(op.operand_types[0].shape))
    kind = _compute_type(op)
    grad, out = (cast(emit, op.values[i], op.operand_type(i), kind.dtype) for i in range(2))
    total = _joined_sum(emit, op, grad, kind, dim)
    weights = emit.call("aten.exp.default", (out,), kind)
    value = emit.call("aten.addcmul.default", (grad, weights, total), kind, {"value": -1})
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def _compute_type(op: LocalOp) -> TensorType:
    kind = op.operand_type(0)
    return TensorType(kind.shape, compute_dtype(kind.dtype))


def _joined_sum(emit: Emitter, op: LocalOp, value: Ref, kind: TensorType, dim: int) -> Ref:
    row = with_size(kind, dim, 1)
    total = emit.call("aten.sum.dim_IntList", (value, (dim,), True), row)
    return emit.all_reduce(total, op.axes_on(0, dim))


# Causal attention of a contiguous piece of the queries: query ``first + i`` reads the keys up to
# its own place.


def attention(emit: Emitter, op: LocalOp) -> None:
    """Two attentions without a mask where that is possible, one with a mask otherwise."""
    if len(op.values) == 3 and _is_square(op, 0):
        results: tuple[Ref, ...] = _attention_in_parts(emit, op)
    else:
        mask = causal_mask(emit, op, 0, op.values[3] if len(op.values) > 3 else None)
        args = (*op.values[:3], mask, False, op.node.args[5])
        results = emit.call_many(op.node.op, args, (op.output_type(0), op.output_type(1)))
    for index, value in enumerate(results):
        emit.result(value, index)


def attention_backward(emit: Emitter, op: LocalOp) -> None:
    """The backward of `attention`, in the same parts."""
    if len(op.values) == 6 and _is_square(op, 1):
        results: tuple[Ref, ...] = _attention_backward_in_parts(emit, op)
    else:
        mask = causal_mask(emit, op, 1, op.values[4] if len(op.values) > 6 else None)
        args = (*op.values[:4], mask, *op.values[-2:], False, op.node.args[8])
        outs = tuple(op.output_type(i) for i in range(len(op.node.outputs)))
        results = emit.call_many(op.node.op, args, outs)
    for index, value in enumerate(results):
        emit.result(value, index)


def _is_square(op: LocalOp, query: int) -> bool:
    """Whether queries and keys are at the same places."""
    return op.operand_types[query].shape[2] == op.operand_types[query + 1].shape[2]


def _attention_in_parts(emit: Emitter, op: LocalOp) -> tuple[Ref, Ref]:
    """All keys before the piece, and the causal square of the piece, joined by log-sum-exp.

    Kernels have both parts, and the keys behind the piece cost nothing.
    """
    first, rows = op.start(0, 2), op.operand_shape(0)[2]
    outs = (op.output_type(0), op.output_type(1))
    parts = []
    for start, end, causal in _parts(first, rows):
        keys, values = (_between(emit, op, i, start, end) for i in (1, 2))
        args = (op.values[0], keys, values, None, causal, op.node.args[5])
        parts.append(emit.call_many(op.node.op, args, outs))
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    lse = emit.call("aten.logaddexp.default", (parts[0][1], parts[1][1]), outs[1])
    high = TensorType(outs[0].shape, outs[1].dtype)
    column = TensorType((*outs[1].shape, 1), outs[1].dtype)
    terms = []
    for out, own in parts:
        away = emit.call("aten.sub.Tensor", (own, lse), outs[1])
        share = emit.call("aten.exp.default", (away,), outs[1])
        share = emit.call("aten.unsqueeze.default", (share, 3), column)
        wide = cast(emit, out, outs[0], high.dtype)
        terms.append(emit.call("aten.mul.Tensor", (wide, share), high))
    total = emit.call("aten.add.Tensor", (terms[0], terms[1]), high)
    return cast(emit, total, high, outs[0].dtype), lse


def _attention_backward_in_parts(emit: Emitter, op: LocalOp) -> tuple[Ref, Ref, Ref]:
    """Each part's backward from the joined output; keys behind the piece get zeros."""
    first, rows = op.start(1, 2), op.operand_shape(1)[2]
    outs = tuple(op.output_type(i) for i in range(3))
    grad, q, out, lse = (op.values[i] for i in (0, 1, 4, 5))
    parts = []
    for start, end, causal in _parts(first, rows):
        keys, values = (_between(emit, op, i, start, end) for i in (2, 3))
        args = (grad, q, keys, values, None, out, lse, causal, op.node.args[8])
        kinds = (outs[0], with_size(outs[1], 2, end - start), with_size(outs[2], 2, end - start))
        parts.append(emit.call_many(op.node.op, args, kinds))
    dq = parts[0][0]
    if len(parts) == 2:
        dq = emit.call("aten.add.Tensor", (dq, parts[1][0]), outs[0])
    dk, dv = (_joined_rows(emit, [p[i] for p in parts], outs[i], first + rows) for i in (1, 2))
    return dq, dk, dv


def _parts(first: int, rows: int) -> list[tuple[int, int, bool]]:
    """(start, end, causal) of the keys of each part."""
    own = (first, first + rows, True)
    return [(0, first, False), own] if first else [own]


def _between(emit: Emitter, op: LocalOp, operand: int, start: int, end: int) -> Ref:
    """Rows of keys or values."""
    kind = with_size(op.operand_type(operand), 2, end - start)
    return emit.call("aten.slice.Tensor", (op.values[operand], 2, start, end, 1), kind)


def _joined_rows(emit: Emitter, parts: Sequence[Ref], out: TensorType, rows: int) -> Ref:
    """Rows behind each other, and zeros behind them."""
    kind = with_size(out, 2, rows)
    value = parts[0]
    if len(parts) > 1:
        value = emit.call("aten.cat.default", (tuple(parts), 2), kind)
    behind = out.shape[2] - rows
    if behind:
        value = emit.call("aten.constant_pad_nd.default", (value, (0, 0, 0, behind), 0), out)
    return value


def causal_mask(emit: Emitter, op: LocalOp, query: int, mask: Ref | None) -> Ref:
    """Where the rank's queries may attend, joined with a mask (operand after the values)."""
    rows, columns = op.operand_shape(query)[2], op.operand_types[query + 1].shape[2]
    kind = TensorType((1, 1, rows, columns), "bool")
    args = (op.values[query], kind.shape)
    shown = emit.call("aten.new_ones.default", args, kind, {"dtype": Const("dtype", "bool")})
    first = op.start(query, 2)
    if mask is None:
        return emit.call("aten.tril.default", (shown, first), kind)
    given = op.operand_type(query + 3)
    joined = tuple(max(a, b) for a, b in zip(given.shape, kind.shape, strict=True))
    if given.dtype == "bool":
        shown = emit.call("aten.tril.default", (shown, first), kind)
        return emit.call("aten.bitwise_and.Tensor", (mask, shown), as_bool(TensorType(joined, "")))
    hidden = emit.call("aten.triu.default", (shown, first + 1), kind)
    out = TensorType(joined, given.dtype)
    return emit.call("aten.masked_fill.Scalar", (mask, hidden, -math.inf), out)
