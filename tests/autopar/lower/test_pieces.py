"""Pieces between unlike meshes are what slicing the whole tensor gives."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.sharding import (
    SUM,
    WHOLE,
    AxisSharding,
    Mesh,
    Partial,
    Sharding,
    Split,
    is_legal,
    local_shape,
)
from autopar.lower.pieces import Box, Part, Side, exchange, sent_parts, taken_parts
from tests.oracles.lockstep import piece


@st.composite
def meshes(draw: st.DrawFn, microbatches: int) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    assume(math.prod(sizes) <= 12)
    return Mesh(tuple(f"a{i}" for i in range(len(sizes))), sizes).with_time(microbatches)


@st.composite
def shardings(
    draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], time: AxisSharding, partial: bool
) -> Sharding:
    """Any legal sharding, one axis after the other; uneven and empty splits included."""
    found: Sharding = (WHOLE,) * (len(mesh.space.sizes))
    found = found if mesh.time_axis is None else (*found, time)
    for axis, ranks in enumerate(mesh.space.sizes):
        choices: list[AxisSharding] = [WHOLE, SUM] if partial else [WHOLE]
        for dim, size in enumerate(shape):
            for outer in (n for n in range(1, size + 1) if size % n == 0):
                row = size // outer
                shares = (*range(1, ranks), 0) if ranks > 1 else ()
                parts = sum(shares)
                blocks = [(row // parts, shares)] if shares and row % parts == 0 else []
                for block, own in [*((b, ()) for b in range(-(-row // ranks), row + 1)), *blocks]:
                    after = (*found[:axis], Split(dim, outer, block, own), *found[axis + 1 :])
                    if is_legal(shape, after, mesh, empty=True):
                        choices.append(after[axis])
        new = draw(st.sampled_from(choices))
        found = (*found[:axis], new, *found[axis + 1 :])
    return found


@st.composite
def borders(draw: st.DrawFn) -> tuple[tuple[int, ...], Side, Side]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), max_size=3).map(tuple))
    microbatches = draw(st.sampled_from([1, 2, 3]))
    time: AxisSharding = WHOLE
    if shape and microbatches > 1 and draw(st.booleans()):
        time = Split(0, 1, -(-shape[0] // microbatches))
    number = draw(st.integers(0, microbatches - 1))
    source, target = draw(meshes(microbatches)), draw(meshes(microbatches))
    return (
        shape,
        Side(source, draw(shardings(source, shape, time, False)), number),
        Side(target, draw(shardings(target, shape, time, True)), number),
    )


def local(tensor: torch.Tensor, side: Side, place: int) -> torch.Tensor:
    return piece(tensor, side.sharding, side.coordinates(place)).contiguous()


def elements(flat: torch.Tensor, box: Box) -> torch.Tensor:
    return flat.as_strided(box.sizes, box.strides, box.start)


def moved(
    shape: tuple[int, ...], source: Side, target: Side
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What every target rank holds behind an exchange, and the whole value."""
    whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    wire: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(source.mesh.num_ranks):
        own = local(whole, source, rank)
        for part in sent_parts(shape, source, target, rank):
            assert (rank, part.place) not in wire, "one message from one rank to another"
            flat = [elements(own, box).reshape(-1) for box in part.boxes]
            wire[rank, part.place] = torch.cat(flat)
    found = []
    for rank in range(target.mesh.num_ranks):
        into = torch.zeros(local_shape(shape, target.sharding, target.coordinates(rank)))
        written = torch.zeros_like(into)
        for part in taken_parts(shape, source, target, rank):
            pieces = wire.pop((part.place, rank)).split([box.num_elements for box in part.boxes])
            for box, values in zip(part.boxes, pieces, strict=True):
                elements(into, box).copy_(values.reshape(box.sizes))
                elements(written, box).add_(1)
        assert not written.numel() or float(written.max()) <= 1, "an element arrives once"
        found.append(into)
    assert not wire, "messages nobody takes"
    return found, whole


@settings(max_examples=150)
@given(borders())
def test_every_rank_gets_exactly_its_piece(border: tuple[tuple[int, ...], Side, Side]) -> None:
    shape, source, target = border
    found, whole = moved(shape, source, target)
    for rank, mine in enumerate(found):
        coordinates = target.coordinates(rank)
        summed = zip(target.sharding, coordinates, strict=True)
        zero = any(isinstance(axis, Partial) and at for axis, at in summed)
        wanted = local(whole, target, rank)
        assert torch.equal(mine, torch.zeros_like(wanted) if zero else wanted)


def rows(size: int, ranks: int) -> Split:
    return Split(0, 1, size // ranks)


def test_replicas_share_what_is_asked_of_them() -> None:
    source = Side(Mesh(("dp", "tp"), (2, 2)), (rows(8, 2), WHOLE))
    target = Side(Mesh(("dp", "tp"), (2, 4)), (rows(8, 2), WHOLE))
    sends = exchange((8, 6), source, target).sends
    assert {rank: len(parts) for rank, parts in sends.items()} == {0: 2, 1: 2, 2: 2, 3: 2}


def test_four_replicas_send_to_two_and_two_to_one_without_copies() -> None:
    sizes = (4, 2, 1, 1)
    sides = [Side(Mesh(("dp",), (n,)), (rows(8, n),)) for n in sizes]
    found = [exchange((8, 3), *pair) for pair in itertools.pairwise(sides)]
    assert [len(one.takes[0]) for one in found] == [2, 2, 1]
    assert all(part.is_contiguous for one in found for own in one.sends.values() for part in own)
    assert found[0].sends[3] == (Part(1, (Box(0, (2, 3), (3, 1)),)),)


def test_a_sequence_split_meets_a_batch_split_in_one_box_a_pair() -> None:
    source = Side(Mesh(("dp",), (2,)), (Split(0, 1, 16),))
    target = Side(Mesh(("sp",), (4,)), (Split(0, 4, 2),))
    found = exchange((32, 3), source, target)
    boxes = [part.boxes for own in found.takes.values() for part in own]
    assert len(boxes) == 8 and all(len(own) == 1 for own in boxes)
    assert boxes[0][0].num_elements == 2 * 2 * 3


def test_equal_sides_send_every_piece_to_its_place_even_terms_of_sums() -> None:
    side = Side(Mesh(("a", "b"), (2, 2)), (SUM, rows(6, 2)))
    for rank in range(4):
        (part,) = sent_parts((6, 5), side, side, rank)
        assert part == Part(rank, (Box(0, (15,), (1,)),))
        assert taken_parts((6, 5), side, side, rank) == (part,)
