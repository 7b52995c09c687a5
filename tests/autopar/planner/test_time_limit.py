"""What a search tells that the clock ended."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar import hint
from autopar.hint import Hint
from autopar.options import Options


def planned(time_limit_s: float, *hints: Hint) -> autopar.Plan:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    cluster = autopar.Cluster.preset("h100", nodes=2)
    return autopar.plan(
        model,
        cluster,
        torch.zeros(1 << 20, 64),
        loss=lambda model, x: model(x).square().mean(),
        hints=hints,
        options=Options(time_limit_s=time_limit_s),
    )


def test_a_search_that_the_clock_ended_says_so() -> None:
    whole, short = planned(60.0), planned(1e-9)
    assert whole.search.status != "time_limited"
    assert short.search.status == "time_limited"
    assert short.search.objective_s >= whole.search.objective_s


def test_parts_of_the_cluster_that_the_clock_left_untried_are_told_of() -> None:
    hinted = hint.degrees(dp=8, cp=1, pp=1)
    whole, short = planned(60.0, hinted), planned(1e-9, hinted)
    assert len(whole.search.meshes) > len(short.search.meshes) == 1
    assert whole.search.status != "time_limited"
    assert short.search.status == "time_limited"
