"""Local programs of ops whose reduced or looked-up dim is split.

Each emits the ops of one rank. A masked lookup reads what the rank holds and gives zero for the
rest, so its result is a term of a sum. A softmax over a split dim joins its maximum and its sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.ir.graph import Arg, Const, Ref, TensorType
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


def onehot_scatter(emit: Emitter, op: LocalOp) -> None:
    """Rows whose index lies elsewhere stay zero."""
    src, index = op.values
    out, kind = op.output_type(), op.operand_type(1)
    dim = _dim(op, 2, len(out.shape))
    size = out.shape[dim]
    safe, outside = masked_index(emit, index, kind, op.output_start(0, dim), size)
    held = zero_where(emit, src, outside, op.operand_type(0))
    emit.result(emit.call(op.node.op, (held, safe, dim, size), out))


def softmax(emit: Emitter, op: LocalOp) -> None:
    """Softmax over a split dim: maximum and sum are joined."""
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    shifted, total, kind = _exponents(emit, op, dim)
    high = emit.call("aten.exp.default", (shifted,), kind)
    value = emit.call("aten.div.Tensor", (high, total), kind)
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def log_softmax(emit: Emitter, op: LocalOp) -> None:
    """Log-softmax over a split dim: maximum and sum are joined."""
    dim = _dim(op, 1, len(op.operand_types[0].shape))
    shifted, total, kind = _exponents(emit, op, dim)
    log = emit.call("aten.log.default", (total,), with_size(kind, dim, 1))
    value = emit.call("aten.sub.Tensor", (shifted, log), kind)
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def _exponents(emit: Emitter, op: LocalOp, dim: int) -> tuple[Ref, Ref, TensorType]:
    """Input minus its maximum, the sum of its exponentials, the type computed in."""
    kind = op.operand_type(0)
    value = cast(emit, op.values[0], kind, compute_dtype(op.node.outputs[0].dtype))
    kind = TensorType(kind.shape, compute_dtype(op.node.outputs[0].dtype))
    row, axes = with_size(kind, dim, 1), op.axes_on(0, dim)
    top = emit.call("aten.amax.default", (value, (dim,), True), row)
    top = emit.all_reduce(top, axes, "max")
    shifted = emit.call("aten.sub.Tensor", (value, top), kind)
    exps = emit.call("aten.exp.default", (shifted,), kind)
    total = emit.call("aten.sum.dim_IntList", (exps, (dim,), True), row)
    return shifted, emit.all_reduce(total, axes), kind


def softmax_backward(emit: Emitter, op: LocalOp) -> None:
    """``out * (grad - sum(grad * out))``."""
    dim = _dim(op, 2, len(op.operand_types[0].shape))
    kind = _compute_type(op)
    grad, out = (cast(emit, op.values[i], op.operand_type(i), kind.dtype) for i in range(2))
    product = emit.call("aten.mul.Tensor", (grad, out), kind)
    total = _joined_sum(emit, op, product, kind, dim)
    scaled = emit.call("aten.mul.Tensor", (out, total), kind)
    value = emit.call("aten.sub.Tensor", (product, scaled), kind)
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def log_softmax_backward(emit: Emitter, op: LocalOp) -> None:
    """``grad - exp(out) * sum(grad)``."""
    dim = _dim(op, 2, len(op.operand_types[0].shape))
    kind = _compute_type(op)
    grad, out = (cast(emit, op.values[i], op.operand_type(i), kind.dtype) for i in range(2))
    total = _joined_sum(emit, op, grad, kind, dim)
    weights = emit.call("aten.exp.default", (out,), kind)
    scaled = emit.call("aten.mul.Tensor", (weights, total), kind)
    value = emit.call("aten.sub.Tensor", (grad, scaled), kind)
    emit.result(cast(emit, value, kind, op.output_type().dtype))


def _compute_type(op: LocalOp) -> TensorType:
    kind = op.operand_type(0)
    return TensorType(kind.shape, compute_dtype(kind.dtype))


def _joined_sum(emit: Emitter, op: LocalOp, value: Ref, kind: TensorType, dim: int) -> Ref:
    row = with_size(kind, dim, 1)
    total = emit.call("aten.sum.dim_IntList", (value, (dim,), True), row)
    return emit.all_reduce(total, op.axes_on(0, dim))


def attention(emit: Emitter, op: LocalOp) -> None:
    """Causal attention of a piece of the queries: the triangle becomes a mask."""
    mask = op.values[3] if len(op.values) > 3 else None
    hidden = _causal_mask(emit, op, 0, mask)
    args = (*op.values[:3], hidden, False, op.node.args[5])
    outs = (op.output_type(0), op.output_type(1))
    for index, value in enumerate(emit.call_many(op.node.op, args, outs)):
        emit.result(value, index)


def attention_backward(emit: Emitter, op: LocalOp) -> None:
    """Its backward, with the same mask."""
    mask = op.values[4] if len(op.values) > 6 else None
    hidden = _causal_mask(emit, op, 1, mask)
    args = (*op.values[:4], hidden, *op.values[-2:], False, op.node.args[8])
    outs = tuple(op.output_type(i) for i in range(len(op.node.outputs)))
    for index, value in enumerate(emit.call_many(op.node.op, args, outs)):
        emit.result(value, index)


def _causal_mask(emit: Emitter, op: LocalOp, query: int, mask: Ref | None) -> Ref:
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
