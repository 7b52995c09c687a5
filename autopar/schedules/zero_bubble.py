"""Schedules whose backward is split, so that weight gradients fill what were bubbles.

A family of orders of forwards and input gradients is tried, weight gradients are placed in each
(`weights.place_weights`), and the rows with the shortest period win. In all of them a lane runs
some forwards, then one input gradient, one forward in turn, as in 1F1B; they differ in how many.

Source:
    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, 2023, sections 2 to 4; the V of
    two chunks: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.schedules.actions import Kind, Schedule
from autopar.schedules.weights import Costs, Placed, Policy, Step, place_weights


def one_chunk(lanes: int, microbatches: int, limit: int, costs: Costs) -> Schedule:
    """The best rows found that hold at most `limit` live microbatches on any lane.

    `limit` = S is ZB-H1, with the memory of 1F1B's first lane on every lane; 2 S is ZB-H2.
    """
    shortest_s = _least_period_s(lanes, microbatches, limit, costs)
    orders = (
        [_in_turn(lane, first, microbatches) for lane, first in enumerate(warm_up)]
        for warm_up in _warm_ups(lanes, limit, costs)
    )
    return _best(orders, range(lanes), limit, costs, shortest_s)


def two_chunks(lanes: int, microbatches: int, limit: int, costs: Costs) -> Schedule:
    """The best rows found of the V: lane i holds chunks i and 2S - 1 - i, at most `limit` live.

    `limit` = 2 S chunks is the memory of 1F1B's first lane on every lane.
    """
    placement = [*range(lanes), *reversed(range(lanes))]
    shortest_s = 2 * microbatches * (costs.forward_s + costs.input_s + costs.weight_s)
    orders = [[_v_order(lane, lanes, microbatches) for lane in range(lanes)]]
    return _best(orders, placement, limit, costs, shortest_s)


def _best(
    orders: Iterable[Sequence[Sequence[Step]]],
    placement: Sequence[int],
    limit: int,
    costs: Costs,
    shortest_s: float,
) -> Schedule:
    """The rows of the shortest period; the first that cannot be shortened ends the search."""
    best: Placed | None = None
    for order in orders:
        steps_s = len(order[0]) / 2 * (costs.forward_s + costs.input_s + costs.weight_s)
        for policy in _policies(len(order), limit):
            if best is not None:
                policy = replace(policy, most_idle_s=best.period_s - steps_s)
            placed = place_weights(order, placement, costs, policy)
            if placed is None:
                continue
            if best is None or _seconds(placed) < _seconds(best):
                best = placed
            if best.period_s <= shortest_s * (1 + 1e-9):
                return best.schedule
    assert best is not None, f"no order of {len(placement)} chunks holds {limit} microbatches"
    return best.schedule


def _seconds(placed: Placed) -> tuple[float, float]:
    """Period, then makespan, without what rounding adds."""
    return round(placed.period_s, 9), round(placed.makespan_s, 9)


def _policies(lanes: int, limit: int) -> Iterator[Policy]:
    """Weight gradients at a steady distance, or as late as memory lets them.

    Some wait for a gap that they fill to a half or wholly, others delay the next action for it.
    """
    steady = [2 * lane for lane in range(lanes)]
    yield Policy(limit=limit, backlog=steady, gap=0.05)
    yield Policy(limit=limit, gap=0.05)
    yield Policy(limit=limit, gap=0.5)
    if limit <= lanes:
        yield Policy(limit=limit, gap=1.0)


def _least_period_s(lanes: int, microbatches: int, limit: int, costs: Costs) -> float:
    """A period of the first lane that no rows within the limit can beat.

    * its work, and its wait for the first input gradient, which `limit` forwards cannot fill;
    * the way of the first microbatch to the last lane, all forwards and input gradients there with
      those weight gradients that free memory for the last forward, and the way back.
    """
    both_s = costs.forward_s + costs.input_s
    forwards = min(limit, microbatches)
    wait_s = max(0.0, _return_s(lanes, costs) - forwards * costs.forward_s)
    work_s = microbatches * (both_s + costs.weight_s)
    unfreed = (limit - 1) / costs.pending_share if costs.pending_share else math.inf
    forced = math.ceil(max(0.0, microbatches - 1 - unfreed - 1e-9))
    ways_s = (lanes - 1) * (both_s + 2 * costs.send_s)
    last_s = ways_s + microbatches * both_s + (forced + (lanes > 1)) * costs.weight_s
    return max(work_s + wait_s, last_s)


def _return_s(lanes: int, costs: Costs) -> float:
    """From a lane's first forward to its first input gradient, `lanes` lanes from the loss."""
    hop_s = costs.forward_s + costs.input_s + 2 * costs.send_s
    return costs.forward_s + (lanes - 1) * hop_s


def _warm_ups(lanes: int, limit: int, costs: Costs) -> list[list[int]]:
    """Forwards in front of the first input gradient, for every lane, in ways worth trying.

    Where memory is short, one less per lane. Where it is not, twice those of 1F1B, or about as many
    as fill the way to the loss and back.
    """
    left = range(lanes, 0, -1)
    ways: list[list[float]] = [[limit - lane for lane in range(lanes)]]
    if limit > lanes:
        forward_s = max(costs.forward_s, 1e-9)
        back = [_return_s(n, costs) / forward_s for n in left]
        ways = [[2 * n for n in left], [2 * n - 1 for n in left], *ways]
        ways += [[share * n + more for n in back] for share, more in _FILLS]
    ways.append(list(left))
    counts = [[max(1, min(limit, math.floor(n + 1e-9))) for n in way] for way in ways]
    return [count for i, count in enumerate(counts) if count not in counts[:i]]


_FILLS = ((1, 0), (0.9, 1), (1, 0.5), (1, 0.999))
"""(share of the way that is filled, forwards added), found best for some costs."""


def _in_turn(lane: int, warm_up: int, microbatches: int) -> list[Step]:
    """`warm_up` forwards, then one input gradient, one forward in turn."""
    first = min(warm_up, microbatches)
    steps = [(Kind.FORWARD, lane, m) for m in range(first)]
    for m in range(microbatches):
        steps.append((Kind.INPUT_GRADIENT, lane, m))
        if first + m < microbatches:
            steps.append((Kind.FORWARD, lane, first + m))
    return steps


def _v_order(lane: int, lanes: int, microbatches: int) -> list[Step]:
    """The V of one lane, written for enough microbatches; those that there are not are left out."""
    enough = max(2 * lanes - 1, microbatches)
    near, far = lane, 2 * lanes - 1 - lane
    forward, gradient = Kind.FORWARD, Kind.INPUT_GRADIENT
    turns = [(forward, near)] * (2 * (lanes - lane) - 1)
    turns += [(forward, far), (forward, near)] * lane
    turns += [(forward, far), (gradient, far)] * (lanes - lane)
    rest = enough - (2 * lanes - 1 - lane)
    for turn in range(enough - lanes):
        turns += [(forward, near)] * (turn < rest)
        turns += [(gradient, near), (forward, far), (gradient, far)]
    turns += [(gradient, near), (gradient, far)] * lane
    turns += [(gradient, near)] * (lanes - lane)
    count: dict[tuple[Kind, int], int] = {}
    steps = []
    for kind, chunk in turns:
        microbatch = count.get((kind, chunk), 0)
        count[kind, chunk] = microbatch + 1
        if microbatch < microbatches:
            steps.append((kind, chunk, microbatch))
    return steps
