"""Cuts and what every stage recomputes, chosen together, against one after the other."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture_step
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import gpt2
from tests.oracles.stagecuts import StageCuts

STAGES, MICROBATCHES = 4, 8
SLOW = (
    *(("blocks", part) for part in (0.6, 0.64, 0.7, 0.8, 0.9)),
    *(("gpt2", p) for p in (0.6, 0.7, 0.8, 0.9)),
)


class Block(nn.Module):
    """Two products, with a way around them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@functools.cache
def subject(name: str) -> Analysis:
    if name == "blocks":
        with torch.device("meta"):
            model, batch = nn.Sequential(*(Block() for _ in range(16))), torch.zeros(2048, 64)
        loss = lambda m, x: m(x).square().mean()  # noqa: E731
        return analyse(capture_step(model, batch, loss, grad=True).graph)
    return analyse(capture_step(*gpt2(8, batch=16), grad=True).graph)


def within(name: str, num_bytes: float) -> StageCuts:
    """A model on stages of one device that holds so much."""
    alike = Cluster.local(STAGES)
    device = replace(alike.device(0), memory_bytes=int(num_bytes), unified_memory=True)
    cluster = replace(
        alike, devices=(Devices(device=device, count=STAGES),), usable_memory_fraction=1.0
    )
    return StageCuts(subject(name), cluster, MICROBATCHES)


@functools.cache
def kept_bytes(name: str) -> int:
    """What the fullest stage holds where everything is kept and stages take equally long."""
    return max(within(name, 1e12).balanced().peaks)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blocks", 0.57),
        ("blocks", 0.72),
        *(pytest.param(*own, marks=pytest.mark.large) for own in SLOW),
    ],
)
def test_both_at_once_are_no_slower_than_the_cut_first_and_fit_where_whole_blocks_do(
    name: str, part: float
) -> None:
    cuts = within(name, part * kept_bytes(name))
    assert max(cuts.balanced().peaks) > cuts.limit_bytes
    planned, first = cuts.planned(), cuts.cut_first()
    assert cuts.whole_blocks_fit() and planned is not None and first is not None
    assert max(planned.peaks) <= cuts.limit_bytes
    assert planned.step_s <= first.step_s


def test_stages_hold_about_as_much_where_memory_binds_all_of_them() -> None:
    planned = within("blocks", 0.6 * kept_bytes("blocks")).planned()
    assert planned is not None and planned.spread <= 1.15


def test_what_one_limit_leaves_known_changes_no_plan_within_another() -> None:
    first, part = within("blocks", 0.8 * kept_bytes("blocks")), 0.72 * kept_bytes("blocks")
    assert first.planned() is not None
    assert first.within(int(part)).planned() == within("blocks", part).planned()
