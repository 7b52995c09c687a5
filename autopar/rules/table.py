"""Lookup over all rule tables.

``rule_for(node, operand_types, extra)`` is the one way to a rule; ``user_rule`` makes the entry
of an op that autopar does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.errors import MissingRuleError, RuleError
from autopar.ir.graph import Node, TensorType
from autopar.rules import (
    attention,
    contraction,
    convolution,
    creation,
    indexing,
    linear_algebra,
    movement,
    normalization,
    pointwise,
    random,
    reduction,
    spatial,
)
from autopar.rules.factors import all_whole, op_name
from autopar.rules.notation import Rule, RuleMaker, rule

RULES: Mapping[str, RuleMaker] = MappingProxyType(
    {
        **pointwise.RULES,
        **contraction.RULES,
        **convolution.RULES,
        **movement.RULES,
        **reduction.RULES,
        **normalization.RULES,
        **spatial.RULES,
        **linear_algebra.RULES,
        **attention.RULES,
        **random.RULES,
        **indexing.RULES,
        **creation.RULES,
    }
)
"""The rule of every op autopar knows, by the op's name."""

WHOLE_TEXT = "whole"
"""The text of a rule that computes an op whole on every rank."""

_NO_EXTRA: Mapping[str, RuleMaker] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class UserRule:
    """A user's table entry.

    Attributes:
        op: The op as graphs name it, ``mylib.op.default``.
        text: Its factor notation, or ``whole``.
        make: Makes the rule of a node.
    """

    op: str
    text: str
    make: RuleMaker


def user_rule(name: str, text: str, *, linear: str = "", whole: str = "") -> UserRule:
    """The entry of an op of the user's.

    Args:
        name: ``mylib::op`` or ``mylib::op.overload``.
        text: Factor notation over every tensor operand and output, or ``"whole"`` to compute the
            op whole on every rank.
        linear: Sets of operand positions that may be partial together, ``"0 1 | 2"``.
        whole: Factors never split, separated by spaces.

    Raises:
        RuleError: The name or the text does not parse.
    """
    if name.count("::") != 1:
        raise RuleError(
            f"cannot register a rule for {name!r}: it does not name an op; "
            "write 'mylib::op' or 'mylib::op.overload'"
        )
    make = all_whole if text.strip() == WHOLE_TEXT else rule(text, linear=linear, whole=whole)
    return UserRule(op_name(name), text, make)


def rule_for(
    node: Node,
    operand_types: tuple[TensorType, ...],
    extra: Mapping[str, RuleMaker] = _NO_EXTRA,
) -> Rule:
    """The rule of a node.

    Args:
        node: A node of a graph.
        operand_types: Global types of its operands, in order.
        extra: Entries that come before the tables, by op.

    Raises:
        MissingRuleError: No table has the op.
        RuleError: The rule does not fit the node.
    """
    maker = extra.get(node.op) or RULES.get(node.op)
    if maker is None:
        raise MissingRuleError(_missing(node))
    try:
        return maker(node, operand_types)
    except RuleError as error:
        raise RuleError(f"{error} (op {node.op!r} in {node.source})") from None


def _missing(node: Node) -> str:
    name = node.op.replace(".", "::", 1).removesuffix(".default")
    return (
        f"no rule for op {node.op!r} in {node.source}: cannot tell how it may be split; "
        f'register one with autopar.rule("{name}", "b m, m n -> b n"), '
        f'or autopar.rule("{name}", "whole") to compute it whole on every rank'
    )
