"""Tensors made of numbers, and ops that put numbers into tensors."""

from __future__ import annotations

from autopar.capture.arguments import Refs, argument, as_ref
from autopar.capture.simplify import CPU, Builder, Draft, Rewrite
from autopar.capture.views import cast_like
from autopar.ir.graph import Const, Ref, TensorType


def filled(value: float | bool | None, position: int = 0) -> Rewrite:
    """A tensor of one number, whatever it is made like.

    Args:
        value: The number; None if it is the argument at ``position``.
        position: Where the number is.
    """

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        output = draft.outputs[0]
        number = argument(draft, position, "fill_value") if value is None else value
        if isinstance(number, Ref):
            return (cast_like(builder, draft, number, output),)
        if not isinstance(number, (bool, int, float)):
            return None  # a complex number
        return (full(builder, draft, number, output),)

    return rewrite


def full(builder: Builder, draft: Draft, number: float | bool, output: TensorType) -> Ref:
    """A tensor of one number, which is written as its dtype has it."""
    if output.dtype == "bool":
        number = bool(number)
    elif output.is_floating:
        number = float(number)
    else:
        number = int(number)
    dtype = Const("dtype", output.dtype)
    made = Draft(
        "aten.full.default",
        (output.shape, number),
        (("device", CPU), ("dtype", dtype)),
        (output,),
        draft.phase,
        draft.source,
    )
    return builder.keep(made)[0]


def copy(builder: Builder, draft: Draft) -> Refs:
    """What a functional ``copy_`` leaves: the other tensor in the first one's shape and dtype."""
    return (cast_like(builder, draft, as_ref(draft.args[1]), draft.outputs[0]),)


def arange(builder: Builder, draft: Draft) -> Refs:
    """Start, end and step are written out."""
    numbers = [a for a in draft.args if isinstance(a, (int, float))]
    start, end, step = {
        1: (0, numbers[0], 1),
        2: (numbers[0], numbers[-1], 1),
        3: tuple(numbers),
    }[len(numbers)]
    draft.op, draft.args = "aten.arange.start_step", (start, end, step)
    draft.kwargs = (("device", CPU), ("dtype", Const("dtype", draft.outputs[0].dtype)))
    return None


def factory(builder: Builder, draft: Draft) -> Refs:
    """Other ops without a tensor operand say their device and dtype."""
    draft.kwargs = (("device", CPU), ("dtype", Const("dtype", draft.outputs[0].dtype)))
    return None


def masked_fill(builder: Builder, draft: Draft) -> Refs:
    """A choice between the number and the operand."""
    output, value = draft.outputs[0], draft.args[2]
    kind = TensorType((), output.dtype)
    if isinstance(value, Ref):
        filler = cast_like(builder, draft, value, kind)
    else:
        assert isinstance(value, (bool, int, float)), value
        filler = full(builder, draft, value, kind)
    args = (draft.args[1], filler, draft.args[0])
    return (builder.derive(draft, "aten.where.self", args, output),)
