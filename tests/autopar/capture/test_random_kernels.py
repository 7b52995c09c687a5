"""What is drawn: the same in any pieces, and as even and independent as chance has it.

Seeds are fixed. A chi-square statistic is compared with the value that one in a million samples
exceeds, so a change of the generator passes unless it is bad.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from autopar.capture import random_kernels as kernels
from autopar.capture.random import make_key

CPU = torch.device("cpu")
COUNT = 1 << 20
KEY = make_key(5, 9)
RARE = 4.753
"""Standard normal numbers exceed it once in a million."""


def drawn(key: Tensor = KEY, stream: str = "a", count: int = COUNT, start: int = 0) -> Tensor:
    """Numbers of [0, 1) of consecutive elements."""
    place = [start, 0, count, 1]
    return kernels.uniform(key, stream, (count,), torch.float64, CPU, place)


def words_of(count: int, place: list[int], microbatch: int = 0) -> list[int]:
    return [
        word
        for _, _, bits in kernels.words(KEY, "a", count, place, microbatch, CPU)
        for word in bits.tolist()
    ]


def assert_even(counts: Tensor) -> None:
    """Counts of equally likely outcomes, by chi-square (Wilson and Hilferty's normal)."""
    freedom, expected = counts.numel() - 1, float(counts.sum()) / counts.numel()
    statistic = float(((counts - expected) ** 2).sum()) / expected
    spread = 2.0 / (9.0 * freedom)
    normal = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    assert abs(normal) < RARE, (statistic, freedom)


def assert_independent(first: Tensor, second: Tensor) -> None:
    """Pairs of numbers fall evenly into 16 x 16 cells."""
    cells = (first * 16).long() * 16 + (second * 16).long()
    assert_even(torch.bincount(cells, minlength=256).double())


# Pieces.


@pytest.fixture(params=[7, 64])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CPU_CHUNK", request.param)


@pytest.mark.usefixtures("small_chunks")
def test_the_size_of_chunks_does_not_matter() -> None:
    rows = [words_of(10, [100 * row + 3, 0, 10, 1]) for row in range(12)]
    assert words_of(120, [3, 0, 12, 100, 10, 1]) == [word for row in rows for word in row]
    assert words_of(1000, []) == [words_of(1, [i, 0])[0] for i in range(1000)]
    assert words_of(500, [1, 0, 500, 2]) == words_of(1000, [])[1::2]


def test_a_microbatch_starts_behind_those_before_it() -> None:
    assert words_of(8, [4, 16, 2, 32, 4, 1], 3) == words_of(8, [52, 0, 2, 32, 4, 1])


def test_elements_beyond_four_billion_have_numbers_of_their_own() -> None:
    edge = 1 << 32
    across = words_of(40, [edge - 20, 0, 40, 1])
    assert across == [words_of(1, [edge - 20 + i, 0])[0] for i in range(40)]
    assert not set(across[20:]) & set(words_of(20, []))
    rows = words_of(60, [edge - 30, 0, 3, edge, 20, 1])
    assert rows == [w for row in range(3) for w in words_of(20, [edge * (row + 1) - 30, 0, 20, 1])]
    assert rows[:20] != rows[20:40]


def test_no_elements_are_none() -> None:
    assert kernels.dropout(torch.empty(0, 3), KEY, "a", 0.5, [0, 0, 0, 1]).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_normal_numbers_do_not_depend_on_where_they_lie(dtype: torch.dtype) -> None:
    whole = kernels.normal(KEY, "a", (5000,), dtype, CPU)
    parts = [kernels.normal(KEY, "a", (n,), dtype, CPU, [s, 0, n, 1]) for s, n in SPANS]
    assert torch.equal(torch.cat(parts), whole)


SPANS = [(0, 1), (1, 3), (4, 996), (1000, 1), (1001, 3999)]


# Numbers.


def test_drawn_numbers_are_even() -> None:
    found = drawn()
    assert float(found.min()) >= 0.0 and float(found.max()) < 1.0
    assert_even(torch.bincount((found * 1024).long(), minlength=1024).double())
    low_bits = (found * 2.0**53).long() & 1023
    assert_even(torch.bincount(low_bits, minlength=1024).double())


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 768, 4096, 65536])
def test_neighbours_are_independent(distance: int) -> None:
    found = drawn(count=COUNT + distance)
    assert_independent(found[:COUNT], found[distance:])


