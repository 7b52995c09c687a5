"""Pipelines cut at any op equal one process: tied weights, tensor parallel stages, microbatches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.sharding import Mesh
from autopar.lower.program import Program, Section
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import StateBytes, build_problem, decode
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.stages import balanced_cuts, forward_order, split_stages
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS, Built
from tests.oracles.pipeline import assert_pipeline_exact

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
    cluster = Cluster.local(mesh.num_ranks)
    cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    states = StateBytes(per_element=8.0, update_bytes_per_s=1e9)
    problem = build_problem(analysis, mesh, cost, states, Restrictions())
    whole = decode(problem, analysis, solve(problem.problem))
    where = cuts or balanced_cuts([1.0] * len(forward_order(analysis)), num_stages)
    spec = schedule_named(schedule)
    num_lanes = num_stages // max(spec.least_chunks, 1)
    lanes = [spec.lane_of_chunk(chunk, num_lanes) for chunk in range(num_stages)]
    found = split_stages(analysis, whole, where, lanes)
    ended = assert_pipeline_exact(*built, analysis, found, captured, schedule)
    programs = [list(lane.variants[0]) for lane in ended]
    verify_directions(programs)
    return programs


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
    import itertools

    stages = min(stages, len(seconds))

    def longest(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(seconds)]
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(longest(cuts) for cuts in itertools.combinations(range(1, len(seconds)), stages - 1))
    assert longest(balanced_cuts(seconds, stages)) == best


def test_a_gradient_of_the_batch_alone_is_made_where_its_parameter_is() -> None:
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + self.scale

    batch = {"x": torch.randn(4, 3)}
    built = Scaled(), batch, lambda model, b: model(b["x"]).mean()
    pipeline(built, ONE.with_time(2), 2)
