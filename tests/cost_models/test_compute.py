"""Kernels: limits, properties and published measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute import (
    BACKWARD_FLOPS,
    Attention,
    Kind,
    attention_s,
    element_bytes,
    host_copy_s,
    matmul_s,
    memory_s,
    op_s,
)
from cost_models.devices import DEVICES, HOPPER, HOPPER_FLASH, device_named
from cost_models.errors import ClusterSpecError, MissingRateError
from cost_models.records import Efficiency
from tests.cost_models import published
from tests.cost_models.strategies import amounts

KINDS = st.sampled_from(sorted(DEVICES)).map(device_named)
DIMS = st.integers(1, 2**14)
A100 = device_named("A100-80GB")


@given(KINDS, DIMS, DIMS, DIMS, st.integers(1, 64), st.integers(1, 4))
def test_a_larger_product_takes_longer_but_no_longer_than_its_parts(
    device: object, m: int, n: int, k: int, batch: int, factor: int
) -> None:
    device = DEVICES[getattr(device, "kind")]  # noqa: B009
    once = matmul_s(device, m=m, n=n, k=k, batch=batch, dtype="fp32")
    more = matmul_s(device, m=m * factor, n=n, k=k, batch=batch, dtype="fp32")
    assert once <= more <= factor * once * (1 + 1e-9)


@given(KINDS, DIMS, DIMS, DIMS)
def test_no_product_beats_the_peaks(device: object, m: int, n: int, k: int) -> None:
    device = DEVICES[getattr(device, "kind")]  # noqa: B009
    seconds = matmul_s(device, m=m, n=n, k=k, dtype="float32")
    assert seconds > 2 * m * n * k / device.flops_per_s("fp32")
    assert seconds > 4 * (m * k + k * n + m * n) / device.memory_bytes_per_s


@given(KINDS, amounts(0, 1e15), amounts(0, 1e12), st.sampled_from(Kind))
def test_an_op_takes_its_launch_at_least_and_grows(
    device: object, flops: float, moved: float, kind: Kind
) -> None:
    device = DEVICES[getattr(device, "kind")]  # noqa: B009
    seconds = op_s(device, kind=kind, flops=flops, bytes_moved=moved, dtype="float32")
    assert seconds >= device.launch_s
    more = op_s(device, kind=kind, flops=2 * flops, bytes_moved=2 * moved, dtype="float32")
    assert more >= seconds


@given(st.integers(1, 2**15), st.integers(1, 8), st.booleans(), st.booleans())
def test_causal_attention_takes_at_least_half(
    seq: int, heads: int, backward: bool, wide: bool
) -> None:
    def seconds(causal: bool) -> float:
        shape = Attention(
            batch=1,
            heads=heads,
            queries=seq,
            keys=seq,
            head_dim=128 if wide else 64,
            causal=causal,
        )
        return attention_s(A100, shape, dtype="bf16", backward=backward)

    assert seconds(causal=False) / 2 <= seconds(causal=True) + 1e-12


def test_nothing_costs_nothing() -> None:
    empty = Attention(batch=1, heads=1, queries=0, keys=8, head_dim=64, causal=False)
    assert attention_s(A100, empty, dtype="bf16") == 0
    assert matmul_s(A100, m=0, n=8, k=8, dtype="bf16") == 0
    assert memory_s(A100, 0) == 0
    assert host_copy_s(A100, 0) == 0


def test_huge_problems_reach_the_stated_fractions_of_peak() -> None:
    efficiency = A100.efficiency
    flops = 1e18
    seconds = op_s(A100, kind="matmul", flops=flops, bytes_moved=0, dtype="bfloat16")
    assert flops / seconds == pytest.approx(312e12 * efficiency.matmul_best, rel=1e-3)
    seconds = op_s(A100, kind="attention", flops=flops, bytes_moved=0, dtype="bfloat16")
    assert flops / seconds == pytest.approx(312e12 * efficiency.attention_forward_best, rel=1e-3)
    seconds = op_s(A100, kind="memory", flops=0, bytes_moved=1e15, dtype="bfloat16")
    assert 1e15 / seconds == pytest.approx(2.039e12 * efficiency.memory_best, rel=1e-3)


def test_a_rate_with_its_own_best_uses_it() -> None:
    device = device_named("H100-80GB")
    flops = 1e18
    seconds = op_s(device, kind="matmul", flops=flops, bytes_moved=0, dtype="float8_e4m3fn")
    best = device.efficiency.matmul_best_at["fp8"]
    assert flops / seconds == pytest.approx(1978.9e12 * best, rel=1e-3)


def test_a_tall_thin_product_is_bound_by_memory() -> None:
    seconds = matmul_s(A100, m=2**24, n=16, k=16, dtype="bf16")
    moved = 2 * (2**24 * 32 + 16 * 16)
    assert seconds == pytest.approx(A100.launch_s + memory_s(A100, moved))


def test_copies_to_the_host_are_free_where_it_has_the_same_memory() -> None:
    assert host_copy_s(device_named("unified"), 1e9) == 0
    assert host_copy_s(A100, 24e9) == pytest.approx(1, rel=1e-3)


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(ClusterSpecError, match="cannot price an op of kind 'conv'"):
        op_s(A100, kind="conv", flops=1, bytes_moved=1, dtype="bf16")
    with pytest.raises(MissingRateError, match="cannot price 'fp8' on device 'A100-80GB'"):
        op_s(A100, kind="matmul", flops=1, bytes_moved=1, dtype="fp8")
    with pytest.raises(ClusterSpecError, match="cannot size 'fp7'"):
        element_bytes("fp7")


def test_published_attention_is_met_within_2_percent_in_the_median() -> None:
    found = published.by_group(published.attentions())["FlashAttention-2, A100"]
    assert found.num_samples == 23
    assert found.median_error <= 0.02, found.text()
    assert found.largest_error <= 0.05, found.text()


def test_published_products_of_a_transformer_are_met_within_5_percent_in_the_median() -> None:
    found = published.by_group(published.matmuls())
    transformer = found["products of a transformer, A100"]
    assert transformer.median_error <= 0.05, transformer.text()
    assert transformer.largest_error <= 0.25, transformer.text()


def test_best_shapes_are_faster_than_predicted_but_not_by_a_third() -> None:
    best = published.by_group(published.matmuls())["best shapes (upper envelope)"]
    assert 0 < best.bias <= best.largest_error <= 1 / 3, best.text()


def test_published_pointwise_kernels_are_met_within_20_percent() -> None:
    found = published.by_group(published.pointwise())["pointwise, A100"]
    assert found.largest_error <= 0.2, found.text()


@pytest.mark.parametrize(
    ("efficiency", "backward", "queries", "published_tflops"),
    [
        (HOPPER, False, 2048, 484),
        (HOPPER, False, 16384, 539),
        (HOPPER, True, 4096, 499),
        (HOPPER_FLASH, False, 2048, 298),
        (HOPPER_FLASH, False, 16384, 335),
        (HOPPER_FLASH, True, 4096, 310),
    ],
)
def test_attention_of_hopper_is_within_15_percent_of_what_is_published(
    efficiency: Efficiency, backward: bool, queries: int, published_tflops: float
) -> None:
    """Figures 5 and 6 of arXiv 2407.08608 at head dim 128: forward causal, backward not."""
    device = replace(device_named("H100-80GB"), efficiency=efficiency)
    shape = Attention(
        batch=16384 // queries,
        heads=16,
        queries=queries,
        keys=queries,
        head_dim=128,
        causal=not backward,
    )
    seconds = attention_s(device, shape, dtype="bf16", backward=backward)
    flops = shape.forward_flops * (BACKWARD_FLOPS if backward else 1)
    assert flops / seconds == pytest.approx(published_tflops * 1e12, rel=0.15)
