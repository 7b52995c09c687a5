"""Pipelines that the search chooses by itself."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import AutoparError
from autopar.plan.records import Plan
from autopar.planner.batches import stage_counts
from autopar.planner.driver import make_plan
from autopar.planner.pipelines import GAIN
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.outer import run_meshes
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import gpt2


def analysed() -> Analysis:
    model, batch, loss = gpt2(layers=8, batch=16)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def request(cluster: Cluster, *hints: hint.Hint) -> Request:
    return Request(model="m", fingerprint="f", cluster=cluster, hints=hints)


def test_stages_are_whole_nodes_or_parts_of_nodes_and_no_more_than_blocks() -> None:
    analysis = analysed()
    assert stage_counts(analysis, Cluster.local(8)) == (2, 4, 8)
    assert stage_counts(analysis, Cluster.local(6)) == (2, 3, 6)
    assert stage_counts(analysis, Cluster.preset("h100", nodes=4)) == (2, 4, 8)
    assert stage_counts(analysis, Cluster.preset("h100", nodes=64)) == (2, 4, 8)
    assert stage_counts(analysis, Cluster.preset("h100", nodes=3)) == (3, 6)


def test_a_pipeline_is_taken_only_where_it_is_predicted_faster() -> None:
    analysis, cluster = analysed(), Cluster.preset("h100", nodes=2)
    chosen = make_plan(analysis, request(cluster))
    alone = make_plan(analysis, request(cluster, hint.degrees(pp=1)))
    assert len(alone.stages) == 1
    assert chosen.prediction.step_s <= alone.prediction.step_s
    if len(chosen.stages) > 1:
        assert chosen.prediction.step_s < alone.prediction.step_s


def test_a_schedule_that_no_pipeline_runs_is_said_to_have_no_effect() -> None:
    asked = hint.schedule("gpipe")
    plan = make_plan(analysed(), request(Cluster.preset("h100", nodes=1), asked))
    assert len(plan.stages) == 1
    (note,) = [note for note in plan.notes if "has no effect" in note]
    assert str(asked) in note and "hint.degrees(pp=...)" in note
    piped = make_plan(
        analysed(), request(Cluster.preset("h100", nodes=2), asked, hint.degrees(pp=2))
    )
    assert piped.schedule == "gpipe"
    assert not [note for note in piped.notes if "has no effect" in note]


class Block(nn.Module):
    """Two products, with a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@functools.cache
