"""Canonical forms: one op for what torch says in several ways, and no op for what does nothing.

Each entry of `REWRITES` gets the builder and an op, and returns the values that replace its
outputs, or None to keep it. Strides do not exist in a graph, so copies that only change them go.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.simplify import CPU, Builder, Draft, Rewrite
from autopar.ir.graph import Arg, Const, Ref, TensorType

Refs = tuple[Ref, ...] | None


def _ref(arg: Arg) -> Ref:
    assert isinstance(arg, Ref), arg
    return arg


def _int(arg: Arg) -> int:
    assert isinstance(arg, int), arg
    return arg


def _arg(draft: Draft, position: int, name: str, default: Arg = None) -> Arg:
    """An argument that may be positional or named."""
    if position < len(draft.args):
        return draft.args[position]
    return dict(draft.kwargs).get(name, default)


def _same(builder: Builder, draft: Draft) -> Refs:
    """Ops that hand on their operand."""
    return (_ref(draft.args[0]),)


def _operand_type(builder: Builder, draft: Draft) -> TensorType:
    return builder.type_of(_ref(draft.args[0]))


def view(builder: Builder, draft: Draft) -> Refs:
    """Any reshape: views of views are one view, a view to the same shape is none."""
    return (reshape(builder, draft, _ref(draft.args[0]), draft.outputs[0].shape),)


def reshape(builder: Builder, draft: Draft, value: Ref, shape: tuple[int, ...]) -> Ref:
    """``value`` in another shape; ``draft`` lends phase and source."""
    maker = builder.maker(value)
    if maker.op == "aten.view.default":
        value = _ref(maker.args[0])
    known = builder.type_of(value)
    if known.shape == shape:
        return value
    output = TensorType(shape, known.dtype)
    made = Draft("aten.view.default", (value, shape), (), (output,), draft.phase, draft.source)
    return builder.keep(made)[0]


def permute(builder: Builder, draft: Draft) -> Refs:
    """Any reordering of dims: permutes of permutes are one permute, or none."""
    value = _ref(draft.args[0])
    rank = len(builder.type_of(value).shape)
    if draft.op == "aten.permute.default":
        order = tuple(_int(d) % rank for d in _tuple(draft.args[1]))
    elif draft.op == "aten.t.default":
        order = tuple(reversed(range(rank)))
    else:
        swapped = list(range(rank))
        if rank:
            a, b = (_int(d) % rank for d in draft.args[1:3])
            swapped[a], swapped[b] = b, a
        order = tuple(swapped)
    maker = builder.maker(value)
    if maker.op == "aten.permute.default":
        before = _tuple(maker.args[1])
        value, order = _ref(maker.args[0]), tuple(_int(before[d]) for d in order)
    if order == tuple(range(rank)):
        return (value,)
    draft.op, draft.args = "aten.permute.default", (value, order)
    return None


def _tuple(arg: Arg) -> tuple[Arg, ...]:
    assert isinstance(arg, tuple), arg
    return arg


def expand(builder: Builder, draft: Draft) -> Refs:
    """Expands of expands are one expand; the shape is written out."""
    value, shape = _ref(draft.args[0]), draft.outputs[0].shape
    maker = builder.maker(value)
    if maker.op == "aten.expand.default":
        value = _ref(maker.args[0])
    if builder.type_of(value).shape == shape:
        return (value,)
    draft.args, draft.kwargs = (value, shape), ()
    return None


def to_copy(builder: Builder, draft: Draft) -> Refs:
    """Only a change of dtype is a copy."""
    if _operand_type(builder, draft).dtype == draft.outputs[0].dtype:
        return (_ref(draft.args[0]),)
    draft.op = "aten._to_copy.default"
    draft.args = draft.args[:1]
    draft.kwargs = (("dtype", Const("dtype", draft.outputs[0].dtype)),)
    return None


def cast_like(builder: Builder, draft: Draft, value: Ref, wanted: TensorType) -> Ref:
    """``value`` with the dtype and, by expanding, the shape of ``wanted``."""
    known = builder.type_of(value)
    if known.dtype != wanted.dtype:
        value = builder.derive(
            draft,
            "aten._to_copy.default",
            (value,),
            TensorType(known.shape, wanted.dtype),
            dtype=Const("dtype", wanted.dtype),
        )
    if known.shape != wanted.shape:
        value = builder.derive(draft, "aten.expand.default", (value, wanted.shape), wanted)
    return value


def slice_(builder: Builder, draft: Draft) -> Refs:
    """A slice written with its dim, start, end and step in range; none if it keeps all."""
    shape = _operand_type(builder, draft).shape
    dim = _int(_arg(draft, 1, "dim", 0)) % len(shape)
    start, end = _arg(draft, 2, "start"), _arg(draft, 3, "end")
    step = _int(_arg(draft, 4, "step", 1))
    size = shape[dim]
    first, last, _ = slice(start, end, step).indices(size)
    last = max(first, last)
    if (first, last, step) == (0, size, 1):
        return (_ref(draft.args[0]),)
    draft.args, draft.kwargs = (draft.args[0], dim, first, last, step), ()
    return None


def select(builder: Builder, draft: Draft) -> Refs:
    """Dim and index are not negative."""
    shape = _operand_type(builder, draft).shape
    dim = _int(draft.args[1]) % len(shape)
    draft.args = (draft.args[0], dim, _int(draft.args[2]) % shape[dim])
    return None


def unbind(builder: Builder, draft: Draft) -> Refs:
    """One select for each output."""
    rank = len(_operand_type(builder, draft).shape)
    dim = _int(_arg(draft, 1, "dim", 0)) % rank
    return tuple(
        builder.derive(draft, "aten.select.int", (draft.args[0], dim, index), output)
        for index, output in enumerate(draft.outputs)
    )


def stack(builder: Builder, draft: Draft) -> Refs:
    """A concatenation of views with one more dim."""
    output = draft.outputs[0]
    dim = _int(_arg(draft, 1, "dim", 0)) % len(output.shape)
    shape = (*output.shape[:dim], 1, *output.shape[dim + 1 :])
    parts = tuple(reshape(builder, draft, _ref(v), shape) for v in _tuple(draft.args[0]))
    return (builder.derive(draft, "aten.cat.default", (parts, dim), output),)


def cat(builder: Builder, draft: Draft) -> Refs:
    """Empty operands go; a concatenation of one value is that value."""
    output = draft.outputs[0]
    values = [_ref(v) for v in _tuple(draft.args[0])]
    dim = _int(_arg(draft, 1, "dim", 0)) % max(len(output.shape), 1)
    kept = [v for v in values if 0 not in builder.type_of(v).shape]
    if not kept:
        return None
    if len(kept) == 1:
        return (cast_like(builder, draft, kept[0], output),)
    draft.args, draft.kwargs = (tuple(kept), dim), ()
    return None


def sum_(builder: Builder, draft: Draft) -> Refs:
    """The dims are written out, sorted and not negative."""
    shape = _operand_type(builder, draft).shape
    rank = len(shape)
    dims = None if draft.op == "aten.sum.default" else _arg(draft, 1, "dim")
    keep = draft.op != "aten.sum.default" and bool(_arg(draft, 2, "keepdim", False))
    summed = tuple(sorted(_int(d) % max(rank, 1) for d in _tuple(dims))) if dims else ()
    summed = summed if rank and summed else tuple(range(rank))
    if all(shape[d] == 1 for d in summed):
        value = cast_like(
            builder, draft, _ref(draft.args[0]), TensorType(shape, draft.outputs[0].dtype)
        )
        return (reshape(builder, draft, value, draft.outputs[0].shape),)
    draft.op, draft.args = "aten.sum.dim_IntList", (draft.args[0], summed, keep)
    draft.kwargs = tuple(item for item in draft.kwargs if item[0] == "dtype")
    return None


def filled(value: float | bool | None, position: int = 0) -> Rewrite:
    """A tensor of one number, whatever it is made like.

    Args:
        value: The number; None if it is the argument at ``position``.
        position: Where the number is.
    """

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        output = draft.outputs[0]
        number = _arg(draft, position, "fill_value") if value is None else value
        if isinstance(number, Ref):
            return (cast_like(builder, draft, number, output),)
        assert isinstance(number, (bool, int, float)), number
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
    return (cast_like(builder, draft, _ref(draft.args[1]), draft.outputs[0]),)


def arange(builder: Builder, draft: Draft) -> Refs:
    """Start, end and step are written out."""
    numbers = [a for a in draft.args if isinstance(a, (int, float))]
    start, end, step = {
        1: lambda n: (0, n[0], 1),
        2: lambda n: (n[0], n[1], 1),
        3: lambda n: (n[0], n[1], n[2]),
    }[len(numbers)](numbers)
    draft.op, draft.args = "aten.arange.start_step", (start, end, step)
    draft.kwargs = (("device", CPU), ("dtype", Const("dtype", draft.outputs[0].dtype)))
    return None


def factory(builder: Builder, draft: Draft) -> Refs:
    """Other ops without a tensor operand say their device and dtype."""
    draft.kwargs = (("device", CPU), ("dtype", Const("dtype", draft.outputs[0].dtype)))
    return None


def tensor_form(op: str) -> Rewrite:
    """The ``.Tensor`` overload, which takes a number as well."""

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        draft.op = op
        return None

    return rewrite


def renamed(op: str) -> Rewrite:
    """The same op under its usual name."""

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        draft.op = op
        return builder.emit(draft)

    return rewrite


def power(builder: Builder, draft: Draft) -> Refs:
    """``x ** 1`` is x."""
    exponent = draft.args[1]
    same = _operand_type(builder, draft) == draft.outputs[0]
    return (_ref(draft.args[0]),) if exponent == 1 and same else None


def scaled(builder: Builder, draft: Draft) -> Refs:
    """``x * 1`` and ``x / 1`` are x, where that changes neither dtype nor shape."""
    draft.op = draft.op.replace(".Scalar", ".Tensor")
    number = draft.args[1]
    if isinstance(number, Ref) or isinstance(draft.args[0], (int, float)):
        return None
    same = _operand_type(builder, draft) == draft.outputs[0]
    return (_ref(draft.args[0]),) if number == 1 and same else None


def softmax_half(builder: Builder, draft: Draft) -> Refs:
    """Dims of softmax are not negative."""
    rank = max(len(_operand_type(builder, draft).shape), 1)
    draft.args = (draft.args[0], _int(draft.args[1]) % rank, *draft.args[2:])
    return None


REWRITES: Mapping[str, Rewrite] = {
    "aten.detach.default": _same,
    "aten.alias.default": _same,
    "aten.lift_fresh.default": _same,
    "aten.lift_fresh_copy.default": _same,
    "aten.lift.default": _same,
    "aten.clone.default": _same,
    "aten.contiguous.default": _same,
    "aten.resolve_conj.default": _same,
    "aten.resolve_neg.default": _same,
    "aten.view.default": view,
    "aten._unsafe_view.default": view,
    "aten.reshape.default": view,
    "aten._reshape_copy.default": view,
    "aten._reshape_alias.default": view,
    "aten.view_copy.default": view,
    "aten.unsqueeze.default": view,
    "aten.squeeze.default": view,
    "aten.squeeze.dim": view,
    "aten.squeeze.dims": view,
    "aten.permute.default": permute,
    "aten.t.default": permute,
    "aten.transpose.int": permute,
    "aten.expand.default": expand,
    "aten._to_copy.default": to_copy,
    "aten.slice.Tensor": slice_,
    "aten.select.int": select,
    "aten.unbind.int": unbind,
    "aten.stack.default": stack,
    "aten.cat.default": cat,
    "aten.sum.default": sum_,
    "aten.sum.dim_IntList": sum_,
    "aten.unsafe_split.Tensor": renamed("aten.split.Tensor"),
    "aten.unsafe_split_with_sizes.default": renamed("aten.split_with_sizes.default"),
    "aten.zeros.default": filled(0.0),
    "aten.zeros_like.default": filled(0.0),
    "aten.new_zeros.default": filled(0.0),
    "aten.zero.default": filled(0.0),
    "aten.empty.memory_format": filled(0.0),
    "aten.empty_strided.default": filled(0.0),
    "aten.empty_like.default": filled(0.0),
    "aten.new_empty.default": filled(0.0),
    "aten.new_empty_strided.default": filled(0.0),
    "aten.ones.default": filled(1.0),
    "aten.ones_like.default": filled(1.0),
    "aten.new_ones.default": filled(1.0),
    "aten.full.default": filled(None, 1),
    "aten.full_like.default": filled(None, 1),
    "aten.new_full.default": filled(None, 2),
    "aten.scalar_tensor.default": filled(None, 0),
    "aten.fill.Scalar": filled(None, 1),
    "aten.fill.Tensor": filled(None, 1),
    "aten.copy.default": copy,
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.eye.default": factory,
    "aten.eye.m": factory,
    "aten.linspace.default": factory,
    "aten.tril_indices.default": factory,
    "aten.triu_indices.default": factory,
    "aten.add.Scalar": tensor_form("aten.add.Tensor"),
    "aten.sub.Scalar": tensor_form("aten.sub.Tensor"),
    "aten.mul.Scalar": scaled,
    "aten.mul.Tensor": scaled,
    "aten.div.Scalar": scaled,
    "aten.div.Tensor": scaled,
    "aten.pow.Tensor_Scalar": power,
    "aten._softmax.default": softmax_half,
    "aten._log_softmax.default": softmax_half,
}

