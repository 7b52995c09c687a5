"""Printed formulas equal what the package computes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import memory, pipeline
from cost_models.cluster import Cluster, Devices, Level
from cost_models.collectives import axis_link, collective_s
from cost_models.compute import matmul_s
from cost_models.devices import device_named
from cost_models.errors import ClusterSpecError
from cost_models.formulas import FORMULAS, formula_named
from cost_models.memory import LayerShape, Saved
from cost_models.pipeline import SplitTime, StageTime

SMALL = st.integers(1, 8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states(stage: int) -> None:
    letters = {"Psi": 7.5e9, "K": 12.0} | ({"d": 64.0} if stage else {})
    states = memory.model_states(7.5e9, memory.ZERO_ADAM, ranks=64, zero_stage=stage)
    printed = formula_named(f"model states, ZeRO {stage}").value(**letters)
    assert printed == pytest.approx(states.total_bytes)


@given(SMALL, SMALL, SMALL, SMALL)
def test_saved_bytes(b: int, a: int, t: int, wide: int) -> None:
    layer = LayerShape(batch=b, seq=1024, hidden=128 * wide, heads=a, tensor_ranks=t)
    letters: dict[str, float] = {"b": b, "s": 1024, "h": 128 * wide, "a": a, "t": t}
    for name, saved in (
        ("saved by a layer", Saved.ALL),
        ("saved by a layer, tensor", Saved.TENSOR),
        ("saved by a layer, tensor+sequence", Saved.TENSOR_SEQUENCE),
        ("saved by a layer, tensor+sequence+selective", Saved.TENSOR_SEQUENCE_SELECTIVE),
        ("saved by a layer, full recomputation", Saved.INPUT),
    ):
        formula = formula_named(name)
        printed = formula.value(**{letter: letters[letter] for letter in formula.letters})
        assert printed == pytest.approx(memory.gpt_layer_saved_bytes(layer, saved))


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_collectives(ranks: int) -> None:
    level = Level(name="node", size=ranks, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    run = Devices(device=device_named("L4"), count=ranks)
    axis = axis_link(Cluster(name="c", devices=(run,), levels=(level,)), (ranks,), 0)
    letters = {"n": ranks, "B": 1e8, "w": 1e9, "alpha": 1e-5}
    assert formula_named("ring all-reduce").value(**letters) == pytest.approx(
        collective_s("all_reduce", 1e8, axis)
    )
    assert formula_named("ring all-gather").value(**letters) == pytest.approx(
        collective_s("all_gather", 1e8, axis)
    )
    tree = formula_named("tree all-reduce").value(**letters)
    assert tree == pytest.approx(2 * 1e8 / 1e9 + 2e-5 * math.ceil(math.log2(ranks)))


def test_matmul() -> None:
    device = device_named("A100-80GB")
    efficiency = device.efficiency
    printed = formula_named("matmul").value(
        F=2 * 4096**3,
        F_h=efficiency.matmul_half_flops,
        P=312e12,
        e=efficiency.matmul_best,
        k=4096,
        k_h=efficiency.matmul_half_k,
    )
    seconds = matmul_s(device, m=4096, n=4096, k=4096, dtype="bf16")
    assert printed + device.launch_s == pytest.approx(seconds)


@settings(max_examples=20)  # sympy takes a tenth of a second for each
@given(SMALL, st.integers(0, 24), SMALL, SMALL, st.floats(0, 5))
def test_schedules(p: int, extra: int, f: int, g: int, c: float) -> None:
    count = p + extra
    letters: dict[str, float] = {"f": f, "g": g, "p": p, "G": count}
    stage = StageTime(float(f), float(g))
    printed = formula_named("1F1B step, equal stages").value(**letters, c=c)
    assert printed == pytest.approx(pipeline.one_f_one_b_s([stage] * p, count, c))
    printed = formula_named("interleaved step").value(**letters, v=2)
    assert printed == pytest.approx(
        pipeline.interleaved_s(stage, stages=p, chunks=2, num_microbatches=count)
    )


def test_bubbles() -> None:
    letters = {"f": 10.0, "g": 10.0, "w_g": 5.0, "p": 4.0}
    stage = SplitTime(10.0, 10.0, 5.0)
    assert formula_named("bubble, ZB-H1").value(**letters) == pipeline.zb_h1_bubble_s(stage, 4)
    assert formula_named("bubble, ZB-H2").value(**letters) == pipeline.zb_h2_bubble_s(stage, 4)
    live = formula_named("live chunks, interleaved").value(G=8, v=2, p=4, i=1)
    assert live == pipeline.interleaved_live(1, stages=4, chunks=2, num_microbatches=8)


def test_gpt_3_has_175_billion_parameters() -> None:
    printed = formula_named("GPT parameters").value(L=96, h=12288, V=51200, s=2048)
    assert round(printed / 1e9, 1) == 174.6


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_every_formula_prints_its_letters(name: str) -> None:
    formula = FORMULAS[name]
    text = formula.text()
    assert text.startswith(f"{name} [{formula.unit}] = ")
    assert all(meaning in text for meaning in formula.letters.values())
    assert formula.source in text


def test_missing_and_unknown_letters_are_named() -> None:
    with pytest.raises(ClusterSpecError, match="cannot find formula 'matmull': did you mean"):
        formula_named("matmull")
    with pytest.raises(ClusterSpecError, match="'n' is missing \\(ranks of the axis\\)"):
        formula_named("ring all-gather").value(B=1, w=1, alpha=0)
    with pytest.raises(ClusterSpecError, match="it has no letter 'q'"):
        formula_named("ring all-gather").value(q=1)
