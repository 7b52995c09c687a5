"""Convolutions: batch, groups and channels are free, places stay whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Arg, Node, TensorType
from autopar.ir.sharding import Partial
from autopar.rules.factors import (
    Factors,
    drop_outputs,
    integer,
    linear_sets,
    table,
)
from autopar.rules.local import Emitter, LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker, rule

_TRANSPOSED, _GROUPS = 6, 8
"""Positions of these arguments of a convolution; its backward has them one later."""


class _Shapes:
    """Dims of input, weight and output: ``n (g c) i``, ``(g o) c k`` and ``n (g o) p``."""

    def __init__(
        self, x: TensorType, weight: TensorType, out: TensorType, transposed: bool, groups: int
    ) -> None:
        self.factors = Factors()
        batch = self.factors.dim("n", x.shape[0])
        group = self.factors.dim("g", groups) if groups > 1 else ()
        given = self.factors.dim("c", x.shape[1] // groups)
        made = self.factors.dim("o", out.shape[1] // groups)
        kernel = self.factors.dims("k", weight.shape[2:], whole=True)
        channels = (group + made, given) if not transposed else (group + given, made)
        self.x: Dims = (batch, group + given, *self.factors.dims("i", x.shape[2:], whole=True))
        self.weight: Dims = (*channels, *kernel)
        self.out: Dims = (batch, group + made, *self.factors.dims("p", out.shape[2:], whole=True))
        self.bias: Dims = (group + made,)
        places = math.prod(x.shape[2:] if transposed else out.shape[2:])
        self.flops = 2 * places * x.shape[0] * math.prod(weight.shape)


def _forward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    x, weight = operands[:2]
    transposed, groups = bool(node.args[_TRANSPOSED]), integer(node.args[_GROUPS])
    shapes = _Shapes(x, weight, node.outputs[0], transposed, groups)
    biased = len(operands) == 3
    made = shapes.factors.rule(
        (shapes.x, shapes.weight, *((shapes.bias,) if biased else ())),
        (shapes.out,),
        linear=linear_sets("0 2 | 1 2" if biased else "0 | 1"),
        local_args=lambda op: (_local_args(op), {}),
        flops=shapes.flops,
    )
    if biased:
        return replace(made, expand=_bias_once, expand_on=frozenset({"c"}))
    return made


def _local_args(op: LocalOp) -> tuple[Arg, ...]:
    args = op.args()
    channels = op.output_shape()[1] if args[_TRANSPOSED] else op.operand_shape(0)[1]
    return (*args[:_GROUPS], channels // op.operand_shape(1)[1])


def _bias_once(emit: Emitter, op: LocalOp) -> None:
    """Sums over some input channels; one rank adds the bias."""
    args = _local_args(op)
    summed = [axis for axis in op.axes_on(0, 1) if isinstance(op.outputs[0][axis], Partial)]
    if not op.is_first(summed):
        args = (*args[:2], None, *args[3:])
    emit.result(emit.call(op.node.op, args, op.output_type()))


def _backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    grad, x, weight = operands
    transposed, groups = bool(node.args[_TRANSPOSED + 1]), integer(node.args[_GROUPS + 1])
    shapes = _Shapes(x, weight, grad, transposed, groups)
    mask = node.args[_GROUPS + 2]
    assert isinstance(mask, tuple)
    made = shapes.factors.rule(
        (shapes.out, shapes.x, shapes.weight),
        (shapes.x, shapes.weight, shapes.bias),
        linear=linear_sets("0"),
        unrelated=frozenset({("c", 2)}),
        local_args=lambda op: (_local_backward_args(op), {}),
        flops=shapes.flops * sum(bool(wanted) for wanted in mask[:2]),
    )
    return drop_outputs(made, [bool(wanted) for wanted in mask])


def _local_backward_args(op: LocalOp) -> tuple[Arg, ...]:
    args = list(op.args())
    grad, x, weight = (op.operand_shape(i) for i in range(3))
    channels = grad[1] if args[_TRANSPOSED + 1] else x[1]
    args[_GROUPS + 1] = channels // weight[1]
    if args[3] is not None:
        args[3] = (grad[1],)
    return tuple(args)


_TIME_FIRST = "t b c, k c o, o"
"""Input, weight and bias of a convolution over the first dim."""

RULES: Mapping[str, RuleMaker] = {
    **table("convolution", _forward),
    **table("convolution_backward", _backward),
    **table("conv_tbc", rule(f"{_TIME_FIRST} -> p b o", linear="0 2 | 1 2", whole="t c k p")),
    **table(
        "conv_tbc_backward",
        rule(f"p b o, {_TIME_FIRST} -> {_TIME_FIRST}", linear="0", whole="t c k p"),
    ),
}
