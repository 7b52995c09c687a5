"""DAPPLE's latency of a plan, and its random plans.

Source:
    Fan et al., DAPPLE, PPoPP 2021, section 4.1: stages of computation and of communication
    alternate; the pivot Q is the stage with the least bubbles.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autopar.schedules.makespan import ChunkTime


@dataclass(frozen=True)
class DapplePlan:
    """Seconds of stages, of the messages between them, of all-reduces; microbatches."""

    times: list[ChunkTime]
    sends_s: list[float]
    reduces_s: list[float]
    microbatches: int


def latency_s(plan: DapplePlan) -> float:
    """``T_w + T_s + T_e``: the pivot's warm-up, its steady phase, and the end.

    * ``T_w = sum_{s <= Q} F_s``; ``T_s = (M - 1)(F_Q + B_Q)``;
    * ``T_e = max_s (AR_s + sum_{a = s..Q} B_a if s <= Q, else AR_s - sum_{a = Q..s-1} B_a)``;
    * from the last stage backwards, s becomes the pivot if
      ``(M - 1)(F_s + B_s) > (M - 1)(F_Q + B_Q) + sum_{s < a <= Q} (F_a + B_a)``. The sum includes
      Q: without it, neighbours that differ by nothing hand the pivot on, and the stages behind it
      are forgotten.
    """
    forward, backward, reduce = [], [], []
    for i, time in enumerate(plan.times):
        forward.append(time.forward_s)
        backward.append(time.backward_s)
        reduce.append(plan.reduces_s[i])
        if i < len(plan.sends_s):
            forward.append(plan.sends_s[i])
            backward.append(plan.sends_s[i])
            reduce.append(0.0)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    rounds = plan.microbatches - 1
    pivot = len(both) - 1
    for s in reversed(range(len(both) - 1)):
        if rounds * both[s] > rounds * both[pivot] + sum(both[s + 1 : pivot + 1]):
            pivot = s
    end_s = max(
        reduce[s] + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot:s]))
        for s in range(len(both))
    )
    return sum(forward[: pivot + 1]) + rounds * both[pivot] + end_s


def random_plan(draw: random.Random, spread: float) -> DapplePlan:
    """A chain of layers, within `spread` of each other, cut as evenly as their sum allows.

    Messages take up to 5 % of a stage, the all-reduces up to three stages.
    """
    num_stages = draw.randint(2, 8)
    layers = [draw.uniform(1 - spread, 1 + spread) for _ in range(draw.randint(24, 64))]
    total = sum(layers)
    stages = [0.0] * num_stages
    for layer, end in zip(layers, accumulate(layers), strict=True):
        stages[min(int((end - layer / 2) / total * num_stages), num_stages - 1)] += layer
    mean = total / num_stages
    return DapplePlan(
        [ChunkTime(s, 2 * s) for s in stages],
        [draw.uniform(0, 0.05) * mean for _ in range(num_stages - 1)],
        [draw.uniform(0, 3) * mean for _ in range(num_stages)],
        draw.randint(2 * num_stages, 8 * num_stages),
    )


PROFILES = {
    "BERT-48": (48, 2.69e-3, 4.47e-3, 4.325e6, 50.385e6, 64),
    "XLNet-36": (36, 3.4e-3, 4.9e-3, 2e6, 52e6, 128),
}
"""As published with DAPPLE: layers; of each, seconds of forward and backward, bytes sent and of
parameters; microbatches."""

DEVICES, LINK = 16, 1.25e9
"""Devices, and bytes a second between them."""


def placed_plan(draw: random.Random, profile: str) -> DapplePlan:
    """A random plan of DAPPLE's kind: replicas of every stage, and layers in proportion to them."""
    layers, forward_s, backward_s, sent, held, microbatches = PROFILES[profile]
    num_stages = draw.randint(2, 8)
    borders = sorted(draw.sample(range(1, DEVICES), num_stages - 1))
    replicas = [b - a for a, b in zip([0, *borders], [*borders, DEVICES], strict=True)]
    ends = [round(layers * end / DEVICES) for end in accumulate(replicas)]
    counts = [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    each = [count / n for count, n in zip(counts, replicas, strict=True)]
    return DapplePlan(
        [ChunkTime(share * forward_s, share * backward_s) for share in each],
        [sent / min(pair) / LINK for pair in pairwise(replicas)],
        [2 * (n - 1) / n * held * c / LINK for n, c in zip(replicas, counts, strict=True)],
        microbatches,
    )
