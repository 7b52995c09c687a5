"""Finding the rule of a node, and rules of users."""

from __future__ import annotations

import pytest

from autopar.errors import MissingRuleError, RuleError
from autopar.ir.graph import Node, Ref, Source, TensorType
from autopar.rules.table import rule_for, user_rule

KINDS = (TensorType((4, 6), "float32"), TensorType((6, 8), "float32"))
NODE = Node(
    name="n",
    op="mylib.op.default",
    args=(Ref("x"), Ref("y")),
    outputs=(TensorType((4, 8), "float32"),),
    source=Source("encoder.norm", "model.py:12"),
)


def test_a_missing_rule_says_how_to_register_one() -> None:
    with pytest.raises(MissingRuleError) as caught:
        rule_for(NODE, KINDS)
    assert str(caught.value) == (
        "no rule for op 'mylib.op.default' in module 'encoder.norm' (model.py:12): cannot tell "
        'how it may be split; register one with autopar.rule("mylib::op", "b m, m n -> b n"), '
        'or autopar.rule("mylib::op", "whole") to compute it whole on every rank'
    )


def test_a_users_rule_is_used() -> None:
    mine = user_rule("mylib::op", "b m, m n -> b n", linear="0 | 1", whole="n")
    made = rule_for(NODE, KINDS, {mine.op: mine.make})
    assert made.factors() == ("b", "m")
    assert made.linear == (frozenset({0}), frozenset({1}))


def test_a_users_rule_comes_before_the_table() -> None:
    mine = user_rule("aten::mm", "whole")
    node = Node(name="n", op="aten.mm.default", args=NODE.args, outputs=NODE.outputs)
    assert rule_for(node, KINDS, {mine.op: mine.make}).factors() == ()
    assert rule_for(node, KINDS).factors() == ("m", "k", "n")


def test_overloads_are_named() -> None:
    assert user_rule("mylib::op.out", "whole").op == "mylib.op.out"
    assert user_rule("mylib::op", "whole").op == "mylib.op.default"


def test_what_is_no_op_is_refused() -> None:
    with pytest.raises(RuleError, match=r"cannot register a rule for 'mylib\.op'"):
        user_rule("mylib.op", "whole")


def test_a_rule_that_does_not_fit_names_the_op() -> None:
    mine = user_rule("mylib::op", "b m -> b m")
    with pytest.raises(RuleError, match=r"'mylib\.op\.default' in module 'encoder.norm'"):
        rule_for(NODE, KINDS, {mine.op: mine.make})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear": "0 2"}, "'2' is none of its operands"),
        ({"linear": "x"}, "'x' is none of its operands"),
        ({"whole": "z"}, "cannot use factor 'z'"),
    ],
)
def test_names_that_are_not_there_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        user_rule("mylib::op", "b m, m n -> b n", **options)
