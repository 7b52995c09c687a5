"""Shardings against explicit index sets."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.sharding import (
    WHOLE,
    AxisSharding,
    Mesh,
    Split,
    dim_splits,
    is_legal,
    local_indices,
    local_shape,
    max_local_elements,
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[AxisSharding, ...], Mesh]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 24]), max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes: list[AxisSharding] = []
    for _ in sizes:
        if not shape or draw(st.booleans()):
            axes.append(WHOLE)
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        outer = draw(st.sampled_from([d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0]))
        axes.append(Split(dim, outer, draw(st.integers(1, shape[dim]))))
    return shape, tuple(axes), Mesh(tuple("abc"[: len(sizes)]), sizes)


@given(placed())
def test_legal_shardings_cover_every_element_once_a_replica(
    case: tuple[tuple[int, ...], tuple[AxisSharding, ...], Mesh],
) -> None:
    shape, sharding, mesh = case
    if not is_legal(shape, sharding, mesh, empty=True):
        return
    count: dict[tuple[int, ...], int] = {}
    for coordinates in itertools.product(*(range(n) for n in mesh.sizes)):
        held = [
            local_indices(size, dim_splits(sharding, dim), coordinates)
            for dim, size in enumerate(shape)
        ]
        assert tuple(len(h) for h in held) == local_shape(shape, sharding, coordinates)
        for index in itertools.product(*held):
            count[index] = count.get(index, 0) + 1
    copies = math.prod(n for n, a in zip(mesh.sizes, sharding, strict=True) if a == WHOLE)
    assert len(count) == math.prod(shape)
    assert set(count.values()) <= {copies}


@given(placed())
def test_first_rank_holds_most(
    case: tuple[tuple[int, ...], tuple[AxisSharding, ...], Mesh],
) -> None:
    shape, sharding, mesh = case
    if not is_legal(shape, sharding, mesh, empty=True):
        return
    held = [
        math.prod(local_shape(shape, sharding, coordinates))
        for coordinates in itertools.product(*(range(n) for n in mesh.sizes))
    ]
    assert max(held) == held[0] == max_local_elements(shape, sharding)


@given(placed())
def test_legal_without_empty_ranks_means_no_rank_is_empty(
    case: tuple[tuple[int, ...], tuple[AxisSharding, ...], Mesh],
) -> None:
    shape, sharding, mesh = case
    if not is_legal(shape, sharding, mesh):
        return
    for coordinates in itertools.product(*(range(n) for n in mesh.sizes)):
        assert 0 not in local_shape(shape, sharding, coordinates)
