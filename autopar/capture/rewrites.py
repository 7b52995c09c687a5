"""Canonical forms: one op for what torch says in several ways, and no op for what does nothing.

Each entry of `REWRITES` gets the builder and an op, and returns the values that replace its
outputs, or None to keep it. Strides do not exist in a graph, so copies that only change them go.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.algebra import added, both, narrowed, power, scaled, sum_
from autopar.capture.arguments import Refs, as_ref, operand_type
from autopar.capture.fills import arange, copy, factory, filled, masked_fill
from autopar.capture.indexing import as_strided, as_strided_scatter, index
from autopar.capture.simplify import Builder, Draft, Rewrite
from autopar.capture.views import (
    cat,
    expand,
    permute,
    positive_dims,
    repeat,
    select,
    slice_,
    slice_backward,
    slice_scatter,
    stack,
    unbind,
    view,
)
from autopar.ir.graph import Const


def _same(builder: Builder, draft: Draft) -> Refs:
    """Ops that hand on their operand."""
    return (as_ref(draft.args[0]),)


def to_copy(builder: Builder, draft: Draft) -> Refs:
    """Only a change of dtype is a copy."""
    if operand_type(builder, draft).dtype == draft.outputs[0].dtype:
        return (as_ref(draft.args[0]),)
    draft.op = "aten._to_copy.default"
    draft.args = draft.args[:1]
    draft.kwargs = (("dtype", Const("dtype", draft.outputs[0].dtype)),)
    return None


def renamed(op: str) -> Rewrite:
    """The same op under its usual name."""

    def rewrite(builder: Builder, draft: Draft) -> Refs:
        draft.op = op
        return builder.emit(draft)

    return rewrite


_DIM_SECOND = (
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten.all.dim",
    "aten.amax.default",
    "aten.amin.default",
    "aten.any.dim",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.cummax.default",
    "aten.cumprod.default",
    "aten.cumsum.default",
    "aten.flip.default",
    "aten.gather.default",
    "aten.index_add.default",
    "aten.index_select.default",
    "aten.logcumsumexp.default",
    "aten.logsumexp.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.prod.dim_int",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
    "aten.sort.default",
    "aten.unfold.default",
)
"""Ops whose dims are their second argument."""
_DIM_THIRD = (
    "aten.roll.default",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.topk.default",
)
"""Ops whose dims are their third argument."""

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
    "aten.add.Scalar": added,
    "aten.add.Tensor": added,
    "aten.sub.Scalar": added,
    "aten.sub.Tensor": added,
    "aten.mul.Scalar": scaled,
    "aten.mul.Tensor": scaled,
    "aten.div.Scalar": scaled,
    "aten.div.Tensor": scaled,
    "aten.neg.default": narrowed,
    "aten.pow.Tensor_Scalar": power,
    "aten.bitwise_and.Tensor": both,
    "aten.logical_and.default": both,
    "aten.index.Tensor": index,
    "aten.slice_backward.default": slice_backward,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_backward.default": positive_dims(2, rank_of=1),
    "aten.select_scatter.default": positive_dims(2),
    "aten.masked_fill.Scalar": masked_fill,
    "aten.masked_fill.Tensor": masked_fill,
    "aten.repeat.default": repeat,
    "aten.as_strided.default": as_strided,
    "aten.as_strided_scatter.default": as_strided_scatter,
    "aten._conj.default": renamed("aten.conj_physical.default"),
    "aten._softmax_backward_data.default": positive_dims(2),
    "aten._log_softmax_backward_data.default": positive_dims(2),
    **{op: positive_dims(1) for op in _DIM_SECOND},
    **{op: positive_dims(2) for op in _DIM_THIRD},
}
