"""Every schedule of the table is right for every size; what is not a schedule is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import HintError, UnsupportedError
from autopar.schedules import (
    SCHEDULES,
    Action,
    Kind,
    ScheduleSpec,
    Size,
    buffers_needed,
    peak_live,
    schedule_named,
    verify,
)
from cost_models.pipeline import interleaved_live


@st.composite
def sizes(draw: st.DrawFn, spec: ScheduleSpec) -> Size:
    """Sizes that the schedule takes."""
    lanes = draw(st.integers(1, 8))
    chunks = draw(st.integers(spec.least_chunks, spec.most_chunks or 4))
    microbatches = draw(st.integers(1, 24))
    if spec.whole_rounds:
        microbatches = draw(st.integers(1, lanes) | st.integers(1, 4).map(lambda n: n * lanes))
    max_live = draw(st.none() | st.integers(1, 10)) if spec.uses_max_live else None
    return Size(lanes=lanes, chunks=chunks, microbatches=microbatches, max_live=max_live)


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
def test_every_schedule_is_right(name: str, data: st.DataObject) -> None:
    """All work once, in order, in its memory, with channels that hold one message.

    Rows made for certain seconds may need a second one.
    """
    spec = SCHEDULES[name]
    size = data.draw(sizes(spec))
    schedule = spec.generate_for(size)
    bounds = spec.live_bounds(size)
    verify(schedule, num_chunks=size.num_chunks, microbatches=size.microbatches, live_bounds=bounds)
    assert buffers_needed(schedule) <= (2 if spec.splits_backward else 1)
    kinds = {action.kind for row in schedule for action in row}
    assert (Kind.WEIGHT_GRADIENT in kinds) == spec.splits_backward
    for lane, row in enumerate(schedule):
        assert {spec.lane_of_chunk(action.chunk, size.lanes) for action in row} == {lane}
        if not spec.splits_backward:
            assert peak_live(row) == bounds[lane]
        if size.max_live is not None:
            assert peak_live(row) <= size.max_live * size.chunks


@pytest.mark.parametrize("microbatches", [1, 2, 4, 9])
def test_1f1b_holds_fewer_than_gpipe(microbatches: int) -> None:
    plain = SCHEDULES["1f1b"].generate(4, 1, microbatches)
    assert [peak_live(row) for row in plain] == [min(4 - i, microbatches) for i in range(4)]
    every = SCHEDULES["gpipe"].generate(4, 1, microbatches)
    assert [peak_live(row) for row in every] == [microbatches] * 4


def test_early_backward_keeps_to_the_memory_there_is() -> None:
    one = SCHEDULES["early-backward"].generate(4, 1, 8, 2)
    assert [peak_live(row) for row in one] == [2, 2, 2, 1]
    two = SCHEDULES["early-backward-2"].generate(4, 1, 8, 6)
    assert [peak_live(row) for row in two] == [6, 5, 3, 1]


def test_interleaved_of_two_lanes() -> None:
    """Lane 1 holds the chunks 1 and 3; the first microbatches pass both before any backward."""
    schedule = SCHEDULES["interleaved"].generate(2, 2, 2)
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    assert schedule[1] == (
        Action(forward, 1, 0),
        Action(forward, 1, 1),
        Action(forward, 3, 0),
        Action(backward, 3, 0),
        Action(forward, 3, 1),
        Action(backward, 3, 1),
        Action(backward, 1, 0),
        Action(backward, 1, 1),
    )
    live = interleaved_live(1, stages=2, chunks=2, num_microbatches=2)
    assert peak_live(schedule[1]) == live == 3


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1b", (4, 1, 0), "cannot use schedule '1f1b' with 0 microbatches"),
        ("1f1b", (0, 1, 4), "with 0 stages"),
        ("early-backward", (4, 1, 4, 0), "with 0 live microbatches"),
    ],
)
def test_what_is_no_count_is_refused(name: str, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(HintError, match=message):
        SCHEDULES[name].generate(*numbers)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1b", (4, 2, 8), "with 2 chunks a stage: it has 1; use chunks=1, or 'interleaved'"),
        ("interleaved", (4, 1, 8), "with 1 chunks a stage: it needs 2"),
        ("zb-v", (4, 3, 8), "with 3 chunks a stage: it has 2"),
        ("interleaved", (4, 2, 6), "6 microbatches on 4 stages: .* use 4 or 8 microbatches"),
        ("1f1b", (4, 1, 8, 3), "with 3 live microbatches: it holds 4; allow 4"),
        ("gpipe", (2, 1, 8, 7), "with 7 live microbatches: it holds 8"),
        ("interleaved", (2, 2, 8, 2), "with 2 live microbatches: it holds 3"),
    ],
)
def test_what_the_schedule_cannot_do_is_refused(
    name: str, numbers: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        SCHEDULES[name].generate(*numbers)


def test_more_stages_than_ops_are_refused() -> None:
    spec = SCHEDULES["interleaved"]
    size = Size(lanes=4, chunks=2, microbatches=8)
    spec.check(size, num_ops=8)
    with pytest.raises(UnsupportedError, match="4 stages of 2 chunks: the model has 7 ops"):
        spec.check(size, num_ops=7)


def test_an_unknown_name_meets_the_near_one() -> None:
    assert schedule_named("zb-v").name == "zb-v"
    with pytest.raises(HintError, match="did you mean '1f1b'"):
        schedule_named("1f1")
    with pytest.raises(HintError, match=r"use one of gpipe, 1f1b, .*zb-v$"):
        schedule_named("???")
