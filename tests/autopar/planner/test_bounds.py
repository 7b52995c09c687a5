"""No plan takes less than what is proven of its way, nor than what is proven of all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import AutoparError
from autopar.ir.sharding import Mesh
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.plan.text import proof_texts
from autopar.planner import driver
from autopar.planner.bounds import Bounds, _behind, _weights
from autopar.planner.driver import make_plan
from autopar.planner.evaluate import evaluate_stage
from autopar.planner.hints import settle
from autopar.planner.lanes import prepare
from autopar.planner.layout import Layout
from autopar.planner.request import Candidate, Request
from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import rows_of
from autopar.search import outer
from autopar.search.analysis import Analysis, analyse
from autopar.search.decode import decode
from autopar.search.intra import solve
from cost_models.cluster import Cluster, Device
from cost_models.records import Devices
from tests.oracles.hosts import hosted
from tests.oracles.models import bert, gpt2, llama, mlp, penalised, resnet, unet
from tests.oracles.random_plans import recomputing, streaming, with_random_prices

MODELS = {
    "mlp": mlp,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "penalised": penalised,
    "unet": unet,
    "resnet": resnet,
}
ALONE = Layout(schedule="1f1b", num_stages=1, num_chunks=1)


@cache
def analysed(name: str) -> Analysis:
    model, batch, loss = MODELS[name]()
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def request(cluster: Cluster, hints: Sequence[hint.Hint] = ()) -> Request:
    return Request(model="m", fingerprint="f", cluster=cluster, hints=tuple(hints))


def slower(device: Device, flops: float, memory: float) -> Device:
    peaks = {rate: peak / flops for rate, peak in device.peak_flops_per_s.items()}
    return replace(
        device,
        kind=f"{device.kind}-{flops}-{memory}",
        peak_flops_per_s=peaks,
        memory_bytes_per_s=device.memory_bytes_per_s / memory,
    )


def drawn_cluster(draw: random.Random) -> Cluster:
    """1 to 8 devices, alike or of two kinds, with fast or slow links."""
    cluster = Cluster.local(draw.choice((1, 2, 4, 8)))
    (run,) = cluster.devices
    device = replace(
        run.device,
        launch_s=draw.choice((0.0, 5e-6)),
        host_op_s=draw.choice((0.0, 4e-6, 1e-4)),
        memory_bytes_per_s=run.device.memory_bytes_per_s * draw.choice((0.01, 1, 100)),
    )
    level = replace(
        cluster.levels[0], bandwidth_bytes_per_s=draw.choice((1e7, 1e10, 1e12)), latency_s=1e-7
    )
    runs: tuple[Devices, ...] = (Devices(device=device, count=run.count),)
    if run.count > 1 and draw.random() < 0.5:
        other = slower(device, draw.choice((0.4, 3.0)), draw.choice((0.3, 1.0, 4.0)))
        first = draw.choice((1, run.count // 2))
        runs = (
            Devices(device=device, count=first),
            Devices(device=other, count=run.count - first),
        )
    return replace(cluster, devices=runs, levels=(level,))


def drawn_hints(draw: random.Random, ranks: int) -> tuple[hint.Hint, ...]:
    """What a user might force, or nothing."""
    found: list[hint.Hint] = []
    powers = [2**n for n in range(ranks.bit_length())]
    if draw.random() < 0.7:
        pp = draw.choice([n for n in powers if n <= 4])
        dp = draw.choice([n for n in powers if n * pp <= ranks])
        rest = ranks // (pp * dp)
        degrees = draw.choice(({"dp": dp, "tp": rest}, {"dp": dp}, {"tp": rest, "cp": dp}, {}))
        found.append(hint.degrees(pp=pp, **degrees))
        if pp > 1 and draw.random() < 0.7:
            found.append(hint.schedule(draw.choice(("1f1b", "gpipe", "zb-h1", "zb-v"))))
    if draw.random() < 0.4:
        found.append(hint.microbatches(draw.choice((1, 2, 4))))
    if draw.random() < 0.2:
        found.append(hint.recompute("*"))
    return tuple(found)


def looked_at(
    analysis: Analysis, asked: Request, monkeypatch: pytest.MonkeyPatch
) -> tuple[Plan, list[tuple[Candidate, float]]]:
    """The plan, and every candidate with what is proven of its way."""
    found: list[tuple[Candidate, float]] = []

    class Watched(list[Candidate]):
        def __init__(self, outer: driver._Outer) -> None:
            super().__init__()
            self.outer = outer

        def append(self, candidate: Candidate) -> None:
            super().append(candidate)
            found.append((candidate, of_candidate(self.outer.bounds, candidate)))

    made = driver._Outer.__init__

    def init(self: driver._Outer, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        self.found = Watched(self)

    monkeypatch.setattr(driver._Outer, "__init__", init)
    return make_plan(analysis, asked), found


def of_candidate(bounds: Bounds, candidate: Candidate) -> float:
    """What is proven of the way of a candidate."""
    meshes = {stage.first_rank: stage.mesh for stage in candidate.pipeline.stages}
    layout = Layout(
        schedule=candidate.schedule,
        num_stages=len(meshes),
        num_chunks=len(candidate.pipeline.stages) // len(meshes),
    )
    return bounds.way_s(tuple(meshes.values()), candidate.mesh.microbatches, layout)


def assert_bounded(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    cluster = drawn_cluster(draw)
    hints = drawn_hints(draw, cluster.num_devices)
    analysis = analysed(name)
    try:
        plan, found = looked_at(analysis, request(cluster, hints), monkeypatch)
    except AutoparError:
        return
    assert found
    for candidate, bound_s in found:
        assert 0 < bound_s <= candidate.step_s, (hints, candidate.schedule)
    every = plan.search.all_ways
    assert 0 < every.bound_s <= plan.prediction.step_s, hints
    assert every.bound_s <= min(bound_s for _, bound_s in found), hints
    assert every.tried > 0


@pytest.mark.parametrize("seed", [2, 3, 4, 5, 7, 8, 10, 11])
def test_no_candidate_is_faster_than_its_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_bounded(list(MODELS)[seed % 6], seed, monkeypatch)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(1_000, 1_200))
def test_no_candidate_of_any_model_is_faster_than_its_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bounded(list(MODELS)[seed % len(MODELS)], seed, monkeypatch)


MESHES = (
    Mesh(("a",), (2,)),
    Mesh(("a",), (3,)),
    Mesh(("a", "b"), (2, 2)),
    Mesh(("a",), (2,)).with_time(2),
    Mesh(("a", "b"), (2, 2)).with_time(4),
    Mesh(("dp",), (2,), roles=("dp",), shares=((3, 1),)),
)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name,
            mesh,
            id=f"{name} {at}",
            marks=[pytest.mark.large] * (at % 3 != place or at % 2 == 0),
        )
        for at, mesh in enumerate(MESHES)
        for place, name in enumerate(("mlp", "unet", "gpt2"))
    ],
)
def test_no_random_plan_is_faster_than_its_bound(name: str, mesh: Mesh) -> None:
    analysis, draw = analysed(name), random.Random(f"{name} {mesh}")
    cluster = Cluster.preset("h100") if draw.random() < 0.5 else Cluster.local(mesh.num_ranks)
    (run,) = cluster.devices
    runs: tuple[Devices, ...] = (replace(run, count=mesh.num_ranks),)
    if mesh.shares:
        runs = (
            Devices(device=run.device, count=1),
            Devices(device=slower(run.device, 3.0, 0.5), count=1),
        )
    level = replace(cluster.levels[0], size=mesh.num_ranks)
    cluster = replace(cluster, devices=runs, levels=(level,))
    asked = request(cluster, [hint.degrees(dp=2), hint.shares(3, 1)] if mesh.shares else [])
    settled = settle(analysis, cluster, asked.hints, None)
    (kind,) = prepare(analysis, asked, settled, (mesh,), ALONE).kinds
    bound_s = Bounds(analysis, asked, settled).way_s((mesh,), mesh.microbatches, ALONE)
    problem = with_random_prices(kind.plain.problem, draw)
    solution = solve(problem, gap=0.05)
    stage = decode(kind.plain, analysis, solution)
    for own in (stage, recomputing(analysis, stage, draw), streaming(analysis, stage, draw)):
        candidate = evaluate_stage(
            analysis, asked, kind.cost, kind.plain, solution, own, settled.usable_bytes
        )
        assert 0 < bound_s <= candidate.step_s


@given(
    times=st.lists(st.tuples(*[st.floats(0.01, 1.0)] * 3), min_size=1, max_size=5),
    count=st.integers(1, 8),
    name=st.sampled_from(("1f1b", "gpipe", "early-backward-2", "zb-h1")),
    send_s=st.sampled_from((0.0, 0.3)),
)
def test_no_schedule_is_faster_than_its_inequalities(
    times: list[tuple[float, float, float]], count: int, name: str, send_s: float
) -> None:
    """Whatever the stages take, also unlike each other, and whatever speeds were thought of."""
    layout = Layout(schedule=name, num_stages=len(times), num_chunks=1)
    if not layout.fits(count):
        return
    step_s = simulate(
        rows_of(name, len(times), 1, count),
        [ChunkTime(f, b + w, w) for f, b, w in times],
        send_s,
    ).makespan_s
    each_s = [sum(own) for own in times]
    weights = _weights([1.0] * len(times), count)
    heights = [count * w + b for w, b in zip(weights, _behind(weights), strict=True)]
    if name == "zb-h1":
        heights = [count * w for w in weights]
    bound_s = sum(h * s for h, s in zip(heights, each_s, strict=True)) / sum(weights)
    assert bound_s <= (1 + 1e-9) * step_s


@given(stages=st.integers(1, 16), count=st.integers(1, 64))
def test_weights_are_those_of_the_best_cut(stages: int, count: int) -> None:
    """That every stage fills the step is possible, so the program has no better weights."""
    weights = _weights([1.0] * stages, count)
    behind = _behind(weights)
    assert [count * w + b for w, b in zip(weights, behind, strict=True)] == pytest.approx(
        [1.0] * stages
    )
    least_s = 1 / sum(weights)
    cut = [least_s / count * (1 - 1 / count) ** stage for stage in range(stages)]
    assert sum(cut) == pytest.approx(1.0)
    for stage in range(stages):
        assert count * cut[stage] + sum(cut[:stage]) == pytest.approx(least_s)


@pytest.mark.parametrize("name", ["mlp", "bert", "unet", "penalised", "resnet"])
def test_one_device_takes_its_bound(name: str) -> None:
    """There is one way, and all of its work is counted."""
    plan = make_plan(analysed(name), request(Cluster.local(1)))
    every = plan.search.all_ways
    assert every.bound_s == pytest.approx(plan.prediction.step_s, rel=1e-6)
    assert every.estimated == 0
    assert any("optimal over all ways" in text for text in proof_texts(plan))


def forced(ranks: int) -> Iterator[tuple[hint.Hint, ...]]:
    powers = [2**n for n in range(ranks.bit_length())]
    for dp, pp in ((dp, pp) for dp in powers for pp in powers if dp * pp <= ranks):
        for count in (1, 2, 4, 8):
            names = ("1f1b", "zb-h1", "zb-v") if pp > 1 else ("1f1b",)
            for name in names:
                yield (
                    hint.degrees(dp=dp, pp=pp, tp=ranks // (dp * pp)),
                    hint.microbatches(count),
                    *((hint.schedule(name),) if pp > 1 else ()),
                )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.large)])
def test_no_forced_plan_is_faster_than_the_bound_of_all(ranks: int) -> None:
    cluster = Cluster.local(ranks)
    level = replace(cluster.levels[0], bandwidth_bytes_per_s=1e13, latency_s=0.0, setup_s=0.0)
    cluster = replace(cluster, levels=(level,))
    analysis = analysed("mlp")
    plan = make_plan(analysis, request(cluster))
    steps_s = []
    for hints in forced(ranks):
        try:
            other = make_plan(analysis, request(cluster, hints))
        except AutoparError:
            continue
        own = other.search.all_ways
        assert own.bound_s <= other.prediction.step_s
        steps_s.append(other.prediction.step_s)
    assert len(steps_s) > 5
    assert plan.search.all_ways.bound_s <= min(steps_s)


class Wide(nn.Module):
    """Products that take much longer than what is launched, read or sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@cache
