"""Saving and loading is the identity, and every broken file gets its message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from autopar import hint
from autopar.errors import PlanError
from autopar.hint import hint_of
from autopar.plan.records import AllWays, Plan
from autopar.plan.serialize import from_json, load, save, to_json
from tests.autopar.plan.samples import llama, plans


@given(plans)
def test_saving_and_loading_is_the_identity(plan: Plan) -> None:
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text


def test_a_file_gives_the_plan_back(tmp_path: Path) -> None:
    plan = llama(layers=2)
    path = tmp_path / "plan.json"
    path.write_text("the file of before")
    save(plan, path)
    assert load(path) == plan
    assert Plan.load(str(path)) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_saved_before_all_ways_were_bounded_claims_nothing_of_them() -> None:
    plan = llama(layers=2)
    document = json.loads(to_json(plan))
    del document["search"]["all_ways"]
    old = from_json(json.dumps(document))
    assert old.search.all_ways == AllWays()
    assert replace(old, search=plan.search) == plan
    assert "no plan can take less" in str(plan)
    assert "no plan can take less" not in str(old)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(PlanError, match=r"cannot write '.*taken': is a directory"):
        llama(layers=1).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_the_text_is_readable_and_compact() -> None:
    plan = llama(layers=126)
    text = to_json(plan)
    lines = text.splitlines()
    assert len(plan.stage.nodes) > 27_000
    assert len(text) < 110 * len(plan.stage.nodes)
    assert max(map(len, lines)) < 200
    assert '  "model": "LlamaForCausalLM",' in lines
    row = '["float32[14336, 4096]", "S1:512 S0:1792", "R S0:1792", true, false, false]'
    assert f'          "model.layers.7.mlp.up_proj.weight": {row},' in lines


def test_one_changed_decision_is_one_changed_line() -> None:
    text = to_json(llama(layers=2))
    edited = text.replace(
        '"lm_head.weight": ["float32[128256, 4096]", "S1:512 ',
        '"lm_head.weight": ["float32[128256, 4096]", "R ',
    )
    assert text != edited
    again = to_json(from_json(edited)).splitlines()
    assert sum(a != b for a, b in zip(again, text.splitlines(), strict=True)) == 1


def test_a_plan_of_before_is_read() -> None:
    """Of the first autopar that saved version 1: what was added since takes its default."""
    plan = load(Path(__file__).parent / "golden" / "first_version_1.json")
    assert plan.stage.recomputed == plan.per_microbatch == ()
    assert plan.stage.added_up == {}
    assert [hint_of(text) for text in plan.hints] == [
        hint.degrees(dp=2, tp=1, zero=1),
        hint.microbatches(2),
    ]
    assert "hint.degrees(dp=2, tp=1, zero=1), hint.microbatches(2)" in str(plan)
    assert from_json(to_json(plan)) == plan


GOOD = to_json(llama(layers=1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "cannot read plan: line 2 column 10 is not JSON (extra data); undo"),
        (GOOD[-300:], "", "is not JSON"),
        (GOOD, "[]", "cannot read plan: it holds no object; is it a plan at all?"),
        (GOOD, "[" * 100_000, "cannot read plan: it nests too deep to be a plan"),
        ('"version": 1', '"version": 7', "it has version 7, this autopar reads version 1; make"),
        (',\n  "version": 1', "", "it has no version, this autopar reads version 1"),
        ('"model":', '"modle":', "field 'modle' is unknown; did you mean 'model'?"),
        ('  "fingerprint": "5f0c1e0fa1b2c3d4",\n', "", "field 'fingerprint' is missing"),
        ('"cluster_ranks": 64', '"cluster_ranks": "64"', 'at cluster_ranks: found "64" where a wh'),
        ('"cluster_ranks": 64', '"cluster_ranks": true', "found true where a whole number belongs"),
        ('"step_s": 1.4321', '"step_s": null', "at prediction.step_s: found null where a number"),
        (
            '"first_rank": 0',
            '"first_rank": 0.5',
            "at stages[0].first_rank: found 0.5 where a whole",
        ),
        ('"int64[16, 8192]"', '"int65[16]"', "at batch['input_ids']: 'int65[16]' is not a tensor"),
        (
            '"model.norm.weight": ["float32[4096]", "R R"',
            '"model.norm.weight": ["float32[4096]", "R Q"',
            "at stages[0].parameters['model.norm.weight'].stored: 'Q' is not a sharding; write R",
        ),
        (
            '["float32[4096]", "R R", "R R", true, false, false]',
            '["R R"]',
            "norm.weight']: the row",
        ),
        ('"columns": ["type",', '"columns": ["kind",', "field 'kind' is unknown"),
        (
            '"sizes": [8, 8]',
            '"sizes": [8]',
            "at stages[0].mesh: the fields of this Mesh contradict",
        ),
        ('"version": 1', '"version": 1, "version": 1', "'version' is given twice; keep one"),
        ('"gap": 0.00014', '"gap": "big"', 'at search.gap: found "big" where a number belongs'),
        ('["node0=64", 1.91]', '["node0=64"]', "at search.meshes[1]: found 1 entries, 2 belong"),
        ('"mm_217"', '"view_1"', "'view_1' is listed under"),
    ],
    ids=lambda text: text.strip()[:20],
)
def test_a_broken_text_is_named(old: str, new: str, message: str) -> None:
    assert old in GOOD
    where = GOOD.rindex(old) if old.startswith('"mm_') else GOOD.index(old)
    broken = GOOD[:where] + new + GOOD[where + len(old) :]
    with pytest.raises(PlanError) as raised:
        from_json(broken)
    assert message in str(raised.value)
    assert str(raised.value).startswith("cannot read plan")
    assert "\n" not in str(raised.value)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = GOOD.replace("LlamaForCausalLM", f"__import__('pathlib').Path('{mark}').touch()")
    assert str(mark) in from_json(text).model
    assert not mark.exists()


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan '.*none.json': no such file"):
        load(tmp_path / "none.json")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x80\x81\xff")
    with pytest.raises(PlanError, match="it is not text"):
        load(binary)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"version": 1, "name": "left-pad"}))
    with pytest.raises(PlanError, match=r"other.json': field 'name' is unknown"):
        load(other)
