"""Programs in mixed precision: in which dtype gradients travel, and what they come to."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import autopar
from autopar import hint
from autopar.capture import Captured, capture_step
from autopar.capture.precision import Precision, precision_of
from autopar.cost.node import axis_seconds
from autopar.hint import Hint
from autopar.ir.casts import gradient_values
from autopar.ir.graph import Ref
from autopar.ir.sharding import Mesh
from autopar.lower.program import ACCUMULATE, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Program
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.stages import Pipeline
from cost_models.cluster import Cluster
from tests.oracles.lockstep import join, run_lockstep
from tests.oracles.microbatches import run_microbatches, run_pipeline
from tests.oracles.mixed import by_hand
from tests.oracles.models import MODELS, Built
from tests.oracles.pipeline import lanes_of, values_of, variants_of
from tests.oracles.random_plans import random_stage

LAYOUTS: dict[str, tuple[int, tuple[Hint, ...]]] = {
    "dp2": (2, (hint.degrees(dp=2, tp=1),)),
    "zero3": (2, (hint.degrees(dp=2, tp=1, zero=3),)),
    "tp2": (2, (hint.degrees(dp=1, tp=2),)),
    "mb2": (1, (hint.microbatches(2),)),
    "dp2mb2": (2, (hint.degrees(dp=2, tp=1), hint.microbatches(2))),
    "dp2tp2": (4, (hint.degrees(dp=2, tp=2),)),
}
SUMS = (ALL_REDUCE, REDUCE_SCATTER, ACCUMULATE)


@functools.cache
def planned(
    name: str, layout: str, precision: Precision
) -> tuple[Built, Analysis, Captured, Plan, list[list[Program]]]:
    built = MODELS[name]()
    model, batch, loss = built
    captured = capture_step(model, batch, loss, grad=True, precision=precision)
    analysis = analyse(captured.graph)
    ranks, hints = LAYOUTS[layout]
    cluster = Cluster.local(ranks)
    plan = make_plan(analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=hints))
    variants = variants_of(analysis, plan.stage, axis_seconds(cluster, plan.mesh))
    return built, analysis, captured, plan, variants


def sums_of_gradients(analysis: Analysis, program: Program) -> list[str]:
    """Dtypes in which terms of gradients are summed."""
    made = {ref.node for ref in gradient_values(analysis.graph, analysis.aliases)}
    made |= {ref.node for ref in analysis.carried}
    own = {Ref(name, index) for name in made for index in range(3)}
    found, terms = [], set(own)
    for i in program.instructions:
        reads = set(i.operands) & terms
        if i.op in SUMS and (reads or i.purpose == "gradients"):
            found.append(i.outputs[0].dtype)
        if reads and i.view:
            terms.add(Ref(i.name))
    return found


BF16 = precision_of("bf16")
NARROW = Precision(param="fp32", compute="bf16", reduce="bf16")
STORED_NARROW = Precision(param="bf16", compute="bf16", reduce="fp32")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_gradients_are_summed_in_fp32(name: str, layout: str) -> None:
    for precision in (BF16, STORED_NARROW):
        _, analysis, _, _, variants = planned(name, layout, precision)
        found = sums_of_gradients(analysis, variants[0][0])
        assert set(found) == ({"float32"} if layout != "tp2" else set()), found


@pytest.mark.parametrize("layout", ["dp2", "zero3", "mb2"])
def test_gradients_may_be_summed_in_bf16(layout: str) -> None:
    _, analysis, _, _, variants = planned("mlp", layout, NARROW)
    assert not analysis.carried
    assert set(sums_of_gradients(analysis, variants[0][0])) == {"bfloat16"}


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_parameters_are_cast_before_they_are_gathered(name: str) -> None:
    _, _, _, _, variants = planned(name, "zero3", BF16)
    gathers = [i for i in variants[0][0].instructions if i.op == ALL_GATHER]
    assert gathers
    assert {(i.purpose, i.outputs[0].dtype) for i in gathers} == {("parameters", "bfloat16")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mlp", "gpt2", pytest.param("llama", marks=pytest.mark.large)])
def test_programs_equal_one_process(name: str, layout: str) -> None:
    (model, batch, loss), analysis, captured, _, variants = planned(name, layout, BF16)
    values = values_of(model, batch, analysis, captured)
    single = len(variants) == 1
    envs = run_lockstep(variants[0], values) if single else run_microbatches(variants, values)
    wanted_loss, wanted = by_hand(model, batch, loss)
    for program, env in zip(variants[0], envs, strict=True):
        assert program.loss is not None
        assert abs(float(env[program.loss]) - float(wanted_loss)) <= 2e-2
    for path, ref in analysis.graph.gradients.items():
        own = wanted[path]
        assert own is not None
        found = gradient(path, analysis, ref, variants[0], envs)
        assert found.dtype == torch.float64 and own.dtype == torch.float32
        error = float((found - own.double()).abs().max())
        assert error <= 5e-2 * max(float(own.abs().max()), 0.1), (path, error)


def gradient(
    path: str,
    analysis: Analysis,
    ref: Ref,
    programs: list[Program],
    envs: list[dict[Ref, torch.Tensor]],
) -> torch.Tensor:
    """The whole gradient, from the pieces of all ranks."""
    item = next(i for i in programs[0].inputs if i.kind == "parameter" and i.target == path)
    pieces = {p.coordinates: e[p.gradients[path]] for p, e in zip(programs, envs, strict=True)}
    assert {piece.dtype for piece in pieces.values()} == {torch.float32}
    return join(pieces, analysis.graph.type_of(ref).shape, item.sharding)


class Fused(nn.Module):
    """One stored weight read as three, joined in the backward before it is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.weight.unbind(0)
        h = x * q * self.scale + x * k + x * v
        return (h + 0.0 * h * h).sum()


