"""How well predictions rank the plans that were measured for one model, GPUs and batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean

from tests.benchmarks.run import Run

TIE = 0.02
"""Measured steps no further apart are a tie: runs of one plan that were repeated differ as much."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One measured plan: what it ran, seconds predicted and measured."""

    run: Run
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of the groups of a family.

    Attributes:
        tau: Kendall's, mean of groups; None where no group has two plans.
        tau_apart: Of pairs that are no tie.
        regret: Measured step of the plan that is predicted fastest over the best, less 1; the mean.
        num_groups: Groups with two plans or more.
        num_close: Those whose two best are a tie.
    """

    tau: float | None
    tau_apart: float | None
    regret: float
    num_groups: int
    num_close: int


def ranking(groups: Sequence[Sequence[Ranked]]) -> Ranking:
    """Of groups of plans for the same model, GPUs and batch."""
    groups = [group for group in groups if len({ranked.run for ranked in group}) > 1]
    return Ranking(
        tau=_mean(_tau(group, 0.0) for group in groups),
        tau_apart=_mean(_tau(group, TIE) for group in groups),
        regret=_mean(map(_regret, groups)) or 0.0,
        num_groups=len(groups),
        num_close=sum(map(_is_close, groups)),
    )


def repeats(plans: Iterable[Ranked]) -> list[float]:
    """By how much runs of one plan differ, of every pair."""
    same: dict[Run, list[float]] = defaultdict(list)
    for plan in plans:
        same[plan.run].append(plan.measured_s)
    return [max(pair) / min(pair) - 1 for found in same.values() for pair in combinations(found, 2)]


def _mean(found: Iterable[float | None]) -> float | None:
    values = [value for value in found if value is not None]
    return mean(values) if values else None


def _tau(group: Sequence[Ranked], tie: float) -> float | None:
    """Kendall's tau of the pairs further apart than a tie; a pair predicted equal counts 0."""
    signs = list(_signs(group, tie))
    return sum(signs) / len(signs) if signs else None


def _signs(group: Sequence[Ranked], tie: float) -> Iterator[int]:
    for one, other in combinations(group, 2):
        measured = one.measured_s - other.measured_s
        if one.run == other.run or abs(measured) <= tie * min(one.measured_s, other.measured_s):
            continue
        sign = measured * (one.predicted_s - other.predicted_s)
        yield (sign > 0) - (sign < 0)


def _regret(group: Sequence[Ranked]) -> float:
    chosen = min(group, key=lambda plan: plan.predicted_s)
    return chosen.measured_s / min(plan.measured_s for plan in group) - 1


def _is_close(group: Sequence[Ranked]) -> bool:
    best, second, *_ = sorted(plan.measured_s for plan in group)
    return second <= best * (1 + TIE)
