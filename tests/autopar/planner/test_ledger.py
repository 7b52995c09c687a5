"""A ledger says what lowered programs hold and take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.graph import Ref
from autopar.ir.sharding import Mesh, Sharding
from autopar.lower.program import Section
from autopar.lower.rows import turns_of
from autopar.lower.simulate import simulate
from autopar.lower.unroll import Turn
from autopar.plan.records import StagePlan
from autopar.planner.layout import Layout
from autopar.planner.ledger import Ledger, Lowered
from autopar.planner.pipeline import Kind, Lane
from autopar.planner.staged import lower_pipeline
from autopar.search.analysis import Analysis, analyse
from autopar.search.recompute import recompute_of
from autopar.search.stages import balanced_cuts, forward_order, split_stages
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS
from tests.oracles.random_plans import forgetting, random_stage, recomputing
from tests.oracles.recomputes import OneRank

ONCE = (Turn(Section.FORWARD, 0, 0), Turn(Section.BACKWARD, 0, 0))

May = Callable[[str], bool]
"""Whether a node may run again."""


def only(stage: StagePlan, may: May) -> StagePlan:
    """The stage without what a plan would not run again, or drop."""
    forgotten = {
        reader: own
        for reader, names in stage.forgotten.items()
        if (own := tuple(name for name in names if may(name)))
    }
    again = tuple(name for name in stage.recomputed if may(name))
    return replace(stage, recomputed=again, forgotten=forgotten)


def as_made(stages: list[StagePlan], may: May) -> dict[Ref, tuple[Sharding, ...]]:
    """What may run again, kept as it is made."""
    return {
        Ref(plan.name, index): (sharding,)
        for stage in stages
        for plan in stage.nodes
        if may(plan.name)
        for index, sharding in enumerate(plan.outputs)
    }


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_any_choice_holds_and_takes_what_its_program_does(name: str) -> None:
    """From the simulation of one choice, whatever others make again, and how often."""
    analysis = analyse(capture_step(*MODELS[name](), grad=True).graph)
    rank = OneRank(analysis, Cluster.local(1))
    may = recompute_of(analysis, in_loop=False, allowed=True).runs_again
    draw = random.Random(0)
    stages = [recomputing(analysis, rank.plain, draw) for _ in range(6)]
    stages += [forgetting(analysis, stage, draw) for stage in stages]
    stages = [only(stage, may) for stage in stages]
    first = simulate(rank.program(stages[0]), rank.prices)
    lowered = Lowered(chunks={0: stages[0]}, row=ONCE, profile=first.profile)
    ledger = Ledger(analysis, lowered, rank.free.costs[0], as_made([rank.plain], may))
    for stage in stages:
        held, cost = ledger.held(ledger.choice({0: stage})), rank.cost(stage)
        assert held.peak_bytes == cost.peak_bytes
        # Reshapes that copy take time too.
        assert held.seconds == pytest.approx(cost.seconds, rel=0.2)
        plain = tuple(ledger.plain(*own) for own in enumerate(ledger.choice({0: stage})))
        assert ledger.held(plain).peak_bytes == held.peak_bytes
        assert ledger.held(plain).seconds == pytest.approx(held.seconds)


class Pipe:
    """A step on stages of one rank each, cut into equally many ops."""

    def __init__(self, analysis: Analysis, layout: Layout, microbatches: int) -> None:
        self.analysis = analysis
        self.layout = layout
        self.cluster = Cluster.local(layout.num_stages)
        self.whole = random_stage(analysis, Mesh(("a",), (1,)).with_time(microbatches), 0)
        self.may = recompute_of(analysis, in_loop=True, allowed=True).runs_again
        mesh = self.whole.mesh
        self.cost = NodeCost(self.cluster.device(0), mesh, axis_seconds(self.cluster, mesh))
        self.rows = turns_of(layout.schedule, layout.num_stages, layout.num_chunks, microbatches)

    def lowered(self, whole: StagePlan) -> list[tuple[Lowered, int]]:
        """Every stage of a plan of the whole step, and its bytes."""
        layout = self.layout
        cuts = balanced_cuts([1.0] * len(forward_order(self.analysis)), len(layout.lanes))
        pipeline = split_stages(self.analysis, only(whole, self.may), cuts, layout.lanes)
        lanes = [Lane(Kind(whole, self.cost), stage) for stage in range(layout.num_stages)]
        found = lower_pipeline(self.analysis, lanes, pipeline, layout, self.cluster)
        profiles, stages = found.profiles(pipeline, layout), found.under(layout).stages
        return [
            (
                Lowered(
                    chunks={
                        chunk: pipeline.stages[chunk]
                        for chunk, own in enumerate(layout.lanes)
                        if own == lane
                    },
                    row=row,
                    profile=profile,
                    transfers=pipeline.transfers,
                ),
                stage.peak.peak_bytes,
            )
            for lane, (row, profile, stage) in enumerate(
                zip(self.rows, profiles, stages, strict=True)
            )
        ]

    def ledger(self, lowered: Lowered) -> Ledger:
        kept = as_made([*lowered.chunks.values()], self.may)
        return Ledger(self.analysis, lowered, self.cost, kept)


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "chunks", "microbatches"),
    [
        ("mlp", "1f1b", 2, 1, 4),
        ("mlp", "gpipe", 3, 1, 4),
        ("mlp", "interleaved", 2, 2, 4),
        ("mlp", "zb-h1", 2, 1, 4),
        ("gpt2", "1f1b", 4, 1, 4),
        ("gpt2", "interleaved", 2, 2, 4),
    ],
)
def test_stages_hold_what_their_programs_do_in_their_rows(
    name: str, schedule: str, stages: int, chunks: int, microbatches: int
) -> None:
    """From the row of one choice, whatever other choices hold in flight."""
    analysis = analyse(capture_step(*MODELS[name](), grad=True).graph)
    layout = Layout(schedule=schedule, num_stages=stages, num_chunks=chunks)
    pipe, draw = Pipe(analysis, layout, microbatches), random.Random(0)
    drawn = [pipe.whole, *(recomputing(analysis, pipe.whole, draw) for _ in range(2))]
    drawn += [forgetting(analysis, whole, draw) for whole in drawn[1:]]
    found = [pipe.lowered(whole) for whole in drawn]
    ledgers = [pipe.ledger(lowered) for lowered, _ in found[0]]
    for own in found:
        for ledger, (lowered, peak_bytes) in zip(ledgers, own, strict=True):
            assert ledger.held(ledger.choice(lowered.chunks)).peak_bytes == peak_bytes
    assert len({tuple(peak for _, peak in own) for own in found}) > 1
