"""Lookups and scatters. Along a split dim they are masked local ops with a partial result."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Node, TensorType
from autopar.rules import expansions
from autopar.rules.factors import (
    Factors,
    LocalArgs,
    dim_argument,
    linear_sets,
    replaced,
    table,
)
from autopar.rules.local import LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker, rule
from autopar.rules.pointwise import with_linear

_ROWS = frozenset({"v"})


def _embedding_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Tokens are summed into rows; counts of tokens need all of them."""
    factors = Factors()
    by_count = bool(node.args[4])
    tokens = tuple(factors.dim(f"t{i}", s, whole=by_count) for i, s in enumerate(operands[1].shape))
    rows, width = factors.dims("", ()), factors.dim("d", node.outputs[0].shape[1])
    vocabulary = factors.dim("v", node.outputs[0].shape[0])
    made = factors.rule(
        ((*tokens, width), tokens),
        ((*rows, vocabulary, width),),
        expand=expansions.embedding_backward,
        expand_on=_ROWS,
        contiguous=_ROWS,
    )
    return with_linear(made, node, operands, linear_sets("0"))


def _picked(factors: Factors, full: TensorType, index: TensorType, dim: int) -> tuple[Dims, Dims]:
    """Dims of a tensor and of an index into its dim ``v``; others correspond where equal."""
    given, wanted = [], []
    for i, (size, length) in enumerate(zip(full.shape, index.shape, strict=True)):
        same = i != dim and size == length
        given.append(factors.dim("v" if i == dim else f"d{i}", size, whole=not same and i != dim))
        own = "k" if i == dim else f"d{i}" if same else f"e{i}"
        wanted.append(factors.dim(own, length, whole=not same and i != dim))
    return tuple(given), tuple(wanted)


def _gather(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    if not operands[0].shape:
        return factors.rule(((), factors.dims("k", operands[1].shape)), ((),))
    dim = dim_argument(node.args[1], len(operands[0].shape))
    given, wanted = _picked(factors, operands[0], operands[1], dim)
    made = factors.rule(
        (given, wanted), (wanted,), expand=expansions.gather, expand_on=_ROWS, contiguous=_ROWS
    )
    return with_linear(made, node, operands, linear_sets("0"))


def _onehot_scatter(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    out = node.outputs[0]
    dim = dim_argument(node.args[2], len(out.shape))
    full, index = _picked(factors, out, operands[1], dim)

    def local_args(op: LocalOp) -> LocalArgs:
        return replaced(op, {3: op.output_shape()[dim]})

    made = factors.rule(
        (index, index),
        (full,),
        expand=expansions.onehot_scatter,
        expand_on=_ROWS,
        contiguous=_ROWS,
        local_args=local_args,
    )
    return with_linear(made, node, operands, linear_sets("0"))


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
}
