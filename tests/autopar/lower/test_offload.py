"""Programs that keep values in host memory equal one process, to the bit where they should."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.ir.graph import Ref
from autopar.ir.sharding import Mesh
from autopar.lower.program import COPIES, TO_DEVICE, TO_HOST, WAIT, Program
from autopar.plan.records import StagePlan
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.lockstep import run_lockstep
from tests.oracles.microbatches import run_microbatches
from tests.oracles.models import DRAWING, MODELS, Built
from tests.oracles.pipeline import programs_of, two_stages, values_of, variants_of
from tests.oracles.random_plans import offloading, random_stage, recomputing

MESHES = {
    "one rank": Mesh(("a",), (1,)),
    "free": Mesh(("a", "b"), (2, 2)),
    "microbatches": Mesh(("a",), (2,)).with_time(2),
}


def results(
    analysis: Analysis, built: Built, captured: object, stage: StagePlan
) -> tuple[list[torch.Tensor], Program]:
    """What all ranks return, and the first program."""
    mesh = stage.mesh
    seconds = axis_seconds(Cluster.local(mesh.num_ranks), mesh)
    values = values_of(built[0], built[1], analysis, captured)
    if mesh.time_axis is None:
        programs = programs_of(analysis, stage, seconds)
        envs = run_lockstep(programs, values)
    else:
        variants = variants_of(analysis, stage, seconds)
        envs = run_microbatches(variants, values)
        programs = variants[0]
    found = [
        env[ref] for program, env in zip(programs, envs, strict=True) for ref in program.results
    ]
    return found, programs[0]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", "free"), ("gpt2", "one rank"), ("gpt2", "microbatches"), ("drawing", "free")],
)
def test_offload_changes_nothing_to_the_bit(name: str, mesh: str) -> None:
    assert_same_bits(name, mesh)


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS | DRAWING)
def test_more_offload_changes_nothing_to_the_bit(name: str, mesh: str) -> None:
    assert_same_bits(name, mesh)


def assert_same_bits(name: str, mesh: str) -> None:
    built = (MODELS | DRAWING)[name]()
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    stage = random_stage(analysis, MESHES[mesh], seed=0)
    draw = random.Random(len(name))
    for plain in (stage, recomputing(analysis, stage, draw)):
        away = offloading(analysis, plain, draw)
        wanted, _ = results(analysis, built, captured, plain)
        found, program = results(analysis, built, captured, away)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        check_copies(program)
        if plain is stage:
            assert program.copies


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_offload_in_a_pipeline_changes_nothing_to_the_bit(schedule: str) -> None:
    built = MODELS["gpt2"]()
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    stage = random_stage(analysis, Mesh(("a",), (1,)).with_time(4), seed=1)
    found = []
    for whole in (stage, offloading(analysis, stage, random.Random(2))):
        programs, made = two_stages(built, analysis, captured, whole, schedule)
        found.append([value for own in made for value in own])
        for program in programs:
            assert bool(program.copies) == bool(whole.offloaded)
            check_copies(program)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def check_copies(program: Program) -> None:
    """Every copy is awaited in its section; what is on the host is read by copies back alone."""
    waits = {i.operands[0]: i for i in program.instructions if i.op == WAIT}
    away: set[Ref] = set()
    for instruction in program.instructions:
        if instruction.op in COPIES:
            wait = waits[Ref(instruction.name)]
            assert wait.section is instruction.section
            if instruction.op == TO_HOST:
                away |= {Ref(instruction.name), Ref(wait.name)}
    for instruction in program.instructions:
        if instruction.op not in (TO_DEVICE, WAIT):
            assert not away & set(instruction.operands)
