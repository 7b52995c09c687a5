"""Plans whose parameters are at home in host memory: when, that they fit, and what they take."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from autopar import hint
from autopar.capture import capture_step
from autopar.capture.precision import Precision
from autopar.cost.node import axis_seconds
from autopar.errors import AutoparError, InfeasibleError
from autopar.hint import Hint
from autopar.lower.overlap import overlap
from autopar.lower.simulate import prices
from autopar.lower.spmd import lower
from autopar.options import ADAMW, OptimizerSpec
from autopar.plan.records import Plan
from autopar.plan.serialize import from_json, to_json
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.intra import solve
from autopar.search.problem import Choices, Link, Problem
from cost_models.cluster import Cluster
from cost_models.memory import piece_elements
from cost_models.overlap import BOTH_COPIES, together_s
from tests.oracles.hosts import hosted
from tests.oracles.live import counted_peaks
from tests.oracles.models import gpt2, mlp
from tests.oracles.pipeline import values_of

BUILT = gpt2(layers=6, batch=8)
BUCKET = 512
IN_BUCKETS = OptimizerSpec(moments=2, host_bucket_elements=BUCKET)


EMBED = ("wte", "wpe")


@pytest.fixture(scope="module")
def captured() -> tuple[Analysis, Any]:
    found = capture_step(*BUILT, grad=True)
    return analyse(found.graph), found


def planned(
    analysis: Analysis,
    cluster: Cluster,
    *hints: Hint,
    microbatches: int = 1,
    optimizer: OptimizerSpec = IN_BUCKETS,
) -> Plan:
    hints = (hint.microbatches(microbatches), *hints)
    request = Request(model="m", fingerprint="f", cluster=cluster, hints=hints, optimizer=optimizer)
    return make_plan(analysis, request)


@pytest.mark.parametrize(
    ("ranks", "link", "part"), [(2, 2e10, 0.2), pytest.param(1, 1e9, 0.2, marks=pytest.mark.large)]
)
def test_predicted_bytes_are_counted_and_nothing_changes_to_the_bit(
    captured: tuple[Analysis, Any], ranks: int, link: float, part: float
) -> None:
    """In the least memory: some parameters are at home in host memory, and so is all state."""
    analysis, found = captured
    cluster = hosted(ranks, link)
    free = planned(analysis, cluster)
    limit = int(part * free.prediction.memory.total_bytes)
    plan = planned(analysis, cluster, hint.memory_limit(limit))
    home = [p for p in plan.stage.parameters if p.on_host]
    assert home and len(home) < len(plan.stage.parameters)
    assert all(p.state_on_host for p in home)
    assert from_json(to_json(plan)) == plan
    mesh = plan.mesh
    seconds = axis_seconds(cluster, mesh)
    cost = prices(cluster.device(0), seconds)
    values = values_of(BUILT[0], BUILT[1], analysis, found)

    def run(stage: Any) -> Any:
        lowered = [
            lower(analysis.graph, analysis.rules, stage, mesh.coordinates(rank), seconds)
            for rank in range(mesh.num_ranks)
        ]
        programs = [overlap(program, cost) for program in lowered]
        return programs, *counted_peaks(programs, values)

    programs, counts, results = run(plan.stage)
    memory = plan.prediction.memory
    entered = memory.parameters_bytes + memory.inputs_bytes + memory.buffers_bytes
    assert entered + memory.optimizer_bytes + max(c.peak_bytes for c in counts) == (
        memory.total_bytes
    )
    at_home = sum(item.local_type.num_bytes for item in programs[0].inputs if item.on_host)
    states = sum(
        2 * item.local_type.num_bytes for item in programs[0].inputs if item.kind == "parameter"
    )
    assert max(c.host_peak_bytes for c in counts) + at_home + states == memory.host_bytes
    here = replace(
        plan.stage,
        parameters=tuple(replace(p, on_host=False) for p in plan.stage.parameters),
        kept={value: own for value, own in plan.stage.kept.items() if own},
    )
    _, _, wanted = run(here)
    for rank in range(mesh.num_ranks):
        for one, other in zip(results[rank], wanted[rank], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_hint_puts_all_parameters_on_the_host(
    captured: tuple[Analysis, Any], microbatches: int
) -> None:
    analysis, _ = captured
    cluster = hosted(1, 1e9)
    free = planned(analysis, cluster, microbatches=microbatches)
    plan = planned(analysis, cluster, hint.offload("parameters"), microbatches=microbatches)
    before, after = free.prediction.memory, plan.prediction.memory
    assert all(p.on_host and p.state_on_host for p in plan.stage.parameters)
    assert after.parameters_bytes == after.gradients_bytes == after.optimizer_bytes == 0
    size = before.parameters_bytes
    # Added up gradients, and those of a microbatch beside them; but those of embeddings are made
    # behind the loop.
    late = sum(p.type.num_bytes for p in plan.stage.parameters if p.name.split(".")[1] in EMBED)
    late *= microbatches - 1
    assert after.host_bytes == (3 + microbatches) * size - 2 * late
    copies = {(c.kind, c.purpose): c for c in plan.prediction.copies}
    # Once or twice a microbatch; their gradients once, and added up there.
    brought = copies["to_device", "parameters"].num_bytes
    assert size * microbatches < brought <= 2 * size * microbatches
    assert copies["to_host", "gradients"].num_bytes == size * microbatches - late
    assert "on host" in str(plan) and "state on host" not in str(plan)
    told = plan.explain()
    assert "whole, on host" in told and "brought to the device" in told
    assert "read as stored" not in told
    # The update: in come parameter, gradient and two moments, out go all but the gradient.
    # The first piece to come and the last to go have nothing beside them.
    piece = 4 * piece_elements(BUCKET)
    both_s = together_s(4 * (size - piece) / 1e9, 3 * (size - piece) / 1e9, BOTH_COPIES)
    link_s = both_s + 7 * piece / 1e9
    assert plan.prediction.optimizer_s == pytest.approx(link_s, rel=0.01)


def test_a_hint_names_modules_whose_parameters_leave(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    plan = planned(analysis, hosted(1, 1e9), hint.offload("*.h.2.mlp", what="parameters"))
    home = {p.name for p in plan.stage.parameters if p.on_host}
    assert home == {p.name for p in plan.stage.parameters if ".h.2.mlp." in p.name}
    free = planned(analysis, hosted(1, 1e9)).prediction.memory
    left = free.parameters_bytes - plan.prediction.memory.parameters_bytes
    assert left == sum(p.type.num_bytes for p in plan.stage.parameters if p.on_host)


def test_zero_pieces_are_at_home_on_the_host(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    hints = (hint.degrees(dp=2, tp=1, zero=3), hint.offload("parameters"))
    plan = planned(analysis, hosted(2, 1e9), *hints, microbatches=2)
    size = sum(p.type.num_bytes for p in plan.stage.parameters)
    memory = plan.prediction.memory
    assert memory.parameters_bytes == memory.optimizer_bytes == 0
    # Half of parameters, two moments, added up gradients and those of a microbatch.
    assert memory.host_bytes == pytest.approx(2.5 * size, rel=0.02)


def test_every_stage_of_a_pipeline_streams_its_own(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    hints = (hint.degrees(pp=2, dp=1, tp=1), hint.offload("parameters"))
    plan = planned(analysis, hosted(2, 1e9), *hints, microbatches=4)
    assert plan.num_stages == 2
    assert all(p.on_host for stage in plan.stages for p in stage.parameters)
    memory = plan.prediction.memory
    assert memory.parameters_bytes == memory.optimizer_bytes == 0 < memory.host_bytes


@pytest.mark.parametrize("microbatches", [1, 2])
def test_another_step_finds_parameters_at_home_where_they_are(
    captured: tuple[Analysis, Any], microbatches: int
) -> None:
    analysis, _ = captured
    cluster = hosted(1, 1e9)
    plan = planned(analysis, cluster, hint.offload("*.h.1", what="parameters"))
    home = {p.name for p in plan.stage.parameters if p.on_host}
    request = Request(
        model="m",
        fingerprint="f",
        cluster=cluster,
        hints=(hint.microbatches(microbatches),),
        settled_plan=plan,
    )
    evaluation = analyse(capture_step(*BUILT, grad=False).graph)
    for step in (analysis, evaluation):
        found = make_plan(step, request)
        assert {p.name for p in found.stage.parameters if p.on_host} == home
        memory = found.prediction.memory
        assert memory.parameters_bytes == plan.prediction.memory.parameters_bytes
        assert {c.purpose for c in found.prediction.copies} >= {"parameters"}


def test_parameters_stay_where_all_fits_and_leave_by_and_by(
    captured: tuple[Analysis, Any],
) -> None:
    analysis, _ = captured
    cluster = hosted(1, 1e9)
    free = planned(analysis, cluster)
    assert not free.stage.copies
    plans = [
        planned(
            analysis, cluster, hint.memory_limit(int(part * free.prediction.memory.total_bytes))
        )
        for part in (0.4, 0.2)
    ]
    counts = [sum(p.on_host for p in plan.stage.parameters) for plan in plans]
    assert counts[0] < counts[1] < len(free.stage.parameters)
    times = [plan.prediction.step_s for plan in (free, *plans)]
    assert all(less <= more for less, more in pairwise(times))


def test_parameters_need_an_optimizer_that_takes_them_from_there(
    captured: tuple[Analysis, Any],
) -> None:
    analysis, _ = captured
    cluster = hosted(1, 1e9)
    limit = int(0.15 * planned(analysis, cluster).prediction.memory.total_bytes)
    with pytest.raises(InfeasibleError):
        planned(analysis, cluster, hint.memory_limit(limit), optimizer=ADAMW)


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_set_of_parameters_leaves(seed: int) -> None:
    """M6-10T: as few bytes as fit, as a knapsack over the layers says."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 60) * 1e6 for _ in range(11)]
    nodes = tuple(
        Choices(
            name=str(n),
            count=1,
            seconds=(0.0, size * 1e-9),
            resident_bytes=(size, 0.0),
            gradient_bytes=(0.0, 0.0),
            host_bytes=(0.0, size),
        )
        for n, size in enumerate(sizes)
    )
    link = Link(early=(), late=(), host_limit_bytes=1e12)
    limit = draw.uniform(0.3, 0.9) * sum(sizes)
    found = solve(Problem(nodes=nodes, values=(), memory_limit_bytes=limit, link=link), gap=0.0)
    away = sum(sizes[n] for n, choice in enumerate(found.choice) if choice)
    subsets = (s for k in range(12) for s in itertools.combinations(sizes, k))
    assert away == min(sum(s) for s in subsets if sum(sizes) - sum(s) <= limit)


