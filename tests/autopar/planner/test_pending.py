"""Between the parts of a split backward what waits for weight gradients is held, and counted."""

from __future__ import annotations

import functools

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.plan.records import Prediction
from autopar.planner.driver import make_plan
from autopar.planner.layout import Layout, most_pending
from autopar.planner.pipelines import GAIN
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.space import Pending
from cost_models.cluster import Cluster
from tests.oracles.models import gpt2
from tests.oracles.pending import held_bytes

STAGES = 4


@functools.cache
def analysed() -> Analysis:
    model, batch, loss = gpt2(layers=8, batch=32)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


@pytest.mark.parametrize(
    ("schedule", "chunks", "pending"),
    [
        ("1f1b", 1, Pending()),
        ("zb-h1", 1, Pending(3.0, 3.0)),
        ("zb-h2", 1, Pending(6.0, 6.0)),
        ("zb-v", 2, Pending(3.0, 0.0)),
    ],
)
def test_what_waits_is_that_of_the_lane_on_which_most_does(
    schedule: str, chunks: int, pending: Pending
) -> None:
    layout = Layout(schedule=schedule, num_stages=STAGES, num_chunks=chunks)
    assert most_pending(layout, 16) == pending


@pytest.mark.parametrize("again", ["*.mlp", "*.attn", "transformer.h.*"])
def test_what_waits_is_counted_as_it_is_held(again: str) -> None:
    """Within what stages differ in, of which the problem knows the average alone."""
    cluster, hints = Cluster.local(STAGES), [hint.degrees(pp=STAGES), hint.recompute(again)]
    modelled, lowered = held_bytes(analysed(), cluster, "zb-h1", hints, (STAGES, 8))
    assert abs(lowered / modelled - 1) < 0.08
    whole, _ = held_bytes(analysed(), cluster, "1f1b", hints, (STAGES, 8))
    assert modelled > whole


@pytest.mark.large
def test_split_backwards_compete_where_memory_binds() -> None:
    cluster, asked = Cluster.local(STAGES), (hint.degrees(pp=STAGES), hint.microbatches(8))

    def planned(*hints: hint.Hint) -> Prediction:
        request = Request(model="m", fingerprint="f", cluster=cluster, hints=(*asked, *hints))
        return make_plan(analysed(), request).prediction

    most = planned(hint.schedule("1f1b")).memory.total_bytes
    limit = hint.memory_limit(int(0.95 * most))
    own = {name: planned(limit, hint.schedule(name)) for name in ("1f1b", "zb-h1", "zb-v")}
    assert all(found.memory.total_bytes <= limit.limit_bytes for found in own.values())
    assert max(own["zb-h1"].step_s, own["zb-v"].step_s) < own["1f1b"].step_s
    fastest_s = min(found.step_s for found in own.values())
    assert planned(limit).step_s <= (1 + GAIN) * fastest_s
