"""Calls of ``scaled_dot_product_attention`` as the one attention op."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.capture.draws import Draws
from autopar.capture.tape import Tape

SDPA = torch.nn.functional.scaled_dot_product_attention
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


class Attention:
    """In place of ``scaled_dot_product_attention``: ``autopar::attention``, or its dropout form.

    Args:
        draws: Names the dropouts.
        tape: What was recorded before; None while nothing is recorded.
    """

    def __init__(self, draws: Draws, tape: Tape | None = None) -> None:
        self._draws = draws
        self._tape = tape

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        shape = query.shape
        q, k, v = (_four_dims(t) for t in (query, key, value))
        if shape[:-3] != key.shape[:-3] or shape[:-3] != value.shape[:-3]:
            batch = max(t.shape[0] for t in (q, k, v))
            q, k, v = (t.expand(batch, *t.shape[1:]) for t in (q, k, v))
        few_k, few_v = self._unrepeated(k), self._unrepeated(v)
        if few_k is not None and few_v is not None and few_k.shape[1] == few_v.shape[1]:
            k, v = few_k, few_v
        mask = None if attn_mask is None else _mask(attn_mask, query)
        factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        args = (q, k, v, mask, is_causal, factor)
        out: Tensor
        if dropout_p > 0.0:
            random = (self._draws.key, self._draws.stream("attention"), float(dropout_p))
            out = torch.ops.autopar.attention_dropout(*args, *random)[0]
        else:
            out = torch.ops.autopar.attention(*args)[0]
        return out if query.ndim == 4 else out.reshape(*shape[:-1], v.shape[-1])

    def _unrepeated(self, heads: Tensor) -> Tensor | None:
        """``[b, h, t, d]`` before its heads were repeated; None if they were not.

        Repeating heads is an unsqueeze behind the head dim, an expand and a reshape.
        """
        tape = self._tape
        ref = None if tape is None else tape.ref(heads)
        if tape is None or ref is None or heads.ndim != 4 or tape.step_of(ref).op not in _RESHAPES:
            return None
        merged = tape.step_of(ref)
        wide = merged.args[0]
        step = tape.step_of(wide)  # type: ignore[arg-type]
        if step.op == "aten.clone.default":
            wide = step.args[0]
            step = tape.step_of(wide)  # type: ignore[arg-type]
        if step.op != "aten.expand.default":
            return None
        narrow = step.args[0]
        base_step = tape.step_of(narrow)  # type: ignore[arg-type]
        if base_step.op != "aten.unsqueeze.default" or base_step.args[1] not in (2, -3):
            return None
        base = tape.tensor(base_step.args[0])  # type: ignore[arg-type]
        b, h, t, d = base.shape
        repeats = step.outputs[0].shape[2] if step.outputs[0] else 0
        whole = step.outputs[0] is not None and step.outputs[0].shape == (b, h, repeats, t, d)
        if not whole or heads.shape != (b, h * repeats, t, d) or base._version:
            return None
        return base


def _four_dims(tensor: Tensor) -> Tensor:
    """``[..., s, d]`` as ``[b, h, s, d]``."""
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim == 3:
        return tensor.unsqueeze(1)
    if tensor.ndim == 2:
        return tensor[None, None]
    return tensor.flatten(0, tensor.ndim - 4)


def _mask(mask: Tensor, query: Tensor) -> Tensor:
    """The mask with the four dims of what `_four_dims` makes of the query."""
    if mask.dtype != torch.bool and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if query.ndim == 3:
        mask = mask[None] if mask.ndim == 2 else mask
        return mask[:, None]
    while mask.ndim < 4:
        mask = mask[None]
    if query.ndim > 4:
        batch = query.shape[: query.ndim - 3]
        mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, query.ndim - 4)
    return mask
