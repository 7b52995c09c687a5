"""A step of few copies, simulated as if it had all, takes what the whole step takes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from functools import cache

import pytest

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.graph import Graph, Phase
from autopar.ir.sharding import Mesh
from autopar.lower.overlap import overlap
from autopar.lower.simulate import Prices, Simulation, prices
from autopar.lower.spmd import lower
from autopar.lower.stretch import ONCE, NotPeriodicError, Repeats, stretched
from autopar.options import ADAMW
from autopar.plan.records import Memory, StagePlan
from autopar.planner.evaluate import predicted_memory, simulate_loop
from autopar.planner.shorten import shorten
from autopar.search.analysis import Analysis, analyse
from autopar.search.copies import REACH
from cost_models.cluster import Cluster
from tests.oracles.models import bert, gpt2, llama
from tests.oracles.random_plans import random_stage

MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}
MESHES = {
    "2": Mesh(("a",), (2,)),
    "2x2": Mesh(("a", "b"), (2, 2)),
    "2 in 2": Mesh(("a",), (2,)).with_time(2),
    "4 in 4": Mesh(("a",), (4,)).with_time(4),
}
LAYERS = 9
HOSTS = (0.0, 3e-6, 1e-3)
"""Seconds of the host an op: never late, late at times, always late."""


@cache
def analysed(name: str) -> Analysis:
    model, batch, loss = MODELS[name](LAYERS)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def alike(analysis: Analysis, stage: StagePlan, draw: random.Random) -> StagePlan:
    """The plan, with places of the forward that run again in every copy."""
    places: dict[int | None, bool] = {}
    again = []
    for plan in stage.nodes:
        place = analysis.folding.of.get(plan.name)
        late = analysis.graph.by_name[plan.name].phase is Phase.FORWARD
        if late and places.setdefault(place, draw.random() < 0.4):
            again.append(plan.name)
    return replace(stage, recomputed=tuple(again))


def divided(analysis: Analysis, stage: StagePlan, other: StagePlan, first: int) -> StagePlan:
    """The plan, with the parameters of the first copies stored as another plan says."""
    copies = analysis.copies
    own = {plan.name: copies.of.get(copies.parameters[plan.name]) for plan in stage.parameters}
    return replace(
        stage,
        parameters=tuple(
            plan if (place := own[plan.name]) is None or place.index >= first else instead
            for plan, instead in zip(stage.parameters, other.parameters, strict=True)
        ),
    )


def taken(
    analysis: Analysis,
    graph: Graph,
    stage: StagePlan,
    cost: NodeCost,
    priced: Prices,
    repeats: Repeats = ONCE,
) -> tuple[Simulation, Memory]:
    zero = (0,) * len(stage.mesh.sizes)
    program = overlap(lower(graph, analysis.rules, stage, zero, cost.collective_s))
    found = simulate_loop(program, priced, repeats)
    return found, predicted_memory(program, found, ADAMW, repeats)


def alike_in(analysis: Analysis, origins: Sequence[tuple[str, Phase]]) -> list[Hashable]:
    """What nodes are in any copy of their block, each once."""
    copies = analysis.copies
    places = [(copies.of.get(copies.parameters.get(name, name)), name, p) for name, p in origins]
    named = [(at.run, at.family, p) if at else (name, p) for at, name, p in places]
    return list(dict.fromkeys(named))


def assert_same(analysis: Analysis, stage: StagePlan, host_op_s: float) -> None:
    cluster = Cluster.preset("h100", 1)
    cost = NodeCost(cluster.device(0), stage.mesh, axis_seconds(cluster, stage.mesh))
    priced = replace(prices(cluster.device(0), cost.collective_s), host_op_s=host_op_s)
    short = shorten(analysis, (stage,), worth=REACH)
    assert short.repeats.more
    assert len(short.graph.nodes) < len(analysis.graph.nodes)
    ours, held = taken(analysis, short.graph, short.stages[0], cost, priced, short.repeats)
    whole, truth = taken(analysis, analysis.graph, stage, cost, priced)
    assert held == truth
    found = asdict(ours)
    assert not found.pop("profile")
    for name, own in found.items():
        value = getattr(whole, name)
        if name == "peak_origins":
            # A copy that is missing is told as one that is there: as many instructions behind the
            # peak are of the same nodes of blocks, one after the other.
            assert alike_in(analysis, own) == alike_in(analysis, value)
        elif name == "collectives":
            for use, wanted in zip(own, map(asdict, value), strict=True):
                assert use.pop("seconds") == pytest.approx(wanted.pop("seconds"), rel=1e-9)
                assert use == wanted
        elif isinstance(value, float):
            assert own == pytest.approx(value, rel=1e-9, abs=1e-15), name
        else:
            assert own == value, name


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_few_copies_take_what_all_take(name: str, mesh: str) -> None:
    analysis = analysed(name)
    stage = random_stage(analysis, MESHES[mesh], 1)
    assert_same(analysis, alike(analysis, stage, random.Random(1)), HOSTS[len(mesh) % 3])


def test_copies_that_are_treated_unlike_are_told_apart() -> None:
    analysis = analysed("gpt2")
    stages = [random_stage(analysis, MESHES["2x2"], seed) for seed in (2, 3)]
    assert_same(analysis, divided(analysis, *stages, first=2), HOSTS[1])
    many = shorten(analysis, (divided(analysis, *stages, first=LAYERS // 2),), worth=REACH)
    assert not many.repeats.more


@pytest.mark.large
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_of_few_copies_take_what_all_take(name: str, mesh: str, seed: int) -> None:
    analysis = analysed(name)
    stage = random_stage(analysis, MESHES[mesh], seed)
    other = random_stage(analysis, MESHES[mesh], seed + 100)
    plans = [
        stage,
        alike(analysis, stage, random.Random(seed)),
        divided(analysis, stage, other, first=seed % 3),
    ]
    for plan in plans:
        # Refusing to stretch is allowed: the planner then takes the whole program.
        with contextlib.suppress(NotPeriodicError):
            assert_same(analysis, plan, HOSTS[seed % 3])


REPEATS = Repeats(places={f"{c}{n}": (0, ord(c), n) for c in "ab" for n in range(4)}, more=(3,))


def turns(text: str, signs: str = "") -> list[tuple[int, int]]:
    origins = text.split()
    found = stretched(origins, signs or "-" * len(origins), range(len(origins)), REPEATS)
    return list(zip(found.order.tolist(), found.pair.tolist(), strict=True))


def test_what_repeats_has_its_turn_in_every_copy() -> None:
    forth = turns("x a0 b0 a1 b1 a2 b2 a3 b3 y")
    assert [at for at, _ in forth] == [0, 1, 2, *[1, 2] * 3, 3, 4, 5, 6, 7, 8, 9]
    assert len({pair for _, pair in forth}) == len(forth)


def test_instructions_may_run_ahead_of_their_copy_and_back() -> None:
    ahead = turns("a0 a1 b0 a2 b1 a3 b2 b3 b3 b2 b1 b0")
    assert len(ahead) == 12 + 3 * 3
    assert len({pair for _, pair in ahead}) == len(ahead)


@pytest.mark.parametrize(
    ("text", "signs"), [("a0 b0 a1 b1 b2 a2 a3 b3", ""), ("a0 a1 a2 a3", "ab?d")]
)
def test_copies_that_differ_are_refused(text: str, signs: str) -> None:
    with pytest.raises(NotPeriodicError):
        turns(text, signs)
