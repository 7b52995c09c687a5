"""Copies to host memory and back hold no more on their way than the plan leaves for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.ir.sharding import Mesh
from autopar.lower.held import held_in
from autopar.lower.overlap import overlap
from autopar.lower.program import Program
from autopar.lower.rows import turns_of
from autopar.lower.simulate import Prices, prices, simulate
from autopar.lower.spmd import lower
from autopar.search.analysis import Analysis, analyse
from tests.oracles.hosts import hosted
from tests.oracles.models import gpt2
from tests.oracles.random_plans import offloading, random_stage, recomputing

LINKS = (1e8, 1e9)
"""Bytes a second: copies that hide hardly, and in part."""
ROOMS = (0, 20_000, 100_000, 10**9)


@cache
def analysed() -> Analysis:
    return analyse(capture_step(*gpt2(layers=2, batch=8), grad=True).graph)


def programs(
    mesh: Mesh, seed: int, links: Sequence[float] = LINKS[:1]
) -> Iterator[tuple[Program, Prices]]:
    """Programs that offload at random, with and without recompute, and their prices."""
    analysis, draw = analysed(), random.Random(seed)
    stage = random_stage(analysis, mesh, seed=seed)
    for plain in (stage, recomputing(analysis, stage, draw)):
        away = offloading(analysis, plain, draw)
        for link in links:
            cluster = hosted(mesh.num_ranks, link)
            seconds = axis_seconds(cluster, mesh)
            zero = (0,) * len(mesh.sizes)
            program = lower(analysis.graph, analysis.rules, away, zero, seconds)
            yield program, prices(cluster.device(0), seconds)


def with_room(program: Program, room_bytes: int, cost: Prices) -> Program:
    return overlap(replace(program, copy_room_bytes=room_bytes), cost)


@pytest.mark.parametrize("seed", range(2))
def test_copies_keep_to_their_room_and_hide_in_it(seed: int) -> None:
    for program, cost in programs(Mesh(("a",), (1,)), seed, LINKS):
        late = simulate(overlap(program), cost)
        found = [simulate(with_room(program, room, cost), cost) for room in ROOMS]
        for room, own in zip(ROOMS, found, strict=True):
            assert own.peak_bytes <= late.peak_bytes + room
            assert own.host_bytes <= late.host_bytes
        # Below the peak there is room without any: most is hidden there.
        assert found[0].seconds < late.seconds or not program.copies
        for more, less in (
            (found[-1], found[0]),
            (found[-1], simulate(overlap(program, cost), cost)),
        ):
            assert more.seconds <= less.seconds * (1 + 1e-9)


def test_copies_of_a_loop_keep_to_their_room_in_every_row() -> None:
    program, cost = next(programs(Mesh(("a",), (2,)).with_time(4), seed=1))
    assert program.copies
    (row,) = turns_of("gpipe", 1, 1, 4)
    late = held_in(overlap(program), row).peak_bytes
    for room in ROOMS[:2]:
        assert held_in(with_room(program, room, cost), row).peak_bytes <= late + room


def test_the_same_instructions_run_whatever_room_there_is() -> None:
    for program, cost in programs(Mesh(("a",), (2,)).with_time(2), seed=1):
        wanted = {i.name: i for i in overlap(program).instructions}
        for room in ROOMS:
            found = with_room(program, room, cost).instructions
            assert {i.name: i for i in found} == wanted and len(found) == len(wanted)
