"""Orders with a split backward against the makespans of the published search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedules import SCHEDULES, Size, peak_live, verify
from autopar.schedules.makespan import ChunkTime, Timeline, simulate
from autopar.schedules.weights import Costs
from autopar.schedules.zero_bubble import _least_period_s, one_chunk

SIZES = ((4, 8), (8, 24), (16, 48), (32, 128))

TABLE = {
    ((10, 10, 10), 1): (272.4, 795.6, 1602.0, 4174.8),
    ((10, 10, 10), 2): (241.2, 722.8, 1446.0, 3850.0),
    ((10, 12, 8), 1): (284.4, 823.6, 1662.0, 4298.8),
    ((10, 12, 8), 2): (253.2, 729.6, 1466.0, 3906.4),
}
"""(forward, input, weight seconds), memory over 1F1B's: the longest lane, for every size."""

CASES = [
    (times, memory, lanes, microbatches, most)
    for (times, memory), row in TABLE.items()
    for (lanes, microbatches), most in zip(SIZES, row, strict=True)
]


def costs_of(times: tuple[int, int, int], pending_share: float) -> Costs:
    forward, inputs, weight = times
    return Costs(
        forward_s=forward,
        input_s=inputs,
        weight_s=weight,
        send_s=0.2,
        pending_share=pending_share,
    )


def timed(lanes: int, microbatches: int, limit: int, costs: Costs) -> Timeline:
    schedule = one_chunk(lanes, microbatches, limit, costs)
    verify(
        schedule,
        num_chunks=lanes,
        microbatches=microbatches,
        live_bounds=[limit] * lanes,
        pending_share=costs.pending_share,
    )
    time = ChunkTime(costs.forward_s, costs.input_s + costs.weight_s, costs.weight_s)
    return simulate(schedule, [time] * lanes, costs.send_s)


@pytest.mark.parametrize(("times", "memory", "lanes", "microbatches", "most"), CASES)
def test_no_longer_than_published(
    times: tuple[int, int, int], memory: int, lanes: int, microbatches: int, most: float
) -> None:
    """The input gradient frees half of what the forward saved.

    The authors count 34 h + 5 a s bytes behind a forward and 32 h behind its input gradient, with
    a heads and s the sequence: 63 % is freed at h = 2304.
    """
    timeline = timed(lanes, microbatches, memory * lanes, costs_of(times, 0.5))
    assert timeline.period_s <= most + 1e-6


@pytest.mark.parametrize(("times", "memory", "lanes", "microbatches", "most"), CASES)
def test_holding_all_until_the_weight_gradient(
    times: tuple[int, int, int], memory: int, lanes: int, microbatches: int, most: float
) -> None:
    """No longer than published, or proven to be the shortest that this memory allows."""
    costs = costs_of(times, 1.0)
    timeline = timed(lanes, microbatches, memory * lanes, costs)
    bound_s = _least_period_s(lanes, microbatches, memory * lanes, costs)
    assert timeline.period_s <= max(most, bound_s) + 1e-6


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(1, 14),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_rows_are_right_and_no_shorter_than_the_bound(
    times: tuple[int, int, int], lanes: int, microbatches: int, limit: int, share: float
) -> None:
    costs = costs_of(times, share)
    timeline = timed(lanes, microbatches, limit, costs)
    assert timeline.period_s >= _least_period_s(lanes, microbatches, limit, costs) - 1e-6


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(lanes: int) -> None:
    for microbatches in (2 * lanes, 3 * lanes, 4 * lanes + 1):
        size = Size(lanes=lanes, chunks=2, microbatches=microbatches)
        schedule = SCHEDULES["zb-v"].generate_for(size)
        verify(schedule, num_chunks=2 * lanes, microbatches=microbatches, buffers=1)
        assert max(map(peak_live, schedule)) <= 2 * lanes
        times = [ChunkTime(1, 2, 1)] * 2 * lanes
        assert simulate(schedule, times).period_s == 6 * microbatches
        slow = simulate(schedule, times, 0.02)
        assert slow.period_s <= 6 * microbatches * 1.01
