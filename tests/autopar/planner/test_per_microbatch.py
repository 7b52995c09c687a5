"""``hint.per_microbatch`` in plans: what it allows, what plans say, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar import Cluster, Plan, hint
from autopar.errors import AutoparError, HintError, UnsupportedError
from autopar.hint import Hint
from autopar.report.diff import diff
from tests.oracles.alone import ALONE, norms

NORMS = tuple(map(hint.per_microbatch, ALONE["norms"][1]))


def planned(*hints: Hint, ranks: int = 2) -> Plan:
    model, batch, loss = norms()
    return autopar.plan(model, Cluster.local(ranks), batch, loss=loss, hints=hints)


def test_without_it_microbatches_are_an_error_that_names_op_module_and_hint() -> None:
    with pytest.raises(UnsupportedError, match=r"aten\..*'bn1'.*hint.per_microbatch"):
        planned(hint.microbatches(2))


def test_plans_say_what_is_computed_from_each_microbatch(tmp_path: Path) -> None:
    plan = planned(*NORMS, hint.microbatches(2), hint.degrees(dp=2))
    assert plan.per_microbatch == ("bn1", "bn2", "short.1")
    assert "computed from each microbatch alone: bn1, bn2, short.1" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "computed from each microbatch alone: bn1, of 2" in plan.explain("bn1")
    assert "alone" not in plan.explain("conv1")
    other = planned(*NORMS, hint.microbatches(1), hint.degrees(dp=2))
    assert not other.per_microbatch
    assert "from each microbatch alone" in diff(plan, other)


def test_a_pipeline_gets_its_microbatches() -> None:
    plan = planned(*NORMS, hint.degrees(pp=2))
    assert (plan.num_stages, plan.microbatches) == (2, 8)
    assert len(plan.per_microbatch) == 3


def test_the_fewest_microbatches_are_planned_that_are_fastest() -> None:
    assert planned(*NORMS).microbatches == 1


@pytest.mark.parametrize(
    ("hints", "kind", "says"),
    [
        ((hint.per_microbatch("bm1"),), HintError, "did you mean 'bn1'"),
        (
            (*NORMS, hint.microbatches(3)),
            HintError,
            "8 samples are no multiple of 3 microbatches",
        ),
        (
            (hint.per_microbatch("bn*"), hint.microbatches(2)),
            UnsupportedError,
            "module 'short.1'",
        ),
    ],
    ids=["nothing of that name", "unlike microbatches", "not all that needs the whole batch"],
)
def test_errors_say_what_to_do(
    hints: tuple[Hint, ...], kind: type[AutoparError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        planned(*hints)
    assert says in str(caught.value)


def test_a_module_that_needs_no_other_samples_is_a_note() -> None:
    notes = planned(hint.per_microbatch("conv1")).notes
    (said,) = [note for note in notes if "per_microbatch" in note]
    assert "hint.per_microbatch('conv1') has no effect" in said
    assert "'bn1'" in said
