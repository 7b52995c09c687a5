"""Reading the arguments of a draft."""

from __future__ import annotations

from autopar.capture.simplify import Builder, Draft
from autopar.ir.graph import Arg, Ref, TensorType

Refs = tuple[Ref, ...] | None
"""What a rewrite returns: values in place of the op's outputs, or None to keep the op."""


def as_ref(arg: Arg) -> Ref:
    """The argument, which is a value."""
    assert isinstance(arg, Ref), arg
    return arg


def as_int(arg: Arg) -> int:
    """The argument, which is an integer."""
    assert isinstance(arg, int), arg
    return arg


def argument(draft: Draft, position: int, name: str, default: Arg = None) -> Arg:
    """An argument that may be positional or named."""
    if position < len(draft.args):
        return draft.args[position]
    return dict(draft.kwargs).get(name, default)


def operand_type(builder: Builder, draft: Draft) -> TensorType:
    """Type of the first operand."""
    return builder.type_of(as_ref(draft.args[0]))


def as_tuple(arg: Arg) -> tuple[Arg, ...]:
    """The argument, which is a tuple."""
    assert isinstance(arg, tuple), arg
    return arg
