"""Programs of several microbatches equal one process, with parallel ranks inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.errors import UnsupportedError
from autopar.ir.sharding import Mesh
from autopar.lower.program import ACCUMULATE, MICROBATCH, Section
from autopar.options import OptimizerSpec
from autopar.search.analysis import analyse
from autopar.search.build import Built as BuiltProblem
from autopar.search.build import build_problem
from autopar.search.decode import decode
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS, Built, mlp, t5
from tests.oracles.pipeline import assert_exact, variants_of
from tests.oracles.random_plans import random_stage
from tests.oracles.slow import slow_core

MESHES = {
    "one rank": Mesh(("a",), (1,)),
    "dp": Mesh(("dp",), (2,), roles=("dp",)),
    "tp": Mesh(("tp",), (2,), roles=("tp",)),
    "free": Mesh(("a", "b"), (2, 2)),
}


def exact(built: Built, mesh: Mesh) -> BuiltProblem:
    model, batch, loss = built
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    cluster = Cluster.local(mesh.num_ranks)
    cost = NodeCost(slow_core(), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    problem = build_problem(analysis, mesh, cost, updates, Restrictions())
    stage = decode(problem, analysis, solve(problem.problem))
    variants = variants_of(analysis, stage, cost.collective_s)
    for instruction in variants[0][0].instructions:
        if instruction.op == ACCUMULATE:
            assert instruction.section is Section.EPILOGUE
        if instruction.op == MICROBATCH:
            assert instruction.section in (Section.FORWARD, Section.BACKWARD)
    assert_exact(*built, analysis, variants, captured)
    return problem


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_two_microbatches_are_exact(name: str, mesh: str) -> None:
    exact(MODELS[name](), MESHES[mesh].with_time(2))


@pytest.mark.parametrize("mesh", ["one rank", "dp"])
def test_as_many_samples_as_positions_are_cut_all_the_same(mesh: str) -> None:
    """The zeros that labels are shifted into and those of the positions are one node."""
    exact(t5(batch=6), MESHES[mesh].with_time(3))


class Scaled(nn.Module):
    """What is made of the batch alone is read in the loop and, for the gradient, behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.double() * self.scale).sum()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_gradient_made_of_the_batch_alone_is_exact(mesh: str) -> None:
    built = Scaled(), torch.randn(8, 3), lambda model, x: model(x)
    exact(built, MESHES[mesh].with_time(2))


@pytest.mark.parametrize("seed", range(4))
def test_sections_read_only_what_ran_before_them(seed: int) -> None:
    """Under random prices a parameter is gathered by steps in some sections and kept in others."""
    model, batch, loss = MODELS["mlp"]()
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    mesh = Mesh(("a", "b"), (2, 2)).with_time(2)
    stage = random_stage(analysis, mesh, seed)
    seconds = axis_seconds(Cluster.local(4), mesh)
    variants = variants_of(analysis, stage, seconds)
    order = {section: place for place, section in enumerate(Section)}
    section_of = {i.name: i.section for i in variants[0][0].instructions}
    for instruction in variants[0][0].instructions:
        for ref in instruction.operands:
            made = section_of.get(ref.node, Section.PROLOGUE)
            assert order[made] <= order[instruction.section]
    assert_exact(model, batch, loss, analysis, variants, captured)


@pytest.mark.parametrize(("batch_size", "microbatches"), [(8, 4), (7, 2), (7, 3), (5, 3), (3, 3)])
def test_uneven_microbatches_are_exact(batch_size: int, microbatches: int) -> None:
    exact(mlp(batch_size), MESHES["one rank"].with_time(microbatches))


def test_a_step_that_needs_the_whole_batch_is_refused_by_name() -> None:
    import torch

    model, batch, _ = mlp()

    def contrastive(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.nn.functional.normalize(model(batch["x"]), dim=-1)
        return torch.nn.functional.cross_entropy(out @ out.T, torch.arange(8))

    with pytest.raises(UnsupportedError, match="needs the whole batch"):
        exact((model, batch, contrastive), MESHES["one rank"].with_time(2))
