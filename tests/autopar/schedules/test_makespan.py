"""The simulation against closed forms: bubbles, step times, DAPPLE's latency."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedules import SCHEDULES, Schedule
from autopar.schedules.makespan import ChunkTime, Timeline, simulate
from cost_models import pipeline
from cost_models.pipeline import StageTime
from tests.autopar.schedules import dapple, pipelines
from tests.cost_models import simulated_schedule as other

WHOLE = st.integers(1, 9)
"""Whole seconds: their sums are exact."""


def one_chunk(name: str, lanes: int, microbatches: int) -> Schedule:
    return SCHEDULES[name].generate(lanes, 1, microbatches)


def bubble_share(timeline: Timeline, lane: int) -> float:
    """Idle seconds of a lane, of its work."""
    return timeline.bubble_s(lane) / timeline.busy_s(lane)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "early-backward", "early-backward-2"])
@given(st.integers(1, 8), st.integers(1, 24), WHOLE, WHOLE)
def test_bubble_of_equal_stages_is_stages_less_one_over_microbatches(
    name: str, lanes: int, microbatches: int, forward: int, backward: int
) -> None:
    times = [ChunkTime(forward, backward)] * lanes
    timeline = simulate(one_chunk(name, lanes, microbatches), times)
    for lane in range(lanes):
        assert bubble_share(timeline, lane) == (lanes - 1) / microbatches


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4), WHOLE, WHOLE)
def test_interleaving_divides_the_bubble_by_the_chunks(
    lanes: int, chunks: int, rounds: int, forward: int, backward: int
) -> None:
    microbatches = rounds * lanes
    schedule = SCHEDULES["interleaved"].generate(lanes, chunks, microbatches)
    timeline = simulate(schedule, [ChunkTime(forward, backward)] * lanes * chunks)
    for lane in range(lanes):
        assert timeline.bubble_s(lane) == (lanes - 1) * (forward + backward)
        assert bubble_share(timeline, lane) == (lanes - 1) / (microbatches * chunks)
    stage = StageTime(chunks * forward, chunks * backward)
    closed = pipeline.interleaved_s(
        stage, stages=lanes, chunks=chunks, num_microbatches=microbatches
    )
    assert timeline.makespan_s == pytest.approx(closed, rel=1e-12)


@given(st.integers(2, 8), st.integers(0, 12))
def test_zb_h1_has_a_third_of_the_bubble(lanes: int, more: int) -> None:
    microbatches = 2 * lanes + more
    times = [ChunkTime(1, 2, 1)] * lanes
    ours = simulate(one_chunk("zb-h1", lanes, microbatches), times)
    plain = simulate(one_chunk("1f1b", lanes, microbatches), times)
    assert 3 * ours.bubble_s(0) == plain.bubble_s(0) == 3 * (lanes - 1)


TIMES = st.floats(0.1, 10)


@given(st.lists(st.builds(ChunkTime, TIMES, TIMES), min_size=1, max_size=6), WHOLE, TIMES)
def test_the_other_simulator_agrees(times: list[ChunkTime], count: int, send_s: float) -> None:
    stages = [StageTime(t.forward_s, t.backward_s) for t in times]
    for name, order in (("gpipe", other.gpipe_order), ("1f1b", other.one_f_one_b_order)):
        ours = simulate(one_chunk(name, len(times), count), times, send_s).makespan_s
        orders = [order(i, len(times), count) for i in range(len(times))]
        assert ours == pytest.approx(other.makespan_s(stages, orders, send_s))


@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_1f1b_formulas_are_close_below(kind: str) -> None:
    """Random pipelines of 2 to 16 unequal stages, 1 to 64 microbatches, with reductions.

    The closed form is less than the schedule takes by at most three thousandths, and what a
    dynamic program can add up by at most a hundredth, but for one in a hundred; for up to a tenth
    of pipelines whose backwards differ from one to three forwards.
    """
    draw = random.Random(4)
    closed, chained = [], []
    for _ in range(100):
        plan = pipelines.random_pipeline(draw, kind)
        exact_s = pipelines.simulated_s(plan)
        closed.append(1 - pipelines.closed_s(plan) / exact_s)
        chained.append(1 - pipelines.chained_s(plan) / exact_s)
    assert min(closed) >= -1e-9 and max(closed) <= 0.003
    assert all(short >= full - 1e-9 for short, full in zip(chained, closed, strict=True))
    assert sum(error > 0.01 for error in chained) <= (10 if kind == "any ratio" else 1)


@given(st.integers(1, 8), st.integers(1, 24), WHOLE, WHOLE, st.lists(WHOLE, min_size=8, max_size=8))
def test_reductions_of_equal_stages_are_exact(
    lanes: int, count: int, forward: int, backward: int, reduces: list[int]
) -> None:
    """Stage i is done i backwards before the first one."""
    stages = [StageTime(forward, backward)] * lanes
    closed = pipeline.one_f_one_b_reduced_s(stages, reduces[:lanes], count)
    whole = (count + lanes - 1) * (forward + backward)
    ends = [whole - i * backward + reduces[i] for i in range(lanes)]
    assert closed == pytest.approx(max(ends), rel=1e-12)


@pytest.mark.parametrize(("spread", "within"), [(0.0, 199), (0.3, 197)])
def test_dapple_latency_is_within_two_hundredths(spread: float, within: int) -> None:
    """200 random plans under its schedule for costly messages, which do not hold each other up.

    Of 200, one of equal layers and up to three of unequal ones err by up to a half-hundredth more.
    """
    draw = random.Random(12)
    errors = [dapple_error(dapple.random_plan(draw, spread)) for _ in range(200)]
    assert sum(error <= 0.02 for error in errors) >= within
    assert max(errors) <= 0.025
    assert statistics.mean(errors) <= 0.005


@pytest.mark.parametrize("profile", dapple.PROFILES)
def test_dapple_latency_is_within_a_hundredth_for_plans_of_its_own_kind(profile: str) -> None:
    """Layers of a published profile, replicas of every stage, messages and all-reduces."""
    draw = random.Random(12)
    assert max(dapple_error(dapple.placed_plan(draw, profile)) for _ in range(200)) <= 0.01


def dapple_error(plan: dapple.DapplePlan) -> float:
    """Relative error of DAPPLE's latency of a plan."""
    schedule = one_chunk("early-backward-2", len(plan.times), plan.microbatches)
    timeline = simulate(schedule, plan.times, plan.sends_s)
    ended = zip(timeline.ends_s, plan.reduces_s, strict=True)
    return abs(dapple.latency_s(plan) / max(ends[-1] + own for ends, own in ended) - 1)


@given(st.integers(1, 6), st.integers(1, 12))
def test_live_microbatches_of_1f1b_over_time(lanes: int, microbatches: int) -> None:
    timeline = simulate(one_chunk("1f1b", lanes, microbatches), [ChunkTime(1, 2)] * lanes)
    for lane in range(lanes):
        counts = [count for _, count in timeline.live(lane)]
        seconds = [second for second, _ in timeline.live(lane)]
        assert seconds == sorted(seconds) and counts[-1] == 0
        assert max(counts) == min(lanes - lane, microbatches)


def test_sends_can_differ_by_border() -> None:
    timeline = simulate(one_chunk("gpipe", 3, 1), [ChunkTime(1, 1)] * 3, [0.5, 2.0])
    assert timeline.makespan_s == 6 + 2 * 2.5
    assert timeline.span_s(2) == 2
    assert timeline.period_s == timeline.makespan_s
