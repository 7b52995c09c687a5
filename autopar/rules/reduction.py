"""Reductions, scans and sorts along dims, and the softmax family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import DTYPE_BYTES, Node, TensorType
from autopar.rules import expansions
from autopar.rules.factors import (
    Factors,
    argument,
    dim_argument,
    dims_argument,
    linear_sets,
    table,
)
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.pointwise import with_linear


def reduced(
    node: Node,
    operands: tuple[TensorType, ...],
    dims: tuple[int, ...],
    *,
    whole: bool = False,
    reduce: str = "sum",
) -> Rule:
    """The rule of an op that reduces ``dims`` of its operand, kept with size one or dropped."""
    factors = Factors()
    shape = operands[0].shape
    full = tuple(factors.dim(f"d{i}", s, whole=whole and i in dims) for i, s in enumerate(shape))
    outputs = []
    for out in node.outputs:
        kept = len(out.shape) == len(shape)
        left = [() if i in dims else dim for i, dim in enumerate(full) if kept or i not in dims]
        outputs.append(tuple(left))
    joined = {f"d{i}": reduce for i in dims} if reduce != "sum" else {}
    return factors.rule((full,), outputs, reduce=joined)


def _over(
    position: int, *, whole: bool = False, reduce: str = "sum", linear: str = ""
) -> RuleMaker:
    """An entry of a reduction whose dims are argument ``position`` (all, if absent)."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        dims = dims_argument(argument(node, position, "dim"), len(operands[0].shape))
        made = reduced(node, operands, dims, whole=whole, reduce=reduce)
        return with_linear(made, node, operands, linear_sets(linear))

    return make


def _everything(*, whole: bool = False, reduce: str = "sum", linear: str = "") -> RuleMaker:
    """An entry of a reduction of all dims."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        dims = tuple(range(len(operands[0].shape)))
        made = reduced(node, operands, dims, whole=whole, reduce=reduce)
        return with_linear(made, node, operands, linear_sets(linear))

    return make


def _scan(position: int, linear: str = "") -> RuleMaker:
    """An entry of an op along one dim, which stays whole in every operand and output."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()
        shape = operands[0].shape
        if not shape:
            return factors.rule(((),) * len(operands), ((),) * len(node.outputs))
        dim = dim_argument(argument(node, position, "dim", -1), len(shape))
        free = tuple(() if i == dim else factors.dim(f"d{i}", s) for i, s in enumerate(shape))

        def dims(kind: TensorType, name: str) -> tuple[tuple[str, ...], ...]:
            along = factors.dim(name, kind.shape[dim], whole=True)
            return (*free[:dim], along, *free[dim + 1 :])

        given = [dims(t, f"i{n}") for n, t in enumerate(operands)]
        wanted = [dims(t, f"o{n}") for n, t in enumerate(node.outputs)]
        return with_linear(factors.rule(given, wanted), node, operands, linear_sets(linear))

    return make


def _softmax(position: int, expand: expansions.Expansion, linear: str, syncs: int) -> RuleMaker:
    """An entry of the softmax family: over a split dim it joins ``syncs`` rows."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()
        shape = operands[0].shape
        dims = factors.dims("d", shape)
        dim = dim_argument(node.args[position], len(shape)) if shape else 0
        along = frozenset(dims[dim]) if shape else frozenset()
        rows = math.prod(shape) // max(shape[dim], 1) if shape else 0
        row_bytes = DTYPE_BYTES[expansions.compute_dtype(node.outputs[0].dtype)]
        made = factors.rule(
            (dims,) * len(operands),
            (dims,),
            expand=expand,
            expand_on=along,
            synced=along,
            sync_bytes=syncs * rows * row_bytes,
        )
        return with_linear(made, node, operands, linear_sets(linear))

    return make


def _mean(position: int) -> RuleMaker:
    """A mean over a split dim is a local sum divided by the global count."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        rank = len(operands[0].shape)
        dims = dims_argument(argument(node, position, "dim"), rank)
        made = reduced(node, operands, dims)
        over = frozenset(f"d{i}" for i in dims)
        made = replace(made, expand=expansions.mean(position), expand_on=over)
        return with_linear(made, node, operands, linear_sets("0"))

    return make


