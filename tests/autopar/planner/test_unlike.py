"""Stages of unlike meshes and devices: hints, cuts by speed, memory of each stage's own device."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import HintError, InfeasibleError
from autopar.inputs import parse_hints
from autopar.ir.graph import Phase
from autopar.ir.sharding import Mesh, Split
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.lanes import shared_s
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.outer import common_rows, proportional, stage_meshes
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import gpt2


@functools.cache
def analysed() -> Analysis:
    model, batch, loss = gpt2(layers=8, batch=16)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def planned(cluster: Cluster, *hints: hint.Hint) -> Plan:
    request = Request(model="m", fingerprint="f", cluster=cluster, hints=hints)
    return make_plan(analysed(), request)


def mixed(*slower: float, memory_bytes: tuple[int, ...] = ()) -> Cluster:
    """Processes of which each is so many times slower than a core, which alone decides."""
    alike = Cluster.local(len(slower))
    core = replace(alike.device(0), host_op_s=0.0)
    runs = []
    for at, times in enumerate(slower):
        device = replace(
            core,
            kind=f"{core.kind} {at}",
            peak_flops_per_s={kind: rate / times for kind, rate in core.peak_flops_per_s.items()},
            memory_bytes_per_s=core.memory_bytes_per_s / times,
            memory_bytes=memory_bytes[at] if memory_bytes else core.memory_bytes,
        )
        runs.append(Devices(device=device, count=1))
    return replace(alike, devices=tuple(runs))


def forward_nodes(plan: Plan) -> list[int]:
    """Forward nodes of every stage."""
    by_name = analysed().graph.by_name
    phases = [[by_name[n.name].phase for n in stage.nodes] for stage in plan.stages]
    return [own.count(Phase.FORWARD) for own in phases]


def test_degrees_of_every_stage_give_its_mesh() -> None:
    cluster = Cluster.local(8)
    ((a, b, c, d),) = stage_meshes(cluster, hint.degrees(dp=(4, 2, 1, 1)), 4)
    assert [m.num_ranks for m in (a, b, c, d)] == [4, 2, 1, 1]
    ((e, f),) = stage_meshes(cluster, hint.degrees(dp=(2, 1), tp=(2, 4)), 2)
    assert (e.names, e.sizes, f.names, f.sizes) == (("dp", "tp"), (2, 2), ("tp",), (4,))
    assert common_rows((a, b, c, d)) == 4
    assert common_rows((e, f)) == 2
    assert common_rows((e, e)) == 1
    assert common_rows((Mesh(("x",), (3,)), Mesh(("dp",), (2,), roles=("dp",)))) == 6
    plan = planned(cluster, hint.degrees(dp=(4, 2, 1, 1)), hint.microbatches(2))
    assert plan.ranks_of_stages == (range(4), range(4, 6), range(6, 7), range(7, 8))
    assert {mesh.rows for mesh in plan.meshes} == {4}
    assert "of stage 1: dp=2 x time=2, ranks 4 to 5" in str(plan)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: hint.degrees(dp=(2, 1), tp=(1, 1, 1)), "tp=(1, 1, 1) for 2 stages: it has 3"),
        (lambda: hint.degrees(pp=3, dp=(2, 1)), "cannot use dp=(2, 1) for 3 stages: it has 2"),
        (lambda: hint.degrees(dp=(2, 0)), "cannot use degree dp=(2, 0)"),
        (lambda: hint.degrees(dp=()), "cannot use degree dp=()"),
        (
            lambda: stage_meshes(Cluster.local(4), hint.degrees(dp=(2, 1)), 2),
            "cannot lay stages of 2 + 1 = 3 ranks on the 4 ranks",
        ),
        (
            lambda: planned(Cluster.local(4), hint.degrees(dp=(3, 1)), hint.microbatches(2)),
            "cannot cut the batch into 2 microbatches over dp=3",
        ),
    ],
)
def test_degrees_that_cannot_be_are_refused(make: object, what: str) -> None:
    with pytest.raises(HintError) as caught:
        make()  # type: ignore[operator]
    assert what in str(caught.value)


def test_degrees_of_stages_are_read_from_text() -> None:
    assert parse_hints(["shares=5/2/1/0"]) == (hint.shares(5, 2, 1, 0),)
    assert parse_hints(["dp=4/2/1", "tp=1/1/2"]) == (hint.degrees(dp=(4, 2, 1), tp=(1, 1, 2)),)


def test_a_stage_of_fast_devices_gets_more_of_the_model() -> None:
    even = forward_nodes(planned(mixed(1, 1), hint.degrees(pp=2), hint.microbatches(2)))
    first = forward_nodes(planned(mixed(1, 4), hint.degrees(pp=2), hint.microbatches(2)))
    last = forward_nodes(planned(mixed(4, 1), hint.degrees(pp=2), hint.microbatches(2)))
    assert first[0] > 1.3 * even[0] and last[1] > 1.3 * even[1]


def test_stages_of_more_ranks_get_more_of_the_model() -> None:
    slow = mixed(*[1e5] * 4)
    even = forward_nodes(planned(slow, hint.degrees(pp=2), hint.microbatches(1)))
    wide = forward_nodes(planned(slow, hint.degrees(dp=(3, 1)), hint.microbatches(1)))
    assert wide[0] > even[0]


def test_every_stage_keeps_to_the_memory_of_its_own_device() -> None:
    hints = (hint.degrees(pp=2), hint.microbatches(1))
    cluster = mixed(1, 1)
    free = planned(cluster, *hints)
    fraction = cluster.usable_memory_fraction
    needs = int(free.prediction.memory.total_bytes / fraction)
    # The second stage alone has too little: its plan must change, and the limit shown is its own.
    with pytest.raises(InfeasibleError):
        planned(mixed(1, 1, memory_bytes=(100 * needs, needs // 200)), *hints)
    roomy = planned(mixed(1, 1, memory_bytes=(100 * needs, 2 * needs)), *hints)
    assert roomy.memory_limit_bytes == int(2 * needs * fraction)
    assert roomy.prediction.memory.total_bytes <= roomy.memory_limit_bytes


def test_work_is_shared_as_stages_are_fast() -> None:
    assert shared_s([6.0, 6.0, 6.0]) == 2.0
    assert math.isclose(shared_s([4.0, 12.0]), 3.0)
    assert shared_s([0.0, 1.0]) == 0.0


def test_replicas_take_samples_in_proportion_to_their_speed() -> None:
    """The figures of HetSeq: a batch of 64 over speeds 4 : 2 : 1 : 1."""
    assert proportional(64, [4, 2, 1, 1]) == (32, 16, 8, 8)
    plan = planned(mixed(1, 2, 4, 4), hint.degrees(dp=4), hint.microbatches(1))
    assert plan.mesh.shares == ((4, 2, 1, 1),)
    assert plan.stage.inputs["input_ids"] == (Split(0, 1, 2, (4, 2, 1, 1)),)
    twice = planned(mixed(1, 2, 4, 4), hint.degrees(dp=4), hint.microbatches(2))
    assert twice.mesh.shares == ((4, 2, 1, 1), ()) and twice.mesh.rows == 8
    assert planned(mixed(1, 1), hint.degrees(dp=2)).mesh.shares == ()


@given(st.integers(0, 12), st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=4))
def test_no_other_parts_end_sooner(total: int, speeds: list[float]) -> None:
    found = proportional(total, speeds)
    assert sum(found) == total
    ends = [
        max(n / speed for n, speed in zip(parts, speeds, strict=True))
        for parts in itertools.product(range(total + 1), repeat=len(speeds))
        if sum(parts) == total
    ]
    assert max(n / speed for n, speed in zip(found, speeds, strict=True)) == min(ends)


def test_parts_in_proportion_to_speed_are_predicted_faster() -> None:
    cluster = mixed(1, 3)
    fast, even = (
        planned(cluster, hint.degrees(dp=2), hint.shares(*parts)).prediction.step_s
        for parts in ((3, 1), (1, 1))
    )
    assert fast < even


def test_memory_is_that_of_the_rank_that_is_fullest_of_its_own() -> None:
    """The second rank takes a quarter of the batch, and has little memory."""
    hints = (hint.degrees(dp=2), hint.shares(3, 1), hint.microbatches(1))
    free = planned(mixed(1, 1), *hints)
    most = free.prediction.memory.total_bytes
    cluster = mixed(1, 1, memory_bytes=(10 * most, most))
    plan = planned(cluster, *hints)
    assert plan.memory_limit_bytes == int(most * cluster.usable_memory_fraction)
    assert plan.prediction.memory.total_bytes < most


@pytest.mark.parametrize(
    ("hints", "what"),
    [
        ((hint.shares(5, 2, 1, 0),), "has 4 parts, and dp is not fixed"),
        ((hint.degrees(dp=2), hint.shares(1, 2, 3)), "has 3 parts, and dp=2"),
        ((hint.degrees(dp=2), hint.shares(2, 1)), "cannot share the batch out as 2 + 1 in 1"),
    ],
)
def test_parts_that_cannot_be_are_refused(hints: tuple[hint.Hint, ...], what: str) -> None:
    with pytest.raises(HintError) as caught:
        planned(Cluster.local(2), *hints)
    assert what in str(caught.value)
    with pytest.raises(HintError, match="give a count of parts"):
        hint.shares(0, 0)
