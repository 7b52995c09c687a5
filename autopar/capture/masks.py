"""Attention masks that no input decides become flags.

Models build a causal mask with ``arange`` and comparisons and pass it to attention. Such a mask
is evaluated: if it is exactly the causal one it becomes ``causal=True``; if it hides nothing it
goes; any other stays an operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from autopar.capture.interpret import run_nodes
from autopar.capture.simplify import Draft
from autopar.ir.graph import BUFFER, CONSTANT, INPUT, PARAMETER, Node, Ref, refs_in

_ATTENTION = {
    "autopar.attention.default": 3,
    "autopar.attention_backward.default": 4,
}
"""Position of the mask; the causal flag is the last argument but one."""

_LARGEST_ELEMENTS = 2**29
"""Masks beyond this are not evaluated: that would take half a gigabyte and seconds."""


class MaskKind(Enum):
    """What a constant mask hides."""

    NOTHING = auto()
    FUTURE = auto()
    OTHER = auto()


def fold_masks(drafts: Sequence[Draft], constants: Mapping[str, Tensor]) -> None:
    """Replace constant masks of attention ops by what they mean, in place."""
    kinds: dict[Ref, MaskKind] = {}
    for draft in drafts:
        position = _ATTENTION.get(draft.op)
        if position is None:
            continue
        mask = draft.args[position]
        if not isinstance(mask, Ref):
            continue
        if mask not in kinds:
            kinds[mask] = _kind(drafts, mask, constants)
        if kinds[mask] is not MaskKind.OTHER:
            args = list(draft.args)
            args[position] = None
            args[-2] = bool(args[-2]) or kinds[mask] is MaskKind.FUTURE
            draft.args = tuple(args)


def _kind(drafts: Sequence[Draft], mask: Ref, constants: Mapping[str, Tensor]) -> MaskKind:
    if drafts[int(mask.node)].outputs[mask.index].num_elements > _LARGEST_ELEMENTS:
        return MaskKind.OTHER
    ancestors = constant_ancestors(drafts, mask)
    if ancestors is None:
        return MaskKind.OTHER
    return mask_kind(evaluate(drafts, ancestors, mask, constants))


def constant_ancestors(drafts: Sequence[Draft], value: Ref) -> list[int] | None:
    """Numbers of the nodes that make a value; None if the program's state or data is among them."""
    needed, found = {int(value.node)}, []
    for number in range(int(value.node), -1, -1):
        if number not in needed:
            continue
        draft = drafts[number]
        if draft.op in (PARAMETER, BUFFER, INPUT):
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


def mask_kind(mask: Tensor) -> MaskKind:
    """What a mask ``[b, h, s, t]`` hides, the same in every sample and head."""
    for dim in (0, 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min)).all()):
            return MaskKind.OTHER
        mask = shown
    if bool(mask.all()):
        return MaskKind.NOTHING
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril_()
    return MaskKind.FUTURE if bool((mask == causal).all()) else MaskKind.OTHER
