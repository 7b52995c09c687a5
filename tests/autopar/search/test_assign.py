"""Alike layers with transitions: 90 programs with known optima, and exhaustion."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.assign import Layers, assign
from tests.oracles.assignments import known_assignments


def test_every_known_optimum_is_met() -> None:
    known = known_assignments()
    assert len(known) == 90
    for number, (layers, optimum_s) in enumerate(known):
        found = assign(layers)
        if optimum_s is None:
            assert found is None, number
            continue
        assert found is not None, number
        assert found.seconds == pytest.approx(optimum_s, rel=1e-7), number
        assert sum(found.counts) == layers.count
        held = sum(n * size for n, size in zip(found.counts, layers.sizes, strict=True))
        assert held <= layers.capacity


def exhaustive_s(layers: Layers) -> float | None:
    """All options for all layers, in order."""
    best: float | None = None
    for own in itertools.product(range(len(layers.sizes)), repeat=layers.count):
        if sum(layers.sizes[i] for i in own) > layers.capacity:
            continue
        seconds = sum(layers.seconds[i] for i in own)
        seconds += sum(layers.transitions_s[a][b] for a, b in itertools.pairwise(own))
        best = seconds if best is None else min(best, seconds)
    return best


@given(st.data())
def test_assignment_equals_exhaustion(data: st.DataObject) -> None:
    """Up to four layers, of options in up to three groups as far apart as points on a line."""
    number, whole = data.draw(st.integers(1, 5)), st.integers(0, 9)
    places = data.draw(st.lists(st.integers(0, 2), min_size=number, max_size=number))
    count = data.draw(st.integers(1, 4))
    layers = Layers(
        count=count,
        sizes=tuple(data.draw(whole) for _ in range(number)),
        seconds=tuple(data.draw(whole) for _ in range(number)),
        transitions_s=tuple(tuple(float(2 * abs(a - b)) for b in places) for a in places),
        capacity=data.draw(st.integers(0, 9 * count)),
    )
    found = assign(layers)
    assert (None if found is None else found.seconds) == exhaustive_s(layers)
