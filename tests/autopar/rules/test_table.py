"""Every entry: its local programs, joined, give what the dense op gives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.sharding import Mesh
from autopar.rules import pointwise
from autopar.rules.notation import Rule
from autopar.rules.strategies import strategies
from autopar.rules.table import RULES, rule_for
from tests.autopar.rules.draws import Case, Draw, case
from tests.autopar.rules.samples import SAMPLES, sample_of
from tests.oracles.simulated import run_strategy

TWO_AXES = ((2, 2), (2, 3), (4, 2), (3, 2))
MOST = 6
"""Strategies tried of a two-axis mesh."""


def check(example: Case, rule: Rule, draw: Draw, most: int = MOST) -> None:
    """Run one example under all strategies of one axis and some of two."""
    cuts = {factor: draw.cuts(rule.sizes[factor]) for factor in rule.factors()}
    ranks = draw.choice([2, 3, 4])
    pick = random.Random(draw.integer(0, 999))
    for sizes in ((ranks,), draw.choice(TWO_AXES)):
        mesh = Mesh(tuple(f"a{i}" for i in range(len(sizes))), sizes)
        found = strategies(rule, example.types, example.node.outputs, mesh, cuts)
        assert len(set(found)) == len(found)
        for strategy in found if len(sizes) == 1 else pick.sample(found, min(most, len(found))):
            outputs = run_strategy(
                example.node, rule, strategy, mesh, example.operands, draw.generator
            )
            for result, dense in zip(outputs, example.outputs, strict=True):
                assert (result is None) == (dense is None), strategy
                if dense is not None:
                    _close(result, dense, f"{example.node}\n{strategy} on {mesh.sizes}")


def _close(result: Tensor | None, dense: Tensor, where: str) -> None:
    torch.testing.assert_close(
        result, dense, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda text: f"{where}\n{text}"
    )


@pytest.fixture(autouse=True, scope="module")
def _double() -> Iterator[None]:
    """Integers become float64, so that sums may be compared closely."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _run(op: str, data: st.DataObject) -> None:
    draw = Draw(data)
    example = case(op, sample_of(op, draw))
    check(example, rule_for(example.node, example.types), draw)


def _examples(count: int) -> settings:
    """So many examples, unshrunk: a failure prints the node and the strategy."""
    return settings(
        max_examples=count, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )


@pytest.mark.parametrize("op", sorted(pointwise.RULES))
@_examples(4)
@given(data=st.data())
def test_split_pointwise_op_equals_dense_op(op: str, data: st.DataObject) -> None:
    _run(op, data)


@pytest.mark.parametrize("op", sorted(set(SAMPLES) - set(pointwise.RULES)))
@_examples(8)
@given(data=st.data())
def test_split_op_equals_dense_op(op: str, data: st.DataObject) -> None:
    _run(op, data)


@pytest.mark.large
@pytest.mark.parametrize("op", sorted(SAMPLES))
@_examples(150)
@given(data=st.data())
def test_split_op_equals_dense_op_often(op: str, data: st.DataObject) -> None:
    _run(op, data)


def test_every_entry_has_a_sample() -> None:
    sources = {"parameter", "buffer", "input", "constant", "key"}
    assert set(RULES) - set(SAMPLES) == sources