@pytest.mark.parametrize(
    ("cluster", "pattern", "optimizer", "words"),
    [
        (Cluster.local(1), "*", IN_BUCKETS, "host memory is its own memory"),
        (hosted(1, 1e9, host_bytes=0), "*.mlp", IN_BUCKETS, "has no host memory"),
        (hosted(1, 1e9), "*.mpl", IN_BUCKETS, "did you mean"),
        (hosted(1, 1e9), "*.mlp", ADAMW, r"what='parameters'\): the optimizer keeps its state"),
        (hosted(1, 1e9, host_bytes=100_000), "*", IN_BUCKETS, r"each has 100 kB"),
    ],
)
def test_wrong_hints_are_refused(
    captured: tuple[Analysis, Any],
    cluster: Cluster,
    pattern: str,
    optimizer: OptimizerSpec,
    words: str,
) -> None:
    asked = hint.offload(pattern, what="parameters")
    with pytest.raises(AutoparError, match=words):
        planned(captured[0], cluster, asked, optimizer=optimizer)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_gradients_are_added_up_on_the_host_in_no_narrower_dtype_than_is_asked_for(
    reduce: str,
) -> None:
    precision = Precision(param="bf16", compute="fp32", reduce=reduce)
    analysis = analyse(capture_step(*mlp(), grad=True, precision=precision).graph)
    away = hint.offload("parameters")
    stage = planned(analysis, hosted(1, 1e9), away, microbatches=2).stage
    roots = {analysis.root(ref).root for ref in analysis.graph.gradients.values()}
    assert {analysis.graph.type_of(root).dtype for root in roots} == {"bfloat16"}
    on_host = {str(root) for root in roots} & stage.added_up.keys()
    assert len(on_host) == (len(roots) if reduce == "bf16" else 0)