def test_triples_of_neighbours_are_even() -> None:
    cells = (drawn(count=3 << 18).view(-1, 3) * 8).long()
    counted = torch.bincount(cells[:, 0] * 64 + cells[:, 1] * 8 + cells[:, 2], minlength=512)
    assert_even(counted.double())


def test_steps_seeds_ops_and_words_are_independent() -> None:
    found = drawn()
    assert_independent(found, drawn(make_key(5, 10)))
    assert_independent(found, drawn(make_key(6, 9)))
    assert_independent(found, drawn(stream="b"))
    assert_independent(found, drawn(start=1 << 32))


def test_every_bit_of_a_place_moves_half_of_the_bits() -> None:
    count = 1 << 12
    base = np.array(words_of(count, []))
    places = np.arange(count)
    for bit in range(32):
        moved = base[places ^ (1 << bit)] if bit < 12 else words_of(count, [1 << bit, 0, count, 1])
        flipped = (base ^ moved)[:, None] >> np.arange(32) & 1
        # A pair of low places counts twice, and a thousand shares are looked at.
        assert np.abs(flipped.mean(0) - 0.5).max() < 1.25 * RARE * 0.5 * math.sqrt(2 / count), bit


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales_it(p: float) -> None:
    ones = torch.ones(1000, 1000)
    for step in range(3):
        found = kernels.dropout(ones, make_key(0, step), "a", p)
        kept = found != 0
        assert torch.allclose(found[kept], torch.tensor(1.0 / (1.0 - p)))
        error = float(kept.double().mean()) - (1.0 - p)
        assert abs(error) < RARE * math.sqrt(p * (1.0 - p) / ones.numel())
        for dim in (0, 1):
            spread = kept.double().mean(dim).std() ** 2 * 1000 / (p * (1.0 - p))
            assert abs(float(spread) - 1.0) < RARE * math.sqrt(2.0 / 999)


def test_dropout_over_many_seeds_keeps_its_share() -> None:
    """As a user may check it: 50 seeds of one small layer, within 2 %."""
    kept = [kernels.dropout(torch.ones(8, 64), make_key(s, 0), "a", 0.4) != 0 for s in range(50)]
    assert float(torch.stack(kept).double().mean()) == pytest.approx(0.6, rel=0.02)


def test_a_dropped_element_is_zero_whatever_it_was() -> None:
    value = torch.full((1000,), math.inf)
    found = kernels.dropout(value, KEY, "a", 0.5)
    assert set(found.tolist()) == {0.0, math.inf}
    assert not kernels.dropout(value, KEY, "a", 1.0).any()
    assert kernels.dropout(torch.ones(COUNT), KEY, "a", 1e-12).count_nonzero() == COUNT


def test_normal_numbers_have_a_normal_distribution() -> None:
    found = kernels.normal(KEY, "a", (COUNT,), torch.float64, CPU)
    through = torch.special.ndtr(found)
    assert_even(torch.bincount((through * 1024).long(), minlength=1024).double())
    assert_independent(through[:-1], through[1:])


def test_normal_quantiles_equal_those_of_torch() -> None:
    middle = torch.linspace(0.0, 1.0, 10001, dtype=torch.float64)[1:-1]
    tail = 10.0 ** -torch.linspace(1.0, 300.0, 1000, dtype=torch.float64)
    for p in (middle, tail, 2.0**-53 * torch.arange(1, 99, dtype=torch.float64)):
        wanted = torch.special.ndtri(p)
        error = (kernels.normal_quantile(p) - wanted).abs() / wanted.abs().clamp(min=1.0)
        assert float(error.max()) < 4e-15


def test_whole_numbers_are_even_between_their_ends() -> None:
    found = kernels.integers(KEY, "a", (COUNT,), -3, 97, torch.int64, CPU)
    assert_even(torch.bincount(found + 3, minlength=100).double())
    wide = kernels.integers(KEY, "a", (COUNT,), 0, 1 << 40, torch.int64, CPU)
    assert_even(torch.bincount(wide >> 32, minlength=256).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_dtypes_never_round_up_to_one(dtype: torch.dtype) -> None:
    found = kernels.uniform(KEY, "a", (COUNT,), dtype, CPU)
    assert float(found.max()) < 1.0
    assert float(found.double().mean()) == pytest.approx(0.5, abs=3e-3)


def test_seeds_of_all_64_bits_have_keys() -> None:
    keys = [make_key(seed, 0).tolist()[0] for seed in (0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)]
    assert keys == [0, (1 << 63) - 1, -(1 << 63), -1]
