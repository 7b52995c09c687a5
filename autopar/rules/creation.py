"""Ops that make tensors from numbers, and the sources of a graph: every dim is free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import SOURCE_OPS, Node, TensorType
from autopar.rules.factors import Factors, all_whole, linear_sets, local_sizes, table
from autopar.rules.local import Emitter, LocalOp
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.pointwise import with_linear


def _free(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """A source: it can be laid out in every way."""
    factors = Factors()
    return factors.rule((), [factors.dims(f"d{n}_", t.shape) for n, t in enumerate(node.outputs)])


def _filled(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Zeros are also a sum of zeros: they may join partial values in a sum or a scatter."""
    factors = Factors()
    dims = factors.dims("d", node.outputs[0].shape)
    zero = node.op == "aten.zeros.default" or (node.op == _FULL and node.args[1] == 0)
    made = factors.rule((), (dims,), local_args=local_sizes(0))
    return with_linear(made, node, operands, (frozenset(),) if zero else ())


_FULL = "aten.full.default"


def _new(linear: str) -> RuleMaker:
    """A tensor with the dtype of another: dims of the same place and size correspond."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()
        source, target = operands[0].shape, node.outputs[0].shape
        dims = factors.dims("d", target)
        given = tuple(
            dims[i] if i < len(target) and target[i] == size else factors.dim(f"x{i}", size)
            for i, size in enumerate(source)
        )
        unrelated = frozenset((f, 0) for dim in given for f in dim if f.startswith("x"))
        made = factors.rule((given,), (dims,), unrelated=unrelated, local_args=local_sizes(1))
        return with_linear(made, node, operands, linear_sets(linear))

    return make


def _arange(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """A split range starts at the rank's first index."""
    numbers = [arg for arg in node.args if arg is not None]
    if not all(isinstance(number, int) for number in numbers):
        return all_whole(node, operands)
    factors = Factors()
    every = frozenset({"n"})
    dims = (factors.dim("n", node.outputs[0].shape[0]),)
    return factors.rule((), (dims,), expand=_emit_arange, expand_on=every, contiguous=every)


def _emit_arange(emit: Emitter, op: LocalOp) -> None:
    numbers = [arg for arg in op.node.args if isinstance(arg, int)]
    start, step = 0 if len(numbers) == 1 else numbers[0], numbers[2] if len(numbers) > 2 else 1
    out = op.output_type()
    first = start + op.output_start(0, 0) * step
    args = (first, first + out.shape[0] * step, step)
    emit.result(emit.call("aten.arange.start_step", args, out, op.kwargs()))


RULES: Mapping[str, RuleMaker] = {
    **dict.fromkeys(SOURCE_OPS, _free),
    **table("full zeros ones", _filled),
    **table("new_zeros", _new("0")),
    **table("new_full new_ones", _new("")),
    **table("arange arange.start arange.start_step", _arange),
    **table("scalar_tensor eye eye.m linspace tril_indices triu_indices", all_whole),
}
