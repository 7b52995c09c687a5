"""Attention: batch, key heads, query heads of a group and query positions are free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Node, TensorType
from autopar.rules import expansions
from autopar.rules.factors import Factors, table
from autopar.rules.notation import Dims, Rule, RuleMaker


class AttentionShapes:
    """Dims of the tensors of an attention op; query head ``(h r)`` reads key head ``h``."""

    def __init__(self, q: TensorType, k: TensorType, v: TensorType) -> None:
        self.factors = Factors()
        batch = self.factors.dim("b", q.shape[0])
        heads = self.factors.dim("h", k.shape[1])
        group = self.factors.dim("r", q.shape[1] // k.shape[1])
        rows = self.factors.dim("s", q.shape[2])
        columns = self.factors.dim("t", k.shape[2], whole=True)
        width = self.factors.dim("d", q.shape[3], whole=True)
        value_width = self.factors.dim("e", v.shape[3], whole=True)
        query_heads = heads + group if self.factors.sizes["r"] > 1 else heads
        self.q: Dims = (batch, query_heads, rows, width)
        self.k: Dims = (batch, heads, columns, width)
        self.v: Dims = (batch, heads, columns, value_width)
        self.out: Dims = (batch, query_heads, rows, value_width)
        self.lse: Dims = (batch, query_heads, rows)
        self.scores: Dims = (batch, query_heads, rows, columns)
        self.full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def mask(self, kind: TensorType) -> Dims:
        """Dims of a mask, which is broadcast to the scores."""
        pairs = zip(self.scores, kind.shape, self.full, strict=True)
        return tuple(dim if size == full else () for dim, size, full in pairs)

    def flops(self, products: int) -> int:
        """Operations of ``products`` matrix products over queries and keys."""
        sizes = self.factors.sizes
        width = (sizes["d"] + sizes["e"]) // 2
        return products * 2 * width * sizes["b"] * sizes["h"] * sizes["r"] * sizes["s"] * sizes["t"]

    def forward(self, operands: Sequence[TensorType], *, causal: bool) -> Rule:
        """Rule of attention, but for what expands it.

        Args:
            operands: Queries, keys, values and perhaps a mask.
            causal: Whether queries see the keys up to their own position only.
        """
        mask = tuple(self.mask(kind) for kind in operands[3:])
        rows = frozenset({"s"}) if causal else frozenset()
        return self.factors.rule(
            (self.q, self.k, self.v, *mask),
            (self.out, self.lse),
            expand_on=rows,
            contiguous=rows,
            flops=self.flops(2) // (2 if causal else 1),
        )

    def backward(
        self, operands: Sequence[TensorType], *, causal: bool, mask_gradient: bool
    ) -> Rule:
        """Rule of the gradients; those of keys and values are partial under split queries.

        Args:
            operands: The output's gradient, queries, keys, values, perhaps a mask, output and
                log-sum-exp.
            causal: Whether queries see the keys up to their own position only.
            mask_gradient: Whether the mask has a gradient, too.
        """
        mask = tuple(self.mask(kind) for kind in operands[4:-2])
        rows = frozenset({"s"}) if causal else frozenset()
        if causal and mask_gradient and self.full[2] != operands[4].shape[2]:
            self.factors.whole.add("s")
        return self.factors.rule(
            (self.out, self.q, self.k, self.v, *mask, self.out, self.lse),
            (self.q, self.k, self.v, *(mask if mask_gradient else ())),
            linear=(),
            expand_on=rows,
            contiguous=rows,
            flops=self.flops(5) // (2 if causal else 1),
        )


def _forward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    made = AttentionShapes(*operands[:3])
    found = made.forward(operands, causal=bool(node.args[4]))
    return replace(found, expand=expansions.attention)


def _backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    made = AttentionShapes(*operands[1:4])
    mask_gradient = len(node.outputs) == 4
    found = made.backward(operands, causal=bool(node.args[7]), mask_gradient=mask_gradient)
    return replace(found, expand=expansions.attention_backward)


RULES: Mapping[str, RuleMaker] = {
    **table("autopar::attention", _forward),
    **table("autopar::attention_backward autopar::attention_backward_mask", _backward),
}
