"""Exact event simulation of a schedule: seconds, bubbles and live microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedules.actions import (
    LAST_USES,
    Action,
    Kind,
    Schedule,
    chunk_lanes,
    gradient_kind,
    needs,
)


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """Seconds of one chunk and one microbatch.

    Attributes:
        forward_s: Seconds of its forward.
        backward_s: Seconds of all of its backward.
        weight_s: The part of the backward that makes the gradients of parameters, where a schedule
            does it apart.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.forward_s >= 0 and 0 <= self.weight_s <= self.backward_s, self

    def seconds(self, kind: Kind) -> float:
        """Seconds of one action."""
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.backward_s
        return self.weight_s if kind is Kind.WEIGHT_GRADIENT else self.backward_s - self.weight_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every action of a schedule runs.

    Attributes:
        schedule: The schedule, one row per lane.
        starts_s: Start of every action of every row, in seconds from the first.
        ends_s: End of every action of every row.
    """

    schedule: Schedule
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end: a step that ends with a barrier."""
        return max(row[-1] for row in self.ends_s)

    @property
    def period_s(self) -> float:
        """Seconds from first start to last end of the lane that takes longest.

        What repeated steps take where every lane goes on to its next step on its own. Tables of
        zero-bubble schedules give this number.
        """
        return max(map(self.span_s, range(len(self.schedule))))

    def span_s(self, lane: int) -> float:
        """Seconds from the lane's first start to its last end."""
        return self.ends_s[lane][-1] - self.starts_s[lane][0]

    def busy_s(self, lane: int) -> float:
        """Seconds that the lane computes."""
        return sum(
            end - start for start, end in zip(self.starts_s[lane], self.ends_s[lane], strict=True)
        )

    def bubble_s(self, lane: int) -> float:
        """Seconds of the makespan that the lane does not compute."""
        return self.makespan_s - self.busy_s(lane)

    def live(self, lane: int) -> tuple[tuple[float, int], ...]:
        """(second, live microbatches of the lane's chunks from then on), at every change.

        A forward counts from its start, until the end of the last action that reads what it saved.
        """
        changes = []
        timed = zip(self.schedule[lane], self.starts_s[lane], self.ends_s[lane], strict=True)
        for action, start, end in timed:
            if action.kind is Kind.FORWARD:
                changes.append((start, 1))
            elif action.kind in LAST_USES:
                changes.append((end, -1))
        live, counts = 0, []
        for second, change in changes:
            live += change
            counts.append((second, live))
        return tuple(counts)


def simulate(
    schedule: Schedule,
    times: Sequence[ChunkTime],
    send_s: float | Sequence[float] = 0.0,
    free_s: Sequence[float] = (),
) -> Timeline:
    """When every action runs, each as soon as the one before it and its messages allow.

    Messages do not hold up the lanes or each other; between chunks on one lane there are none.

    Args:
        schedule: One row per lane, proven by `verify`.
        times: One entry per chunk.
        send_s: Seconds of a message between neighbouring chunks, one way: one number, or one for
            each border between chunks.
        free_s: For each lane, when it can begin; none for all at once.
    """
    lanes = chunk_lanes(schedule)
    gradient = gradient_kind(schedule)
    last = len(times) - 1
    sends_s = [send_s] * last if isinstance(send_s, int | float) else list(send_s)
    assert len(lanes) == len(times) and len(sends_s) == last, "one time a chunk and border"
    done: dict[Action, float] = {}
    waiting: dict[Action, int] = {}
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    moved = deque(range(len(schedule)))
    while moved:
        lane = moved.popleft()
        row, begun, ended = schedule[lane], starts[lane], ends[lane]
        while len(begun) < len(row):
            action = row[len(begun)]
            ready = ended[-1] if ended else free_s[lane] if free_s else 0.0
            for source in needs(action, last, gradient):
                if source not in done:
                    waiting[source] = lane
                    break
                arrival = done[source]
                if source.chunk != action.chunk and lanes[source.chunk] != lane:
                    arrival += sends_s[min(source.chunk, action.chunk)]
                ready = max(ready, arrival)
            else:
                begun.append(ready)
                ended.append(ready + times[action.chunk].seconds(action.kind))
                done[action] = ended[-1]
                if action in waiting:
                    moved.append(waiting.pop(action))
                continue
            break
    stuck = [i for i, row in enumerate(schedule) if len(starts[i]) < len(row)]
    assert not stuck, f"lanes {stuck} wait for each other"
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
