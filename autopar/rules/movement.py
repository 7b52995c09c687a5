"""Ops that move elements: views, slices, concatenations, padding, repetition.

A view gets its factors from matching the products of its input and output dims. A slice or a
concatenation at equal pieces of a dim reads the dim as ``(c h)``: the piece number ``c`` stays
whole, the place ``h`` inside a piece may be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Node, TensorType
from autopar.rules.factors import (
    Factors,
    LocalArgs,
    all_whole,
    argument,
    dim_argument,
    dims_argument,
    integer,
    integers,
    linear_sets,
    local_sizes,
    table,
)
from autopar.rules.local import Emitter, LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker
from autopar.rules.pointwise import with_linear

FIRST = linear_sets("0")


def reshape_dims(
    factors: Factors, source: Sequence[int], target: Sequence[int]
) -> tuple[Dims, Dims]:
    """Factors of the dims of a reshape: the pieces that both shapes have at the same place.

    Where the dims of one shape do not divide those of the other, the piece they share at the
    outer and the inner end is a factor and the middle stays whole.
    """
    if 0 in source or 0 in target:
        whole = factors.dims("i", source, whole=True)
        return whole, factors.dims("o", target, whole=True)
    given: list[tuple[str, ...]] = [() for _ in source]
    wanted: list[tuple[str, ...]] = [() for _ in target]
    i = j = 0
    while i < len(source) or j < len(target):
        i_end, j_end = _group(source, target, i, j)
        _match(factors, (source, i, i_end, given), (target, j, j_end, wanted))
        i, j = i_end, j_end
    return tuple(given), tuple(wanted)


def _group(source: Sequence[int], target: Sequence[int], i: int, j: int) -> tuple[int, int]:
    """Ends of the shortest runs of dims from i and j with the same product."""
    left = right = 1
    while i < len(source) or j < len(target):
        if j == len(target) or (i < len(source) and left <= right):
            left *= source[i]
            i += 1
        else:
            right *= target[j]
            j += 1
        if left == right and left > 1:
            break
    return i, j


_Side = tuple[Sequence[int], int, int, list[tuple[str, ...]]]


def _match(factors: Factors, source: _Side, target: _Side) -> None:
    """Name the shared pieces of two runs of dims with the same product."""
    left = [source[0][k] for k in range(source[1], source[2])]
    right = [target[0][k] for k in range(target[1], target[2])]
    heads = _shared(left, right, forward=True)
    tails = _shared(left, right, forward=False)
    for which, (sizes, first, end, dims) in enumerate((source, target)):
        rest = left if which == 0 else right
        for k in range(first, end):
            if sizes[k] == 1:
                continue
            here = [p for p in heads if p[1 + which] == k - first]
            last = [p for p in reversed(tails) if p[1 + which] == k - first]
            names = [factors.dim(f"f{source[1]}h{heads.index(p)}", p[0])[0] for p in here]
            if rest[k - first] > 1:
                name = f"{'io'[which]}{k}"
                names += factors.dim(name, rest[k - first], whole=True)
            names += [factors.dim(f"f{source[1]}t{tails.index(p)}", p[0])[0] for p in last]
            dims[k] = tuple(names)


def _shared(left: list[int], right: list[int], *, forward: bool) -> list[tuple[int, int, int]]:
    """(size, position left, position right) of pieces shared from one end; consumes them."""
    found = []
    rows, columns = list(range(len(left))), list(range(len(right)))
    if not forward:
        rows.reverse()
        columns.reverse()
    i = j = 0
    while i < len(rows) and j < len(columns):
        a, b = left[rows[i]], right[columns[j]]
        if a == 1:
            i += 1
            continue
        if b == 1:
            j += 1
            continue
        piece = math.gcd(a, b)
        if piece > 1:
            found.append((piece, rows[i], columns[j]))
            left[rows[i]] //= piece
            right[columns[j]] //= piece
        if left[rows[i]] > 1 and right[columns[j]] > 1:
            break
    return found


def view(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    given, wanted = reshape_dims(factors, operands[0].shape, node.outputs[0].shape)
    made = factors.rule((given,), (wanted,), alias=True, local_args=local_sizes(1), view=True)
    return with_linear(made, node, operands, FIRST)


def _squeeze(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """A view, whose local op must not drop a dim that has size one on this rank only."""
    made = view(node, operands)
    if len(node.args) == 1:
        every = frozenset(made.factors())
        return replace(made, alias=False, local_args=None, expand=_emit_reshape, expand_on=every)
    shape = operands[0].shape
    ones = [d for d in integers(node.args[1]) if shape and shape[d] == 1]
    if node.op == "aten.squeeze.dim":
        kept = (
            frozenset() if ones or not shape else frozenset(made.operands[0][integer(node.args[1])])
        )
        return replace(made, local_args=None, whole=made.whole | kept)
    return replace(made, local_args=lambda op: ((op.values[0], tuple(ones)), {}))


def _emit_reshape(emit: Emitter, op: LocalOp) -> None:
    args = (op.values[0], op.output_shape())
    emit.result(emit.call("aten.reshape.default", args, op.output_type()))


def _unsqueeze(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    return replace(view(node, operands), local_args=None)


def _renaming(order: Callable[[Node, int], tuple[int, ...]], *, alias: bool = True) -> RuleMaker:
    """An entry whose output dim i is input dim ``order[i]``."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()
        dims = factors.dims("d", operands[0].shape)
        moved = tuple(dims[k] for k in order(node, len(dims)))
        made = factors.rule((dims,), (moved,), alias=alias, view=alias)
        return with_linear(made, node, operands, FIRST)

    return make


