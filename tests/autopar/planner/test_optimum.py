"""What is recomputed against the optimum: exhaustion over lowered and simulated programs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar.capture import capture_step
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.recomputes import OneRank, Stages

EXACT = 1e-9
"""Relative difference at which seconds are the same."""


PARTS = (0.98, 0.94, 0.92)
"""Of what the fullest of stages that keep everything holds."""


class Branches(nn.Module):
    """A graph that is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 32)
        self.third, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        gate = torch.sigmoid(self.second(hidden))
        return self.last(hidden * torch.relu(self.third(gate)))


class Segment(nn.Module):
    """Cheap layers between two that are not, which hold more than any of them if all ran again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for cheap in 3 * (torch.tanh, torch.sigmoid):
            hidden = cheap(hidden)
        return self.last(hidden)


def chain() -> nn.Module:
    widths = (8, 16, 32, 8)
    pairs = pairwise(widths)
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.GELU())))


def analysed(model: nn.Module, width: int) -> Analysis:
    x = torch.randn(64, width)
    return analyse(capture_step(model, x, lambda m, x: m(x).sum(), grad=True).graph)


CASES = {"chain": (chain, 8), "branches": (Branches, 16), "segment": (Segment, 8)}


@pytest.mark.parametrize(
    "name", [pytest.param("chain", marks=pytest.mark.large), "branches", "segment"]
)
def test_nothing_that_runs_again_costs_less_than_what_is_chosen(name: str) -> None:
    """Every choice of what is kept, made again once or for each use, at every memory any takes."""
    make, width = CASES[name]
    rank = OneRank(analysed(make(), width), Cluster.local(1))
    everything = list(rank.every_cost())
    limits = sorted({cost.peak_bytes for cost, _ in everything})
    assert len(limits) > 1
    for limit in limits:
        best_s = min(cost.seconds for cost, _ in everything if cost.peak_bytes <= limit)
        plan = rank.planned(rank.fixed_bytes + limit)
        assert plan is not None
        chosen = rank.cost(plan.pipeline.stages[0])
        assert chosen.peak_bytes <= limit
        assert chosen.seconds <= best_s * (1 + EXACT)
    once = min(cost.peak_bytes for cost, each in everything if not each)
    assert (limits[0] < once) == (name == "segment")


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        ("branches", 2),
        *(pytest.param(*own, marks=pytest.mark.large) for own in (("chain", 2), ("segment", 3))),
    ],
)
def test_no_choice_of_what_stages_run_again_is_faster(name: str, num_stages: int) -> None:
    """On the same stages, within a limit that they all have."""
    make, width = CASES[name]
    stages = Stages(analysed(make(), width), num_stages, microbatches=4)
    free = stages.planned(float("inf"))
    assert free is not None
    found = set()
    for part in PARTS:
        limit = int(part * free.memory.total_bytes)
        plan = stages.planned(limit)
        if plan is not None:
            assert plan.memory.total_bytes <= limit
            assert plan.simulation.seconds <= stages.best_s(plan, limit) * (1 + EXACT), part
            found.add(plan.simulation.seconds)
    assert len(found) > 1
