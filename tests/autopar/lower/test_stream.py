"""Programs whose parameters are at home in host memory: the same to the bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from autopar.capture import capture_step
from autopar.capture.precision import precision_of
from autopar.ir.casts import CAST
from autopar.ir.sharding import Mesh
from autopar.lower.program import TO_DEVICE, TO_HOST, Section
from autopar.lower.spmd import lower
from autopar.search.analysis import analyse
from tests.autopar.lower.test_offload import MESHES, results
from tests.oracles.models import DRAWING, MODELS
from tests.oracles.pipeline import two_stages
from tests.oracles.random_plans import offloading, random_stage, recomputing, streaming


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", "free"), ("gpt2", "one rank"), ("gpt2", "microbatches"), ("drawing", "free")],
)
def test_parameters_at_home_on_the_host_change_nothing_to_the_bit(name: str, mesh: str) -> None:
    assert_same_bits(name, mesh, seeds=1)


@pytest.mark.parametrize("mesh", ["one rank", "microbatches"])
def test_casts_of_parameters_at_home_on_the_host_change_nothing_to_the_bit(mesh: str) -> None:
    assert_same_bits("mlp", mesh, seeds=2, precision="bf16")


def test_a_cast_waits_on_the_host_or_is_made_in_every_phase() -> None:
    built = MODELS["mlp"]()
    graph = capture_step(*built, grad=True, precision=precision_of("bf16")).graph
    analysis = analyse(graph)
    stage = random_stage(analysis, Mesh(("a",), (1,)).with_time(2), seed=0)
    parameters = tuple(replace(p, on_host=True, state_on_host=True) for p in stage.parameters)
    casts = [cast for cast in analysis.casts if cast in stage.kept]
    away = dict.fromkeys((*casts, *analysis.casts.values()), ())
    streamed = replace(stage, parameters=parameters, kept=stage.kept | away)
    for offloaded in ((), tuple(casts)):
        plan = replace(streamed, offloaded=offloaded)
        program = lower(graph, analysis.rules, plan, (0, 0), lambda *_: 0.0)
        made: dict[str, set[Section]] = {cast: set() for cast in casts}
        for i in program.instructions:
            if i.origin in made and i.op == CAST:
                made[i.origin].add(i.section)
        gone = {i.origin for i in program.instructions if i.op == TO_HOST and i.origin in casts}
        assert gone == set(offloaded)
        both = {Section.FORWARD, Section.BACKWARD}
        assert all(own == ({Section.PROLOGUE} if offloaded else both) for own in made.values())


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS | DRAWING)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_more_parameters_at_home_on_the_host(name: str, mesh: str, precision: str | None) -> None:
    assert_same_bits(name, mesh, seeds=3, precision=precision)


def assert_same_bits(name: str, mesh: str, seeds: int, precision: str | None = None) -> None:
    built = (MODELS | DRAWING)[name]()
    captured = capture_step(*built, grad=True, precision=precision_of(precision))
    analysis = analyse(captured.graph)
    for seed in range(seeds):
        draw = random.Random(len(name) + seed)
        stage = random_stage(analysis, MESHES[mesh], seed=seed)
        again = offloading(analysis, recomputing(analysis, stage, draw), draw)
        for plain in (stage, again):
            away = streaming(analysis, plain, draw)
            wanted, _ = results(analysis, built, captured, plain)
            found, program = results(analysis, built, captured, away)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
            home = {item.name for item in program.inputs if item.on_host}
            brought = {i.operands[0].node for i in program.instructions if i.op == TO_DEVICE}
            assert home and {i.name for i in program.inputs} & brought <= home
            gone = [i for i in program.instructions if i.op == TO_HOST and i.purpose == "gradients"]
            assert len(gone) == sum(
                item.on_host and item.target in program.gradients for item in program.inputs
            )
            read = {r.node for i in program.instructions if i.op != TO_DEVICE for r in i.operands}
            assert not home & read


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_parameters_at_home_on_the_host_of_a_pipeline(schedule: str) -> None:
    built = MODELS["gpt2"]()
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    stage = random_stage(analysis, Mesh(("a",), (1,)).with_time(4), seed=1)
    found = []
    for whole in (stage, streaming(analysis, stage, random.Random(2))):
        programs, made = two_stages(built, analysis, captured, whole, schedule)
        found.append([value for own in made for value in own])
        for program in programs:
            assert bool(program.copies) == whole.copies
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
