"""Proof that a schedule is right: all work once, in order, within its memory, without deadlock.

What is proven about deadlock. Between two lanes there is one channel each way for forward values
and one for gradients; messages leave a channel in the order they entered it, as on a network that
matches messages by their order. A lane runs its row in order: it takes the messages an action
needs, computes, and puts its result on the channel, *blocking* while the channel already holds
`buffers` messages that the receiver has not taken. Every row ends.

With sends that wait for their receive (rendezvous), a channel that holds n messages is a receiver
that posts its receives n messages ahead; so ``buffers=1`` also covers rendezvous sends where the
next receive of each channel is posted once the one before was taken. Rendezvous with no receive
posted ahead is *not* claimed, and cannot be: two neighbours of a 1F1B pipeline send to each other
at the same time. Sends that never block need nothing more than is proven here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from autopar.schedules.actions import (
    Action,
    Kind,
    Row,
    Schedule,
    chunk_lanes,
    gradient_kind,
    live_counts,
    needs,
)

Channel = tuple[int, int, Kind]
"""Sending lane, receiving lane, and what is sent."""


def verify(
    schedule: Schedule,
    *,
    num_chunks: int,
    microbatches: int,
    live_bounds: Sequence[int] | None = None,
    buffers: int | None = None,
    pending_share: float = 1.0,
) -> None:
    """Assert that a schedule is right.

    Args:
        schedule: One row per lane.
        num_chunks: Chunks of the whole model.
        microbatches: Number of microbatches.
        live_bounds: Most live microbatches of chunks each lane may hold; None allows any number.
        buffers: Messages a channel holds (see above); None for as many as there are.
        pending_share: As of `peak_live`.

    Raises:
        AssertionError: What is wrong, and where.
    """
    verify_complete(schedule, num_chunks, microbatches)
    verify_runs(schedule, buffers)
    for lane, bound in enumerate(live_bounds or ()):
        live = peak_live(schedule[lane], pending_share)
        assert live <= bound + 1e-6, (
            f"lane {lane} holds {live} live microbatches, more than {bound}"
        )


def verify_complete(schedule: Schedule, num_chunks: int, microbatches: int) -> None:
    """Assert that every chunk has every action for every microbatch once, on one lane."""
    count = Counter(action for row in schedule for action in row)
    twice = [action for action, times in count.items() if times > 1]
    assert not twice, f"{twice[0]} runs {count[twice[0]]} times"
    split = gradient_kind(schedule) is Kind.INPUT_GRADIENT
    backward = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if split else (Kind.BACKWARD,)
    expected = {
        Action(kind, chunk, microbatch)
        for kind in (Kind.FORWARD, *backward)
        for chunk in range(num_chunks)
        for microbatch in range(microbatches)
    }
    missing = sorted(expected - count.keys())
    assert not missing, f"{missing[0]} never runs"
    surplus = sorted(count.keys() - expected)
    assert not surplus, f"{surplus[0]} is not part of the step"
    lanes = chunk_lanes(schedule)
    for lane, row in enumerate(schedule):
        for action in row:
            assert lanes[action.chunk] == lane, f"{action} runs on lane {lane}, not its chunk's"


def verify_runs(schedule: Schedule, buffers: int | None = None) -> None:
    """Assert that all rows end, run as the module says."""
    stuck = _run(schedule, buffers)
    assert not stuck, "the rows wait for each other: " + "; ".join(stuck)


def buffers_needed(schedule: Schedule) -> int:
    """The fewest messages that every channel must hold for the rows to end; 1 at least."""
    verify_runs(schedule)
    most = max(len(row) for row in schedule)
    return next(n for n in range(1, most + 1) if not _run(schedule, n))


def peak_live(row: Row, pending_share: float = 1.0) -> float:
    """Most microbatches of chunks whose saved values a lane holds at once.

    Args:
        row: Its actions.
        pending_share: Of what a forward saves, the share that is kept from its input gradient to
            its weight gradient.
    """
    return max(live_counts(row, pending_share), default=0)


def _run(schedule: Schedule, buffers: int | None) -> list[str]:
    """Run the rows in order; for every lane that cannot end, what it waits for."""
    lanes = chunk_lanes(schedule)
    last, gradient = max(lanes), gradient_kind(schedule)
    channels: dict[Channel, deque[Action]] = {}
    done: set[Action] = set()
    sending: list[Channel | None] = [None] * len(schedule)
    position = [0] * len(schedule)
    waits = [""] * len(schedule)
    moved = deque(range(len(schedule)))
    while moved:
        lane = moved.popleft()
        while position[lane] < len(schedule[lane]):
            action = schedule[lane][position[lane]]
            if (target := sending[lane]) is None:
                taken = _take(action, lanes, last, gradient, channels, done)
                if isinstance(taken, str):
                    waits[lane] = f"lane {lane} waits for {taken} to run {action}"
                    break
                moved.extend(taken)
                done.add(action)
                target = _channel(action, lanes, last)
            if target is not None:
                queue = channels.setdefault(target, deque())
                if buffers is not None and len(queue) >= buffers:
                    sending[lane] = target
                    waits[lane] = f"lane {lane} waits to send the result of {action}"
                    break
                queue.append(action)
                moved.append(target[1])
            sending[lane] = None
            position[lane] += 1
    return [waits[i] for i, row in enumerate(schedule) if position[i] < len(row)]


def _take(
    action: Action,
    lanes: dict[int, int],
    last: int,
    gradient: Kind,
    channels: dict[Channel, deque[Action]],
    done: set[Action],
) -> list[int] | str:
    """Take the messages an action needs: the lanes they came from, or what is not there yet."""
    heads: list[tuple[Channel, deque[Action]]] = []
    for source in needs(action, last, gradient):
        channel = _channel(source, lanes, last)
        remote = source.chunk != action.chunk and channel is not None
        if not remote or channel is None:
            if source not in done:
                return str(source)
            continue
        queue = channels.setdefault(channel, deque())
        if not queue:
            return str(source)
        assert queue[0] == source, f"{action} comes before the receiver of {queue[0]}, sent earlier"
        heads.append((channel, queue))
    for _, queue in heads:
        queue.popleft()
    return [channel[0] for channel, _ in heads]


def _channel(action: Action, lanes: dict[int, int], last: int) -> Channel | None:
    """Where the result of an action is sent; None if it stays on the lane."""
    if action.kind is Kind.WEIGHT_GRADIENT:
        return None
    target = action.chunk + (1 if action.kind is Kind.FORWARD else -1)
    if not 0 <= target <= last or lanes[target] == lanes[action.chunk]:
        return None
    return lanes[action.chunk], lanes[target], action.kind
