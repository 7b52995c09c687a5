"""What is recomputed against the optimum: exhaustion over lowered and simulated programs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar.capture import capture_step
from autopar.search.analysis import Analysis, analyse
from autopar.search.branch import DIVE_GAP
from cost_models.cluster import Cluster
from tests.oracles.recomputes import OneRank


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


def chain() -> nn.Module:
    widths = (8, 16, 32, 8)
    pairs = pairwise(widths)
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.GELU())))


def analysed(model: nn.Module, width: int) -> Analysis:
    x = torch.randn(64, width)
    return analyse(capture_step(model, x, lambda m, x: m(x).sum(), grad=True).graph)


@pytest.mark.parametrize("name", [pytest.param("chain", marks=pytest.mark.large), "branches"])
def test_nothing_that_runs_again_costs_less_than_what_is_chosen(name: str) -> None:
    """Every choice of what is kept, at every memory that any takes, but for the solver's gap."""
    analysis = analysed(chain(), 8) if name == "chain" else analysed(Branches(), 16)
    rank = OneRank(analysis, Cluster.local(1))
    everything = list(rank.every_cost())
    limits = sorted({cost.peak_bytes for cost in everything})
    assert len(limits) > 1
    for limit in limits:
        best_s = min(cost.seconds for cost in everything if cost.peak_bytes <= limit)
        plan = rank.planned(rank.fixed_bytes + limit)
        assert plan is not None
        chosen = rank.cost(plan.pipeline.stages[0])
        assert chosen.peak_bytes <= limit
        assert chosen.seconds <= best_s + DIVE_GAP * rank.plain_s
