"""The inter-op program: exhaustion, and the plan spaces of others under the same costs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.search.inter import solve_inter
from autopar.search.interproblem import Family, InterProblem, Link, Place, Point, Setting
from autopar.search.stages import least_firsts
from tests.oracles import inter as oracle

WHOLE = st.integers(0, 6).map(float)
"""Seconds and bytes in small whole numbers: many ties, no rounding."""


@st.composite
def points(draw: st.DrawFn, *, reduces: bool) -> Point:
    backward = draw(st.integers(1, 9))
    return Point(
        forward_s=draw(st.integers(1, 6)),
        backward_s=backward,
        weight_s=draw(st.integers(0, backward)),
        reduce_s=draw(WHOLE) if reduces else 0.0,
        before_s=draw(WHOLE) if reduces else 0.0,
        resident_bytes=draw(WHOLE),
        saved_bytes=draw(WHOLE),
        transient_bytes=draw(WHOLE),
    )


@st.composite
def problems(
    draw: st.DrawFn, schedules: tuple[tuple[str, int], ...], *, uneven: bool = True
) -> InterProblem:
    """Chains of up to four blocks on up to three devices."""
    reduces = draw(st.booleans())
    num_blocks, devices = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_classes = draw(st.integers(1, num_blocks))
    blocks = tuple(draw(st.integers(0, num_classes - 1)) for _ in range(num_blocks))
    memory = draw(st.sampled_from([15.0, 30.0, 60.0]))
    intervals = [(a, n) for n in range(1, devices + 1) for a in range(devices + 1 - n)]
    places = [Place(first=a, size=n, kind=n - 1, memory_bytes=memory) for a, n in intervals]
    families = [
        Family(name=f"of {n}", places=tuple(p for p in places if p.size == n))
        for n in range(1, devices + 1)
        if devices % n == 0
    ]
    if uneven:
        families.append(Family(name="any", places=tuple(places)))
    front = st.lists(points(reduces=reduces), min_size=1, max_size=3).map(tuple)
    found = tuple(
        Setting(
            microbatches=count,
            fronts=tuple(tuple(draw(front) for _ in range(devices)) for _ in range(num_classes)),
            send_bytes=tuple(draw(WHOLE) for _ in range(num_blocks - 1)),
        )
        for count in draw(st.lists(st.integers(1, 6), min_size=1, max_size=2, unique=True))
    )
    links = tuple(
        Link(latency_s=draw(WHOLE), bytes_per_s=4.0, lanes=draw(st.none() | st.just(1)))
        for _ in range(devices - 1)
    )
    return InterProblem(
        blocks=blocks,
        settings=found,
        families=tuple(families),
        links=links,
        schedules=schedules,
    )


@pytest.mark.parametrize("schedules", [("1f1b",), ("gpipe",)])
@settings(max_examples=60)
@given(st.data())
def test_optimum_equals_exhaustion(schedules: tuple[str, ...], data: st.DataObject) -> None:
    problem = data.draw(problems(tuple((name, 1) for name in schedules)))
    found = solve_inter(problem)
    least_s = oracle.brute_force_s(problem, schedules)
    if least_s is None:
        assert found.best is None and found.status == "infeasible"
        return
    assert found.best is not None and found.status == "optimal"
    assert found.best.step_s == pytest.approx(least_s, rel=1e-9)
    assert found.bound_s == pytest.approx(least_s, rel=1e-9)
    again, none = (solve_inter(problem, below_s=part * least_s) for part in (1.01, 0.99))
    assert again.best is not None and again.best.step_s == found.best.step_s
    assert none.best is None
    plan = oracle.plans_of(found.best, problem)
    assert oracle.step_s(problem, plan) == pytest.approx(found.best.step_s, rel=1e-9)


@settings(max_examples=60)
@given(problems((("1f1b", 1),)), st.data())
def test_where_a_stage_must_begin_it_does_and_the_optimum_equals_exhaustion(
    problem: InterProblem, data: st.DataObject
) -> None:
    most = min(len(problem.blocks), len(problem.links) + 1)
    assume(most > 1)
    cut = data.draw(st.integers(1, len(problem.blocks) - 1))
    lanes = range(data.draw(st.integers(2, most)))
    starts = tuple(map(tuple, least_firsts(len(problem.blocks), {cut}, {}, lanes)))
    found = solve_inter(replace(problem, starts=starts)).best
    least_s = oracle.best_s(
        problem,
        (
            plan
            for plan in oracle.every_plan(problem, ["1f1b"])
            if len(plan.places) == len(lanes) and cut in (first for first, _ in plan.borders)
        ),
    )
    assert (found is None) == (least_s is None)
    if found is not None and least_s is not None:
        assert found.step_s == pytest.approx(least_s, rel=1e-9)
        assert len(found.places) == len(lanes) and cut in (piece.first for piece in found.pieces)


EVERY = (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2))


@settings(max_examples=60)
@given(problems(EVERY))
def test_other_plan_spaces_hold_nothing_better(problem: InterProblem) -> None:
    """Megatron's uniform grid, Alpa's two levels, DAPPLE's placements, under the same costs."""
    found = solve_inter(problem)
    spaces = (oracle.megatron_s, oracle.alpa_s, oracle.dapple_s)
    for theirs_s in (space(problem) for space in spaces):
        if theirs_s is not None:
            assert found.best is not None
            assert found.best.step_s <= theirs_s * (1 + 1e-9)
    if found.best is not None:
        plan = oracle.plans_of(found.best, problem)
        assert oracle.step_s(problem, plan) == pytest.approx(found.best.step_s, rel=1e-9)
        assert found.bound_s <= found.best.step_s


@settings(max_examples=40)
@given(problems((("1f1b", 1),)), st.sampled_from([0.01, 0.1]))
def test_a_gap_is_kept(problem: InterProblem, gap: float) -> None:
    exact, near = solve_inter(problem), solve_inter(problem, gap=gap)
    if exact.best is None:
        assert near.best is None
        return
    assert near.best is not None and near.status == "optimal"
    assert near.best.step_s <= exact.best.step_s * (1 + gap) * (1 + 1e-9)
    assert near.bound_s <= exact.best.step_s * (1 + 1e-9)


@settings(max_examples=30)
@given(problems((("1f1b", 1), ("zb-h1", 1))))
def test_more_to_choose_from_is_never_worse(problem: InterProblem) -> None:
    whole = solve_inter(problem)
    for setting, family in itertools.product(problem.settings, problem.families):
        part = solve_inter(
            InterProblem(
                blocks=problem.blocks,
                settings=(setting,),
                families=(family,),
                links=problem.links,
                schedules=problem.schedules[:1],
            )
        )
        if part.best is not None:
            assert whole.best is not None and whole.best.step_s <= part.best.step_s * (1 + 1e-9)
