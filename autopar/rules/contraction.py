"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.ir.graph import DTYPE_BYTES, Node, TensorType
from autopar.rules.expansions import bias_once, routed, routed_outer
from autopar.rules.factors import Factors, linear_sets, table
from autopar.rules.notation import Dims, Rule, RuleMaker, rule


def multiply_adds(names: str) -> Callable[[Rule], int]:
    """Two operations for every point of the loop nest of these factors."""

    def flops(made: Rule) -> int:
        return 2 * math.prod(made.sizes[name] for name in names.split())

    return flops


def _with_bias(left: str, right: str, product: str) -> RuleMaker:
    """A product plus a broadcast bias (operand 0), which split products must add once."""
    out = left.replace("k", "") + right.replace("k", "").replace("b", "")

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()
        bias, first, second = operands
        dims: list[Dims] = [
            tuple(factors.dim(name, size) for name, size in zip(names, kind.shape, strict=True))
            for names, kind in ((left, first), (right, second), (out, node.outputs[0]))
        ]
        names = out[len(out) - len(bias.shape) :]
        added = tuple(
            (name,) if factors.sizes[name] == size else ()
            for name, size in zip(names, bias.shape, strict=True)
        )
        made = factors.rule(
            (added, *dims[:2]),
            dims[2:],
            linear=linear_sets("0 1 | 0 2"),
            expand=bias_once(product),
            expand_on=frozenset({"k"}),
            flops=2 * math.prod(factors.sizes.values()),
        )
        scaled = any(node.kwarg(name, 1) != 1 for name in ("alpha", "beta"))
        return replace(made, whole=frozenset({"k"})) if scaled else made

    return make


_ROW_BYTES = 16
"""What the strides of the operands of a grouped product are multiples of."""


def _grouped(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Products of groups of rows that an offset tensor ends; groups and their rows stay whole."""
    text, whole = {
        (2, 3): ("t k, e k n, e -> t n", "te"),
        (3, 2): ("e m k, k t, e -> m t", "te"),
        (2, 2): ("m t, t n, e -> e m n", "te"),
        (3, 3): ("e m k, e k n -> e m n", ""),
    }[len(operands[0].shape), len(operands[1].shape)]
    unit = _ROW_BYTES // DTYPE_BYTES[operands[0].dtype]
    factors = Factors()

    def dim(name: str, size: int) -> tuple[str, ...]:
        if name in "te" or size % unit:
            return factors.dim(name, size, whole=name in whole or size % unit != 0)
        return factors.dim(name, size // unit) + factors.dim(f"{name}_", unit, whole=True)

    left, right = (
        [
            tuple(dim(name, size) for name, size in zip(part.split(), kind.shape, strict=True))
            for part, kind in zip(side.split(","), kinds, strict=True)
        ]
        for side, kinds in zip(text.split("->"), (operands, node.outputs), strict=True)
    )
    flops = 2 * math.prod(size for name, size in factors.sizes.items() if name != "e" or not whole)
    return factors.rule(left, right, linear=linear_sets("0 | 1"), flops=flops)


_EXPERTS = frozenset({"e"})


def _routed_outer(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    factors = Factors()
    (rows, height), width = operands[0].shape, operands[1].shape[1]
    t, n, k = factors.dim("t", rows), factors.dim("n", height), factors.dim("k", width)
    e = factors.dim("e", node.outputs[0].shape[0])
    return factors.rule(
        ((t, n), (t, k), (t,)),
        ((e, n, k),),
        linear=linear_sets("0 | 1"),
        expand=routed_outer,
        expand_on=_EXPERTS,
        contiguous=_EXPERTS,
        flops=2 * rows * height * width,
    )


RULES: Mapping[str, RuleMaker] = {
    **table("mm", rule("m k, k n -> m n", linear="0 | 1", flops=multiply_adds("m k n"))),
    **table("bmm", rule("b m k, b k n -> b m n", linear="0 | 1", flops=multiply_adds("b m k n"))),
    **table("mv", rule("m k, k -> m", linear="0 | 1", flops=multiply_adds("m k"))),
    **table("dot vdot", rule("k, k -> ", linear="0 | 1", flops=multiply_adds("k"))),
    **table("_cdist_forward", rule("... m d, ... n d -> ... m n", whole="d")),
    **table(
        "_cdist_backward",
        rule("... m n, ... m d, ... n d, ... m n -> ... m d", linear="0", whole="d"),
    ),
    **table("_pdist_forward", rule("m d -> k", whole="m d k")),
    **table("_pdist_backward", rule("k, m d, k -> m d", linear="0", whole="m d k")),
    **table("_grouped_mm", _grouped),
    **table(
        "autopar::routed_linear",
        rule(
            "t k, e n k, t -> t n",
            linear="0 | 1",
            expand=routed,
            expand_on=_EXPERTS,
            contiguous=_EXPERTS,
            flops=multiply_adds("t n k"),
        ),
    ),
    **table("autopar::routed_outer", _routed_outer),
    **table("addmm", _with_bias("mk", "kn", "aten.mm.default")),
    **table("addmv", _with_bias("mk", "k", "aten.mv.default")),
    **table("baddbmm", _with_bias("bmk", "bkn", "aten.bmm.default")),
}
