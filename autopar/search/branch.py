"""From a relaxation to whole choices: it is rounded, and branched on where that costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from autopar.search.linear import NOTHING_FOUND, IntegerProgram, Outcome, run
from autopar.search.problem import Arc

GAP = 1e-4
"""Relative gap at which the solver may stop."""

SHARE = 1e-6
"""Least share of a class that counts as a choice."""

DIVE_GAP = 3e-3
"""Relative gap at which a rounded relaxation is good enough not to branch."""

BRANCH_GAP = 1e-2
"""Relative gap at which branching may stop; what it finds is mostly nearer."""

NUM_NODES = 500
"""Nodes of the branching where rounding is not good enough, so that every machine ends alike."""

ROUGH_GAP, ROUGH_NODES = 0.1, 50
"""The same for a search that is rough."""

HALF = 0.5
"""Share of a class from which rounding has it run again."""


class Way(Enum):
    """Copies over the host link on the arcs of values: their direction and phase."""

    IN_EARLY = auto()
    IN_LATE = auto()
    OUT_LATE = auto()


@dataclass(slots=True)
class Columns:
    """Where the variables of a problem lie."""

    pick: list[range] = field(default_factory=list)
    again: list[range] = field(default_factory=list)
    keep: list[range | None] = field(default_factory=list)
    remade: list[range | None] = field(default_factory=list)
    extra: list[range | None] = field(default_factory=list)
    away: list[range | None] = field(default_factory=list)
    states: list[range | None] = field(default_factory=list)
    added_up: dict[int, list[tuple[int, Arc]]] = field(default_factory=dict)
    over_link: dict[Way, list[tuple[int, float]]] = field(
        default_factory=lambda: {way: [] for way in Way}
    )


def search(
    program: IntegerProgram, columns: Columns, deadline: float, gap: float, *, rough: bool = False
) -> Outcome:
    """Solve the relaxation; round it where it is fractional; branch where rounding costs.

    A rough search branches only where rounding ends with nothing that fits, and not for long.
    """
    relaxed = run(program, deadline, gap, relaxed=True)
    kept = (keep for keep in (*columns.keep, *columns.away, *columns.states) if keep is not None)
    groups = [*columns.pick, *kept]
    if gap < GAP:
        groups += columns.again
    if relaxed.status == "time_limited":
        return NOTHING_FOUND
    if not len(relaxed.values) or not _fractional(program, groups, relaxed.values):
        return relaxed
    rounded = _dive(program, columns, relaxed, deadline, gap)
    # Rounding may end where nothing fits: then its objective is infinite, and close to anything.
    near = (
        rough or gap > DIVE_GAP or rounded.objective - relaxed.bound <= DIVE_GAP * rounded.objective
    )
    if gap >= GAP and near and len(rounded.values):
        return rounded
    branched, asked = NOTHING_FOUND, gap
    for asked, num_nodes in _efforts(gap, rough=rough):
        branched = run(program, deadline, asked, relaxed=False, num_nodes=num_nodes)
        if len(branched.values) or branched.status == "infeasible":
            break
    best = min(branched, rounded, key=lambda outcome: outcome.objective)
    bound = max(branched.bound, relaxed.bound)
    if not len(best.values):
        return branched
    closed = best.objective - bound <= gap * best.objective
    proven = closed or (branched.status == "optimal" and asked <= gap)
    late = branched.status == "time_limited"
    status = "optimal" if proven else "time_limited" if late else "feasible"
    return replace(best, status=status, bound=min(bound, best.objective))


def _efforts(gap: float, *, rough: bool) -> list[tuple[float, int | None]]:
    """Gaps and nodes at which branching stops, of one try after the other until one finds any."""
    if gap < GAP:
        return [(gap, None)]
    return [*([(ROUGH_GAP, ROUGH_NODES)] if rough else ()), (BRANCH_GAP, NUM_NODES)]


def _fractional(
    program: IntegerProgram, groups: Sequence[range], values: NDArray[np.float64]
) -> list[int]:
    """Indices of groups of columns that must be whole numbers and are not."""
    found = []
    for index, group in enumerate(groups):
        if program.integer[group.start]:
            amounts = values[group.start : group.stop]
            if np.any((amounts > SHARE) & (amounts < 1 - SHARE)):
                found.append(index)
    return found


def _dive(
    program: IntegerProgram, columns: Columns, relaxed: Outcome, deadline: float, gap: float
) -> Outcome:
    """Fix the fractional groups at their largest share, solving in between.

    Choices of nodes come first, then what is kept: a value that is kept by less than half runs
    again, one that is kept by more does not. What is away in part is away, since that holds less.
    """
    fixed = replace(program, upper=list(program.upper), lower=list(program.lower))
    now = relaxed
    kept = [
        (keep, again)
        for keep, again in zip(columns.keep, columns.remade, strict=True)
        if keep is not None
    ]
    away = [own for own in (*columns.away, *columns.states) if own is not None]
    while True:
        if time.perf_counter() > deadline:
            return NOTHING_FOUND
        if broken := _fractional(fixed, columns.pick, now.values):
            for index in broken:
                _fix_largest(fixed, columns.pick[index], now.values)
        elif broken := _fractional(fixed, [keep for keep, _ in kept], now.values):
            for index in broken:
                keep, again = kept[index]
                if again is not None and taken(now.values, keep).sum() < HALF:
                    _bar(fixed, keep)
                    continue
                _fix_largest(fixed, keep, now.values)
                if again is not None:
                    _bar(fixed, again)
        elif broken := _fractional(fixed, away, now.values):
            for index in broken:
                chosen = int(np.argmax(taken(now.values, away[index])))
                fixed.lower[away[index][chosen]] = 1.0
        else:
            return replace(now, bound=relaxed.bound, status="feasible")
        now = run(fixed, deadline, gap, relaxed=True)
        if not len(now.values):
            return now


def _fix_largest(fixed: IntegerProgram, group: range, values: NDArray[np.float64]) -> None:
    """Leave only the column of a group that has the largest share."""
    chosen = int(np.argmax(taken(values, group)))
    for place, column in enumerate(group):
        if place != chosen:
            fixed.upper[column] = 0.0


def _bar(fixed: IntegerProgram, group: range) -> None:
    for column in group:
        fixed.upper[column] = 0.0


def taken(found: NDArray[np.float64], columns: range) -> NDArray[np.float64]:
    return found[columns.start : columns.stop]