def _same(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def _reversed(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(range(rank - 1, -1, -1))


def _transposed(node: Node, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    if rank:
        i, j = (dim_argument(node.args[k], rank) for k in (1, 2))
        order[i], order[j] = order[j], order[i]
    return tuple(order)


def _permuted(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(dim_argument(d, rank) for d in integers(node.args[1]))


def expand(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    source, target = operands[0].shape, node.outputs[0].shape
    dims = factors.dims("d", target)
    shift = len(target) - len(source)
    given = tuple(
        dims[shift + i] if size == target[shift + i] else () for i, size in enumerate(source)
    )
    made = factors.rule((given,), (dims,), local_args=local_sizes(1), view=True)
    return with_linear(made, node, operands, FIRST)


def _range(node: Node, size: int, at: int) -> tuple[int, int, int]:
    """(start, end, step) of a slice whose arguments begin at ``at``, clamped to the dim."""
    start, end = argument(node, at, "start"), argument(node, at + 1, "end")
    step = integer(argument(node, at + 2, "step", 1))
    first = 0 if start is None else integer(start)
    last = size if end is None else integer(end)
    first = min(max(first + size if first < 0 else first, 0), size)
    last = min(max(last + size if last < 0 else last, first), size)
    return first, last, step


def _slice_dims(
    factors: Factors, shape: Sequence[int], dim: int, bounds: tuple[int, int, int]
) -> tuple[Dims, Dims]:
    """Factors of a tensor and of a slice of it."""
    start, end, step = bounds
    size, length = shape[dim], -(-(end - start) // step)
    piece = math.gcd(size, start, length) if step == 1 and length else 1
    if length == size:
        all_of_it = part = factors.dim("h", size)
    elif piece == 1:
        all_of_it = factors.dim("c", size, whole=True)
        part = factors.dim("e", length, whole=True)
    else:
        inner = factors.dim("h", piece)
        all_of_it = factors.dim("c", size // piece, whole=True) + inner
        part = factors.dim("e", length // piece, whole=True) + inner
    others = [() if i == dim else factors.dim(f"d{i}", s) for i, s in enumerate(shape)]
    before, after = tuple(others[:dim]), tuple(others[dim + 1 :])
    return (*before, all_of_it, *after), (*before, part, *after)


def _slicing(node: Node, full: TensorType, at: int) -> tuple[Factors, Dims, Dims]:
    """`_slice_dims` of a node whose argument ``at`` is the dim."""
    factors = Factors()
    dim = dim_argument(argument(node, at, "dim", 0), len(full.shape))
    bounds = _range(node, full.shape[dim], at + 1)
    return factors, *_slice_dims(factors, full.shape, dim, bounds)


def _local_slice(op: LocalOp, at: int, full: Sequence[int], local: Sequence[int]) -> LocalArgs:
    """Arguments with the bounds counted in the rank's pieces of the dim."""
    node = op.node
    dim = dim_argument(argument(node, at, "dim", 0), len(full))
    start, end, step = _range(node, full[dim], at + 1)
    if full[dim]:
        start, end = (bound * local[dim] // full[dim] for bound in (start, end))
    return (*op.args()[:at], dim, start, end, step), {}


def _slice(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors, full, part = _slicing(node, operands[0], 1)

    def local_args(op: LocalOp) -> LocalArgs:
        return _local_slice(op, 1, op.operand_types[0].shape, op.operand_shape(0))

    made = factors.rule((full,), (part,), local_args=local_args, view=True)
    return with_linear(made, node, operands, FIRST)


def _slice_scatter(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors, full, part = _slicing(node, operands[0], 2)

    def local_args(op: LocalOp) -> LocalArgs:
        return _local_slice(op, 2, op.operand_types[0].shape, op.operand_shape(0))

    made = factors.rule((full, part), (full,), local_args=local_args)
    return with_linear(made, node, operands, linear_sets("0 1"))


def _slice_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors, full, part = _slicing(node, node.outputs[0], 2)

    def local_args(op: LocalOp) -> LocalArgs:
        args, _ = _local_slice(op, 2, op.node.outputs[0].shape, op.output_shape())
        return (args[0], op.output_shape(), *args[2:]), {}

    made = factors.rule((part,), (full,), local_args=local_args)
    return with_linear(made, node, operands, FIRST)


def _select_dims(shape: Sequence[int], dim: int) -> tuple[Factors, Dims, Dims]:
    """Factors of a tensor and of what is left when one index of ``dim`` is taken."""
    factors = Factors()
    full = tuple(factors.dim(f"d{i}", s, whole=i == dim) for i, s in enumerate(shape))
    return factors, full, full[:dim] + full[dim + 1 :]


def _select(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = operands[0].shape
    factors, full, part = _select_dims(shape, dim_argument(node.args[1], len(shape)))
    return with_linear(factors.rule((full,), (part,), view=True), node, operands, FIRST)


def _select_scatter(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = operands[0].shape
    factors, full, part = _select_dims(shape, dim_argument(node.args[2], len(shape)))
    made = factors.rule((full, part), (full,))
    return with_linear(made, node, operands, linear_sets("0 1"))


def _select_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = node.outputs[0].shape
    factors, full, part = _select_dims(shape, dim_argument(node.args[2], len(shape)))
    made = factors.rule((part,), (full,), local_args=local_sizes(1))
    return with_linear(made, node, operands, FIRST)


def _unbind(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = operands[0].shape
    dim = dim_argument(argument(node, 1, "dim", 0), len(shape))
    factors, full, part = _select_dims(shape, dim)
    made = factors.rule((full,), (part,) * len(node.outputs), view=True)
    return with_linear(made, node, operands, FIRST)


def _stack(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = node.outputs[0].shape
    dim = dim_argument(argument(node, 1, "dim", 0), len(shape))
    factors, full, part = _select_dims(shape, dim)
    made = factors.rule((part,) * len(operands), (full,))
    return with_linear(made, node, operands, (frozenset(range(len(operands))),))


def _joined(
    factors: Factors, whole: TensorType, parts: Sequence[TensorType], dim: int
) -> tuple[Dims, list[Dims]]:
    """Factors of a tensor and of the tensors that joined along ``dim`` make it."""
    lengths = [t.shape[dim] for t in parts if len(t.shape) == len(whole.shape)]
    piece = math.gcd(*lengths) if lengths else 1
    own = [factors.dim(f"d{i}", s) if i != dim else () for i, s in enumerate(whole.shape)]

    def dims(kind: TensorType, name: str) -> Dims:
        if len(kind.shape) != len(whole.shape):
            return factors.dims(f"{name}_", kind.shape, whole=True)
        count = kind.shape[dim] // piece if piece else 0
        middle = factors.dim(name, count, whole=True) if count != 1 else ()
        if count:
            middle += factors.dim("h", piece)
        return (*own[:dim], middle, *own[dim + 1 :])

    return dims(whole, "c"), [dims(kind, f"c{i}") for i, kind in enumerate(parts)]


def _cat(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Equal pieces joined; each rank joins its parts of all pieces."""
    factors = Factors()
    dim = dim_argument(argument(node, 1, "dim", 0), len(node.outputs[0].shape))
    full, parts = _joined(factors, node.outputs[0], operands, dim)
    made = factors.rule(parts, (full,))
    return with_linear(made, node, operands, (frozenset(range(len(operands))),))


def _split(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The inverse of a concatenation; local sizes are those of the local outputs."""
    factors = Factors()
    dim = dim_argument(argument(node, 2, "dim", 0), len(operands[0].shape))
    full, parts = _joined(factors, operands[0], node.outputs, dim)
    listed = isinstance(node.args[1], tuple)

    def local_args(op: LocalOp) -> LocalArgs:
        sizes = tuple(op.output_shape(i)[dim] for i in range(len(op.node.outputs)))
        return (op.values[0], sizes if listed else max(sizes[0], 1), dim), {}

    empty = frozenset(("h", i) for i, kind in enumerate(node.outputs) if kind.shape[dim] == 0)
    made = factors.rule((full,), parts, unrelated=empty, local_args=local_args, view=True)
    return with_linear(made, node, operands, FIRST)


def _pad(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Padded dims stay whole."""
    factors = Factors()
    amounts = integers(node.args[1])
    rank = len(operands[0].shape)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    given, wanted = _free_but(factors, operands[0].shape, node.outputs[0].shape, padded)
    made = factors.rule((given,), (wanted,))
    zero = argument(node, 2, "value", 0) == 0 and node.op.startswith("aten.constant_pad")
    return with_linear(made, node, operands, FIRST if zero else ())


def _free_but(
    factors: Factors, source: Sequence[int], target: Sequence[int], whole: set[int]
) -> tuple[Dims, Dims]:
    """Dims of two tensors that share all but the dims in ``whole``, which are never split."""
    given = tuple(
        factors.dim(f"i{i}" if i in whole else f"d{i}", s, whole=i in whole)
        for i, s in enumerate(source)
    )
    wanted = tuple(
        factors.dim(f"o{i}" if i in whole else f"d{i}", s, whole=i in whole)
        for i, s in enumerate(target)
    )
    return given, wanted


def _moving(touched: Callable[[Node, int], set[int]], linear: str = "0") -> RuleMaker:
    """An entry of an op that keeps the shape and mixes elements along some dims only."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()
        shape = operands[0].shape
        whole = touched(node, len(shape))
        dims = tuple(factors.dim(f"d{i}", s, whole=i in whole) for i, s in enumerate(shape))
        made = factors.rule((dims,), (dims,) * len(node.outputs))
        return with_linear(made, node, operands, linear_sets(linear))

    return make


def _flipped(node: Node, rank: int) -> set[int]:
    return {dim_argument(d, rank) for d in integers(node.args[1])}


def _rolled(node: Node, rank: int) -> set[int]:
    return set(dims_argument(argument(node, 2, "dims", ()), rank))


def _triangle(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The lower or upper triangle: the diagonal moves with the rank's first row and column."""
    factors = Factors()
    dims = factors.dims("d", operands[0].shape)
    rank = len(dims)

    def local_args(op: LocalOp) -> LocalArgs:
        diagonal = integer(argument(op.node, 1, "diagonal", 0))
        moved = diagonal + op.start(0, rank - 2) - op.start(0, rank - 1)
        return (op.values[0], moved), {}

    contiguous = frozenset(name for dim in dims[-2:] for name in dim)
    made = factors.rule((dims,), (dims,), local_args=local_args, contiguous=contiguous)
    return with_linear(made, node, operands, FIRST)


def _repeat(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Every dim is ``(r x)``: the copies and the place inside a copy."""
    factors = Factors()
    repeats = integers(node.args[1])
    shift = len(repeats) - len(operands[0].shape)
    source = (1,) * shift + operands[0].shape
    wanted = []
    given = []
    for i, (copies, size) in enumerate(zip(repeats, source, strict=True)):
        own = factors.dim(f"d{i}", size) if size != 1 else ()
        wanted.append((factors.dim(f"r{i}", copies) if copies != 1 else ()) + own)
        given.append(own)

    def local_args(op: LocalOp) -> LocalArgs:
        local = (1,) * shift + op.operand_shape(0)
        pairs = zip(op.output_shape(), local, strict=True)
        return (op.values[0], tuple(out // max(own, 1) for out, own in pairs)), {}

    made = factors.rule((tuple(given[shift:]),), (tuple(wanted),), local_args=local_args)
    return with_linear(made, node, operands, FIRST)


def _interleave(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """repeat_interleave with a number: one dim becomes ``(x r)``."""
    factors = Factors()
    shape = operands[0].shape
    where = argument(node, 2, "dim")
    if where is None:
        given, wanted = reshape_dims(factors, shape, (math.prod(shape),))
        dim = 0
    else:
        given = wanted = factors.dims("d", shape)
        dim = dim_argument(where, len(shape))
    copies = factors.dim("r", integer(node.args[1]), whole=True)
    wanted = (*wanted[:dim], wanted[dim] + copies, *wanted[dim + 1 :])

    def local_args(op: LocalOp) -> LocalArgs:
        return op.args(), {k: v for k, v in op.kwargs().items() if k != "output_size"}

    made = factors.rule((given,), (wanted,), local_args=local_args)
    return with_linear(made, node, operands, FIRST)


def _pixel_shuffle(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    up = node.op.startswith("aten.pixel_shuffle")
    fine = node.outputs[0].shape if up else operands[0].shape
    ratio = integer(node.args[1])
    lead = factors.dims("d", fine[:-3])
    channel = factors.dim("c", fine[-3])
    high, wide = factors.dim("h", fine[-2] // ratio), factors.dim("w", fine[-1] // ratio)
    p, q = factors.dim("p", ratio, whole=True), factors.dim("q", ratio, whole=True)
    shuffled = (*lead, channel, high + p, wide + q)
    packed = (*lead, channel + p + q, high, wide)
    given, wanted = (packed, shuffled) if up else (shuffled, packed)
    return with_linear(factors.rule((given,), (wanted,)), node, operands, FIRST)


def _diagonal(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = operands[0].shape
    i, j = (dim_argument(argument(node, k, f"dim{k - 1}", k - 2), len(shape)) for k in (2, 3))
    factors = Factors()
    full = tuple(factors.dim(f"d{k}", s, whole=k in (i, j)) for k, s in enumerate(shape))
    left = tuple(dim for k, dim in enumerate(full) if k not in (i, j))
    part = (*left, factors.dim("g", node.outputs[0].shape[-1], whole=True))
    return with_linear(factors.rule((full,), (part,)), node, operands, FIRST)


def _diagonal_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = node.outputs[0].shape
    i, j = (dim_argument(argument(node, k, f"dim{k - 2}", k - 3), len(shape)) for k in (3, 4))
    factors = Factors()
    full = tuple(factors.dim(f"d{k}", s, whole=k in (i, j)) for k, s in enumerate(shape))
    left = tuple(dim for k, dim in enumerate(full) if k not in (i, j))
    part = (*left, factors.dim("g", operands[0].shape[-1], whole=True))
    made = factors.rule((part,), (full,), local_args=local_sizes(1))
    return with_linear(made, node, operands, FIRST)


def _unfold(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = operands[0].shape
    factors = Factors()
    dim = dim_argument(node.args[1], len(shape))
    given, wanted = _free_but(factors, shape, node.outputs[0].shape[: len(shape)], {dim})
    window = factors.dim("w", node.outputs[0].shape[-1], whole=True)
    return with_linear(factors.rule((given,), ((*wanted, window),)), node, operands, FIRST)


def _unfold_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    shape = node.outputs[0].shape
    factors = Factors()
    dim = dim_argument(node.args[2], len(shape))
    given, wanted = _free_but(factors, operands[0].shape[: len(shape)], shape, {dim})
    window = factors.dim("w", operands[0].shape[-1], whole=True)
    made = factors.rule(((*given, window),), (wanted,), local_args=local_sizes(1))
    return with_linear(made, node, operands, FIRST)


def _bit_view(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The same bytes as another dtype: the last dim may change its size."""
    factors = Factors()
    source, target = operands[0].shape, node.outputs[0].shape
    whole = set() if source == target else {len(source) - 1}
    given, wanted = _free_but(factors, source, target, whole)
    return factors.rule((given,), (wanted,), view=True)


def _complex_view(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Complex numbers as pairs of reals in a last dim of two, and back."""
    factors = Factors()
    split = node.op == "aten.view_as_real.default"
    dims = factors.dims("d", operands[0].shape if split else node.outputs[0].shape)
    pairs = (*dims, factors.dim("pair", 2, whole=True))
    given, wanted = (dims, pairs) if split else (pairs, dims)
    return with_linear(factors.rule((given,), (wanted,), view=True), node, operands, FIRST)


def _strided(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """A reshape, if the strides are those of a dense tensor; otherwise whole."""
    shape = node.outputs[0].shape
    dense, step = True, 1
    for size, stride in zip(reversed(shape), reversed(integers(node.args[2])), strict=True):
        dense = dense and (size == 1 or stride == step)
        step *= size
    offset = argument(node, 3, "storage_offset")
    if not dense or step != operands[0].num_elements or offset not in (None, 0):
        return all_whole(node, operands)
    made = view(node, operands)
    every = frozenset(made.factors())
    return replace(made, alias=False, local_args=None, expand=_emit_reshape, expand_on=every)


RULES: Mapping[str, RuleMaker] = {
    **table("view _unsafe_view reshape", view),
    **table("unsqueeze", _unsqueeze),
    **table("squeeze squeeze.dim squeeze.dims", _squeeze),
    **table("alias detach lift_fresh lift_fresh_copy", _renaming(_same)),
    **table("contiguous", _renaming(_same, alias=False)),
    **table("t", _renaming(_reversed)),
    **table("transpose.int", _renaming(_transposed)),
    **table("permute", _renaming(_permuted)),
    **table("expand", expand),
    **table("as_strided", _strided),
    **table("as_strided_scatter", all_whole),
    **table("slice.Tensor", _slice),
    **table("slice_scatter", _slice_scatter),
    **table("slice_backward", _slice_backward),
    **table("select.int", _select),
    **table("select_scatter", _select_scatter),
    **table("select_backward", _select_backward),
    **table("unbind.int", _unbind),
    **table("stack", _stack),
    **table("cat", _cat),
    **table("split.Tensor split_with_sizes", _split),
    **table("unsafe_split.Tensor unsafe_split_with_sizes", _split),
    **table("constant_pad_nd", _pad),
    **table("flip", _moving(_flipped)),
    **table("roll", _moving(_rolled)),
    **table("tril triu", _triangle),
    **table("repeat", _repeat),
    **table("repeat_interleave.self_int", _interleave),
    **table("pixel_shuffle pixel_unshuffle", _pixel_shuffle),
    **table("diagonal", _diagonal),
    **table("diagonal_backward", _diagonal_backward),
    **table("unfold", _unfold),
    **table("unfold_backward", _unfold_backward),
    **table("view.dtype", _bit_view),
    **table("view_as_real view_as_complex", _complex_view),
}