def _logsumexp(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    dims = dims_argument(node.args[1], len(operands[0].shape))
    made = reduced(node, operands, dims)
    over = frozenset(f"d{i}" for i in dims)
    return replace(
        made,
        expand=expansions.logsumexp,
        expand_on=over,
        synced=over,
        sync_bytes=2 * node.outputs[0].num_bytes,
    )


def _vector_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    dims = dims_argument(argument(node, 2, "dim"), len(operands[0].shape))
    return reduced(node, operands, dims, whole=True)


def _halves(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Gated linear units and their backward: a dim of two halves ``(c h)``."""
    factors = Factors()
    full = operands[-1].shape
    dim = dim_argument(argument(node, len(operands), "dim", -1), len(full))
    half = factors.dim("h", full[dim] // 2)
    both = factors.dim("c", 2, whole=True) + half
    dims = [() if i == dim else factors.dim(f"d{i}", s) for i, s in enumerate(full)]
    outer = (*dims[:dim], both, *dims[dim + 1 :])
    inner = (*dims[:dim], half, *dims[dim + 1 :])
    if len(operands) == 1:
        return factors.rule((outer,), (inner,))
    return with_linear(factors.rule((inner, outer), (outer,)), node, operands, linear_sets("0"))


def _histogram(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Counts are summed, if the range does not depend on the elements."""
    factors = Factors()
    low, high = argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    given = factors.dims("d", operands[0].shape, whole=low == high)
    return factors.rule((given,), (factors.dims("bin", node.outputs[0].shape, whole=True),))


def _transform(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Fourier transforms keep the dims they transform whole."""
    factors = Factors()
    source, target = operands[0].shape, node.outputs[0].shape
    over = dims_argument(node.args[1], len(source))
    given = tuple(
        factors.dim(f"i{i}" if i in over else f"d{i}", s, whole=i in over)
        for i, s in enumerate(source)
    )
    wanted = tuple(
        factors.dim(f"o{i}" if i in over else f"d{i}", s, whole=i in over)
        for i, s in enumerate(target)
    )
    return with_linear(factors.rule((given,), (wanted,)), node, operands, linear_sets("0"))


RULES: Mapping[str, RuleMaker] = {
    **table("sum.dim_IntList", _over(1, linear="0")),
    **table("sum", _everything(linear="0")),
    **table("amax", _over(1, reduce="max")),
    **table("amin", _over(1, reduce="min")),
    **table("max", _everything(reduce="max")),
    **table("min", _everything(reduce="min")),
    **table("any.dim any.dims", _over(1, reduce="max")),
    **table("any", _everything(reduce="max")),
    **table("all.dim all.dims", _over(1, reduce="min")),
    **table("all", _everything(reduce="min")),
    **table("prod.dim_int", _over(1, whole=True)),
    **table("prod", _everything(whole=True)),
    **table("argmax argmin max.dim min.dim", _over(1, whole=True)),
    **table(
        "var.dim std.dim var.correction std.correction var_mean.correction std_mean.correction",
        _over(1, whole=True),
    ),
    **table("count_nonzero.dim_IntList nansum", _over(1)),
    **table("mean.dim", _mean(1)),
    **table("mean", _mean(1)),
    **table("logsumexp", _logsumexp),
    **table("linalg_vector_norm norm.ScalarOpt_dim", _vector_norm),
    **table("glu glu_backward", _halves),
    **table("histc", _histogram),
    **table("_fft_r2c _fft_c2r _fft_c2c", _transform),
    **table("kthvalue", _over(2, whole=True)),
    **table("median.dim mode", _over(1, whole=True)),
    **table("median", _everything(whole=True)),
    **table("linalg_cross", _scan(2, "0 | 1")),
    **table("cumsum", _scan(1, "0")),
    **table("_safe_softmax", _scan(1)),
    **table("cumprod logcumsumexp cummax cummin", _scan(1)),
    **table("sort sort.stable argsort", _scan(1)),
    **table("topk", _scan(2)),
    **table("_softmax", _softmax(1, expansions.softmax, "", 2)),
    **table("_log_softmax", _softmax(1, expansions.log_softmax, "", 2)),
    **table("_softmax_backward_data", _softmax(2, expansions.softmax_backward, "0", 1)),
    **table("_log_softmax_backward_data", _softmax(2, expansions.log_softmax_backward, "0", 1)),
}
