"""Cuts that hints ask for: met, as balanced as they can be, or refused by what contradicts."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import HintError
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.stages import bounded_cuts, last_firsts, least_firsts
from cost_models.cluster import Cluster
from tests.oracles.models import llama


@functools.cache
def subject() -> tuple[Any, Analysis]:
    model, batch, loss = llama()
    captured = capture_step(model, batch, loss, grad=True)
    return captured, analyse(captured.graph)


def planned(*hints: hint.Hint, pp: int = 2, schedule: str = "1f1b") -> Plan:
    _, analysis = subject()
    asked = (hint.degrees(pp=pp, dp=1, tp=1), hint.microbatches(4), hint.schedule(schedule))
    cluster = Cluster.local(pp)
    request = Request(model="m", fingerprint="f", cluster=cluster, hints=(*asked, *hints))
    return make_plan(analysis, request)


def modules_of(plan: Plan, chunk: int) -> set[str]:
    graph = subject()[1].graph
    names = [node.name for node in plan.stages[chunk].nodes]
    return {graph.by_name[n].source.module for n in names if graph.by_name[n].phase == "forward"}


@given(st.data())
def test_bounded_cuts_equal_brute_force(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 8))
    speed = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    lanes = data.draw(st.sampled_from([[0], [0, 1], [0, 1, 0], [0, 1, 1, 0]]))
    by_lane = data.draw(st.tuples(speed, speed))
    seconds = [by_lane[lane] for lane in lanes]
    cuts = data.draw(st.sets(st.integers(1, count - 1), max_size=2))
    homes = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 1), max_size=2))
    wanted = data.draw(st.sets(st.integers(0, count - 1)))
    needy = data.draw(st.sets(st.integers(0, len(lanes) - 1)))
    extra = st.lists(st.integers(0, 5).map(float), min_size=count + 1, max_size=count + 1)
    begins = data.draw(st.none() | extra)
    weighed = begins and [[0.0] * (count + 1), *[begins] * (len(lanes) - 1)]
    longest = []
    for places in itertools.combinations(range(1, count), len(lanes) - 1):
        pieces = list(itertools.pairwise([0, *places, count]))
        runs = {at: lane for lane, (a, b) in zip(lanes, pieces, strict=True) for at in range(a, b)}
        has = all(wanted.intersection(range(*pieces[stage])) for stage in needy)
        if has and cuts <= set(places) and all(runs[at] == lane for at, lane in homes.items()):
            longest.append(longest_of(seconds, pieces, weighed))
    most = last_firsts(count, wanted, needy, len(lanes))
    found = bounded_cuts(seconds, least_firsts(count, cuts, homes, lanes), most, weighed)
    assert (found is None) == (not longest)
    if found is not None:
        pieces = list(itertools.pairwise([0, *found, count]))
        assert longest_of(seconds, pieces, weighed) == min(longest)


def longest_of(
    seconds: list[list[float]], pieces: list[tuple[int, int]], begins: list[list[float]] | None
) -> float:
    """Seconds of the stage that takes longest; each has its own for every node and beginning."""
    more = [[0.0] * (len(own) + 1) for own in seconds] if begins is None else begins
    owns = zip(seconds, more, pieces, strict=True)
    return max(begin[a] + sum(own[a:b]) for own, begin, (a, b) in owns)


def test_a_stage_begins_where_a_hint_says() -> None:
    plan = planned(hint.cut_before("model.layers.1.mlp"))
    assert "model.layers.1.self_attn.o_proj" in modules_of(plan, 0)
    assert "model.layers.1.mlp.gate_proj" in modules_of(plan, 1)
    assert not any("layers.1.mlp" in module for module in modules_of(plan, 0))


def test_a_module_runs_on_the_stage_a_hint_says() -> None:
    plan = planned(hint.stage("model.layers.0.mlp", 1))
    assert "model.layers.0.mlp.gate_proj" in modules_of(plan, 1)
    assert not any("layers.0.mlp" in module for module in modules_of(plan, 0))
    two = planned(hint.stage("model.layers.0", 0), hint.stage("lm_head", 0), schedule="zb-v")
    assert "lm_head" in modules_of(two, 3)
    assert any("layers.0" in module for module in modules_of(two, 0))
    assert not any("layers.0" in m for chunk in (1, 2) for m in modules_of(two, chunk))


class Front(torch.nn.Module):
    """Two small layers, and behind them what takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu())
        for _ in range(8):
            x = torch.cat([x, x.sin() + x.cos()], 1)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_every_stage_is_given_a_parameter(schedule: str) -> None:
    captured = capture_step(Front(), torch.ones(4, 4), grad=True)
    hints = (hint.degrees(pp=2, dp=1, tp=1), hint.microbatches(1), hint.schedule(schedule))
    if schedule == "interleaved":
        hints = (hints[0], hint.microbatches(2), hints[2])
    request = Request(model="m", fingerprint="f", cluster=Cluster.local(2), hints=hints)
    plan = make_plan(analyse(captured.graph), request)
    for stage in range(2):
        assert any(chunk.parameters for chunk in plan.chunks_of(stage).values())


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ((hint.cut_before("model.layer.1"),), ("'model.layer.1'", "'model.layers.1'")),
        ((hint.stage("head", 1),), ("hint.stage('head', 1)", "'lm_head'")),
        ((hint.stage("lm_head", 2),), ("there are 2 stages", "0 to 1")),
        ((hint.cut_before("model.embed_tokens"),), ("runs first",)),
        (
            (hint.cut_before("model.layers.0.mlp"), hint.cut_before("model.layers.1.mlp")),
            ("into 2 pieces", "layers.0.mlp') and hint.cut_before('model.layers.1.mlp'"),
        ),
        ((hint.cut_before("*mlp"),), ("hint.cut_before('*mlp') asks",)),
        (
            (
                hint.cut_before("model.layers.1"),
                hint.stage("lm_head", 0),
                hint.stage("model.layers.0", 1),
            ),
            ("as hint.stage('lm_head', 0) and hint.stage('model.layers.0', 1) ask;",),
        ),
        (
            (hint.stage("lm_head", 1), hint.stage("lm_*", 0)),
            ("hint.stage('lm_*', 0)",),
        ),
    ],
)
def test_hints_that_cannot_be_met_are_named(
    hints: tuple[hint.Hint, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(HintError) as caught:
        planned(*hints)
    for words in said:
        assert words in str(caught.value)


def test_a_cut_needs_a_pipeline() -> None:
    with pytest.raises(HintError, match=r"hint.degrees\(pp=1\)"):
        planned(hint.cut_before("lm_head"), pp=1)
