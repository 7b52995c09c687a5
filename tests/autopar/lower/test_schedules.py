"""Every schedule, as its rows say: exact, in order, and holding what it promises."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.sharding import Mesh
from autopar.lower.held import Held, held_in
from autopar.lower.live import byte_changes, live_bytes, storages
from autopar.lower.program import Program, Section
from autopar.lower.simulate import prices, simulate
from autopar.lower.unroll import Row, unroll
from autopar.options import OptimizerSpec
from autopar.plan.records import StagePlan
from autopar.schedules.table import SCHEDULES, Size
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import build_problem
from autopar.search.decode import decode
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from autopar.search.stages import Pipeline, balanced_cuts, forward_order, split_stages
from cost_models.cluster import Cluster
from tests.oracles import models
from tests.oracles.models import Built
from tests.oracles.pipeline import assert_pipeline_exact, lanes_of, values_of
from tests.oracles.random_plans import random_stage
from tests.oracles.slow import slow_core
from tests.oracles.wire import run_stages

MODELS: dict[str, Callable[[], Built]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "t5": models.t5,
    "unet": models.unet,
    "resnet": models.resnet,
}
OTHERS: dict[str, Callable[[], Built]] = {"mlp": models.mlp}
ONE = Mesh(("a",), (1,))
DATA = Mesh(("dp",), (2,), roles=("dp",))
TENSOR = Mesh(("tp",), (2,), roles=("tp",))
UNEVEN = 3
"""Microbatches of five samples: two, two and one."""


@functools.cache
def subject(name: str, mesh: Mesh) -> tuple[Built, Any, Analysis, StagePlan]:
    """A model, its captured step and a plan of the whole of it."""
    model, batch, loss = (MODELS | OTHERS)[name]()
    if mesh.microbatches == UNEVEN:
        batch = {key: torch.cat([value, value[:1].roll(1, -1)]) for key, value in batch.items()}
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    cluster = Cluster.local(mesh.num_ranks)
    cost = NodeCost(slow_core(), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    problem = build_problem(analysis, mesh, cost, updates, Restrictions())
    plan = decode(problem, analysis, solve(problem.problem))
    return (model, batch, loss), captured, analysis, plan


def cut(analysis: Analysis, plan: StagePlan, schedule: str, num_stages: int) -> Pipeline:
    """Equally many ops a chunk."""
    spec = SCHEDULES[schedule]
    count = num_stages * spec.least_chunks
    lanes = [spec.lane_of_chunk(chunk, num_stages) for chunk in range(count)]
    cuts = balanced_cuts([1.0] * len(forward_order(analysis)), count)
    return split_stages(analysis, plan, cuts, lanes)


def cases() -> list[Any]:
    """The whole matrix; by default the cheapest parts that cover every value of every axis."""
    default = {
        ("llama", "zb-v", 4, TENSOR, 2),
        ("llama", "interleaved", 2, DATA, 4),
        ("gpt2", "zb-v", 2, ONE, UNEVEN),
        ("gpt2", "interleaved", 4, ONE, 4),
        ("t5", "interleaved", 4, ONE, 4),
        ("t5", "zb-h1", 2, TENSOR, 2),
        ("t5", "zb-v", 4, ONE, 1),
        ("unet", "zb-h1", 4, ONE, UNEVEN),
        ("unet", "zb-v", 2, ONE, 2),
        ("unet", "early-backward", 4, ONE, 4),
        ("resnet", "zb-h2", 2, ONE, 4),
        ("resnet", "early-backward-2", 4, ONE, UNEVEN),
        ("resnet", "1f1b", 2, DATA, 2),
        ("resnet", "gpipe", 4, ONE, 1),
    }
    found = []
    for name in MODELS:
        for schedule, spec in SCHEDULES.items():
            for stages in (2, 4):
                for mesh in (ONE, DATA, TENSOR):
                    for count in (1, 2, 4, UNEVEN):
                        if spec.whole_rounds and count > stages and count % stages:
                            continue
                        if count * mesh.num_ranks > 4 and mesh is DATA:
                            continue  # no sample for some rank in some microbatch
                        case = (name, schedule, stages, mesh, count)
                        marks = () if case in default else pytest.mark.large
                        found.append(
                            pytest.param(*case, marks=marks, id="-".join(map(_text, case)))
                        )
    return found


def _text(value: object) -> str:
    return value.names[0] if isinstance(value, Mesh) else str(value)


@pytest.mark.parametrize(("name", "schedule", "stages", "mesh", "count"), cases())
def test_every_schedule_is_exact(
    name: str, schedule: str, stages: int, mesh: Mesh, count: int
) -> None:
    built, captured, analysis, plan = subject(name, mesh.with_time(count))
    pipeline = cut(analysis, plan, schedule, stages)
    lanes = assert_pipeline_exact(*built, analysis, pipeline, captured, schedule)
    spec = SCHEDULES[schedule]
    size = Size(lanes=stages, chunks=spec.least_chunks, microbatches=count)
    for lane, bound in zip(lanes, spec.live_bounds(size), strict=True):
        assert lane.most_live <= bound
        parts = {i.section for p in lane.variants[0] for i in p.instructions}
        assert (Section.WEIGHT_GRADIENT in parts) <= spec.splits_backward


QUICK = (0, 29, 44, 45)
SEEDS = [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.large) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_cuts_and_recompute_are_exact(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(list(MODELS))
    mesh = draw.choice((ONE, Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))))
    count = draw.choice((1, 2, 4, UNEVEN))
    built, captured, analysis, _ = subject(name, ONE.with_time(count))
    whole = random_stage(analysis, mesh.with_time(count), seed)
    forward = [n.name for n in whole.nodes if analysis.graph.by_name[n.name].phase == "forward"]
    again = [node for node in forward if draw.random() < draw.choice((0.0, 0.5))]
    whole = replace(whole, recomputed=tuple(again))
    schedule = draw.choice([n for n, s in SCHEDULES.items() if not s.whole_rounds or count == 4])
    spec, stages = SCHEDULES[schedule], draw.choice((2, 4))
    chunks = stages * spec.least_chunks
    places = draw.sample(range(1, len(forward_order(analysis))), chunks - 1)
    lanes = [spec.lane_of_chunk(chunk, stages) for chunk in range(chunks)]
    pipeline = split_stages(analysis, whole, sorted(places), lanes)
    assert_pipeline_exact(*built, analysis, pipeline, captured, schedule)


def running(name: str, schedule: str, stages: int, count: int) -> Any:
    """The real runner of every stage: programs and rows, live bytes and what it did."""
    built, captured, analysis, plan = subject(name, ONE.with_time(count))
    pipeline = cut(analysis, plan, schedule, stages)
    lanes = [([m[0] for m in v], row) for v, row in lanes_of(analysis, pipeline, schedule)]
    tensors = values_of(built[0], built[1], analysis, captured)
    held = tuple(stage.first_rank for stage in pipeline.stages)
    return lanes, *run_stages(lanes, held, tensors)


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "count"),
    [
        ("llama", "1f1b", 4, 4),
        ("llama", "zb-v", 2, 4),
        ("gpt2", "zb-h1", 4, 4),
        ("gpt2", "interleaved", 2, 4),
        ("t5", "zb-v", 4, 2),
        ("unet", "gpipe", 2, 2),
        # What the last turn but one sends is let go of before the last.
        ("mlp", "gpipe", 4, 2),
        ("mlp", "interleaved", 2, 2),
    ],
)
def test_a_stage_holds_the_bytes_that_are_simulated(
    name: str, schedule: str, stages: int, count: int
) -> None:
    lanes, counts, _ = running(name, schedule, stages, count)
    for (programs, row), counted in zip(lanes, counts, strict=True):
        assert peak_bytes(programs[0], row) == counted.peak_bytes


def peak_bytes(program: Program, row: Row) -> int:
    written = unroll(program, row)
    return int(live_bytes(byte_changes(written, storages(written)))[:, 0].max())


def held_when_written_out(program: Program, row: Row) -> Held:
    """What `simulate` says of the whole row."""
    found = simulate(unroll(program, row), prices(Cluster.local(1).device(0), lambda *_: 0.0))
    return Held(
        peak_bytes=found.peak_bytes,
        saved_bytes=found.saved_bytes,
        gradient_bytes=found.gradient_bytes,
        host_bytes=found.host_bytes,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_row_holds_is_told_from_two_microbatches(schedule: str) -> None:
    _, _, analysis, plan = subject("mlp", ONE.with_time(8))
    pieces = cut(analysis, plan, schedule, 2)
    for (program, *_), row in lanes_of(analysis, pieces, schedule):
        assert held_in(program[0], row) == held_when_written_out(program[0], row)


@pytest.mark.parametrize(
    ("schedule", "stages", "count"), [("1f1b", 4, 4), ("interleaved", 2, 4), ("zb-v", 2, 3)]
)
def test_messages_run_beside_what_does_not_need_them(
    schedule: str, stages: int, count: int
) -> None:
    """A receive is posted before the action ahead of its own, a send right behind its action."""
    lanes, _, events = running("gpt2", schedule, stages, count)
    for (programs, row), happened in zip(lanes, events, strict=True):
        runs = {event[1]: place for place, event in enumerate(happened) if event[0] == "run"}
        assert list(runs) == list(row)
        program = programs[0]
        per_microbatch = 1 + max(m.number for other, _ in lanes for m in other[0].sends)
        places = [runs[turn] for turn in row]
        for at, turn in enumerate(row):
            before = places[at - 1] if at else places[0]
            after = places[at + 1] if at + 1 < len(row) else len(happened)
            for messages, check in (
                (program.receives, ("receive", 0, before)),
                (program.receives, ("take", before if at else 0, places[at])),
                (program.sends, ("send", places[at], after)),
            ):
                what, first, last = check
                for message in messages:
                    if (message.section, message.chunk) == turn[:2]:
                        tag = turn.microbatch * per_microbatch + message.number
                        assert first <= happened.index((what, tag)) < last, (turn, what)
