"""What differs between two plans, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.sharding import WHOLE
from autopar.report.diff import diff
from tests.autopar.plan.samples import llama


def test_equal_plans_do_not_differ() -> None:
    assert diff(llama(2), llama(2)) == ""


def test_a_changed_layer_kind_is_one_line() -> None:
    plan = llama(8)
    parameters = tuple(
        replace(p, stored=(WHOLE, WHOLE)) if p.name.endswith("up_proj.weight") else p
        for p in plan.stage.parameters
    )
    other = replace(plan, stages=(replace(plan.stage, parameters=parameters),))
    lines = [line.rstrip() for line in diff(plan, other, ("old", "new")).splitlines()]
    assert lines[0] == "old -> new"
    assert "  model.layers.0-7.mlp.up_proj.weight" in lines or any(
        "mlp.up_proj.weight" in line and "whole, S0(intra0)" in line for line in lines
    )
    assert not any("down_proj" in line for line in lines)


def test_predictions_are_compared_with_their_change() -> None:
    plan = llama(1)
    faster = replace(plan, prediction=replace(plan.prediction, step_s=0.7, compute_s=2.0))
    text = diff(plan, faster)
    assert "step" in text
    assert "1.43 s" in text
    assert "-51 %" in text
    assert "+69 %" in text
    assert "optimizer" not in text


def test_another_model_is_named() -> None:
    plan = llama(1)
    text = diff(plan, replace(plan, model="Other", hints=("a", "b")))
    assert "LlamaForCausalLM" in text
    assert "Other" in text
    assert "a, b" in text
    assert "mesh" not in text
