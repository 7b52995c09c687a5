"""Pipelines lowered: alike stages once, one lowering for all schedules of the same chunks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar import hint
from autopar.capture import capture_step
from autopar.lower.simulate import Simulation
from autopar.planner import staged
from autopar.planner.evaluate import lanes_of
from autopar.planner.hints import settle
from autopar.planner.lanes import prepare
from autopar.planner.layout import Layout
from autopar.planner.pipeline import cut
from autopar.planner.request import Request
from autopar.planner.staged import LoweredPipeline, lower_pipeline
from autopar.search.analysis import Analysis, analyse
from autopar.search.outer import meshes
from cost_models.cluster import Cluster

LAYERS, STAGES = 8, 4


@functools.cache
def analysed() -> Analysis:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(16, 4))
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    return analyse(capture_step(model, torch.zeros(16, 16), loss, grad=True).graph)


class Block(nn.Module):
    """Two products, with a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def lowered(schedule: str, chunks: int = 1, *, apart: bool = False) -> LoweredPipeline:
    """A pipeline of four stages of one rank; ``apart`` lowers every stage by itself."""
    analysis, cluster = analysed(), Cluster.local(STAGES)
    each = LAYERS // (STAGES * chunks)
    cuts = tuple(hint.cut_before(str(n)) for n in range(each, LAYERS, each))
    layout = Layout(schedule=schedule, num_stages=STAGES, num_chunks=chunks, hints=cuts)
    request = Request(model="m", fingerprint="f", cluster=cluster)
    settled = settle(analysis, cluster, [hint.microbatches(8)], None)
    (mesh, *_) = meshes(cluster, None, num_stages=STAGES)
    search = prepare(analysis, request, settled, (mesh.with_time(8),) * STAGES, layout)
    lanes = lanes_of(analysis, search, {kind: kind.within(None, 10.0) for kind in search.kinds})
    pipeline = cut(analysis, lanes, (layout,), cluster)
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(staged, "texts", lambda *_: tuple(range(STAGES)))
        return lower_pipeline(analysis, lanes, pipeline, layout, cluster)


def nameless(found: Mapping[Any, Simulation]) -> dict[Any, Simulation]:
    """Simulations without what they say by name."""
    return {key: replace(simulation, peak_origins=()) for key, simulation in found.items()}


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)]
)
def test_alike_stages_are_lowered_once_and_take_what_each_takes(schedule: str, chunks: int) -> None:
    together, each = lowered(schedule, chunks), lowered(schedule, chunks, apart=True)
    assert len(set(map(id, together.stages))) < STAGES == len(set(map(id, each.stages)))
    assert together.sends_s == each.sends_s and together.behind_s == each.behind_s
    layout = together.layout
    found, wanted = together.under(layout), each.under(layout)
    assert found.ends_s == wanted.ends_s
    for own, other in zip(found.stages, wanted.stages, strict=True):
        assert nameless(own.sections) == nameless(other.sections)
        assert nameless({"peak": own.peak}) == nameless({"peak": other.peak})


def test_one_lowering_serves_all_schedules_of_the_same_chunks() -> None:
    once = lowered("1f1b")
    for schedule in ("gpipe", "early-backward-2"):
        own = lowered(schedule)
        assert once.under(own.layout).ends_s == own.under(own.layout).ends_s
        held = [[s.peak.peak_bytes for s in x.under(own.layout).stages] for x in (once, own)]
        assert held[0] == held[1]
