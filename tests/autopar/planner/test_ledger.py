"""A ledger says what lowered programs hold and take."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.capture import capture_step
from autopar.ir.graph import Ref
from autopar.lower.simulate import simulate
from autopar.planner.ledger import Ledger
from autopar.search.analysis import analyse
from autopar.search.recompute import recompute_of
from cost_models.cluster import Cluster
from tests.oracles.models import MODELS
from tests.oracles.random_plans import forgetting, recomputing
from tests.oracles.recomputes import OneRank


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_any_choice_holds_and_takes_what_its_program_does(name: str) -> None:
    """From the simulation of one choice, whatever others make again, and how often."""
    analysis = analyse(capture_step(*MODELS[name](), grad=True).graph)
    rank = OneRank(analysis, Cluster.local(1))
    may = recompute_of(analysis, in_loop=False, allowed=True)
    made = {plan.name: plan.outputs for plan in rank.plain.nodes if may.runs_again(plan.name)}
    kept = {Ref(own, n): (s,) for own, outputs in made.items() for n, s in enumerate(outputs)}
    draw = random.Random(0)
    stages = [recomputing(analysis, rank.plain, draw) for _ in range(6)]
    stages += [forgetting(analysis, stage, draw) for stage in stages]
    stages = [replace(s, recomputed=tuple(n for n in s.recomputed if n in made)) for s in stages]
    stages = [
        replace(
            stage,
            forgotten={
                reader: own
                for reader, names in stage.forgotten.items()
                if (own := tuple(name for name in names if name in made))
            },
        )
        for stage in stages
    ]
    first = simulate(rank.program(stages[0]), rank.prices)
    ledger = Ledger(analysis, stages[0], rank.free.costs[0], kept, first)
    for stage in stages:
        held, cost = ledger.held(ledger.choice(stage)), rank.cost(stage)
        assert held.peak_bytes == cost.peak_bytes
        # Reshapes that copy take time too.
        assert held.seconds == pytest.approx(cost.seconds, rel=0.2)
        plain = tuple(ledger.plain(*own) for own in enumerate(ledger.choice(stage)))
        assert ledger.held(plain).peak_bytes == held.peak_bytes
        assert ledger.held(plain).seconds == pytest.approx(held.seconds)
