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
from tests.autopar.schedules import dapple
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


@pytest.mark.parametrize("relative_send", [0.0, 0.02])
def test_1f1b_formula_is_within_a_hundredth(relative_send: float) -> None:
    """300 pipelines, stages within 30 % of each other, backward twice the forward.

    One in a hundred may err by up to a half more.
    """
    draw = random.Random(4)
    errors = []
    for _ in range(300):
        lanes = draw.randint(2, 12)
        count = draw.randint(lanes + 1, 4 * lanes)
        forwards = [draw.uniform(0.7, 1.3) for _ in range(lanes)]
        send_s = 3 * relative_send
        times = [ChunkTime(f, 2 * f) for f in forwards]
        exact = simulate(one_chunk("1f1b", lanes, count), times, send_s).makespan_s
        closed = pipeline.one_f_one_b_s([StageTime(f, 2 * f) for f in forwards], count, send_s)
        errors.append(abs(closed / exact - 1))
    assert statistics.mean(errors) <= 0.002
    assert sum(error > 0.01 for error in errors) <= 3
    assert max(errors) <= 0.015


@pytest.mark.parametrize(
    ("ratio", "within"), [((2.0, 2.0), 295), ((1.5, 3.0), 280)], ids=["one ratio", "any ratio"]
)
def test_1f1b_formula_with_reductions_is_within_a_hundredth(
    ratio: tuple[float, float], within: int
) -> None:
    """300 pipelines: unequal stages, messages up to 3 % of one, reductions up to three of them.

    Backward over forward is the same in all stages, or between 1.5 and 3 in each. Where it differs
    and microbatches are few, up to 20 of 300 err by more, by up to 2.5 hundredths.
    """
    draw = random.Random(7)
    errors = []
    for _ in range(300):
        lanes = draw.randint(2, 12)
        count = draw.randint(1, 4 * lanes)
        times = []
        for _ in range(lanes):
            forward_s = draw.uniform(0.7, 1.3)
            times.append(ChunkTime(forward_s, forward_s * draw.uniform(*ratio)))
        sends_s = [draw.uniform(0, 0.09) for _ in range(lanes - 1)]
        reduces_s = [draw.uniform(0, 9) for _ in range(lanes)]
        timeline = simulate(one_chunk("1f1b", lanes, count), times, sends_s)
        exact = max(
            ends[-1] + reduce_s for ends, reduce_s in zip(timeline.ends_s, reduces_s, strict=True)
        )
        stages = [StageTime(t.forward_s, t.backward_s) for t in times]
        closed = pipeline.one_f_one_b_reduced_s(stages, reduces_s, count, sends_s)
        errors.append(abs(closed / exact - 1))
    assert statistics.mean(errors) <= 0.002
    assert sum(error <= 0.01 for error in errors) >= within
    assert max(errors) <= 0.025


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
    errors = []
    for _ in range(200):
        plan = dapple.random_plan(draw, spread)
        schedule = one_chunk("early-backward-2", len(plan.times), plan.microbatches)
        timeline = simulate(schedule, plan.times, plan.sends_s)
        exact = max(
            ends[-1] + reduce_s
            for ends, reduce_s in zip(timeline.ends_s, plan.reduces_s, strict=True)
        )
        errors.append(abs(dapple.latency_s(plan) / exact - 1))
    assert sum(error <= 0.02 for error in errors) >= within
    assert max(errors) <= 0.025
    assert statistics.mean(errors) <= 0.005


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
