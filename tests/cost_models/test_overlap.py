"""Streams that share a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import overlap
from cost_models.errors import ClusterSpecError
from cost_models.overlap import AMPERE_COLLECTIVE, Slowdown

SECONDS = st.floats(0, 1e3)
SLOWDOWNS = st.builds(
    Slowdown, first=st.floats(1, 4), second=st.floats(1, 4), source=st.just("test")
)
NONE = Slowdown(first=1, second=1, source="test")


@given(SECONDS, SECONDS, SLOWDOWNS)
def test_together_lies_between_the_longer_and_the_sum(
    a: float, b: float, slowdown: Slowdown
) -> None:
    seconds = overlap.together_s(a, b, slowdown)
    assert max(a, b) - 1e-9 <= seconds <= a + b + 1e-9


@given(SECONDS, SECONDS)
def test_without_slowdown_the_longer_hides_the_shorter(a: float, b: float) -> None:
    assert overlap.together_s(a, b, NONE) == pytest.approx(max(a, b))
    assert overlap.exposed_s(a, b, NONE) == pytest.approx(max(0.0, b - a))


@given(SECONDS, SECONDS, SLOWDOWNS, st.floats(1, 3))
def test_more_work_never_ends_sooner(a: float, b: float, slowdown: Slowdown, factor: float) -> None:
    seconds = overlap.together_s(a, b, slowdown)
    assert overlap.together_s(a * factor, b, slowdown) >= seconds - 1e-9
    assert overlap.together_s(a, b * factor, slowdown) >= seconds - 1e-9


def test_a_collective_beside_computation_on_a100_slows_it_by_29_percent() -> None:
    assert overlap.together_s(10.0, 2.0, AMPERE_COLLECTIVE) == pytest.approx(
        2 * 1.04 + (10 - 2 * 1.04 / 1.29)
    )
    assert overlap.exposed_s(10.0, 2.0, AMPERE_COLLECTIVE) == pytest.approx(2.08 * (1 - 1 / 1.29))
    assert overlap.compute_collective("H200") == AMPERE_COLLECTIVE
    assert overlap.compute_collective("V100-16GB").first == 1.17


def test_a_core_that_computes_hides_no_communication() -> None:
    assert overlap.exposed_s(5.0, 3.0, overlap.compute_collective("cpu-core")) == 3.0


def test_gradient_reduction_hides_behind_the_last_backwards() -> None:
    exposed = overlap.exposed_reduction_s
    assert exposed(1.0, 10.0, 0.0, 4, NONE) == 0
    assert exposed(10.0, 4.0, 1.0, 4, NONE) == pytest.approx(10 - 3 - 1)
    assert exposed(10.0, 4.0, 1.0, 1, NONE) == pytest.approx(9)
    assert exposed(10.0, 4.0, 1.0, 4, AMPERE_COLLECTIVE) == pytest.approx(10 - 3 / 1.29 - 1)


def test_offloading_activations_hides_for_wide_layers() -> None:
    share = overlap.activation_offload_share(
        fraction=1.0, flops_per_s=150e12, host_bytes_per_s=24e9, hidden=12288, seq=2048
    )
    assert share == pytest.approx(0.94 * 150e12 / (24e9 * 12288 * (1 + 2048 / (6 * 12288))))
    assert share < 1


def test_a_slowdown_below_one_is_refused() -> None:
    with pytest.raises(ClusterSpecError, match="sharing a device speeds nothing up"):
        Slowdown(first=0.9, second=1, source="test")


@given(SECONDS, SECONDS, SLOWDOWNS)
def test_two_streams_take_the_longer_and_what_the_other_adds(
    a: float, b: float, slowdown: Slowdown
) -> None:
    to_first, to_second = overlap.beside_s(slowdown)
    found = min(max(a + to_first * b, b + to_second * a), a + b)
    assert overlap.together_s(a, b, slowdown) == pytest.approx(found, abs=1e-9)


def test_copies_both_ways_take_43_percent_longer_than_one_way_on_a100() -> None:
    both = overlap.both_copies("A100-80GB")
    assert overlap.together_s(1.0, 1.0, both) == pytest.approx(1.434, abs=1e-3)
