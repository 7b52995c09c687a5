"""Lookups and scatters. Along a split dim they are masked local ops with a partial result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Node, Ref, TensorType
from autopar.rules import expansions
from autopar.rules.factors import (
    Factors,
    all_whole,
    argument,
    dim_argument,
    linear_sets,
    replaced,
    table,
)
from autopar.rules.notation import Dims, Rule, RuleMaker, rule
from autopar.rules.pointwise import with_linear

_ROWS = frozenset({"v"})

# Embeddings.


def _embedding_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Tokens are summed into rows; gradients scaled by frequency need all tokens."""
    factors = Factors()
    by_count = bool(node.args[4])
    tokens = tuple(factors.dim(f"t{i}", s, whole=by_count) for i, s in enumerate(operands[1].shape))
    vocabulary, width = node.outputs[0].shape
    column = factors.dim("d", width)
    made = factors.rule(
        ((*tokens, column), tokens),
        ((factors.dim("v", vocabulary), column),),
        expand=expansions.embedding_backward,
        expand_on=_ROWS,
        contiguous=_ROWS,
    )
    return with_linear(made, node, operands, linear_sets("0"))


# Picking and placing single elements along one dim: gather and its relatives.


def _picked(factors: Factors, full: Sequence[int], index: Sequence[int], dim: int) -> Dims:
    """Dims of an index into dim ``v`` of a tensor: ``k`` there, the same factor where equal.

    An index shorter than the tensor along another dim keeps that dim whole.
    """
    found = []
    for i, (size, length) in enumerate(zip(full, index, strict=True)):
        if i == dim:
            found.append(factors.dim("k", length))
        elif size == length:
            found.append(factors.dim(f"d{i}", size))
        else:
            factors.dim(f"d{i}", size, whole=True)
            found.append(factors.dim(f"e{i}", length, whole=True))
    return tuple(found)


def _rows(factors: Factors, full: Sequence[int], dim: int) -> Dims:
    return tuple(factors.dim("v" if i == dim else f"d{i}", s) for i, s in enumerate(full))


