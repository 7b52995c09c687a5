"""Factor notation: ``"m k, k n -> m n"`` says how the dims of an op relate.

Every letter or word is a *factor*, a loop index of the op. A dim is one factor, several merged
ones in parentheses (``(b s)``, outermost first), or ``1`` for a dim of size one that is broadcast;
a tensor without dims is written as nothing (``"k, k ->"``). ``...`` stands for any leading dims,
aligned from the right as broadcasting does. A factor that an output lacks is *reduced*: split it,
and that output is partial.

Reading a text gives a `Pattern`; binding a pattern to the global types of a node gives a `Rule`,
with the size of every factor known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autopar.errors import RuleError
from autopar.ir.graph import Arg, Node, TensorType
from autopar.ir.sharding import (
    SUM,
    WHOLE,
    AxisSharding,
    Mesh,
    Partial,
    Sharding,
    Split,
    is_legal,
)

if TYPE_CHECKING:
    from autopar.rules.local import Emitter, LocalOp

Dims = tuple[tuple[str, ...], ...]
"""The factors of each dim of a tensor, outermost first; ``()`` is a broadcast dim of size one."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one node may be split.

    Attributes:
        operands: Factors of each operand (in the order of ``Node.operands``).
        outputs: Factors of each output.
        sizes: Global size of every factor.
        whole: Factors that are never split.
        reduce: How partial results of a reduced factor are joined; default sum.
        unrelated: (factor, output) pairs where the output does not depend on the factor, so it
            stays whole (a bias gradient under split input channels).
        linear: Sets of operands through which partial values may pass together; the other
            operands are whole on that axis. Only sums pass. The empty set says that the op makes
            zeros, which are partial as well.
        expand: Emits the local program where the strategy splits a factor in ``expand_on``;
            otherwise the node runs as captured, with local sizes.
        expand_on: Factors whose split needs ``expand``; if ``synced`` their outputs are complete.
        synced: Factors in ``expand_on`` whose partial results ``expand`` itself joins, by
            collectives: outputs without them are whole, not partial.
        sync_bytes: Bytes of the tensors those collectives carry for the whole node, for pricing.
        local_args: Rewrites constant arguments (sizes, offsets) for one rank.
        even: Factors that may be split into equal parts only.
        contiguous: Factors whose local indices must have no gaps: ``local_args`` or ``expand``
            use the first of them (`LocalOp.start`).
        alias: The op only renames or reorders dims: it costs nothing, and its output is its
            first operand under another shape.
        view: The op moves no bytes: its outputs are views of its first operand (an alias, a
            slice, an expansion of a dim of size one).
        flops: Multiply-adds count double; 0 for ops that only move bytes.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduce: Mapping[str, str] = field(default_factory=dict)
    unrelated: frozenset[tuple[str, int]] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    expand: Callable[[Emitter, LocalOp], None] | None = None
    expand_on: frozenset[str] = frozenset()
    synced: frozenset[str] = frozenset()
    sync_bytes: int = 0
    local_args: Callable[[LocalOp], tuple[tuple[Arg, ...], dict[str, Arg]]] | None = None
    even: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()
    alias: bool = False
    view: bool = False
    flops: int = 0

    def factors(self) -> tuple[str, ...]:
        """Every factor that may be split, in order of first appearance."""
        seen: dict[str, None] = {}
        for dims in self.operands + self.outputs:
            for dim in dims:
                seen.update(dict.fromkeys(dim))
        return tuple(f for f in seen if f not in self.whole and self.sizes[f] > 1)

    def place(
        self, dims: Dims, factor: str, outer: int, block: int, shares: tuple[int, ...] = ()
    ) -> Split | None:
        """The split of a tensor's dim that splits ``factor`` so; None if it lacks the factor."""
        for index, dim in enumerate(dims):
            if factor in dim:
                at = dim.index(factor)
                before = math.prod(self.sizes[f] for f in dim[:at])
                after = math.prod(self.sizes[f] for f in dim[at + 1 :])
                return Split(index, outer * before, block * after, shares)
        return None

    def factor_of(self, dims: Dims, split: Split, ranks: int) -> tuple[str, int, int] | None:
        """(factor, outer, block) that a split of a tensor's dim means; None if it cuts across."""
        size = math.prod(self.sizes[f] for f in dims[split.dim])
        row = size // split.outer
        before, after = 1, size
        for factor in dims[split.dim]:
            own = self.sizes[factor]
            after //= own
            end = after * own
            if split.outer % before == 0 and row <= end:
                fits = split.block % after == 0 and row % after == 0 and split.block >= after
                if fits and own % (split.outer // before) == 0:
                    return factor, split.outer // before, split.block // after
            before *= own
        return None

    def carry(self, sharding: Sharding, sizes: Sequence[int], source: int = 0) -> Sharding | None:
        """Sharding of output 0 of an alias, given that of its operand; None if it cannot pass."""
        return self._move(sharding, self.operands[source], self.outputs[0], sizes)

    def carry_back(self, sharding: Sharding, sizes: Sequence[int]) -> Sharding | None:
        """Sharding of an alias' operand that gives this sharding of its output; None if none."""
        return self._move(sharding, self.outputs[0], self.operands[0], sizes)

    def _move(
        self, sharding: Sharding, given: Dims, wanted: Dims, sizes: Sequence[int]
    ) -> Sharding | None:
        moved: list[AxisSharding] = []
        for axis, ranks in zip(sharding, sizes, strict=True):
            if not isinstance(axis, Split):
                moved.append(axis)
                continue
            found = self.factor_of(given, axis, ranks)
            placed = None if found is None else self.place(wanted, *found, axis.shares)
            if placed is None or found is None or found[0] in self.whole:
                return None
            moved.append(placed)
        return tuple(moved) if self._fits(wanted, moved, sizes) else None

    def _fits(self, dims: Dims, sharding: Sequence[AxisSharding], sizes: Sequence[int]) -> bool:
        """Whether unequal chunks that a move has placed in other dims are legal there."""
        unequal = False
        for axis, ranks in zip(sharding, sizes, strict=True):
            if isinstance(axis, Split):
                size = math.prod(self.sizes[f] for f in dims[axis.dim])
                unequal |= bool(axis.shares) or axis.block * ranks * axis.outer != size
        if not unequal:
            return True
        shape = [math.prod(self.sizes[f] for f in dim) for dim in dims]
        mesh = Mesh(tuple(str(i) for i in range(len(sizes))), tuple(sizes))
        return is_legal(shape, tuple(sharding), mesh)


def axis_effect(
    rule: Rule, factor: str, outer: int, block: int, shares: tuple[int, ...] = ()
) -> tuple[tuple[AxisSharding, ...], tuple[AxisSharding, ...]]:
    """What splitting ``factor`` over one axis does to every operand and every output."""
    operands = tuple(
        rule.place(dims, factor, outer, block, shares) or WHOLE for dims in rule.operands
    )
    outputs: list[AxisSharding] = []
    for index, dims in enumerate(rule.outputs):
        split = rule.place(dims, factor, outer, block, shares)
        if split is not None:
            outputs.append(split)
        elif factor in rule.synced or (factor, index) in rule.unrelated:
            outputs.append(WHOLE)
        else:
            outputs.append(Partial(rule.reduce.get(factor, "sum")))
    return operands, tuple(outputs)


def linear_effect(
    rule: Rule, partial: frozenset[int]
) -> tuple[tuple[AxisSharding, ...], tuple[AxisSharding, ...]]:
    """What partial operands do to every operand and every output."""
    operands = tuple(SUM if i in partial else WHOLE for i in range(len(rule.operands)))
    return operands, (SUM,) * len(rule.outputs)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed text: dims of operands and outputs, ``...`` kept as the factor ``"..."``."""

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    text: str

    def bind(
        self,
        operands: Sequence[TensorType],
        outputs: Sequence[TensorType],
        sizes: Mapping[str, int] | None = None,
    ) -> Rule:
        """The rule for these global types.

        Args:
            operands: Type of every operand the text names, in order.
            outputs: Type of every output.
            sizes: Sizes of factors that shapes alone do not give (pieces of merged dims).

        Raises:
            RuleError: The types do not fit the text.
        """
        if len(operands) != len(self.operands) or len(outputs) != len(self.outputs):
            raise RuleError(
                f"cannot use rule {self.text!r}: it names {len(self.operands)} operands and "
                f"{len(self.outputs)} outputs, the op has {len(operands)} and {len(outputs)}; "
                "name every tensor operand and output"
            )
        ranks = [
            len(t.shape) - sum(1 for d in dims if d != ("...",))
            for dims, t in zip(self.operands + self.outputs, (*operands, *outputs), strict=True)
            if ("...",) in dims
        ]
        free = max(ranks, default=0)
        bound: dict[str, int] = dict(sizes or {})
        spread = tuple(_spread(d, t, free, self.text) for d, t in _pairs(self, operands, outputs))
        pairs = list(zip(spread, (*operands, *outputs), strict=True))
        for dims, kind in pairs:
            for dim, size in zip(dims, kind.shape, strict=True):
                if len(dim) == 1 and (size != 1 or dim[0] not in bound):
                    if bound.get(dim[0], size) not in (size, 1):
                        raise RuleError(
                            f"cannot use rule {self.text!r}: factor {dim[0]!r} is {bound[dim[0]]} "
                            f"in one place and {size} in another"
                        )
                    bound[dim[0]] = max(size, bound.get(dim[0], 1))
        _solve_merged(pairs, bound, self.text)
        settled = tuple(
            tuple(
                () if size == 1 and all(bound[f] != 1 for f in dim) and dim else dim
                for dim, size in zip(dims, kind.shape, strict=True)
            )
            for dims, kind in pairs
        )
        return Rule(
            operands=settled[: len(operands)], outputs=settled[len(operands) :], sizes=bound
        )


def _pairs(
    pattern: Pattern, operands: Sequence[TensorType], outputs: Sequence[TensorType]
) -> list[tuple[Dims, TensorType]]:
    return list(zip(pattern.operands + pattern.outputs, (*operands, *outputs), strict=True))


def _spread(dims: Dims, kind: TensorType, free: int, text: str) -> Dims:
    """Dims with ``...`` replaced by numbered factors, aligned from the right."""
    if ("...",) not in dims:
        if len(dims) != len(kind.shape):
            raise RuleError(
                f"cannot use rule {text!r}: it gives {len(dims)} dims to a tensor of shape "
                f"{list(kind.shape)}"
            )
        return dims
    own = len(kind.shape) - len(dims) + 1
    at = dims.index(("...",))
    named = tuple((f".{free - own + i}",) for i in range(own))
    return dims[:at] + named + dims[at + 1 :]


def _solve_merged(
    pairs: Sequence[tuple[Dims, TensorType]], bound: dict[str, int], text: str
) -> None:
    """Sizes of the factors that occur in merged dims only, where they can be computed."""
    changed = True
    while changed:
        changed = False
        for dims, kind in pairs:
            for dim, size in zip(dims, kind.shape, strict=True):
                open_factors = [f for f in dim if f not in bound]
                if len(open_factors) == 1:
                    known = math.prod(bound[f] for f in dim if f in bound)
                    if known == 0 or size % known:
                        raise RuleError(
                            f"cannot use rule {text!r}: {size} is not a multiple of {known}"
                        )
                    bound[open_factors[0]] = size // known
                    changed = True
    for dims, kind in pairs:
        for dim, size in zip(dims, kind.shape, strict=True):
            missing = [f for f in dim if f not in bound]
            if missing or (size != 1 and math.prod(bound[f] for f in dim) != size):
                raise RuleError(
                    f"cannot use rule {text!r}: factors {list(dim)} do not make a dim of {size}"
                )


_TOKEN = re.compile(r"\(([^()]*)\)|(\.\.\.)|([A-Za-z_][A-Za-z_0-9]*)|(1)")


def parse(text: str) -> Pattern:
    """The pattern a text says.

    Raises:
        RuleError: The text is not factor notation.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"cannot read rule {text!r}: it needs exactly one '->'")
    inputs = sides[0].split(",") if sides[0].strip() else []
    left, right = (tuple(_dims(p, text) for p in parts) for parts in (inputs, sides[1].split(",")))
    return Pattern(left, right, text)


