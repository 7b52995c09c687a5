"""Attention masks that no input decides become flags.

Models build a causal mask from ``arange`` and comparisons, join it with the batch's padding mask,
and pass that to attention. The parts of such a mask that depend on no input are evaluated: if
they hide exactly the future they become ``causal=True``, if they hide nothing they go; what is
left is the batch's own part, or nothing. Any other constant mask (a sliding window) stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.capture.indexing import run_of
from autopar.capture.interpret import run_nodes
from autopar.capture.simplify import Builder, Draft, Rewrite
from autopar.capture.views import reshape
from autopar.ir.graph import BUFFER, CONSTANT, INPUT, KEY, PARAMETER, Node, Ref, TensorType, refs_in

_POSITIONS = {
    "autopar.attention.default": (3, 4),
    "autopar.attention_backward.default": (4, 7),
    "autopar.attention_dropout.default": (3, 4),
    "autopar.attention_dropout_backward.default": (4, 7),
}
"""Where attention's mask and its causal flag are."""

_ANDS = ("aten.bitwise_and.Tensor", "aten.logical_and.default")

_COMPARISONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    f"aten.{name}.Tensor": getattr(torch, name) for name in ("eq", "ne", "le", "lt", "ge", "gt")
}

Scores = tuple[int, int]
"""Numbers of query and key positions."""

_LARGEST_ELEMENTS = 2**29
"""Larger masks are not evaluated: that would take more than half a gigabyte, and seconds."""


class MaskKind(Enum):
    """What a constant mask hides."""

    NOTHING = auto()
    FUTURE = auto()
    OTHER = auto()


def mask_rewrites(constants: Mapping[str, Tensor]) -> Mapping[str, Rewrite]:
    """Rewrites of attention ops that fold constant masks.

    Args:
        constants: Real tensors of CONSTANT nodes.
    """
    folded: dict[tuple[Ref, Scores], tuple[Ref | None, bool]] = {}

    def rewriter(position: int, flag: int) -> Rewrite:
        def rewrite(builder: Builder, draft: Draft) -> tuple[Ref, ...] | None:
            mask = draft.args[position]
            if isinstance(mask, Ref):
                q, k = refs_in(draft.args[position - 3 : position - 1])
                scores = (builder.type_of(q).shape[2], builder.type_of(k).shape[2])
                if (mask, scores) not in folded:
                    folded[mask, scores] = _fold(builder, draft, mask, scores, constants)
                left, causal = folded[mask, scores]
                args = list(draft.args)
                args[position], args[flag] = left, bool(args[flag]) or causal
                draft.args = tuple(args)
            return None

        return rewrite

    return {op: rewriter(*positions) for op, positions in _POSITIONS.items()}


def _fold(
    builder: Builder, draft: Draft, mask: Ref, scores: Scores, constants: Mapping[str, Tensor]
) -> tuple[Ref | None, bool]:
    """What is left of a mask, and whether causality was in it."""
    parts = _conjuncts(builder, mask)
    causal = [
        part
        for part in parts
        if _compares_positions(builder, part, scores)
        or _compares_numbers(builder, part, scores, constants)
    ]
    rest = [part for part in parts if part not in causal]
    ancestors = {part: constant_ancestors(builder.nodes, part) for part in rest}
    fixed = [part for part in rest if ancestors[part] is not None]
    left = [part for part in rest if ancestors[part] is None]
    kind = MaskKind.NOTHING
    if fixed:
        values = [_value(builder, part, ancestors[part] or [], constants) for part in fixed]
        known = [value for value in values if value is not None]
        if len(known) < len(fixed):
            return _unexpanded(builder, draft, mask), False
        kind = mask_kind(_all(known), scores)
    if kind is MaskKind.OTHER:
        return _unexpanded(builder, draft, mask), False
    return _joined(builder, draft, left), bool(causal) or kind is MaskKind.FUTURE


def _value(
    builder: Builder, part: Ref, ancestors: Sequence[int], constants: Mapping[str, Tensor]
) -> Tensor | None:
    """A constant mask, one entry long in dims along which it is all the same; None if too large.

    A comparison is made of what differs in its operands alone: in a batch of sequences of which
    none is packed, all are of sequence 0, whatever the batch.
    """
    maker = builder.maker(part)
    operands = [ref for arg in maker.args for ref in refs_in(arg)]
    if maker.op in _COMPARISONS and len(operands) == 2:
        left, right = (_narrowed_value(builder, ref, constants) for ref in operands)
        if left is not None and right is not None:
            elements = math.prod(np.broadcast_shapes(left.shape, right.shape))
            return None if elements > _LARGEST_ELEMENTS else _COMPARISONS[maker.op](left, right)
    large = builder.type_of(part).num_elements > _LARGEST_ELEMENTS
    return None if large else evaluate(builder.nodes, ancestors, part, constants)


def _narrowed_value(builder: Builder, ref: Ref, constants: Mapping[str, Tensor]) -> Tensor | None:
    """A constant, one entry long in dims along which it is all the same; None if too large.

    It may take as many bytes as a mask of a byte an element.
    """
    numbers = constant_ancestors(builder.nodes, ref)
    if numbers is None or builder.type_of(ref).num_bytes > _LARGEST_ELEMENTS:
        return None
    return _narrowed(evaluate(builder.nodes, numbers, ref, constants))


def _narrowed(value: Tensor) -> Tensor:
    """The value, one entry long in dims along which it is all the same."""
    for dim, size in enumerate(value.shape):
        first = value.narrow(dim, 0, min(1, size))
        if size > 1 and bool((value == first).all()):
            value = first
    return value


