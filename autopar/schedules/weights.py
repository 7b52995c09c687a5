"""Where weight gradients go in rows whose forwards and input gradients are in a given order.

Nothing waits for a weight gradient, so it runs in the idle time in front of an action whose message
is late, when memory must be freed before the next forward, when more than an allowed backlog waits,
or at the end of the row. Which it is depends on seconds: the rows are simulated while they grow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.schedules.actions import Action, Kind, Schedule

Step = tuple[Kind, int, int]
"""Forward or input gradient, chunk, microbatch."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What decides between orders: seconds of one chunk, of a message, and shares of memory.

    Attributes:
        forward_s: Seconds of a forward.
        input_s: Seconds of the gradient of an input.
        weight_s: Seconds of the gradients of parameters.
        send_s: Seconds of a message between neighbouring lanes, one way.
        pending_share: Of what a forward saves, the share that is kept between the two gradients.
    """

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    send_s: float = 0.02
    pending_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a weight gradient may run early.

    Attributes:
        limit: Most live microbatches of chunks on a lane.
        backlog: Weight gradients that may wait on each lane before one goes first; None for any.
        gap: The idle time that one needs in front of it, as a share of its own seconds.
        most_idle_s: Idle seconds between its first and last action at which a lane is given up.
    """

    limit: int
    backlog: Sequence[int] | None = None
    gap: float = 0.05
    most_idle_s: float = math.inf


@dataclass(slots=True)
class _Lane:
    steps: Sequence[Step]
    at: int = 0
    now_s: float = 0.0
    start_s: float = 0.0
    idle_s: float = 0.0
    load: float = 0.0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Placed:
    """A schedule and its seconds under the costs it was made for.

    Attributes:
        period_s: Seconds of the lane that takes longest, from its first start to its last end.
        makespan_s: Seconds from the first start to the last end.
        schedule: The rows.
    """

    period_s: float
    makespan_s: float
    schedule: Schedule


def place_weights(
    orders: Sequence[Sequence[Step]], lanes: Sequence[int], costs: Costs, policy: Policy
) -> Placed | None:
    """The rows with their weight gradients; None if they wait for each other, memory or too long.

    Args:
        orders: Forwards and input gradients of every lane, in order.
        lanes: Lane of every chunk; neighbouring chunks are on one lane or on neighbouring ones.
        costs: Seconds and shares.
        policy: When a weight gradient may go first.
    """
    state = [_Lane(steps) for steps in orders]
    ends: dict[Step, float] = {}
    moved = deque(range(len(orders)))
    while moved:
        number = moved.popleft()
        lane = state[number]
        before = lane.at
        while lane.at < len(lane.steps):
            ready_s = _ready_s(lane.steps[lane.at], lanes, costs, ends)
            if ready_s is None:
                break
            backlog = None if policy.backlog is None else policy.backlog[number]
            if not _fill(lane, ready_s, costs, (policy, backlog)):
                return None
            _advance(lane, ready_s, costs, ends)
            if lane.idle_s > policy.most_idle_s + _ROUNDING:
                return None
        if lane.at > before:
            moved.extend(n for n in (number - 1, number + 1) if 0 <= n < len(state))
    if any(lane.at < len(lane.steps) for lane in state):
        return None
    for lane in state:
        while lane.pending:
            _weight(lane, costs)
    return Placed(
        max(lane.now_s - lane.start_s for lane in state),
        max(lane.now_s for lane in state),
        tuple(tuple(lane.row) for lane in state),
    )


def _ready_s(
    step: Step, lanes: Sequence[int], costs: Costs, ends: dict[Step, float]
) -> float | None:
    """When the inputs of a step are on its lane; None if that is not known yet."""
    kind, chunk, microbatch = step
    if kind is Kind.FORWARD:
        source = chunk - 1
        if source < 0:
            return 0.0
    else:
        source = chunk + 1
        if source == len(lanes):
            return ends.get((Kind.FORWARD, chunk, microbatch))
    end_s = ends.get((kind, source, microbatch))
    if end_s is None or lanes[source] == lanes[chunk]:
        return end_s
    return end_s + costs.send_s


def _fill(lane: _Lane, ready_s: float, costs: Costs, rule: tuple[Policy, int | None]) -> bool:
    """Run the weight gradients that go before the next step; False if memory forbids the step."""
    policy, backlog = rule
    needed = 1.0 if lane.steps[lane.at][0] is Kind.FORWARD else 0.0
    gap_s = policy.gap * costs.weight_s - _ROUNDING
    while lane.pending:
        full = needed and lane.load + needed > policy.limit + _ROUNDING
        over = backlog is not None and len(lane.pending) > backlog
        if not (full or over or ready_s - lane.now_s >= gap_s > -_ROUNDING):
            break
        _weight(lane, costs)
    return not needed or lane.load + needed <= policy.limit + _ROUNDING


def _advance(lane: _Lane, ready_s: float, costs: Costs, ends: dict[Step, float]) -> None:
    """Run the next step."""
    step = lane.steps[lane.at]
    kind, chunk, microbatch = step
    start_s = max(lane.now_s, ready_s)
    if lane.row:
        lane.idle_s += start_s - lane.now_s
    else:
        lane.start_s = start_s
    if kind is Kind.FORWARD:
        lane.now_s = start_s + costs.forward_s
        lane.load += 1
    else:
        lane.now_s = start_s + costs.input_s
        lane.load -= 1 - costs.pending_share
        lane.pending.append((chunk, microbatch))
    ends[step] = lane.now_s
    lane.row.append(Action(kind, chunk, microbatch))
    lane.at += 1


def _weight(lane: _Lane, costs: Costs) -> None:
    """Run the weight gradient that has waited longest."""
    lane.row.append(Action(Kind.WEIGHT_GRADIENT, *lane.pending.popleft()))
    lane.now_s += costs.weight_s
    lane.load -= costs.pending_share