@pytest.mark.parametrize("layout", ["dp2", "mb2"])
def test_small_terms_of_a_sum_are_not_lost(layout: str) -> None:
    """256 and 1 come to 257, which bf16 cannot hold: it would be 256."""
    ranks, hints = LAYOUTS[layout]
    cluster = Cluster.local(ranks)
    batch = torch.tensor([[256.0, 256.0], [1.0, 1.0]])
    model = Fused()
    for precision, expected in ((BF16, 257.0), (NARROW, 256.0)):
        captured = capture_step(
            model, batch, lambda m, x: m(x).float(), grad=True, precision=precision
        )
        analysis = analyse(captured.graph)
        request = Request(model="m", fingerprint="f", cluster=cluster, hints=hints)
        plan = make_plan(analysis, request)
        variants = variants_of(analysis, plan.stage, axis_seconds(cluster, plan.mesh))
        values = values_of(model, batch, analysis, captured)
        single = len(variants) == 1
        envs = run_lockstep(variants[0], values) if single else run_microbatches(variants, values)
        for path, ref in analysis.graph.gradients.items():
            found = gradient(path, analysis, ref, variants[0], envs)
            assert found.flatten().tolist() == [expected] * found.numel(), (path, precision)


def test_a_plan_says_where_terms_are_summed_early() -> None:
    model, batch, loss = MODELS["mlp"]()

    def penalized(model: nn.Module, batch: object) -> torch.Tensor:
        return loss(model, batch) + model.mid.weight.float().square().sum()

    captured = capture_step(model, batch, penalized, grad=True, precision=BF16)
    analysis = analyse(captured.graph)
    ranks, hints = LAYOUTS["dp2"]
    request = Request(model="m", fingerprint="f", cluster=Cluster.local(ranks), hints=hints)
    notes = [note for note in make_plan(analysis, request).notes if "summed" in note]
    assert notes and notes[0].startswith("gradients of 'mid' are summed in bfloat16")
    assert not any("summed" in note for note in planned("mlp", "dp2", BF16)[3].notes)


@pytest.mark.parametrize(("layout", "ranks"), [({}, 2), ({"dp": 2}, 4)])
def test_pipelines_equal_one_process(layout: dict[str, int], ranks: int) -> None:
    """The embedding is tied to the head: terms of its gradient cross the stages as they are."""
    model, batch, loss = MODELS["gpt2"]()
    captured = capture_step(model, batch, loss, grad=True, precision=BF16)
    analysis = analyse(captured.graph)
    hints = (hint.degrees(pp=2, tp=1, **{"dp": 1, **layout}), hint.microbatches(2))
    request = Request(model="m", fingerprint="f", cluster=Cluster.local(ranks), hints=hints)
    plan = make_plan(analysis, request)
    pipeline = Pipeline(plan.stages, plan.transfers)
    values = values_of(model, batch, analysis, captured)
    _, wanted = by_hand(model, batch, loss)
    for lane in run_pipeline(lanes_of(analysis, pipeline, plan.schedule), values):
        programs = lane.variants[0]
        assert set(sums_of_gradients(analysis, programs[0])) == {"float32"}
        for path in programs[0].gradients:
            ref, own = analysis.graph.gradients[path], wanted[path]
            assert own is not None
            found = gradient(path, analysis, ref, programs, lane.envs)
            error = float((found - own.double()).abs().max())
            assert error <= 5e-2 * max(float(own.abs().max()), 0.1), (path, error)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mesh", [Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2)).with_time(2)])
def test_no_plan_sums_in_bf16(mesh: Mesh, seed: int) -> None:
    model, batch, loss = MODELS["gpt2"]()
    captured = capture_step(model, batch, loss, grad=True, precision=BF16)
    analysis = analyse(captured.graph)
    stage = random_stage(analysis, mesh, seed)
    variants = variants_of(analysis, stage, lambda kind, size, axis: 1.0)
    assert set(sums_of_gradients(analysis, variants[0][0])) <= {"float32"}


def bytes_a_parameter(precision: Precision, state: float) -> tuple[int, int, int]:
    model, batch, loss = MODELS["mlp"]()
    analysis = analyse(capture_step(model, batch, loss, grad=True, precision=precision).graph)
    request = Request(model="m", fingerprint="f", cluster=Cluster.local(1))
    memory = make_plan(analysis, request).prediction.memory
    count = sum(p.numel() for p in model.parameters())
    assert memory.optimizer_bytes == state * count
    assert memory.parameters_bytes % count == 0
    return memory.parameters_bytes // count, memory.optimizer_bytes // count, count


def test_zero_paper_takes_sixteen_bytes_a_parameter() -> None:
    model, batch, loss = MODELS["mlp"]()
    memory = autopar.plan(
        model,
        Cluster.local(1),
        batch,
        loss=loss,
        precision="zero_paper",
        optimizer=autopar.OptimizerSpec(state_bytes=12),
    ).prediction.memory
    count = sum(p.numel() for p in model.parameters())
    assert (memory.parameters_bytes, memory.optimizer_bytes) == (2 * count, 12 * count)
    graph = capture_step(model, batch, loss, grad=True, precision=precision_of("zero_paper")).graph
    assert sum(graph.type_of(ref).num_bytes for ref in graph.gradients.values()) == 2 * count


def test_planned_bytes_follow_the_stored_dtype() -> None:
    assert bytes_a_parameter(precision_of(None), 8)[:2] == (4, 8)
    assert bytes_a_parameter(BF16, 8)[:2] == (4, 8)
    assert bytes_a_parameter(STORED_NARROW, 4)[:2] == (2, 4)