def _gather(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    shape, index = operands[0].shape, operands[1].shape
    if not shape or not index:
        return all_whole(node, operands)
    dim = dim_argument(node.args[1], len(shape))
    given, wanted = _rows(factors, shape, dim), _picked(factors, shape, index, dim)
    made = factors.rule(
        (given, wanted), (wanted,), expand=expansions.gather, expand_on=_ROWS, contiguous=_ROWS
    )
    return with_linear(made, node, operands, linear_sets("0"))


def _onehot_scatter(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    shape = node.outputs[0].shape
    dim = dim_argument(node.args[2], len(shape))
    full = _rows(factors, shape, dim)
    index = _picked(factors, shape, operands[1].shape, dim)
    factors.whole.update(index[dim])
    made = factors.rule(
        (index, index),
        (full,),
        expand=expansions.onehot_scatter,
        expand_on=_ROWS,
        contiguous=_ROWS,
        local_args=lambda op: replaced(op, {3: op.output_shape()[dim]}),
    )
    return with_linear(made, node, operands, linear_sets("0"))


def _scatter(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Scatters that overwrite or join: the dim they scatter along stays whole."""
    factors = Factors()
    shape, index = operands[0].shape, operands[1].shape
    if not shape or not index:
        return all_whole(node, operands)
    dim = dim_argument(node.args[1], len(shape))
    full, picked = _rows(factors, shape, dim), _picked(factors, shape, index, dim)
    factors.whole |= {"v", "k"}
    others = tuple(_source(factors, picked, index, kind.shape) for kind in operands[2:])
    made = factors.rule((full, picked, *others), (full,))
    copies = node.op == "aten.scatter.src"
    return with_linear(made, node, operands, linear_sets("0 2" if copies else ""))


def _source(factors: Factors, picked: Dims, index: Sequence[int], source: Sequence[int]) -> Dims:
    """Dims of the elements placed; those longer than the index stay whole, and so does it."""
    found = []
    for i, (dim, length, size) in enumerate(zip(picked, index, source, strict=True)):
        if length != size:
            factors.whole.update(dim)
            found.append(factors.dim(f"s{i}", size, whole=True))
        else:
            found.append(dim)
    return tuple(found)


def _scatter_add(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Split elements are added to zeros on all ranks but one; split rows take their own."""
    factors = Factors()
    shape, index = operands[0].shape, operands[1].shape
    if not shape or not index:
        return all_whole(node, operands)
    dim = dim_argument(node.args[1], len(shape))
    full, picked = _rows(factors, shape, dim), _picked(factors, shape, index, dim)
    source = _source(factors, picked, index, operands[2].shape)
    if source != picked:
        factors.whole.add("v")
    made = factors.rule(
        (full, picked, source),
        (full,),
        expand=expansions.scatter_add,
        expand_on=frozenset({"v", "k"}),
        contiguous=_ROWS,
    )
    return with_linear(made, node, operands, linear_sets("0 2"))


# Whole rows along one dim.


def _index_select(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    shape = operands[0].shape
    if not shape:
        return all_whole(node, operands)
    dim = dim_argument(node.args[1], len(shape))
    given = _rows(factors, shape, dim)
    count = operands[1].num_elements
    wanted = (*given[:dim], factors.dim("k", count), *given[dim + 1 :])
    index: Dims = (factors.dim("k", count),) if operands[1].shape else ()
    made = factors.rule(
        (given, index),
        (wanted,),
        expand=expansions.index_select,
        expand_on=_ROWS,
        contiguous=_ROWS,
    )
    return with_linear(made, node, operands, linear_sets("0"))


def _index_add(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    shape = operands[0].shape
    if not shape or not operands[1].shape:
        return all_whole(node, operands)
    dim = dim_argument(node.args[1], len(shape))
    full = _rows(factors, shape, dim)
    count = factors.dim("k", operands[1].num_elements)
    made = factors.rule(
        (full, (count,), (*full[:dim], count, *full[dim + 1 :])),
        (full,),
        expand=expansions.index_add,
        expand_on=frozenset({"v", "k"}),
        contiguous=_ROWS,
    )
    return with_linear(made, node, operands, linear_sets("0 2"))


def _index_copy(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Index_copy and index_fill: overwritten rows stay whole."""
    factors = Factors()
    shape = operands[0].shape
    if not shape:
        return all_whole(node, operands)
    dim = dim_argument(node.args[1], len(shape))
    full = _rows(factors, shape, dim)
    factors.whole.add("v")
    index = factors.dims("k", operands[1].shape, whole=True)
    count = factors.dim("k", operands[1].num_elements, whole=True)
    others = tuple(
        (*full[:dim], count, *full[dim + 1 :]) if kind.shape else () for kind in operands[2:]
    )
    return factors.rule((full, index, *others), (full,))


# Indexing with tensors in several dims.


class _Indexed:
    """Dims of ``x[i0, :, i2]``: indexed dims ``v<i>``, others ``d<i>``, index dims ``k<j>``."""

    def __init__(self, node: Node, shape: Sequence[int], index_types: Sequence[TensorType]) -> None:
        self.factors = Factors()
        indices = node.args[1]
        assert isinstance(indices, tuple)
        self.places = [i for i, index in enumerate(indices) if isinstance(index, Ref)]
        self.boolean = any(kind.dtype in ("bool", "uint8") for kind in index_types)
        self.full: Dims = tuple(
            self.factors.dim(f"v{i}" if i in self.places else f"d{i}", size)
            for i, size in enumerate(shape)
        )
        rank = max(len(kind.shape) for kind in index_types)
        sizes = [1] * rank
        for kind in index_types:
            for at, size in enumerate(kind.shape, start=rank - len(kind.shape)):
                sizes[at] = max(sizes[at], size) if size else 0
        self.rank = rank
        self.index: Dims = self.factors.dims("k", sizes)
        self.indices = tuple(_aligned(self.index, sizes, kind.shape) for kind in index_types)
        first, last = self.places[0], self.places[-1]
        adjacent = last - first + 1 == len(self.places)
        self.first = first if adjacent else 0
        left = tuple(dim for i, dim in enumerate(self.full) if i not in self.places)
        self.picked: Dims = (*left[: self.first], *self.index, *left[self.first :])
        self.rows = frozenset(f"v{i}" for i in self.places)


def _aligned(dims: Dims, sizes: Sequence[int], shape: Sequence[int]) -> Dims:
    """Dims of a tensor that is broadcast to others, aligned from the right."""
    start = len(sizes) - len(shape)
    return tuple(
        dims[start + i] if size == sizes[start + i] else () for i, size in enumerate(shape)
    )


def _index(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Elements that another rank holds are zero; boolean masks are computed whole."""
    dims = _Indexed(node, operands[0].shape, operands[1:])
    if dims.boolean or 0 in dims.factors.sizes.values():
        return all_whole(node, operands)
    made = dims.factors.rule(
        (dims.full, *dims.indices),
        (dims.picked,),
        expand=expansions.index(dims.places, dims.first, dims.rank),
        expand_on=dims.rows,
        contiguous=dims.rows,
    )
    return with_linear(made, node, operands, linear_sets("0"))


def _index_put(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """With accumulation elements are added as by scatter_add; without, they stay whole."""
    dims = _Indexed(node, operands[0].shape, operands[1:-1])
    if dims.boolean or 0 in dims.factors.sizes.values():
        return all_whole(node, operands)
    sizes = [dims.factors.sizes[dim[0]] for dim in dims.picked]
    values = _aligned(dims.picked, sizes, operands[-1].shape)
    placed = frozenset(dim[0] for dim in dims.index)
    adds = bool(argument(node, 3, "accumulate", False))
    if not adds:
        dims.factors.whole |= dims.rows | placed
    made = dims.factors.rule((dims.full, *dims.indices, values), (dims.full,))
    if adds:
        made = replace(
            made,
            expand=expansions.index_put(dims.places, dims.first, dims.rank),
            expand_on=dims.rows | placed,
            contiguous=dims.rows,
        )
    return with_linear(made, node, operands, (frozenset({0, len(operands) - 1}),))


def _searchsorted(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The sorted values stay whole, the looked up ones are free."""
    factors = Factors()
    boundaries, value = (0, 1) if node.op.startswith("aten.searchsorted") else (1, 0)
    borders = factors.dims("s", operands[boundaries].shape, whole=True)
    if len(borders) > 1:
        return all_whole(node, operands)
    dims = factors.dims("d", operands[value].shape)
    given = (borders, dims) if boundaries == 0 else (dims, borders)
    return factors.rule(given, (dims,))


def _isin(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The set stays whole, the elements are free."""
    factors = Factors()
    dims = factors.dims("d", operands[0].shape)
    members = factors.dims("s", operands[1].shape, whole=True)
    return factors.rule((dims, members), (dims,))


RULES: Mapping[str, RuleMaker] = {
    **table(
        "embedding",
        rule(
            "v d, ... -> ... d",
            linear="0",
            expand=expansions.embedding,
            expand_on=_ROWS,
            contiguous=_ROWS,
        ),
    ),
    **table("embedding_dense_backward", _embedding_backward),
    **table("gather", _gather),
    **table("autopar::onehot_scatter", _onehot_scatter),
    **table("scatter.src scatter.value scatter_reduce.two", _scatter),
    **table("scatter_add", _scatter_add),
    **table("index_select", _index_select),
    **table("index_add", _index_add),
    **table("index_copy index_fill.int_Scalar index_fill.int_Tensor", _index_copy),
    **table("index.Tensor _unsafe_index.Tensor", _index),
    **table("index_put _unsafe_index_put", _index_put),
    **table("searchsorted.Tensor bucketize.Tensor", _searchsorted),
    **table("isin.Tensor_Tensor", _isin),
    **table("take masked_scatter", all_whole),
}
