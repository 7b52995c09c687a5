"""Steps of a model within more and more memory, which must not get slower."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar import hint
from autopar.errors import InfeasibleError
from autopar.hint import Hint
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis
from cost_models.cluster import Cluster

EXACT = 1e-9
"""Relative difference at which seconds are the same."""

NEVER_S = 1e6
"""More seconds than any of these plans takes to find."""

WHOLE = 1000
"""Thousandths that are all of the memory."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The plan within a part of the memory.

    Attributes:
        part: Thousandths of what the fastest plan holds.
        step_s: Its step; infinite where nothing was found.
    """

    part: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Slower:
    """A plan that is slower than one within less memory.

    Attributes:
        part: Thousandths of what the fastest plan holds; ``other`` those of the faster plan.
        by: By what part of the other's step.
    """

    part: int
    other: int
    by: float


def within_parts(
    analysis: Analysis, cluster: Cluster, parts: Sequence[int], *hints: Hint
) -> list[Budget]:
    """Plans within thousandths of what the fastest holds, and that one, from less to more.

    The clock ends none of them.
    """
    request = Request(model="m", fingerprint="f", cluster=cluster, time_limit_s=NEVER_S)

    def planned(*more: Hint) -> tuple[float, int]:
        found = make_plan(analysis, replace(request, hints=(*hints, *more))).prediction
        return found.step_s, found.memory.total_bytes

    free_s, total = planned()
    found = [Budget(WHOLE, free_s)]
    for part in sorted(parts, reverse=True):
        try:
            step_s, _ = planned(hint.memory_limit(total * part // WHOLE))
        except InfeasibleError:
            step_s = math.inf
        found.append(Budget(part, step_s))
    return found[::-1]


def slower(budgets: Sequence[Budget]) -> Iterator[Slower]:
    """Plans that are slower than one within less memory, beside the fastest of those."""
    best = budgets[0]
    for own in budgets:
        if own.step_s > best.step_s * (1 + EXACT):
            yield Slower(own.part, best.part, own.step_s / best.step_s - 1)
        best = min(best, own, key=lambda budget: budget.step_s)
