"""Step time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import AutoparError
from autopar.hint import Hint
from autopar.plan.records import Plan
from autopar.plan.text import render
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.report.pareto import pareto, pareto_view
from autopar.report.plot import chart_of, write_plot
from autopar.search.analysis import analyse
from tests.oracles.hosts import hosted
from tests.oracles.models import gpt2, mlp

Front = tuple[tuple[Plan, ...], list[tuple[Hint, ...]]]


@pytest.fixture(scope="module")
def front() -> Front:
    """Plans of a small GPT-2 on a device with host memory, and the hints they were asked under."""
    analysis = analyse(capture_step(*gpt2(layers=4, batch=8), grad=True).graph)
    request = Request(model="Gpt2", fingerprint="f", cluster=hosted(1, 3e8))
    asked: list[tuple[Hint, ...]] = []

    def search(more: Sequence[Hint]) -> Plan:
        asked.append(tuple(more))
        hints = (hint.microbatches(1), *more)
        return make_plan(analysis, replace(request, hints=hints))

    return pareto(search), asked


def test_less_memory_takes_more_time_along_the_front(front: Front) -> None:
    plans, asked = front
    assert asked[0] == () and len(plans) > 3
    for plan, other in pairwise(plans):
        assert plan.prediction.step_s <= other.prediction.step_s
        assert plan.prediction.memory.total_bytes > other.prediction.memory.total_bytes
    lines = render(pareto_view(plans)).splitlines()
    assert len(lines) == 3 + len(plans)


def test_problems_are_built_once_for_all_limits_and_plans_are_the_same() -> None:
    analysis = analyse(capture_step(*mlp(), grad=True).graph)
    request = Request(model="Mlp", fingerprint="f", cluster=hosted(1, 3e8))
    total = make_plan(analysis, request).prediction.memory.total_bytes
    (built,) = request.known.values()
    hints = (hint.microbatches(1), hint.memory_limit(total - 1))
    shared = make_plan(analysis, replace(request, hints=hints))
    assert list(request.known.values()) == [built]
    alone = make_plan(analysis, replace(request, hints=hints, known={}))
    assert shared.stages == alone.stages and shared.prediction == alone.prediction


def test_a_point_that_fails_or_an_interrupt_loses_no_other_point(front: Front) -> None:
    """Limits in turn: planned, an error, planned, Ctrl-C."""
    plans, lines = front[0], list[str]()
    ends = iter((plans[0], plans[1], AutoparError("no such thing"), plans[2], KeyboardInterrupt()))

    def search(more: Sequence[Hint]) -> Plan:
        end = next(ends)
        if isinstance(end, BaseException):
            raise end
        return end

    assert pareto(search, told=lines.append) == plans[:3]
    assert "passed over: no such thing" in lines[2] and "(80" in lines[2]
    assert lines[-1] == "stopped; what was planned is kept" and len(lines) == 5


def within(plans: Sequence[Plan], limit_bytes: int) -> list[Plan]:
    return [replace(plan, memory_limit_bytes=limit_bytes) for plan in plans]


def test_the_picture_shows_plans_limit_and_units(front: Front, tmp_path: Path) -> None:
    most = front[0][0].prediction.memory.total_bytes
    plans = within(front[0], int(1.2 * most))
    chart = chart_of(plans)
    assert chart.x_label == "memory a rank (MB)" and chart.y_label == "step time (ms)"
    assert [point.chosen for point in chart.points] == [True] + [False] * (len(plans) - 1)
    assert chart.left < chart.points[-1].x < chart.points[0].x < chart.limit.at < chart.right
    assert chart.top < chart.points[-1].y < chart.points[0].y < chart.bottom
    assert len({tick.text for tick in chart.x_ticks}) == len(chart.x_ticks) > 3
    write_plot(plans, tmp_path / "pareto.svg")
    root = ElementTree.parse(tmp_path / "pareto.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{name}circle")) == len(plans)
    texts = ["".join(text.itertext()) for text in root.findall(f".//{name}text")]
    assert chart.chosen in texts and chart.limit.text in texts


def test_a_far_limit_is_said_and_a_page_has_the_table(front: Front, tmp_path: Path) -> None:
    plans = within(front[0], 10**12)
    chart = chart_of(plans)
    assert not chart.limit_drawn and chart.limit.text == "usable: 1.00 TB, beyond this edge"
    write_plot(plans, tmp_path / "pareto.html")
    page = (tmp_path / "pareto.html").read_text()
    assert "<svg" in page and page.count("<tr") == 1 + len(plans)


def test_one_plan_is_a_picture_too(front: Front) -> None:
    (point,) = chart_of(front[0][:1]).points
    assert point.chosen


def test_other_files_are_refused(front: Front, tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"ends in none of \.svg, \.html"):
        write_plot(front[0], tmp_path / "pareto.png")
