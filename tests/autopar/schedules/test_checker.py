"""What is wrong with a schedule is found, and named."""

from __future__ import annotations

import pytest

from autopar.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Row,
    Schedule,
    buffers_needed,
    peak_live,
    verify,
)

LETTERS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.INPUT_GRADIENT,
    "W": Kind.WEIGHT_GRADIENT,
}


def row(chunk: int, text: str) -> Row:
    """``F0 B0``: the forward of microbatch 0, its backward."""
    return tuple(Action(LETTERS[word[0]], chunk, int(word[1:])) for word in text.split())


def rows(*texts: str) -> Schedule:
    return tuple(row(chunk, text) for chunk, text in enumerate(texts))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (rows("F0 B0 F1 B1", "F0 B0 F1"), "backward of chunk 1 for microbatch 1 never runs"),
        (rows("F0 F0 B0 F1 B1", "F0 B0 F1 B1"), "forward of chunk 0 for microbatch 0 runs 2 times"),
        (rows("F0 B0 F1 B1 F2", "F0 B0 F1 B1"), "microbatch 2 is not part of the step"),
        (rows("F0 I0 W0 F1 I1 W1", "F0 I0 W0 F1 I1"), "weight_gradient of chunk 1 .* never runs"),
        (
            (row(0, "F0 F1 B0 B1") + row(1, "F0"), row(1, "B0 F1 B1")),
            "runs on lane 0, not its chunk's",
        ),
        (rows("F0 F1 B0 B1", "B0 F0 F1 B1"), "the rows wait for each other: lane 0 waits"),
        (
            rows("F0 B0 F1 B1", "F0 F1 B0 B1"),
            "lane 1 waits for forward of chunk 0 for microbatch 1",
        ),
        (rows("F0 W0 I0 F1 I1 W1", "F0 I0 W0 F1 I1 W1"), "lane 0 waits for input_gradient"),
        (rows("F0 F1 B0 B1", "F1 F0 B0 B1"), "microbatch 1 comes before the receiver of forward"),
    ],
)
def test_a_broken_schedule_is_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        verify(schedule, num_chunks=2, microbatches=2)


def test_too_many_live_microbatches_are_found() -> None:
    schedule = SCHEDULES["gpipe"].generate(2, 1, 3)
    verify(schedule, num_chunks=2, microbatches=3, live_bounds=(3, 3))
    with pytest.raises(AssertionError, match=r"lane 1 holds 3\.0 live microbatches, more than 2"):
        verify(schedule, num_chunks=2, microbatches=3, live_bounds=(3, 2))


def test_blocking_sends_can_need_more_than_one_message_a_channel() -> None:
    """Lane 0 sends three forwards before it takes a gradient; lane 1 wants to send it after one."""
    schedule = rows("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    verify(schedule, num_chunks=2, microbatches=4)
    assert buffers_needed(schedule) == 2
    with pytest.raises(AssertionError, match="lane 0 waits to send the result of forward"):
        verify(schedule, num_chunks=2, microbatches=4, buffers=1)


def test_live_microbatches_end_with_the_weight_gradient() -> None:
    actions = row(0, "F0 I0 F1 I1 W0 W1")
    assert peak_live(actions) == 2
    assert peak_live(actions, pending_share=0.5) == 1.5
    assert peak_live(()) == 0


def test_one_lane_sends_nothing() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        schedule = SCHEDULES[name].generate(1, 1, 3)
        verify(schedule, num_chunks=1, microbatches=3, buffers=0)
