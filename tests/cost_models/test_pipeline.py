"""Closed forms of schedules against exact simulation and published answers."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import pipeline
from cost_models.errors import ClusterSpecError
from cost_models.pipeline import SplitTime, StageTime
from tests.cost_models import simulated_schedule as exact

TIMES = st.floats(0.1, 10)
STAGES = st.lists(st.builds(StageTime, TIMES, TIMES), min_size=1, max_size=6)


def simulated_1f1b_s(stages: list[StageTime], num_microbatches: int, send_s: float) -> float:
    orders = [exact.one_f_one_b_order(i, len(stages), num_microbatches) for i in range(len(stages))]
    return exact.makespan_s(stages, orders, send_s)


@given(STAGES, st.integers(1, 12), st.floats(0, 3))
def test_gpipe_equals_simulation(stages: list[StageTime], count: int, send_s: float) -> None:
    orders = [exact.gpipe_order(i, len(stages), count) for i in range(len(stages))]
    expected = exact.makespan_s(stages, orders, send_s)
    assert pipeline.gpipe_s(stages, count, send_s) == pytest.approx(expected)


@given(STAGES, st.integers(1, 12))
def test_1f1b_never_takes_less_than_its_work(stages: list[StageTime], count: int) -> None:
    seconds = pipeline.one_f_one_b_s(stages, count)
    assert seconds >= count * max(stage.both_s for stage in stages) - 1e-9
    assert seconds >= sum(stage.both_s for stage in stages) - 1e-9
    assert seconds <= pipeline.one_f_one_b_s(stages, count + 1) + 1e-9


@given(st.integers(1, 8), st.integers(1, 32), TIMES, TIMES)
def test_1f1b_of_equal_stages_is_exact(stages: int, count: int, f: float, b: float) -> None:
    equal = [StageTime(f, b)] * stages
    seconds = pipeline.one_f_one_b_s(equal, count)
    assert seconds == pytest.approx((count + stages - 1) * (f + b))
    assert seconds == pytest.approx(simulated_1f1b_s(equal, count, 0.0))
    assert seconds == pytest.approx(pipeline.gpipe_s(equal, count))


@pytest.mark.parametrize(("relative_send", "most"), [(0.0, 1e-4), (0.02, 2e-4)])
def test_1f1b_of_300_random_pipelines_errs_little(relative_send: float, most: float) -> None:
    """Stages within 30 % of each other, backward twice the forward."""
    draw = random.Random(2026)
    errors, sum_errors = [], []
    for _ in range(300):
        num_stages = draw.randint(2, 16)
        count = draw.randint(1, 4 * num_stages)
        times = [draw.uniform(0.7, 1.3) for _ in range(num_stages)]
        stages = [StageTime(t, 2 * t) for t in times]
        send_s = 3 * relative_send
        expected = simulated_1f1b_s(stages, count, send_s)
        errors.append(abs(pipeline.one_f_one_b_s(stages, count, send_s) / expected - 1))
        total = sum(s.both_s for s in stages) + 2 * (num_stages - 1) * send_s
        usual = total + (count - 1) * max(s.both_s for s in stages)
        sum_errors.append(abs(usual / expected - 1))
    assert statistics.fmean(errors) <= most
    assert statistics.fmean(errors) < statistics.fmean(sum_errors)


def test_live_microbatches_equal_simulation() -> None:
    for stages in range(1, 6):
        for count in range(1, 9):
            for i in range(stages):
                order = exact.one_f_one_b_order(i, stages, count)
                assert exact.most_live(order) == pipeline.one_f_one_b_live(
                    i, stages=stages, num_microbatches=count
                )
    assert [pipeline.one_f_one_b_live(i, stages=4, num_microbatches=8) for i in range(4)] == [
        4, 3, 2, 1,
    ]  # fmt: skip


def test_interleaving_divides_the_bubble_and_multiplies_the_activations() -> None:
    stage = StageTime(1.0, 2.0)
    plain = pipeline.interleaved_s(stage, stages=4, chunks=1, num_microbatches=8)
    assert plain == pipeline.one_f_one_b_s([stage] * 4, 8)
    four = pipeline.interleaved_s(stage, stages=4, chunks=4, num_microbatches=8)
    assert (plain - 24) / (four - 24) == pytest.approx(4)
    live = pipeline.interleaved_live(0, stages=4, chunks=4, num_microbatches=8)
    assert live == 2 * 3 + 3 * 4 + 1
    factor = live / 4 / pipeline.one_f_one_b_live(0, stages=4, num_microbatches=8)
    assert factor == pytest.approx(pipeline.interleaving_memory_factor(4, 4))
    assert pipeline.interleaved_live(0, stages=4, chunks=2, num_microbatches=1) == 2
    assert pipeline.interleaved_live(1, stages=4, chunks=1, num_microbatches=9) == 3


def test_zero_bubble_schedules_shrink_the_bubble_by_the_weight_gradients() -> None:
    """f = b = w = 10 on 4 ranks: the authors' makespans for 8 microbatches, messages 0.2."""
    stage = SplitTime(10.0, 10.0, 10.0)
    assert pipeline.one_f_one_b_bubble_s(stage, 4) == 90
    assert pipeline.zb_h1_bubble_s(stage, 4) == 30
    assert pipeline.zb_h2_bubble_s(stage, 4) == 0
    work = 8 * stage.all_s
    assert work + pipeline.one_f_one_b_bubble_s(stage, 4) == pytest.approx(331.2, rel=0.01)
    assert work + pipeline.zb_h1_bubble_s(stage, 4) == pytest.approx(272.4, rel=0.01)
    assert work + pipeline.zb_h2_bubble_s(stage, 4) == pytest.approx(241.2, rel=0.01)


@pytest.mark.parametrize(
    ("stages", "count", "h1", "h2"),
    [(8, 24, 795.6, 722.8), (16, 48, 1602, 1446), (32, 128, 4174.8, 3850)],
)
def test_published_zero_bubble_makespans_are_met(
    stages: int, count: int, h1: float, h2: float
) -> None:
    stage = SplitTime(10.0, 10.0, 10.0)
    work = count * stage.all_s
    assert work + pipeline.zb_h1_bubble_s(stage, stages) == pytest.approx(h1, rel=0.02)
    assert work + pipeline.zb_h2_bubble_s(stage, stages) == pytest.approx(h2, rel=0.01)


def test_dapple_profile_of_bert_prefers_more_microbatches() -> None:
    """The bubble's share falls with the microbatches: (S - 1) / (G + S - 1)."""
    stages = [StageTime(2.69e-3 * 12, 4.47e-3 * 12)] * 4
    for count in (4, 16, 64):
        seconds = pipeline.one_f_one_b_s(stages, count)
        idle = 1 - count * stages[0].both_s / seconds
        assert idle == pytest.approx(3 / (count + 3))


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ClusterSpecError, match="num_microbatches is 0"):
        pipeline.one_f_one_b_s([StageTime(1.0, 1.0)], 0)
    with pytest.raises(ClusterSpecError, match="forward_s is -1"):
        StageTime(-1.0, 1.0)