def _dims(part: str, text: str) -> Dims:
    found: list[tuple[str, ...]] = []
    rest = _TOKEN.sub("", part).strip()
    if rest and rest != ".":
        raise RuleError(
            f"cannot read rule {text!r}: {rest!r} is not a factor; write 'm k, k n -> m n'"
        )
    for merged, dots, name, one in _TOKEN.findall(part):
        if merged:
            found.append(tuple(merged.split()))
        elif dots:
            found.append(("...",))
        elif one:
            found.append(())
        else:
            found.append((name,))
    return tuple(found)


RuleMaker = Callable[[Node, tuple[TensorType, ...]], Rule]
"""Makes the rule of a node from the global types of its operands."""


def rule(
    text: str,
    *,
    linear: str = "",
    whole: str = "",
    even: str = "",
    flops: Callable[[Rule], int] | None = None,
    **fields: object,
) -> RuleMaker:
    """A table entry from a text.

    Args:
        text: Factor notation over every tensor operand and output of the op.
        linear: Sets of operand positions that may be partial together, ``"0 1 | 2"``.
        whole: Factors never split, separated by spaces.
        even: Factors split into equal parts only.
        flops: Floating-point operations of the whole node from its bound rule.
        fields: Further fields of `Rule`.

    Raises:
        RuleError: The text is not factor notation, or names what is not there.
    """
    pattern = parse(text)
    sets = _linear_sets(pattern, linear)
    _check_factors(pattern, (*whole.split(), *even.split()))

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        bound = pattern.bind(operands, node.outputs)
        made = replace(
            bound,
            linear=sets,
            whole=frozenset(whole.split()),
            even=frozenset(even.split()),
            **fields,  # type: ignore[arg-type]
        )
        return made if flops is None else replace(made, flops=flops(made))

    return make


def _linear_sets(pattern: Pattern, text: str) -> tuple[frozenset[int], ...]:
    """Sets of operand positions from ``"0 1 | 2"``."""
    known = {str(i): i for i in range(len(pattern.operands))}
    parts = [part.split() for part in text.split("|")]
    for position in (name for part in parts for name in part):
        if position not in known:
            raise RuleError(
                f"cannot read linear={text!r} of rule {pattern.text!r}: {position!r} is none of "
                f"its operands {list(known.values())}; write '0 1 | 2'"
            )
    return tuple(frozenset(known[name] for name in part) for part in parts if part)


def _check_factors(pattern: Pattern, names: Sequence[str]) -> None:
    known = {f for dims in pattern.operands + pattern.outputs for dim in dims for f in dim}
    for name in names:
        if name not in known:
            raise RuleError(
                f"cannot use factor {name!r} in rule {pattern.text!r}: it has "
                f"{sorted(known - {'...'})}; name one of them"
            )
