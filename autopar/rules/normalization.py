"""Normalizations: the dims they normalize over stay whole, all others are free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Arg, Node, TensorType
from autopar.rules.factors import (
    Factors,
    LocalArgs,
    argument,
    drop_outputs,
    integer,
    integers,
    linear_sets,
    table,
)
from autopar.rules.local import LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker


def _wanted(mask: Arg) -> list[bool]:
    """Which gradients a backward gives."""
    assert isinstance(mask, tuple)
    return [bool(item) for item in mask]


# Over the last dims: layer norm and RMS norm.


def _row_dims(factors: Factors, kind: TensorType, normalized: int) -> tuple[Dims, Dims, Dims]:
    """Dims of the input, of its normalized part and of the statistics."""
    batch = factors.dims("b", kind.shape[: len(kind.shape) - normalized])
    inner = factors.dims("n", kind.shape[len(kind.shape) - normalized :], whole=True)
    return (*batch, *inner), inner, (*batch, *((),) * normalized)


def _row_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    full, inner, rows = _row_dims(factors, operands[0], len(integers(node.args[1])))
    parameters = (inner,) * (len(operands) - 1)
    return factors.rule((full, *parameters), (full, *(rows,) * (len(node.outputs) - 1)))


def _row_norm_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Gradients of weight and bias are partial under split rows."""
    factors = Factors()
    full, inner, rows = _row_dims(factors, operands[0], len(integers(node.args[2])))
    mask = _wanted(node.args[-1])
    statistics = len(mask) - 1
    parameters = (inner,) * (len(operands) - 2 - statistics)
    made = factors.rule(
        (full, full, *(rows,) * statistics, *parameters),
        (full, *(inner,) * (len(mask) - 1)),
        linear=linear_sets("0"),
    )
    return drop_outputs(made, mask)


# Over groups of channels and all places.


class _Groups:
    """Dims ``n (g c) p`` of a group norm and ``n g`` of its statistics."""

    def __init__(self, x: TensorType, groups: int) -> None:
        self.factors = Factors()
        batch = self.factors.dim("n", x.shape[0])
        group = self.factors.dim("g", groups)
        channel = self.factors.dim("c", x.shape[1] // groups, whole=True)
        places = self.factors.dims("p", x.shape[2:], whole=True)
        self.full: Dims = (batch, group + channel, *places)
        self.rows: Dims = (batch, group)
        self.weight: Dims = (group + channel,)


def _group_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    dims = _Groups(operands[0], integer(node.args[6]))

    def local_args(op: LocalOp) -> LocalArgs:
        args = op.args()
        batch, channels = op.operand_shape(0)[:2]
        groups = op.output_shape(1)[1]
        return (*args[:3], batch, channels, args[5], groups, *args[7:]), {}

    return dims.factors.rule(
        (dims.full, *(dims.weight,) * (len(operands) - 1)),
        (dims.full, dims.rows, dims.rows),
        local_args=local_args,
    )


def _group_norm_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    dims = _Groups(operands[0], integer(node.args[8]))

    def local_args(op: LocalOp) -> LocalArgs:
        args = op.args()
        batch, channels = op.operand_shape(0)[:2]
        groups = op.operand_shape(2)[1]
        return (*args[:5], batch, channels, args[7], groups, args[9]), {}

    made = dims.factors.rule(
        (dims.full, dims.full, dims.rows, dims.rows, *(dims.weight,) * (len(operands) - 4)),
        (dims.full, dims.weight, dims.weight),
        linear=linear_sets("0"),
        local_args=local_args,
    )
    return drop_outputs(made, _wanted(node.args[9]))


# Over the batch and all places, for each channel. Capture writes the statistics of a batch norm
# as sums and counts; these entries serve graphs that keep the op.


def _channel_dims(kind: TensorType, *, whole: bool) -> tuple[Factors, Dims, Dims]:
    factors = Factors()
    full = tuple(
        factors.dim("c", size) if i == 1 else factors.dim(f"p{i}", size, whole=whole)
        for i, size in enumerate(kind.shape)
    )
    return factors, full, full[1:2]


def _batch_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """With the batch's statistics only channels are free, with given ones everything is."""
    training = node.op != _FROZEN and bool(node.args[5])
    factors, full, channel = _channel_dims(operands[0], whole=training)
    places = [dim[0] for dim in full if dim != channel[0]]
    made = factors.rule(
        (full, *(channel,) * (len(operands) - 1)),
        (full, *(channel,) * (len(node.outputs) - 1)),
        unrelated=frozenset((p, i) for p in places for i in range(1, len(node.outputs))),
    )
    return drop_outputs(made, [kind.shape != (0,) for kind in node.outputs])


# Weight normalization: a weight over its norm for each index of one dim.


def _weight_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """All dims but the one that keeps its norm stay whole."""
    backward = node.op == "aten._weight_norm_interface_backward.default"
    kept = integer(argument(node, 4 if backward else 2, "dim", 0))
    full = operands[1] if backward else operands[0]
    factors = Factors()
    weight = tuple(factors.dim(f"d{i}", size, whole=i != kept) for i, size in enumerate(full.shape))
    norm = tuple(dim if i == kept else () for i, dim in enumerate(weight))
    if backward:
        return factors.rule((weight, weight, norm, norm), (weight, norm), linear=linear_sets("0"))
    return factors.rule((weight, norm), (weight, norm))


_FROZEN = "aten._native_batch_norm_legit_no_training.default"

RULES: Mapping[str, RuleMaker] = {
    **table("native_layer_norm _fused_rms_norm", _row_norm),
    **table("native_layer_norm_backward _fused_rms_norm_backward", _row_norm_backward),
    **table("_weight_norm_interface _weight_norm_interface_backward", _weight_norm),
    **table("native_group_norm", _group_norm),
    **table("native_group_norm_backward", _group_norm_backward),
    **table("_native_batch_norm_legit_functional", _batch_norm),
    **table("_native_batch_norm_legit_no_training", _batch_norm),
}
