"""Programs that run forward nodes again in the backward equal one process."""

from __future__ import annotations

import random

import pytest

from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.ir.sharding import Mesh
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.oracles.models import DRAWING, MODELS, Built
from tests.oracles.pipeline import assert_exact, programs_of, variants_of
from tests.oracles.random_plans import forgetting, random_stage, recomputing

MESHES = {
    "one rank": Mesh(("a",), (1,)),
    "two": Mesh(("a",), (2,)),
    "free": Mesh(("a", "b"), (2, 2)),
    "microbatches": Mesh(("a",), (2,)).with_time(2),
}


def exact(built: Built, mesh: Mesh, seed: int, *, forgets: bool = False) -> int:
    """How many instructions run again."""
    model, batch, loss = built
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    collective_s = axis_seconds(Cluster.local(mesh.num_ranks), mesh)
    stage = random_stage(analysis, mesh, seed)
    draw = random.Random(seed)
    again = recomputing(analysis, stage, draw)
    if forgets:
        again = forgetting(analysis, again, draw)
    if mesh.time_axis is None:
        programs = programs_of(analysis, again, collective_s)
        plain = programs_of(analysis, stage, collective_s)[0]
        assert_exact(*built, analysis, programs, captured)
        return len(programs[0].instructions) - len(plain.instructions)
    variants = variants_of(analysis, again, collective_s)
    assert_exact(*built, analysis, variants, captured)
    return len(variants[0][0].instructions) - len(
        variants_of(analysis, stage, collective_s)[0][0].instructions
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_random_recompute_is_exact(name: str, mesh: str) -> None:
    added = exact(MODELS[name](), MESHES[mesh], seed=0)
    assert added > 0


def test_what_is_forgotten_and_made_once_more_is_exact() -> None:
    once, more = (exact(MODELS["gpt2"](), MESHES["one rank"], 0, forgets=f) for f in (False, True))
    assert more > once
    assert exact(MODELS["mlp"](), MESHES["microbatches"], 1, forgets=True) > 0


@pytest.mark.parametrize("mesh", ["free", "microbatches"])
def test_what_is_drawn_again_is_the_same(mesh: str) -> None:
    assert exact(DRAWING["drawing"](), MESHES[mesh], seed=0) > 0


@pytest.mark.large
@pytest.mark.parametrize("seed", range(1, 8))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS | DRAWING)
def test_more_random_recompute_is_exact(name: str, mesh: str, seed: int) -> None:
    exact((MODELS | DRAWING)[name](), MESHES[mesh], seed, forgets=seed % 2 == 0)
