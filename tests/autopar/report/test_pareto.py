"""Step time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar import hint
from autopar.capture import capture_step
from autopar.hint import Hint
from autopar.plan.records import Plan
from autopar.plan.text import render
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.report.pareto import pareto, pareto_view
from autopar.search.analysis import analyse
from tests.oracles.hosts import hosted
from tests.oracles.models import gpt2


def test_less_memory_takes_more_time_along_the_front() -> None:
    analysis = analyse(capture_step(*gpt2(layers=4, batch=8), grad=True).graph)
    asked: list[tuple[Hint, ...]] = []

    def search(more: Sequence[Hint]) -> Plan:
        asked.append(tuple(more))
        hints = (hint.microbatches(1), *more)
        cluster = hosted(1, 3e8)
        return make_plan(
            analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=hints)
        )

    front = pareto(search)
    assert asked[0] == () and len(front) > 3
    for plan, other in pairwise(front):
        assert plan.prediction.step_s <= other.prediction.step_s
        assert plan.prediction.memory.total_bytes > other.prediction.memory.total_bytes
    lines = render(pareto_view(front)).splitlines()
    assert len(lines) == 3 + len(front)
