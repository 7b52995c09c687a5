"""Plans within so little memory that not every block keeps what it hands to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.lanes import MeshSearch
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import build_problem, with_reruns
from autopar.search.intra import least_bytes, solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster
from tests.benchmarks.superneurons import Family
from tests.oracles import sequential
from tests.oracles.live import counted_peaks
from tests.oracles.models import gpt2
from tests.oracles.pipeline import assert_exact, programs_of, values_of
from tests.oracles.recomputes import ONE
from tests.oracles.sequential import Make, planned_on


def keeping_every(copies: int) -> Make:
    def make(search: MeshSearch) -> MeshSearch:
        assert search.keeps_every(copies)
        return search

    return make


def planned(analysis: Analysis, limit_bytes: int | None = None) -> Plan:
    hints = [hint.microbatches(1)]
    if limit_bytes is not None:
        hints.append(hint.memory_limit(limit_bytes))
    request = Request(model="m", fingerprint="f", cluster=Cluster.local(1), hints=tuple(hints))
    return make_plan(analysis, request)


@pytest.mark.large
def test_checkpoints_become_sparser_where_nothing_else_fits() -> None:
    """Of 24 layers' inputs, 24 are kept; then 8, two more being made at a time."""
    analysis = analyse(capture_step(*gpt2(layers=24, batch=256), grad=True).graph)
    free = planned(analysis)
    resident = free.prediction.memory.parameters_bytes + free.prediction.memory.optimizer_bytes
    made = free.prediction.memory.total_bytes - resident
    dense, sparse = (planned(analysis, resident + int(p * made)) for p in (0.1, 0.068))
    assert sparse.stage.forgotten
    assert sparse.prediction.memory.total_bytes <= resident + int(0.068 * made)
    assert sparse.prediction.step_s > dense.prediction.step_s
    few, all_but_one = (
        [value for value in plan.stage.kept if value.partition(":")[0] in sums(analysis)]
        for plan in (sparse, dense)
    )
    assert 2 * len(few) <= 24 == len(all_but_one) + 1


def sums(analysis: Analysis) -> set[str]:
    """What blocks hand on."""
    of = analysis.copies.of
    return {
        ref.node
        for node in analysis.graph.nodes
        for ref in node.operands
        if node.name in of and ref.node in of and of[node.name].index - of[ref.node].index == 1
    }


def test_copies_at_the_ends_of_a_stretch_count_as_parts_of_their_class() -> None:
    """What the first block hands on is read in another way: a value apart."""
    family = Family(others=(1, 5, 1), inner=4, batch=4, size=32)
    analysis, cluster = family.analysed(8), Cluster.local(1)
    cost = NodeCost(cluster.device(0), ONE, axis_seconds(cluster, ONE))
    updates = Updates(OptimizerSpec(state_bytes=4.0), 1e9)
    plain = build_problem(analysis, ONE, cost, updates, Restrictions())
    problem = with_reruns(plain, every=2).problem
    least = least_bytes(problem).num_bytes
    found = solve(replace(problem, memory_limit_bytes=1.01 * least))
    assert found.choice
    assert max(found.memory_bytes) <= 1.01 * least * (1 + 1e-9)


@pytest.mark.parametrize("copies", [pytest.param(2, marks=pytest.mark.large), 3])
def test_sparse_checkpoints_are_exact_and_hold_what_is_predicted(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Local moves would keep more where there is room.
    monkeypatch.setattr(sequential, "refined", lambda analysis, request, found, limit_of: found)
    built = gpt2(layers=6, batch=8)
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    cluster = Cluster.local(1)
    free = planned_on(analysis, cluster, ONE, float("inf"))
    assert free is not None
    found = planned_on(analysis, cluster, ONE, 0.5 * free.memory.total_bytes, keeping_every(copies))
    assert found is not None
    stage = found.pipeline.stages[0]
    assert stage.forgotten
    programs = programs_of(analysis, stage, axis_seconds(cluster, ONE))
    assert_exact(*built, analysis, programs, captured)
    counts, _ = counted_peaks(programs, values_of(built[0], built[1], analysis, captured))
    memory = found.memory
    entered = memory.parameters_bytes + memory.inputs_bytes + memory.buffers_bytes
    assert entered + memory.optimizer_bytes + counts[0].peak_bytes == memory.total_bytes
