"""Quantities as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import units
from cost_models.errors import ClusterSpecError

NUMBERS = st.floats(1e-9, 1e18, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("16 GB", 16 * 10**9),
        ("1.5 KiB", 1536),
        ("7 B", 7),
        ("64kB", 64_000),
        (123, 123),
        ("1e3", 1000),
    ],
)
def test_bytes_parse(text: str | int, expected: int) -> None:
    assert units.parse_bytes(text, "memory") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25 GB/s", 25e9),
        ("25GB/s", 25e9),
        ("400 Gb/s", 50e9),
        ("400 Gbit/s", 50e9),
        ("100Gbps", 12.5e9),
        ("2 TB/s", 2e12),
        ("1 GiB/s", 2**30),
        (3e9, 3e9),
    ],
)
def test_bandwidths_parse_and_small_b_is_bits(text: str | float, expected: float) -> None:
    assert units.parse_bandwidth(text, "bandwidth") == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("5us", 5e-6), ("0.3 ms", 3e-4), ("2 s", 2.0), ("7 ns", 7e-9), (1, 1.0)]
)
def test_seconds_parse(text: str | float, expected: float) -> None:
    assert units.parse_seconds(text, "latency") == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["312 TFLOP/s", "312TFLOPS", "0.312 PFLOP/s", 312e12])
def test_flops_parse(text: str | float) -> None:
    assert units.parse_flops(text, "peak") == pytest.approx(312e12)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (units.parse_bytes, "80 XB", "cannot read 'f': '80 XB' has the unit 'XB'"),
        (units.parse_bytes, "80 Gb", "has the unit 'Gb'"),
        (units.parse_bytes, "many", "'many' has no number"),
        (units.parse_bytes, True, "True is not a quantity"),
        (units.parse_bandwidth, "3 GB", "write bytes or bits a second"),
        (units.parse_bandwidth, "3 furlongs/s", "has the unit 'furlongs/s'"),
        (units.parse_seconds, "3 GB", "write a time such as 5us"),
        (units.parse_flops, "3 GB", "write a rate such as 312 TFLOP/s"),
    ],
)
def test_what_does_not_parse_names_field_unit_and_remedy(
    parse: object, text: str, message: str
) -> None:
    assert callable(parse)
    with pytest.raises(ClusterSpecError) as caught:
        parse(text, "f")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(NUMBERS)
def test_written_quantities_read_back_to_the_same_number(value: float) -> None:
    assert units.parse_size(units.exact_size(value), "") == value
    assert units.parse_bandwidth(units.exact_bandwidth(value), "") == value
    assert units.parse_seconds(units.exact_seconds(value), "") == value
    assert units.parse_flops(units.exact_flops(value), "") == value


def test_people_read_binary_sizes_and_short_times() -> None:
    assert units.bytes_text(80 * 2**30) == "80 GiB"
    assert units.bytes_text(3.5) == "3.5 B"
    assert units.seconds_text(3.2e-3) == "3.2 ms"
    assert units.seconds_text(0.0) == "0 ns"
