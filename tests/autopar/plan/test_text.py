"""A plan as text: folded, aligned, within its width, and the same from one version to the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.ir.graph import TensorType
from autopar.ir.sharding import SUM, WHOLE, Mesh, Partial, Sharding, Split
from autopar.plan.records import AllWays, NodePlan, ParameterPlan, StagePlan
from autopar.plan.text import axis_roles, bar, hint_text, op_of, plan_text
from autopar.plan.wording import (
    bytes_text,
    fold_names,
    percent_text,
    ranges_text,
    seconds_text,
    sharding_text,
)
from autopar.report.diff import diff
from tests.autopar.plan.samples import llama

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["plan", "layers.3.mlp", "self_attn"])
def test_the_text_is_as_it_was(name: str) -> None:
    """To accept a new text, write it over the golden file and read the difference."""
    plan = llama()
    text = str(plan) if name == "plan" else plan.explain(name)
    assert text + "\n" == (GOLDEN / f"llama_{name}.txt").read_text()
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("every", "texts"),
    [
        (
            AllWays(bound_s=1.02, gap=0.288, tried=3, excluded=1_040, estimated=12),
            (
                "no plan can take less than 1.02 s, this one is at most 29 % from it",
                "3 ways tried, 1,040 left out by proof, 12 by estimate",
            ),
        ),
        (
            AllWays(bound_s=1.4321, gap=0.0, tried=1, excluded=2),
            (
                "no plan can take less than 1.43 s, this one is optimal over all ways",
                "1 ways tried, 2 left out by proof, none by estimate: no other way can be faster",
            ),
        ),
    ],
)
def test_what_is_proven_of_all_ways_is_said(every: AllWays, texts: tuple[str, ...]) -> None:
    plan = llama(2)
    plan = replace(plan, search=replace(plan.search, all_ways=every))
    for text in texts:
        assert text in str(plan)
        assert text in plan.explain()
        assert text not in plan.explain("layers.1")


def test_what_is_recomputed_is_told_by_module() -> None:
    plan = llama(4)
    made = {plan.modules.get(node.name, ""): node.name for node in reversed(plan.stage.nodes)}
    names = tuple(name for module, name in made.items() if module.endswith("mlp.up_proj"))
    op = op_of(names[0])
    again = replace(plan, stages=(replace(plan.stage, recomputed=names),))
    assert "recomputed in the backward" not in str(plan)
    for text in (str(again), again.explain("layers.2"), diff(plan, again)):
        assert "recomputed in the backward" in text
    assert "recomputed in the backward" not in again.explain("layers.2.self_attn")
    (line,) = [row for row in str(again).split("recomputed")[1].splitlines() if "up_proj" in row]
    assert line.split() == ["mlp.up_proj", op]


def test_depth_does_not_lengthen_the_tables() -> None:
    assert len(str(llama(126)).splitlines()) == len(str(llama(2)).splitlines())


def test_a_layer_that_differs_stands_apart() -> None:
    plan = llama(8)
    stage = plan.stage
    odd = "model.layers.3.mlp.up_proj.weight"
    parameters = tuple(
        replace(p, stored=(WHOLE, WHOLE)) if p.name == odd else p for p in stage.parameters
    )
    text = str(replace(plan, stages=(replace(stage, parameters=parameters),)))
    lines = [line.split() for line in text.splitlines() if "up_proj.weight" in line]
    assert [line[0] for line in lines] == ["mlp.up_proj.weight", odd]
    assert "model.layers.0-2,4-7" in text


def test_names_that_look_like_markup_are_printed_as_they_are() -> None:
    plan = replace(llama(1), model="[bold]x[/bold]", notes=("[red]", "[/]"))
    assert "[bold]x[/bold] on" in str(plan)
    assert "- [/]" in str(plan)


def test_narrow_text_still_says_all() -> None:
    text = plan_text(llama(2), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "optimizer" in text


def test_a_plan_of_one_rank_says_so() -> None:
    plan = llama(1)
    stage = StagePlan(mesh=Mesh((), ()), inputs={}, parameters=(), nodes=(), kept={})
    text = str(replace(plan, stages=(stage,), cluster_ranks=1))
    assert "1 rank:" in text
    assert "mesh   one rank" in text


def test_an_unknown_module_names_near_ones() -> None:
    with pytest.raises(PlanError) as raised:
        llama(2).explain("layers.1.mlq")
    assert "cannot explain 'layers.1.mlq': the plan knows no module of that name" in str(
        raised.value
    )
    assert "did you mean 'model.layers.1.mlp'" in str(raised.value)


def test_a_plan_without_modules_of_collectives_says_so() -> None:
    plan = llama(1)
    collectives = tuple(replace(c, module="") for c in plan.prediction.collectives)
    other = replace(plan, prediction=replace(plan.prediction, collectives=collectives))
    assert "tells its collectives for the whole model only" in other.explain("mlp")
    assert "all_gather" in other.explain()


def _roles(output: Sharding, stored: Sharding, used: Sharding) -> tuple[str, ...]:
    kind = TensorType((8, 8), "float32")
    parameter = ParameterPlan(name="w", type=kind, stored=stored, used=(used,))
    return axis_roles(
        StagePlan(
            mesh=Mesh(("a", "b"), (2, 2), (0, 0), ("", "")),
            inputs={},
            parameters=(parameter,),
            nodes=(NodePlan(name="mm_3", operands=(), outputs=(output,)),),
            kept={},
        )
    )


def test_axes_are_called_by_what_they_do() -> None:
    s0, s1, r = Split(0, 1, 4), Split(1, 1, 4), WHOLE
    assert _roles((s0, r), (r, s0), (r, s0)) == ("dp", "tp")
    assert _roles((s0, r), (s1, s0), (r, s0)) == ("dp, zero", "tp")
    assert _roles((r, r), (r, s1), (r, r)) == ("replicated", "zero")
    assert _roles((s0, Split(0, 4, 1)), (r, r), (r, r)) == ("dp", "sp")


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        ((WHOLE, WHOLE), "whole"),
        ((Split(1, 1, 4), Split(0, 1, 4)), "S0(b) S1(a)"),
        ((Split(0, 1, 8), Split(0, 2, 4)), "S0(a,b)"),
        ((Split(0, 4, 1), Split(0, 1, 8)), "S0(b) S0/4(a)"),
        ((SUM, SUM), "P(a,b)"),
        ((Partial("max"), Split(0, 8, 1)), "S0/8(b) Pmax(a)"),
    ],
)
def test_shardings_name_axes(sharding: Sharding, text: str) -> None:
    assert sharding_text(sharding, Mesh(("a", "b"), (2, 2))) == text


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 999_999, 10**9, 41_234_000_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "1.00 GB",
        "41.2 GB",
    ]
    assert [seconds_text(s) for s in (0.0, 2e-9, 0.0000314, 0.9999, 12.34, 1234.5)] == [
        "0 s",
        "2.00 ns",
        "31.4 us",
        "1.00 s",
        "12.3 s",
        "1,234 s",
    ]
    assert [percent_text(p) for p in (0.0, 0.00014, 0.034, 0.64)] == [
        "0 %",
        "0.01 %",
        "3.4 %",
        "64 %",
    ]


def test_numbers_fold_in_every_place() -> None:
    names = [f"m.{i}.experts.{j}.w" for i in range(4) for j in range(8)]
    assert [one.name for one in fold_names((n, "x") for n in names)] == ["m.0-3.experts.0-7.w"]
    apart = [("a.0", "x"), ("a.1", "y"), ("a.2", "x"), ("b.0", "x")]
    assert [one.name for one in fold_names(apart)] == ["a.0,2", "a.1", "b.0"]
    assert ranges_text([5, 1, 2, 3, 9]) == "1-3,5,9"


def test_bars_are_proportional() -> None:
    assert bar(1.0, 1.0, 8).plain == "█" * 8
    assert bar(0.5, 1.0, 8).plain == "█" * 4
    assert bar(0.0, 0.0, 8).plain == ""


def test_hints_show_what_they_fix() -> None:
    assert hint_text("Degrees(dp=2, tp=None, zero=3)") == "hint.degrees(dp=2, zero=3)"
    assert hint_text("hint.of_later(dp=4)") == "hint.of_later(dp=4)"


def test_chunks_of_a_stage_are_told_apart() -> None:
    plan = llama(2)
    stage, ranks = plan.stage, plan.mesh.num_ranks
    later = replace(stage, parameters=(), first_rank=ranks)
    chunks = (stage, later, later, replace(later, first_rank=0))
    text = str(replace(plan, stages=chunks, schedule="zb-v", cluster_ranks=2 * ranks))
    assert "2 of 2 chunks each, schedule zb-v" in text
    assert f"values of chunk 2 on stage 1, from rank {ranks}" in text
    two = str(replace(plan, stages=chunks[:2], schedule="gpipe", cluster_ranks=2 * ranks))
    assert "2, schedule gpipe" in two and f"values of stage 1, from rank {ranks}" in two


def test_unlike_meshes_of_stages_are_told_apart() -> None:
    plan = llama(2)
    first = plan.stage
    bare = replace(first, parameters=(), nodes=(), inputs={}, kept={})
    line, one = Mesh(("tp",), (2,), roles=("tp",)), Mesh((), ())
    stages = (
        first,
        replace(bare, mesh=line, first_rank=64),
        replace(bare, mesh=one, first_rank=66),
    )
    text = str(replace(plan, stages=stages, cluster_ranks=67))
    assert "of stage 0: node0=8 (dp, zero) x intra0=8 (tp), ranks 0 to 63" in text
    assert "of stage 1: tp=2, ranks 64 to 65" in text
    assert "of stage 2: one rank, rank 66" in text
