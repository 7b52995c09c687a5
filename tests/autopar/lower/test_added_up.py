"""Terms of microbatches that are joined over ranks in the loop, where the plan says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.ir.sharding import WHOLE, Mesh
from autopar.lower.program import Program, Section
from autopar.plan.records import StagePlan
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS
from tests.oracles.pipeline import assert_exact, variants_of
from tests.oracles.random_plans import random_stage

MESH = Mesh(("a",), (2,)).with_time(2)


def in_the_loop(analysis: Analysis, stage: StagePlan) -> StagePlan:
    """The plan with every gradient added up as its parameter is stored."""
    stored = {p.name: p.stored for p in stage.parameters}
    added_up = {
        str(analysis.root(ref).root): (*stored[name][:-1], WHOLE)
        for name, ref in analysis.graph.gradients.items()
        if not analysis.root(ref).chain
    }
    return replace(stage, added_up=added_up)


def joined_behind(program: Program) -> int:
    """Collectives of gradients behind the loop."""
    return sum(
        i.purpose == "gradients" and i.section is Section.EPILOGUE for i in program.collectives
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_are_joined_in_every_microbatch(name: str) -> None:
    built = MODELS[name]()
    captured = capture_step(*built, grad=True)
    analysis = analyse(captured.graph)
    collective_s = axis_seconds(Cluster.local(2), MESH)
    counts = {}
    stage = replace(random_stage(analysis, MESH, seed=1), added_up={})
    for plan in (stage, in_the_loop(analysis, stage)):
        variants = variants_of(analysis, plan, collective_s)
        assert_exact(*built, analysis, variants, captured)
        counts[bool(plan.added_up)] = joined_behind(variants[0][0])
    assert counts[True] < counts[False]
