"""Pipelines cut at any op equal one process: tied weights, tensor parallel stages, microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.sharding import Mesh
from autopar.lower.program import Program, Section
from autopar.options import OptimizerSpec
from autopar.plan.records import StagePlan
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import build_problem
from autopar.search.decode import decode
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from autopar.search.stages import balanced_cuts, forward_order, split_lanes, split_stages
from cost_models.cluster import Cluster
from tests.autopar.capture.eager import load_case
from tests.oracles.models import MODELS, Built, unet
from tests.oracles.pipeline import assert_exact, assert_pipeline_exact, variants_of
from tests.oracles.slow import slow_core

ONE = Mesh(("a",), (1,))
TENSOR = Mesh(("tp",), (2,), roles=("tp",))
DATA = Mesh(("dp",), (2,), roles=("dp",))


def pipeline(
    built: Built,
    mesh: Mesh,
    num_stages: int,
    cuts: tuple[int, ...] | None = None,
    schedule: str = "1f1b",
) -> list[list[Program]]:
    model, batch, loss = built
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    whole = whole_plan(analysis, mesh)
    where = cuts or balanced_cuts([1.0] * len(forward_order(analysis)), num_stages)
    spec = schedule_named(schedule)
    num_lanes = num_stages // max(spec.least_chunks, 1)
    lanes = [spec.lane_of_chunk(chunk, num_lanes) for chunk in range(num_stages)]
    found = split_stages(analysis, whole, where, lanes)
    ended = assert_pipeline_exact(*built, analysis, found, captured, schedule)
    programs = [list(lane.variants[0]) for lane in ended]
    verify_directions(programs)
    return programs


def whole_plan(analysis: Analysis, mesh: Mesh, zero: int | None = None) -> StagePlan:
    """The best plan of the whole step on a mesh of ranks so slow that every split pays."""
    cluster = Cluster.local(mesh.num_ranks)
    cost = NodeCost(slow_core(), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    problem = build_problem(analysis, mesh, cost, updates, Restrictions(zero=zero))
    return decode(problem, analysis, solve(problem.problem))


def unlike_pipeline(
    built: Built, meshes: Sequence[Mesh], schedule: str = "1f1b", zero: int | None = None
) -> list[list[Program]]:
    """As `pipeline`, with a mesh of its own for every stage."""
    model, batch, loss = built
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    firsts = itertools.accumulate((mesh.num_ranks for mesh in meshes), initial=0)
    wholes = [
        replace(whole_plan(analysis, mesh, zero), first_rank=first)
        for mesh, first in zip(meshes, firsts, strict=False)
    ]
    spec = schedule_named(schedule)
    count = len(meshes) * max(spec.least_chunks, 1)
    lanes = [spec.lane_of_chunk(chunk, len(meshes)) for chunk in range(count)]
    cuts = balanced_cuts([1.0] * len(forward_order(analysis)), count)
    found = split_lanes(analysis, wholes, cuts, lanes)
    ended = assert_pipeline_exact(*built, analysis, found, captured, schedule)
    programs = [list(lane.variants[0]) for lane in ended]
    verify_directions(programs)
    return programs


def in_time(microbatches: int, *meshes: Mesh) -> list[Mesh]:
    """Meshes that run the same microbatches, whatever part of the batch each rank has."""
    rows = math.lcm(
        *(n for m in meshes for n, own in zip(m.sizes, m.roles, strict=True) if own == "dp")
    )
    return [mesh.with_time(microbatches, rows) for mesh in meshes]


def role(name: str, ranks: int) -> Mesh:
    return Mesh((name,), (ranks,), roles=(name,))


UNLIKE = {
    "dp2-tp2": (role("dp", 2), role("tp", 2)),
    "tp2-dp2": (role("tp", 2), role("dp", 2)),
    "dp4-dp2": (role("dp", 4), role("dp", 2)),
    "2-1-1": (role("dp", 2), ONE, ONE),
    "tp2-1-dp2": (role("tp", 2), ONE, role("dp", 2)),
    "dp2tp2-tp4": (Mesh(("dp", "tp"), (2, 2), roles=("dp", "tp")), role("tp", 4)),
}


DEFAULT = {("llama", "dp2-tp2", 2), ("gpt2", "tp2-1-dp2", 2), ("gpt2", "2-1-1", 4)}
"""What every run tries; the others are large."""


@pytest.mark.parametrize(
    ("name", "meshes", "microbatches"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.large)
        for case in itertools.product(("llama", "gpt2"), UNLIKE, (1, 2, 4))
    ],
)
def test_stages_of_unlike_meshes_are_exact(name: str, meshes: str, microbatches: int) -> None:
    model, batch, loss = MODELS[name]()
    more = {key: torch.cat([v, *(v.roll(n, -1) for n in range(1, 8))]) for key, v in batch.items()}
    batch = {key: value[:16] for key, value in more.items()}
    unlike_pipeline((model, batch, loss), in_time(microbatches, *UNLIKE[meshes]))


def verify_directions(stages: list[list[Program]]) -> None:
    """In the loop, forward values flow down the stages and gradients up: no cycle, no hang."""
    for programs in stages:
        for message in programs[0].receives:
            if message.section is Section.FORWARD:
                assert message.peer < message.chunk
            if message.section is Section.BACKWARD:
                assert message.peer > message.chunk


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_two_stages_are_exact(name: str, microbatches: int) -> None:
    pipeline(MODELS[name](), ONE.with_time(microbatches), 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["g05", "g06", "g08", "g10", "g14"])
def test_given_cases_are_exact(name: str, schedule: str) -> None:
    """Among them gradients that depend on parameters alone, and cross stages before the loop."""
    pipeline(load_case(name).build(), ONE.with_time(2), 2, schedule=schedule)


@pytest.mark.parametrize(("mesh", "stages"), [(TENSOR, 2), (DATA, 2), (ONE, 4), (TENSOR, 3)])
def test_stages_of_parallel_ranks_are_exact(mesh: Mesh, stages: int) -> None:
    pipeline(MODELS["llama"](), mesh.with_time(2), stages)


@settings(max_examples=8)
@given(st.data())
def test_any_cut_is_exact(data: st.DataObject) -> None:
    count = len(forward_order(_analysed("mlp")))
    cuts = data.draw(st.lists(st.integers(1, count - 1), min_size=1, max_size=3, unique=True))
    microbatches = data.draw(st.sampled_from([1, 2, 3]))
    pipeline(MODELS["mlp"](), ONE.with_time(microbatches), len(cuts) + 1, tuple(sorted(cuts)))


def _analysed(name: str) -> Analysis:
    model, batch, loss = MODELS[name]()
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def test_a_tied_parameter_is_owned_once_and_its_gradient_comes_back_once() -> None:
    first, last = (programs[0] for programs in pipeline(MODELS["gpt2"](), ONE.with_time(2), 2))
    owned = [{i.target for i in p.inputs if i.kind == "parameter"} for p in (first, last)]
    assert not owned[0] & owned[1]
    assert "transformer.wte.weight" in owned[0]
    late = [m for m in first.receives if m.section is Section.EPILOGUE]
    assert len(late) == 1


@given(st.lists(st.integers(1, 20).map(float), min_size=2, max_size=9), st.integers(1, 4))
def test_balanced_cuts_equal_brute_force(seconds: list[float], stages: int) -> None:
    stages = min(stages, len(seconds))

    def longest(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(seconds)]
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(longest(cuts) for cuts in itertools.combinations(range(1, len(seconds)), stages - 1))
    assert longest(balanced_cuts(seconds, stages)) == best


def test_a_gradient_of_the_batch_alone_is_made_where_its_parameter_is() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + self.scale

    batch = {"x": torch.randn(4, 3)}
    built = Scaled(), batch, lambda model, b: model(b["x"]).mean()
    pipeline(built, ONE.with_time(2), 2)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_a_gradient_that_others_are_made_of_comes_before_them(schedule: str) -> None:
    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
            self.scale, self.unit = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
            self.shift = torch.nn.ParameterList([torch.randn(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x) + self.scale * self.unit + self.shift[0]

    built = Shifted(), {"x": torch.randn(4, 3)}, lambda model, b: model(b["x"]).square().mean()
    pipeline(built, ONE.with_time(2), 4, schedule=schedule)


SHARES = {
    "5-2-1-0": ((5, 2, 1, 0),),
    "0-3-1-4": ((0, 3, 1, 4),),
    "1-3 x tp": ((1, 3), ()),
}


SHARES_DEFAULT = {("mlp", "5-2-1-0", 1), ("unet", "1-3 x tp", 2)}


@pytest.mark.parametrize(
    ("name", "shares", "microbatches"),
    [
        pytest.param(*case, marks=() if case in SHARES_DEFAULT else pytest.mark.large)
        for case in itertools.product(("mlp", "llama", "gpt2", "bert", "unet"), SHARES, (1, 2))
    ],
)
def test_replicas_that_take_unequal_parts_of_the_batch_are_exact(
    name: str, shares: str, microbatches: int
) -> None:
    model, batch, loss = (MODELS | {"unet": unet})[name]()
    more = {k: torch.cat([v, *(v.roll(n, -1) for n in range(1, 8))])[:16] for k, v in batch.items()}
    own = SHARES[shares]
    names = ("dp", "tp")[: len(own)]
    sizes = tuple(len(one) or 2 for one in own)
    mesh = Mesh(names, sizes, roles=names, shares=own).with_time(microbatches, sum(own[0]))
    captured = capture_step(model, more, loss, grad=True)
    analysis = analyse(captured.graph)
    whole = whole_plan(analysis, mesh)
    seconds = axis_seconds(Cluster.local(mesh.num_ranks), mesh)
    variants = variants_of(analysis, whole, seconds)
    assert_exact(
        model, more, loss, analysis, variants if microbatches > 1 else variants[0], captured
    )
    per_share = 16 // sum(own[0]) // microbatches
    wanted = [n * per_share for n in own[0] for _ in range(sizes[-1] if len(own) > 1 else 1)]
    for program, rows in zip(variants[0], wanted, strict=True):
        made = [kind.shape for i in program.instructions for kind in i.outputs]
        assert any(shape[:1] == (rows,) and len(shape) > 1 for shape in made)
