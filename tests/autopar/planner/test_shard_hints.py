"""``hint.shard`` names an axis that is there, or is refused."""

from __future__ import annotations

import pytest

import autopar
from autopar import Cluster, Plan, hint
from autopar.errors import HintError
from autopar.hint import Hint
from autopar.ir.sharding import Split
from tests.oracles.models import mlp


def planned(axis: str, *hints: Hint, ranks: int = 2) -> Plan:
    model, batch, loss = mlp()
    hints = (hint.shard("up.weight", 0, axis), *hints)
    return autopar.plan(model, Cluster.local(ranks), batch, loss=loss, hints=hints)


@pytest.mark.parametrize("hints", [(), (hint.ranks(1),), (hint.degrees(pp=2),)])
def test_an_axis_that_is_not_there_is_an_error(hints: tuple[Hint, ...]) -> None:
    with pytest.raises(HintError, match=r"cannot apply hint.shard\('up.weight', dim=0, axis='tp'"):
        planned("tp", *hints)


@pytest.mark.parametrize("hints", [(hint.degrees(tp=2),), (hint.degrees(tp=2, pp=2),)])
def test_a_role_that_hints_make_is_an_axis(hints: tuple[Hint, ...]) -> None:
    plan = planned("tp", *hints, ranks=2 * (hints[0].pp or 1))  # type: ignore[union-attr]
    (used, *_) = plan.parameters["up.weight"].used
    assert isinstance(used[0], Split)


def test_an_axis_of_the_network_is_one() -> None:
    assert isinstance(planned("node0").parameters["up.weight"].stored[0], Split)


def test_a_role_of_one_rank_splits_nothing() -> None:
    assert planned("tp", hint.degrees(tp=1, dp=2)).mesh.names == ("dp",)
