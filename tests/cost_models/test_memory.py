"""Bytes against the published closed forms, exactly."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import memory
from cost_models.devices import device_named
from cost_models.errors import ClusterSpecError
from cost_models.memory import (
    FP8_LM_ADAM,
    MEGATRON_ADAM,
    ZERO_ADAM,
    LayerShape,
    ModelStates,
    Peak,
    Saved,
    StateBytes,
)
from cost_models.units import GIB
from tests.cost_models.published import Row, rows

THEORY = {row["id"]: row for row in rows("memory_theory.csv")}

MODES = {
    "no parallelism": Saved.ALL,
    "TP": Saved.TENSOR,
    "TP+SP": Saved.TENSOR_SEQUENCE,
    "TP+selective": Saved.TENSOR_SELECTIVE,
    "TP+SP+selective": Saved.TENSOR_SEQUENCE_SELECTIVE,
    "full recompute (layer input only)": Saved.INPUT,
    "full recompute + SP (input sharded)": Saved.INPUT_SEQUENCE,
}
LAYER_ROWS = [row for row in THEORY.values() if row["quantity"].startswith("activation bytes per")]


def layer_of(row: Row) -> LayerShape:
    letters = {key: int(value) for key, value in re.findall(r"\b([tsbha])=(\d+)", row["config"])}
    return LayerShape(
        batch=letters["b"],
        seq=letters["s"],
        hidden=letters["h"],
        heads=letters["a"],
        tensor_ranks=letters["t"],
    )


@pytest.mark.parametrize("row", LAYER_ROWS, ids=lambda row: row["id"])
def test_saved_bytes_of_a_layer_equal_the_published_formulas(row: Row) -> None:
    mode = MODES[row["config"].split("mode=")[1]]
    assert memory.gpt_layer_saved_bytes(layer_of(row), mode) == int(row["value_bytes"])


def test_all_28_layer_rows_are_tested() -> None:
    assert len(LAYER_ROWS) == 28


DEEPSEEK_DENSE, DEEPSEEK_EXPERTS = 429_719_552, 5_820_645_376
DEEPSEEK_STATES = StateBytes(parameter=2, gradient=4, optimizer=8)


def deepseek(zero_stage: int) -> ModelStates:
    dense = memory.model_states(DEEPSEEK_DENSE, DEEPSEEK_STATES, ranks=32, zero_stage=zero_stage)
    experts = memory.model_states(DEEPSEEK_EXPERTS, DEEPSEEK_STATES, ranks=8, zero_stage=zero_stage)
    return dense + experts


def test_parameters_of_deepseek_v3_take_the_published_bytes() -> None:
    assert deepseek(0).parameter_bytes == int(THEORY["mt-029"]["value_bytes"])


@pytest.mark.parametrize(
    ("zero_stage", "row"), [(0, "mt-030"), (1, "mt-031"), (2, "mt-032"), (3, "mt-033")]
)
def test_states_of_deepseek_v3_shard_experts_apart(zero_stage: int, row: str) -> None:
    assert deepseek(zero_stage).total_bytes == int(THEORY[row]["value_bytes"])


def test_full_recomputation_keeps_the_routing() -> None:
    layer = LayerShape(batch=1, seq=4096, hidden=7168, heads=128)
    kept = memory.routed_input_bytes(layer, experts_per_token=8, layers=4)
    assert kept == pytest.approx(int(THEORY["mt-034"]["value_bytes"]), rel=1e-2)


def test_freed_stage_outputs_are_2_73_gib_on_gpt_530b() -> None:
    layer = LayerShape(batch=1, seq=2048, hidden=20480, heads=128, tensor_ranks=8)
    freed = memory.stage_output_bytes(layer, stages=35)
    assert round(freed / GIB, 2) == float(THEORY["mt-036"]["value_gib"])


@pytest.mark.parametrize(
    ("zero_stage", "gigabytes"), [(0, 120.0), (1, 31.41), (2, 16.64), (3, 1.88)]
)
def test_zero_on_7_5_billion_parameters_and_64_ranks(zero_stage: int, gigabytes: float) -> None:
    states = memory.model_states(7.5e9, ZERO_ADAM, ranks=64, zero_stage=zero_stage)
    assert round(states.total_bytes / 1e9, 2) == gigabytes


def test_zero_volumes_are_two_two_two_three() -> None:
    assert [memory.zero_volume(1, zero_stage=stage) for stage in range(4)] == [2, 2, 2, 3]


@given(st.integers(1, 10**12), st.integers(1, 10**5), st.integers(0, 2))
def test_a_higher_stage_or_more_ranks_never_hold_more(
    parameters: int, ranks: int, stage: int
) -> None:
    def held(ranks: int, stage: int) -> float:
        return memory.model_states(
            parameters, MEGATRON_ADAM, ranks=ranks, zero_stage=stage
        ).total_bytes

    assert held(ranks, stage + 1) <= held(ranks, stage)
    assert held(ranks + 1, stage) <= held(ranks, stage)
    assert held(1, stage) == 18 * parameters


def test_buckets_of_optimizer_state_take_a_quarter() -> None:
    """0.25 billion parameters in buckets of 16 million: 5.00 to 1.26 GB."""
    assert 20 * 0.25e9 / 1e9 == 5.0
    assert round(memory.bucketed_optimizer_bytes(0.25e9, 16e6) / 1e9, 2) == 1.26
    assert memory.bucketed_optimizer_bytes(10, 2) == 4 * 10 + 16 * 2


def test_fp8_states_take_6_bytes_instead_of_16() -> None:
    assert MEGATRON_ADAM.gradient + MEGATRON_ADAM.optimizer == 16
    assert FP8_LM_ADAM.gradient + FP8_LM_ADAM.optimizer == 6
    gpt3 = memory.model_states(175e9, FP8_LM_ADAM)
    assert (gpt3.gradient_bytes + gpt3.optimizer_bytes) / 1e9 == 1050


def test_libra_byte_vectors_of_gpt_3() -> None:
    tensor = memory.hierarchical_all_reduce_bytes(805_306_368, [4, 4])
    assert tensor == (1_207_959_552, 301_989_888)
    assert tensor[0] / tensor[1] == 4
    data = memory.hierarchical_all_reduce_bytes(452_984_832, [2, 4, 32])
    assert [round(sent / 1e6, 1) for sent in data] == [453.0, 339.7, 109.7]


def test_a_peak_reports_each_kind_apart() -> None:
    peak = Peak(parameters=10e9, optimizer=20e9, saved=30e9)
    full = memory.with_overheads(peak, device_named("H100-80GB"), num_communicators=2)
    assert full.allocated_bytes == pytest.approx(60e9 + 2 * memory.COMMUNICATOR_BYTES)
    assert full.context == memory.CONTEXT_BYTES
    assert full.fragmentation == pytest.approx(0.105 * full.allocated_bytes)
    assert full.total_bytes == pytest.approx(full.allocated_bytes * 1.105 + full.context)


def test_a_unified_device_has_no_overheads() -> None:
    peak = Peak(saved=1e9)
    assert memory.with_overheads(peak, device_named("cpu-core"), num_communicators=9) == peak


def test_negative_states_and_no_ranks_are_refused() -> None:
    with pytest.raises(ClusterSpecError, match="gradient is -1"):
        StateBytes(parameter=2, gradient=-1, optimizer=0)
    with pytest.raises(ClusterSpecError, match="ranks is 0"):
        memory.model_states(1, ZERO_ADAM, ranks=0)