def wide() -> Analysis:
    with torch.device("meta"):
        model, batch = Wide(), torch.empty(65536, 1024)
    return analyse(capture_step(model, batch, lambda m, x: m(x).sum(), grad=True).graph)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_step_that_computes_is_near_its_bound(ranks: int) -> None:
    cluster = Cluster.local(ranks)
    level = replace(cluster.levels[0], bandwidth_bytes_per_s=1e12, latency_s=1e-6, setup_s=0.0)
    (run,) = cluster.devices
    roomy = replace(run, device=replace(run.device, memory_bytes=1 << 40))
    cluster = replace(cluster, devices=(roomy,), levels=(level,))
    hinted = make_plan(wide(), request(cluster, [hint.degrees(dp=ranks, pp=1)]))
    free = make_plan(wide(), request(cluster))
    assert 0 < hinted.search.all_ways.gap < 0.05
    assert 0 < free.search.all_ways.gap < 0.05
    assert free.search.all_ways.bound_s <= hinted.prediction.step_s
    assert free.search.all_ways.excluded > 0


def test_state_that_no_device_holds_crosses_the_host_link() -> None:
    analysis = analysed("gpt2")
    cluster = hosted(1, 1e3)
    asked = replace(request(cluster), optimizer=OptimizerSpec(moments=2, host_bucket_elements=512))
    free = Bounds(analysis, asked, settle(analysis, cluster, (), None))
    limit = int(0.3 * free.work.resident_bytes)
    tight = replace(asked, hints=(hint.memory_limit(limit),))
    bounds = Bounds(analysis, tight, settle(analysis, cluster, tight.hints, None))
    assert free.away_bytes == 0
    assert bounds.away_bytes == free.work.resident_bytes - limit
    (mesh,) = outer.meshes(cluster, None)[:1]
    free_s, bound_s = (own.way_s((mesh,), 1, ALONE) for own in (free, bounds))
    assert bound_s > free_s + 0.9 * bounds.away_bytes / 1e3
    plan = make_plan(analysis, replace(tight, hints=(hint.memory_limit(4 * limit),)))
    assert plan.search.all_ways.bound_s <= plan.prediction.step_s
