"""Exact event simulation of GPipe and 1F1B, the oracle of the closed forms."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.pipeline import StageTime

Task = tuple[str, int]
"""``F`` or ``B``, and the microbatch."""


def gpipe_order(stage: int, stages: int, num_microbatches: int) -> list[Task]:
    """All forwards, then all backwards."""
    del stage, stages
    return [("F", m) for m in range(num_microbatches)] + [("B", m) for m in range(num_microbatches)]


def one_f_one_b_order(stage: int, stages: int, num_microbatches: int) -> list[Task]:
    """As many forwards as stages follow, then one forward, one backward."""
    warm_up = min(stages - 1 - stage, num_microbatches)
    order = [("F", m) for m in range(warm_up)]
    for m in range(num_microbatches - warm_up):
        order += [("F", warm_up + m), ("B", m)]
    return order + [("B", m) for m in range(num_microbatches - warm_up, num_microbatches)]


def makespan_s(stages: Sequence[StageTime], orders: Sequence[list[Task]], send_s: float) -> float:
    """Seconds until every stage has done its tasks in order, each as soon as its input is there.

    Messages take `send_s` and do not hold up the stages.
    """
    last = len(stages) - 1
    end: dict[tuple[str, int, int], float] = {}
    free_s = [0.0] * len(stages)
    position = [0] * len(stages)
    while any(position[i] < len(orders[i]) for i in range(len(stages))):
        before = list(position)
        for i, stage in enumerate(stages):
            while position[i] < len(orders[i]):
                kind, microbatch = orders[i][position[i]]
                if kind == "F":
                    source = None if i == 0 else ("F", i - 1, microbatch)
                else:
                    source = ("F", i, microbatch) if i == last else ("B", i + 1, microbatch)
                if source is not None and source not in end:
                    break
                sent_s = 0.0 if source is None else end[source]
                if source is not None and source[1] != i:
                    sent_s += send_s
                seconds = stage.forward_s if kind == "F" else stage.backward_s
                free_s[i] = max(free_s[i], sent_s) + seconds
                end[kind, i, microbatch] = free_s[i]
                position[i] += 1
        assert before != position, "the orders wait for each other"
    return max(free_s)


def most_live(order: list[Task]) -> int:
    """Most microbatches that a stage has done forward and not yet backward."""
    live = most = 0
    for kind, _ in order:
        live += 1 if kind == "F" else -1
        most = max(most, live)
    return most
