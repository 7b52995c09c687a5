"""Local moves on lowered plans: within the same memory, never slower, and the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.ir.sharding import Mesh
from autopar.plan.records import StagePlan
from autopar.planner.layout import Layout
from autopar.planner.request import Candidate
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles import sequential
from tests.oracles.lockstep import run_lockstep
from tests.oracles.microbatches import run_pipeline
from tests.oracles.models import gpt2
from tests.oracles.pipeline import lanes_of, programs_of, values_of
from tests.oracles.sequential import planned_on

BUILT = gpt2(layers=6, batch=8)
PARTS = (0.8, 0.5)


STAGES, MICROBATCHES = 2, 4


@pytest.fixture(scope="module")
def captured() -> tuple[Analysis, Any]:
    found = capture_step(*BUILT, grad=True)
    return analyse(found.graph), found


@pytest.mark.parametrize("ranks", [1, 2])
def test_moves_fit_and_are_never_slower(
    captured: tuple[Analysis, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysis, _ = captured
    mesh, cluster = Mesh(("a",), (ranks,)), Cluster.local(ranks)
    free = planned_on(analysis, cluster, mesh, float("inf"))
    assert free is not None
    limits = [part * free.memory.total_bytes for part in PARTS]
    after = [planned_on(analysis, cluster, mesh, limit) for limit in limits]
    monkeypatch.setattr(sequential, "refined", lambda analysis, request, found, limit_of: found)
    before = [planned_on(analysis, cluster, mesh, limit) for limit in limits]
    gains = []
    for own, was, limit in zip(after, before, limits, strict=True):
        if own is None:
            assert was is None
            continue
        assert own.memory.total_bytes <= limit
        gains.append(1.0 if was is None else 1 - own.step_s / was.step_s)
    assert min(gains) >= 0
    assert max(gains) > 1e-3


def test_what_moves_change_changes_nothing_to_the_bit(captured: tuple[Analysis, Any]) -> None:
    analysis, found = captured
    mesh, cluster = Mesh(("a",), (1,)), Cluster.local(1)
    values = values_of(BUILT[0], BUILT[1], analysis, found)

    def results(stage: StagePlan) -> list[torch.Tensor]:
        programs = programs_of(analysis, stage, axis_seconds(cluster, mesh))
        (env,) = run_lockstep(programs, values)
        return [env[ref] for ref in programs[0].results]

    free = planned_on(analysis, cluster, mesh, float("inf"))
    assert free is not None
    plain = results(free.pipeline.stages[0])
    for part in PARTS:
        plan = planned_on(analysis, cluster, mesh, part * free.memory.total_bytes)
        assert plan is not None
        assert all(map(torch.equal, results(plan.pipeline.stages[0]), plain))


@pytest.mark.parametrize(
    ("schedule", "chunks", "part"),
    [
        ("1f1b", 1, 0.8),
        pytest.param("1f1b", 1, 0.7, marks=pytest.mark.large),
        pytest.param("interleaved", 2, 0.8, marks=pytest.mark.large),
        pytest.param("zb-h1", 1, 0.9, marks=pytest.mark.large),
    ],
)
def test_moves_of_stages_fit_are_never_slower_and_change_nothing_to_the_bit(
    captured: tuple[Analysis, Any],
    schedule: str,
    chunks: int,
    part: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    analysis, found = captured
    layout = Layout(schedule=schedule, num_stages=STAGES, num_chunks=chunks)
    cluster, mesh = Cluster.local(STAGES), Mesh(("a",), (1,)).with_time(MICROBATCHES)

    def planned(limit: float) -> Candidate | None:
        return planned_on(analysis, cluster, mesh, limit, layout=layout)

    free = planned(float("inf"))
    assert free is not None
    limit = part * free.memory.total_bytes
    after = planned(limit)
    monkeypatch.setattr(sequential, "refined", lambda analysis, request, found, limit_of: found)
    before = planned(limit)
    assert after is not None and before is not None
    assert after.memory.total_bytes <= limit
    assert after.step_s < (1 - 1e-3) * before.step_s
    values = values_of(BUILT[0], BUILT[1], analysis, found)
    plain, moved = results_of(analysis, free, values), results_of(analysis, after, values)
    assert moved.keys() == plain.keys()
    assert all(torch.equal(moved[name], value) for name, value in plain.items())


def results_of(
    analysis: Analysis, plan: Candidate, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Loss and gradients of a pipeline, by name."""
    lanes = lanes_of(analysis, plan.pipeline, plan.schedule)
    found = {}
    for lane in run_pipeline(lanes, values):
        program, env = lane.variants[0][0], lane.envs[0]
        found |= {name: env[ref] for name, ref in program.gradients.items()}
        if program.loss is not None:
            found["loss"] = env[program.loss]
    return found
