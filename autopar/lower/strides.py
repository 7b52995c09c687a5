"""Strides of the local tensors of a program, as eager kernels lay them out.

A captured graph has no strides, and nothing that runs depends on them; but a reshape of a tensor
whose dims were reordered copies it, and a copy takes memory and time. What is here follows torch's
own rules: views move strides, pointwise results take the order of dims of their operands, other
results are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

from autopar.capture.ops import runs_on_dense
from autopar.ir.graph import Const
from autopar.lower.program import COPIES, WAIT, Instruction
from autopar.rules import pointwise

Strides = tuple[int, ...]
Shape = Sequence[int]


def dense(shape: Shape) -> Strides:
    """Strides of a tensor without gaps, the last dim fastest."""
    sizes = [max(size, 1) for size in reversed(shape[1:])]
    return tuple(reversed(list(accumulate(sizes, mul, initial=1)))) if len(shape) else ()


def is_dense(shape: Shape, strides: Strides) -> bool:
    """Whether memory order is index order; dims of one element may have any stride."""
    wanted = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != wanted:
                return False
            wanted *= size
    return True


def viewed(shape: Shape, strides: Strides, new: Shape) -> Strides | None:
    """Strides of a view of another shape; None if the elements have to move.

    Runs of dims that lie in memory as one are matched with runs of new dims of as many elements.
    """
    if 0 in shape:
        return dense(new)
    found: list[int] = []
    at = len(new) - 1
    run, base = 1, strides[-1] if shape else 1
    for dim in range(len(shape) - 1, -1, -1):
        run *= shape[dim]
        joined = dim > 0 and (shape[dim - 1] == 1 or strides[dim - 1] == run * base)
        if joined:
            continue
        part = 1
        while at >= 0 and (part < run or new[at] == 1):
            found.append(part * base)
            part *= new[at]
            at -= 1
        if part != run:
            return None
        if dim > 0:
            run, base = 1, strides[dim - 1]
    found += [base] * (at + 1)
    return tuple(reversed(found)) if at < 0 or all(s == 1 for s in new[: at + 1]) else None


def ordered_like(shape: Shape, operands: Sequence[tuple[Shape, Strides]]) -> Strides:
    """Strides of a pointwise result: dense, its dims in the order of the operands' strides.

    Source:
        ``TensorIterator`` of ATen: dims sorted by insertion, the first operand that can tell two
        dims apart decides.
    """
    aligned = []
    for own, strides in operands:
        missing = len(shape) - len(own)
        pairs = zip(own, strides, shape[missing:], strict=True)
        moved = [0 if size == 1 != wide else stride for size, stride, wide in pairs]
        aligned.append([0] * missing + moved)
    order = list(range(len(shape) - 1, -1, -1))
    for last in range(1, len(shape)):
        here = last
        for before in range(last - 1, -1, -1):
            found = _compare(shape, aligned, order[before], order[here])
            if found < 0:
                break
            if found > 0:
                order[before], order[here] = order[here], order[before]
                here = before
    laid = [0] * len(shape)
    step = 1
    for dim in order:
        laid[dim] = step
        step *= max(shape[dim], 1)
    return tuple(laid)


def _compare(shape: Shape, aligned: Sequence[Sequence[int]], a: int, b: int) -> int:
    for strides in aligned:
        if strides[a] == 0 or strides[b] == 0:
            continue
        if strides[a] != strides[b]:
            return -1 if strides[a] < strides[b] else 1
        if shape[a] > shape[b]:
            return 1
    return 0


ViewStrides = Callable[[Instruction, Shape, Strides], Strides]


def _permuted(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    order = instruction.args[1]
    assert isinstance(order, tuple)
    return tuple(strides[_dim(d, shape)] for d in order)


def _transposed(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    a, b = (_dim(d, shape) for d in instruction.args[1:3])
    moved = list(strides)
    moved[a], moved[b] = moved[b], moved[a]
    return tuple(moved)


def _reversed(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    return tuple(reversed(strides))


def _same(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    return strides


def _sliced(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    dim = _dim(instruction.args[1] if len(instruction.args) > 1 else 0, shape)
    step = instruction.args[4] if len(instruction.args) > 4 else 1
    assert isinstance(step, int)
    return (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])


def _selected(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    dim = _dim(instruction.args[1], shape)
    return (*strides[:dim], *strides[dim + 1 :])


def _expanded(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    wide = instruction.outputs[0].shape
    missing = len(wide) - len(shape)
    kept = zip(shape, strides, wide[missing:], strict=True)
    return (0,) * missing + tuple(0 if size == 1 != new else step for size, step, new in kept)


def _unsqueezed(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    dim = instruction.args[1]
    assert isinstance(dim, int)
    dim %= len(shape) + 1
    step = shape[dim] * strides[dim] if dim < len(shape) else 1
    return (*strides[:dim], step, *strides[dim:])


def _squeezed(instruction: Instruction, shape: Shape, strides: Strides) -> Strides:
    given = instruction.args[1] if len(instruction.args) > 1 else tuple(range(len(shape)))
    dims = {_dim(d, shape) for d in (given if isinstance(given, tuple) else (given,))}
    gone = {d for d in dims if shape[d] == 1}
    return tuple(stride for dim, stride in enumerate(strides) if dim not in gone)


_VIEWS: Mapping[str, ViewStrides] = {
    "aten.permute.default": _permuted,
    "aten.transpose.int": _transposed,
    "aten.t.default": _reversed,
    "aten.slice.Tensor": _sliced,
    "aten.select.int": _selected,
    "aten.expand.default": _expanded,
    "aten.unsqueeze.default": _unsqueezed,
    "aten.squeeze.default": _squeezed,
    "aten.squeeze.dim": _squeezed,
    "aten.squeeze.dims": _squeezed,
    "aten.split.Tensor": _same,
    "aten.split_with_sizes.default": _same,
    "aten.alias.default": _same,
    "aten.contiguous.default": _same,
    "aten.detach.default": _same,
    WAIT: _same,
}
"""Views with a rule of their own; a result of any other is taken to be dense."""

_DENSE_FORMATS = ("contiguous_format",)
_ATTENTION = ("autopar.attention.default", "autopar.attention_backward.default")


def _dim(dim: object, shape: Shape) -> int:
    assert isinstance(dim, int)
    return dim % len(shape)


def view_strides(instruction: Instruction, shape: Shape, strides: Strides) -> Strides | None:
    """Strides of the results of an op that renames its operand's dims; None if it copies.

    Args:
        instruction: One with ``view`` set.
        shape: Of its operand.
        strides: Of its operand.
    """
    if instruction.op == "aten.reshape.default":
        return viewed(shape, strides, instruction.outputs[0].shape)
    needs_dense = instruction.op == "aten.contiguous.default" or runs_on_dense(instruction.op)
    if needs_dense and not is_dense(shape, strides):
        return None
    made = _VIEWS.get(instruction.op)
    if made is None:
        return dense(instruction.outputs[0].shape)
    return made(instruction, shape, strides)


def result_strides(
    instruction: Instruction, operands: Sequence[tuple[Shape, Strides]]
) -> list[Strides]:
    """Strides of the results of an op that makes new tensors.

    Args:
        instruction: One that is no view.
        operands: Shape and strides of each of its operands.
    """
    if instruction.op in _ATTENTION:
        return _attention_strides(instruction, operands)
    if instruction.op in COPIES and instruction.purpose != "gradients":
        return [ordered_like(kind.shape, operands) for kind in instruction.outputs]
    layout = dict(instruction.kwargs).get("memory_format")
    asked = isinstance(layout, Const) and layout.value in _DENSE_FORMATS
    if instruction.op in pointwise.RULES and not asked:
        if all(is_dense(shape, strides) for shape, strides in operands):
            return [dense(kind.shape) for kind in instruction.outputs]
        return [ordered_like(kind.shape, operands) for kind in instruction.outputs]
    return [dense(kind.shape) for kind in instruction.outputs]


def _attention_strides(
    instruction: Instruction, operands: Sequence[tuple[Shape, Strides]]
) -> list[Strides]:
    """Of an attention: of torch's fused kernel where it computes it, else dense.

    The fused kernel lays its output out as the queries, all else as ``[b, s, h, d]``.
    """
    outputs = [kind.shape for kind in instruction.outputs]
    forward = instruction.op == "autopar.attention.default"
    (query, laid), (key, _), (value, _) = operands[:3] if forward else operands[1:4]
    square = query[2] == key[2] or not instruction.args[4 if forward else 7]
    if query[3] != value[3] or 0 in (*query, *key) or not square:
        return [dense(shape) for shape in outputs]
    found = [_rows_first(shape) for shape in outputs]
    if forward:
        own = laid if laid[3] == 1 else dense(query)
        found[0] = ordered_like(outputs[0], [(query, own)])
    return found


def _rows_first(shape: Shape) -> Strides:
    """Of ``[b, h, s, ...]`` laid out as ``[b, s, h, ...]``."""
    b, h, s, *rest = shape
    strides = dense((b, s, h, *rest))
    return (strides[0], strides[2], strides[1], *strides[3:])
