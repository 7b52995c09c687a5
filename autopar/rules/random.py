"""Random ops: every dim of what is drawn is free, since an element's number decides what it is.

The rank's op is told which elements of the whole it makes (`LocalOp.place`). The key is whole
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Arg, Node, Ref, TensorType
from autopar.rules.attention import AttentionShapes
from autopar.rules.expansions import causal_mask
from autopar.rules.factors import Factors, LocalArgs, replaced, table
from autopar.rules.local import Emitter, LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker

_BACKWARD = (
    "autopar.attention_dropout_backward.default",
    "autopar.attention_dropout_backward_mask.default",
)


def _key(factors: Factors) -> Dims:
    return (factors.dim("key", 2, whole=True),)


def _dropout(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Linear: ranks whose terms are to be summed draw the same mask."""
    factors = Factors()
    dims = factors.dims("d", operands[0].shape)
    linear = (frozenset({0}),)
    key = _key(factors)
    return factors.rule((dims, key), (dims,), linear=linear, local_args=_dropout_args)


def _dropout_args(op: LocalOp) -> LocalArgs:
    return (*op.args(), *op.place(op.node.outputs[0].shape, op.outputs[0])), op.kwargs()


def _drawn(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    dims = factors.dims("d", node.outputs[0].shape)
    return factors.rule((_key(factors),), (dims,), local_args=_drawn_args)


def _drawn_args(op: LocalOp) -> LocalArgs:
    args, kwargs = replaced(op, {_SIZE: op.output_shape()})
    return (*args, *op.place(op.node.outputs[0].shape, op.outputs[0])), kwargs


_SIZE = 2
"""Position of the size of a tensor that is drawn."""


def _attention(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    *tensors, _ = operands
    made = AttentionShapes(*tensors[:3])
    return _keyed(made, made.forward(tensors, causal=bool(node.args[4])))


def _attention_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    *tensors, _ = operands
    made = AttentionShapes(*tensors[1:4])
    found = made.backward(tensors, causal=bool(node.args[7]), mask_gradient=len(node.outputs) == 4)
    return _keyed(made, found)


def _keyed(shapes: AttentionShapes, made: Rule) -> Rule:
    """The rule of attention with the key as its last operand."""
    key = _key(shapes.factors)
    return replace(
        made,
        operands=(*made.operands, key),
        sizes=shapes.factors.sizes,
        whole=frozenset(shapes.factors.whole),
        expand=_emit_attention,
        local_args=_attention_args,
    )


def _weights_place(op: LocalOp) -> tuple[Arg, ...]:
    """Where the rank's attention weights ``[b, hq, s, t]`` are."""
    backward = op.node.op in _BACKWARD
    query, key = op.operand_types[1:3] if backward else op.operand_types[:2]
    sharding = op.operands[0] if backward else op.outputs[0]
    return op.place((*query.shape[:3], key.shape[2]), sharding)


def _attention_args(op: LocalOp) -> LocalArgs:
    return (*op.args(), *_weights_place(op)), op.kwargs()


def _emit_attention(emit: Emitter, op: LocalOp) -> None:
    """Split causal queries: with a mask of what they may attend to."""
    args = list(op.args())
    backward = op.node.op in _BACKWARD
    at, flag = (4, 7) if backward else (3, 4)
    mask = args[at]
    assert mask is None or isinstance(mask, Ref), mask
    args[at], args[flag] = causal_mask(emit, op, 1 if backward else 0, mask), False
    outs = tuple(op.output_type(index) for index in range(len(op.node.outputs)))
    results = emit.call_many(op.node.op, (*args, *_weights_place(op)), outs)
    for index, value in enumerate(results):
        emit.result(value, index)


RULES: Mapping[str, RuleMaker] = {
    **table("autopar::dropout", _dropout),
    **table(
        "autopar::random_uniform autopar::random_normal autopar::random_integers",
        _drawn,
    ),
    **table("autopar::attention_dropout", _attention),
    **table(
        "autopar::attention_dropout_backward autopar::attention_dropout_backward_mask",
        _attention_backward,
    ),
}