def wide() -> Analysis:
    """A model of many parameters and few activations."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with torch.device("meta"):
        model, batch = nn.Sequential(*(Block() for _ in range(8))), torch.zeros(64, 512)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def apart() -> Cluster:
    """Four nodes of one core, on a slow network."""
    alike = Cluster.local(4)
    slow = replace(alike.levels[0], name="wan", bandwidth_bytes_per_s=2e7)
    return replace(alike, levels=(replace(alike.levels[0], size=1), slow))


def test_a_pipeline_has_the_schedule_that_is_simulated_fastest() -> None:
    chosen = make_plan(wide(), request(apart()))
    assert chosen.num_stages > 1
    asked = [hint.degrees(pp=chosen.num_stages), hint.microbatches(chosen.microbatches)]
    for schedule in ("1f1b", "zb-h1"):
        other = make_plan(wide(), request(apart(), *asked, hint.schedule(schedule)))
        assert chosen.prediction.step_s <= 1.001 * other.prediction.step_s, schedule
    tried = [name for name, _ in chosen.search.meshes]
    assert any(f", {chosen.schedule}" in name for name in tried)


def test_a_hinted_schedule_is_the_only_one_tried() -> None:
    chosen = make_plan(wide(), request(apart(), hint.schedule("gpipe")))
    assert chosen.num_stages > 1 and chosen.schedule == "gpipe"
    pipelines = [name for name, _ in chosen.search.meshes if "stages of" in name]
    assert pipelines and all(name.endswith(", gpipe") for name in pipelines)


def test_stages_of_one_node_are_taken_where_its_network_is_slow() -> None:
    alike = Cluster.local(4)
    slow = replace(alike, levels=(replace(alike.levels[0], bandwidth_bytes_per_s=2e7),))
    chosen = make_plan(wide(), request(slow))
    assert chosen.num_stages > 1
    for degrees in (hint.degrees(pp=1), hint.degrees(pp=2, dp=2), hint.degrees(pp=4)):
        other = make_plan(wide(), request(slow, degrees, hint.microbatches(8)))
        assert chosen.prediction.step_s <= other.prediction.step_s
        assert other.num_stages > 1 or chosen.prediction.step_s < other.prediction.step_s


def of_two_kinds(fast: int, slow: int, times: float, bytes_per_s: float) -> Cluster:
    """Nodes of one core, the last ones so many times slower."""
    alike = Cluster.local(fast + slow)
    core = replace(alike.device(0), host_op_s=0.0)
    slower = replace(
        core,
        kind="slow core",
        peak_flops_per_s={kind: rate / times for kind, rate in core.peak_flops_per_s.items()},
        memory_bytes_per_s=core.memory_bytes_per_s / times,
    )
    runs = (Devices(device=core, count=fast), Devices(device=slower, count=slow))
    level = replace(alike.levels[0], bandwidth_bytes_per_s=bytes_per_s)
    return replace(alike, devices=runs, levels=(level,))


def test_stages_of_unlike_devices_share_the_work_as_they_are_fast() -> None:
    chosen = make_plan(wide(), request(of_two_kinds(2, 2, 2, 2e7)))
    assert chosen.num_stages == 4
    held = [sum(len(c.nodes) for c in chosen.chunks_of(stage).values()) for stage in range(4)]
    assert min(held[:2]) > max(held[2:])


def test_stages_of_unlike_meshes_are_found_where_devices_are_unlike() -> None:
    cluster = of_two_kinds(1, 3, 4, 2e9)
    assert [m.sizes for m in run_meshes(cluster)[0]] == [(1,), (3,)]
    assert run_meshes(Cluster.local(4)) == run_meshes(of_two_kinds(2, 2, 4, 2e9)) == ()
    chosen = make_plan(wide(), request(cluster))
    assert [mesh.space.sizes for mesh in chosen.meshes] == [(1,), (3,)]
    for hints in ((hint.degrees(tp=(1, 3)), hint.microbatches(2)), (hint.degrees(pp=4),)):
        other = make_plan(wide(), request(cluster, *hints))
        assert chosen.prediction.step_s <= 1.001 * other.prediction.step_s


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((hint.degrees(pp=2), hint.microbatches(8)), id="stages and microbatches"),
        pytest.param((hint.degrees(pp=4),), id="stages", marks=pytest.mark.large),
        pytest.param((hint.schedule("zb-h1"),), id="schedule"),
        pytest.param((hint.schedule("interleaved"), hint.degrees(pp=2)), id="chunks left out"),
        pytest.param((hint.cut_before("3"),), id="a cut", marks=pytest.mark.large),
    ],
)
def test_what_hints_leave_out_of_a_pipeline_is_chosen(asked: tuple[hint.Hint, ...]) -> None:
    chosen = make_plan(wide(), request(apart(), *asked))
    assert chosen.num_stages > 1
    for given in asked:
        if isinstance(given, hint.Degrees):
            assert chosen.num_stages == given.pp
        if isinstance(given, hint.Microbatches):
            assert chosen.microbatches == given.count
        if isinstance(given, hint.Schedule):
            assert chosen.schedule == given.name
        if isinstance(given, hint.CutBefore):
            assert given.pattern in first_modules(chosen)
    stages = [] if any(isinstance(h, hint.Degrees) for h in asked) else [hint.degrees(pp=4)]
    names = [h.name for h in asked if isinstance(h, hint.Schedule)] or ["1f1b", "zb-v"]
    for name in names:
        rest = [h for h in asked if not isinstance(h, hint.Schedule)]
        other = make_plan(wide(), request(apart(), *rest, *stages, hint.schedule(name)))
        assert chosen.prediction.step_s <= 1.001 * other.prediction.step_s, name


def first_modules(plan: Plan) -> set[str]:
    """Outermost module that every chunk's forward begins in."""
    by_name = wide().graph.by_name
    looped = [
        [n.name for n in chunk.nodes if n.name in wide().looped and by_name[n.name].source.module]
        for chunk in plan.stages
    ]
    return {by_name[names[0]].source.module.split(".")[0] for names in looped}


def test_more_cuts_than_stages_of_one_chunk_ask_for_several() -> None:
    cuts = [hint.cut_before(str(n)) for n in (2, 4, 6)]
    plan = make_plan(wide(), request(Cluster.local(2), *cuts))
    assert plan.num_stages == 2 and len(plan.stages) >= 4


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ([hint.cut_before("3"), hint.degrees(pp=1)], "there is one stage"),
        ([hint.stage("3", 4)], "use 0 to 3"),
        ([hint.stage("7", 0), hint.schedule("gpipe"), hint.stage("0", 1)], "ask"),
        ([hint.schedule("interleaved"), hint.degrees(pp=2), hint.microbatches(3)], "multiple"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(hints: list[hint.Hint], said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        make_plan(wide(), request(apart(), *hints))


@pytest.mark.parametrize("bytes_per_s", [2e7, 2e9])
def test_no_number_of_stages_that_is_hinted_is_faster(bytes_per_s: float) -> None:
    """Two nodes of two cores, on networks from where messages are costly to where they are not."""
    inner = Cluster.local(4).levels[0]
    outer = replace(inner, name="wan", size=2, bandwidth_bytes_per_s=bytes_per_s)
    cluster = replace(Cluster.local(4), levels=(replace(inner, size=2), outer))
    free = make_plan(wide(), request(cluster))
    for hints in ([hint.degrees(pp=2)], [hint.degrees(pp=4)]):
        other = make_plan(wide(), request(cluster, *hints))
        assert free.prediction.step_s <= (1 + GAIN) * other.prediction.step_s