def _compares_positions(builder: Builder, part: Ref, scores: Scores) -> bool:
    """Whether a mask says, in so many words, that keys come no later than queries."""
    maker = builder.maker(part)
    if maker.op not in ("aten.le.Tensor", "aten.ge.Tensor") or len(maker.operands) != 2:
        return False
    keys, queries = maker.operands if maker.op == "aten.le.Tensor" else maker.operands[::-1]
    shape = builder.type_of(part).shape
    rank = len(shape)
    return (
        shape[-2:] == scores
        and run_of(builder, keys, shape[-1], rank) == rank - 1
        and run_of(builder, queries, shape[-2], rank) == rank - 2
    )


def _compares_numbers(
    builder: Builder, part: Ref, scores: Scores, constants: Mapping[str, Tensor]
) -> bool:
    """Whether a mask compares constants that number the keys and the queries to the same end."""
    maker = builder.maker(part)
    if maker.op not in ("aten.le.Tensor", "aten.ge.Tensor") or len(maker.operands) != 2:
        return False
    pair = [_narrowed_value(builder, ref, constants) for ref in maker.operands]
    keys, queries = pair if maker.op == "aten.le.Tensor" else pair[::-1]
    return _counts(keys, -1, scores[1]) and _counts(queries, -2, scores[0])


def _counts(value: Tensor | None, dim: int, count: int) -> bool:
    """Whether a constant counts from zero along a dim, and is the same along all others."""
    return (
        value is not None
        and value.ndim >= -dim
        and value.numel() == value.shape[dim] == count
        and bool((value.flatten() == torch.arange(count)).all())
    )


def _conjuncts(builder: Builder, mask: Ref) -> list[Ref]:
    """The masks that all have to be true where ``mask`` is, up to broadcasting."""
    maker = builder.maker(mask)
    if maker.op == "aten.expand.default":
        return _conjuncts(builder, *refs_in(maker.args[0]))
    if maker.op in _ANDS and builder.type_of(mask).dtype == "bool":
        return [
            part for arg in maker.args for ref in refs_in(arg) for part in _conjuncts(builder, ref)
        ]
    return [mask]


def _unexpanded(builder: Builder, draft: Draft, mask: Ref) -> Ref:
    """The mask before it was repeated for every sample and head, which attention does itself."""
    maker = builder.maker(mask)
    if maker.op != "aten.expand.default":
        return mask
    (narrow,) = refs_in(maker.args[0])
    return _four_dims(builder, draft, narrow)


def _four_dims(builder: Builder, draft: Draft, mask: Ref) -> Ref:
    shape = builder.type_of(mask).shape
    return reshape(builder, draft, mask, (1,) * (4 - len(shape)) + shape)


def _joined(builder: Builder, draft: Draft, parts: Sequence[Ref]) -> Ref | None:
    """One mask of four dims that is true where all parts are."""
    if not parts:
        return None
    first, *rest = (_four_dims(builder, draft, part) for part in parts)
    for part in rest:
        sizes = zip(builder.type_of(first).shape, builder.type_of(part).shape, strict=True)
        output = TensorType(tuple(max(a, b) for a, b in sizes), "bool")
        first = builder.derive(draft, _ANDS[0], (first, part), output)
    return first


def constant_ancestors(drafts: Sequence[Draft], value: Ref) -> list[int] | None:
    """Numbers of the nodes that make a value; None if state or data of the program is in it."""
    needed, found = {int(value.node)}, []
    for number in range(int(value.node), -1, -1):
        if number not in needed:
            continue
        draft = drafts[number]
        if draft.op in (PARAMETER, BUFFER, INPUT, KEY):
            return None
        found.append(number)
        for arg in (*draft.args, *(arg for _, arg in draft.kwargs)):
            needed.update(int(ref.node) for ref in refs_in(arg))
    return found[::-1]


def evaluate(
    drafts: Sequence[Draft], numbers: Sequence[int], value: Ref, constants: Mapping[str, Tensor]
) -> Tensor:
    """The value, computed by these nodes."""
    env: dict[Ref, Any] = {}
    for number in numbers:
        draft = drafts[number]
        if draft.op == CONSTANT:
            env[Ref(str(number))] = constants[draft.target].cpu()
            continue
        node = Node(
            name=str(number),
            op=draft.op,
            args=draft.args,
            kwargs=draft.kwargs,
            outputs=draft.outputs,
        )
        run_nodes((node,), env, "cpu")
    found = env[value]
    assert isinstance(found, Tensor)
    return found


def _all(masks: Sequence[Tensor]) -> Tensor:
    """True where every mask is; one that is added to scores stays as it is if alone."""
    first, *rest = masks
    for mask in rest:
        first = first & mask
    return first


def mask_kind(mask: Tensor, scores: Scores) -> MaskKind:
    """What a mask broadcastable to ``[b, h, s, t]`` hides.

    Args:
        mask: Bool (true: attend), or floating (added to the scores).
        scores: (s, t).
    """
    for dim in range(mask.ndim - 2):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min)).all()):
            return MaskKind.OTHER
        mask = shown
    if bool(mask.all()):
        return MaskKind.NOTHING
    causal = torch.ones(scores, dtype=torch.bool).tril_()
    same = mask.shape[-2:] == causal.shape and bool((mask == causal).all())
    return MaskKind.FUTURE if same else MaskKind.OTHER
