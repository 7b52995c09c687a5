"""Normalizations: normalized dims stay whole, batch dims are free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Node, TensorType
from autopar.rules.factors import Factors, integers, linear_sets, table
from autopar.rules.notation import Dims, Rule, RuleMaker


def _row_dims(factors: Factors, kind: TensorType, normalized: int) -> tuple[Dims, Dims, Dims]:
    """Dims of the input, of the normalized part and of the statistics."""
    batch = factors.dims("b", kind.shape[: len(kind.shape) - normalized])
    inner = factors.dims("n", kind.shape[len(kind.shape) - normalized :], whole=True)
    return (*batch, *inner), inner, (*batch, *((),) * normalized)


def _layer_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    full, inner, rows = _row_dims(factors, operands[0], len(integers(node.args[1])))
    return factors.rule((full, *(inner,) * (len(operands) - 1)), (full, rows, rows))


def _layer_norm_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Gradients of weight and bias are partial under split rows."""
    factors = Factors()
    full, inner, rows = _row_dims(factors, operands[0], len(integers(node.args[2])))
    return factors.rule(
        (full, full, rows, rows, *(inner,) * (len(operands) - 4)),
        (full, inner, inner),
        linear=linear_sets("0"),
    )


RULES: Mapping[str, RuleMaker] = {
    **table("native_layer_norm", _layer_norm),
    **table("native_layer_norm_backward", _layer_norm_backward),
}
