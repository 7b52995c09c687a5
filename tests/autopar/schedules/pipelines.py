"""Random pipelines of unequal stages, by simulation and by closed form."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import Size, schedule_named
from cost_models.pipeline import StageTime, one_f_one_b_chained_s, one_f_one_b_reduced_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages, messages at every border, reductions of every stage, microbatches."""

    stages: tuple[StageTime, ...]
    sends_s: tuple[float, ...]
    reduces_s: tuple[float, ...]
    microbatches: int


def _apart(draw: random.Random) -> StageTime:
    return StageTime(draw.uniform(0.7, 1.3), 2 * draw.uniform(0.7, 1.3))


def _one_ratio(draw: random.Random) -> StageTime:
    forward_s = draw.uniform(0.7, 1.3)
    return StageTime(forward_s, 2 * forward_s)


def _any_ratio(draw: random.Random) -> StageTime:
    forward_s = draw.uniform(0.7, 1.3)
    return StageTime(forward_s, forward_s * draw.uniform(1, 3))


KINDS: dict[str, Callable[[random.Random], StageTime]] = {
    "f and b apart": _apart,
    "one ratio": _one_ratio,
    "any ratio": _any_ratio,
}
"""How stages within 30 % of each other are drawn; a backward takes about two forwards."""


def random_pipeline(draw: random.Random, kind: str, *, reduces: bool = True) -> Pipeline:
    """2 to 16 stages, 1 to 64 microbatches, messages up to 2 % of a stage, reductions up to 3."""
    num_stages = draw.randint(2, 16)
    send_s = draw.uniform(0, 0.02) * 3
    return Pipeline(
        stages=tuple(KINDS[kind](draw) for _ in range(num_stages)),
        sends_s=(send_s,) * (num_stages - 1),
        reduces_s=tuple(reduces * draw.uniform(0, 9) for _ in range(num_stages)),
        microbatches=draw.randint(1, 64),
    )


def simulated_s(plan: Pipeline) -> float:
    """Seconds of 1F1B, action by action."""
    size = Size(lanes=len(plan.stages), chunks=1, microbatches=plan.microbatches)
    rows = schedule_named("1f1b").generate(size.lanes, size.chunks, size.microbatches)
    times = [ChunkTime(s.forward_s, s.backward_s) for s in plan.stages]
    ends = simulate(rows, times, plan.sends_s).ends_s
    return max(own[-1] + reduce_s for own, reduce_s in zip(ends, plan.reduces_s, strict=True))


def closed_s(plan: Pipeline) -> float:
    """The closed form."""
    return one_f_one_b_reduced_s(plan.stages, plan.reduces_s, plan.microbatches, plan.sends_s)


def chained_s(plan: Pipeline) -> float:
    """What a dynamic program adds up."""
    return one_f_one_b_chained_s(plan.stages, plan.reduces_s, plan.microbatches, plan.sends_s)
