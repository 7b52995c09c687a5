"""Stages that differ: dealt out by the inter-op program, exact all the same."""

from __future__ import annotations

import functools
import random
from bisect import bisect_right
from dataclasses import replace

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.ir.sharding import Mesh
from autopar.plan.records import Plan, StagePlan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.planner.stagewise import composed
from autopar.planner.units import Units, units_of
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis, analyse
from autopar.search.stages import forward_order, split_lanes
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import bert, gpt2, llama, t5, unet
from tests.oracles.pipeline import assert_pipeline_exact
from tests.oracles.random_plans import random_stage, recomputing

MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "unet": unet}


def cut(analysis: Analysis, most: int) -> Units:
    """Units of nodes that take equally long."""
    return units_of(analysis, [1.0] * len(forward_order(analysis)), most)


CASES = [
    pytest.param(name, schedule, marks=() if quick else pytest.mark.large)
    for name in MODELS
    for schedule in ("1f1b", "zb-v")
    for quick in ((schedule == "zb-v") == (name in ("llama", "bert")),)
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_any_mixture_of_plans_cut_anywhere_is_exact(name: str, schedule: str) -> None:
    draw = random.Random(f"{name} {schedule}")
    built = MODELS[name]()
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    mesh = Mesh(("dp",), (2,)).with_time(2, 1)
    plans = [
        recomputing(analysis, random_stage(analysis, mesh, seed), draw)
        for seed in draw.sample(range(100), 2)
    ]
    units = cut(analysis, 12)
    chunks = 2 * max(1, schedule_named(schedule).least_chunks)
    lanes = [schedule_named(schedule).lane_of_chunk(chunk, 2) for chunk in range(chunks)]
    cuts = sorted(draw.sample(range(1, units.starts[-1]), chunks - 1))
    taken: list[dict[int, int]] = [{}, {}]
    for unit, start in enumerate(units.starts[:-1]):
        taken[lanes[bisect_right(cuts, start)]][unit] = draw.randrange(len(plans))
    wholes = [
        replace(composed(units, plans, own), first_rank=2 * lane) for lane, own in enumerate(taken)
    ]
    pipeline = split_lanes(analysis, wholes, cuts, lanes)
    assert_pipeline_exact(*built, analysis, pipeline, captured, schedule)


def test_what_a_stage_gets_from_another_goes_where_its_own_way_sends_it() -> None:
    analysis = analyse(capture_step(*MODELS["gpt2"](), grad=True).graph)
    units, stays = cut(analysis, 12), random_stage(analysis, Mesh(("dp",), (2,)).with_time(2, 1), 0)
    ways = stays, replace(stays, offloaded=tuple(stays.kept))
    first, end = len(units.kinds) // 2, len(units.kinds)
    taken = {unit: int(unit == first) for unit in range(first, end)}

    def second(whole: StagePlan) -> StagePlan:
        wholes = stays, replace(whole, first_rank=2)
        return split_lanes(analysis, wholes, [units.starts[first]], range(2)).stages[1]

    made = {node.name for node in second(ways[1]).nodes}
    away = {value: value.partition(":")[0] for value in second(ways[1]).offloaded}
    got = [v for v, name in away.items() if name not in made and first in units.readers[name]]
    assert got and set(got) <= set(second(composed(units, ways, taken)).offloaded)


@functools.cache
def deep() -> Analysis:
    model, batch, loss = gpt2(layers=8, batch=16)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def test_units_of_a_kind_are_the_same_places_of_copies_that_read_alike() -> None:
    units, analysis = cut(deep(), 32), deep()
    order = forward_order(analysis)
    by_kind: dict[int, set[tuple[int, ...]]] = {}
    for unit, kind in enumerate(units.kinds):
        own = order[units.starts[unit] : units.starts[unit + 1]]
        by_kind.setdefault(kind, set()).add(tuple(analysis.folding.of[name] for name in own))
    assert all(len(places) == 1 for places in by_kind.values())
    assert len(by_kind) < len(units.kinds)
    assert set(units.home.values()) == set(range(len(units.kinds)))


@functools.cache
def within(num_bytes: float, *hints: hint.Hint) -> Plan:
    """Four stages of one device that holds so much."""
    alike = Cluster.local(4)
    device = replace(alike.device(0), memory_bytes=int(num_bytes), unified_memory=True)
    cluster = replace(alike, devices=(Devices(device=device, count=4),))
    asked = (hint.degrees(pp=4), hint.microbatches(8), hint.schedule("1f1b"), *hints)
    return make_plan(
        deep(),
        Request(model="m", fingerprint="f", cluster=cluster, hints=asked, memory_fraction=1.0),
    )


def test_an_early_stage_recomputes_more_than_a_late_one_and_no_more_than_it_must() -> None:
    free = within(1e12)
    most = free.prediction.memory.total_bytes
    plan = within(0.7 * most)
    again = [len(stage.recomputed) for stage in plan.stages]
    assert again[0] > 0 and again[0] >= again[1] >= again[2] >= again[3]
    assert plan.prediction.memory.total_bytes <= 0.7 * most


@pytest.mark.large
def test_where_hints_cut_every_stage_recomputes_what_it_must() -> None:
    limit = 0.7 * within(1e12).prediction.memory.total_bytes
    plan = within(limit, hint.cut_before("transformer.h.3"))
    assert plan.prediction.memory.total_bytes <= limit
    assert len({len(stage.recomputed) for stage in plan.stages}) > 1
    nodes = deep().graph.by_name
    for stage in plan.stages:
        modules = [f"{nodes[own.name].source.module}." for own in stage.nodes]
        held = [any(m.startswith(f"transformer.h.{n}.") for m in modules) for n in (2, 3)]
        assert not all(held)
