"""One option for every member of groups of alike members, within a capacity: all best choices.

A choice adds up sizes and costs of several kinds (*measures*) and has a peak: the largest of its
members' peaks, which counts once. What comes out are the choices that no other beats in every
measure, as counts: how many members of a group take which option. It is exact: members are added
one by one, and a partial choice is dropped only where

* its least size does not fit,
* another one is no larger and no dearer in any measure,
* the relaxation of its total is above the most that is asked for, or
* a whole choice that is known is no dearer in any measure, and cheaper in one, than the relaxation
  of what it can become (the rest along the lower convex hulls of its options, in fractions).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DIGITS = 12
"""Of the whole, that make a difference between two sums of floating-point numbers."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What members choose from.

    Attributes:
        sizes: [options], added up against the capacity.
        peaks: [options], of which the largest is added once.
        costs: [options, measures], added up.
        totals: [options], added up against the most of `best_choices`.
    """

    sizes: Floats
    peaks: Floats
    costs: Floats
    totals: Floats

    @cached_property
    def hulls(self) -> tuple[Hull, ...]:
        """Of every measure."""
        return tuple(hull_of(self.sizes, column) for column in self.costs.T)

    @cached_property
    def total_hull(self) -> Hull:
        """Of the totals."""
        return hull_of(self.sizes, self.totals)


Group = tuple[int, Options]
"""Members, and what they choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the members take.

    Attributes:
        counts: For every group, how many members take each option.
        costs: [measures], sums.
        size: Sum of the sizes, and the peak.
    """

    counts: tuple[tuple[int, ...], ...]
    costs: Floats
    size: float


@dataclass(frozen=True, slots=True)
class Step:
    """One corner of a hull to the next: more size, less cost, for one member."""

    size: float
    cost: float
    option: int


@dataclass(frozen=True, slots=True)
class Hull:
    """Lower convex hull of cost over size: the option of least size, and the steps from it.

    Attributes:
        start: The option.
        size: Of the option.
        cost: Of the option.
        steps: Steeper ones first.
    """

    start: int
    size: float
    cost: float
    steps: tuple[Step, ...]


def hull_of(sizes: Floats, costs: Floats) -> Hull:
    """The hull of options, from the smallest to the cheapest."""
    order = np.lexsort((costs, sizes))
    at = start = int(order[0])
    steps: list[Step] = []
    while True:
        cheaper = np.flatnonzero(costs < costs[at])
        cheaper = cheaper[sizes[cheaper] > sizes[at]]
        if not cheaper.size:
            return Hull(start, float(sizes[start]), float(costs[start]), tuple(steps))
        slopes = (costs[cheaper] - costs[at]) / (sizes[cheaper] - sizes[at])
        steepest = np.flatnonzero(slopes == slopes.min())
        to = int(cheaper[steepest[np.argmax(sizes[cheaper[steepest]])]])
        steps.append(Step(float(sizes[to] - sizes[at]), float(costs[to] - costs[at]), to))
        at = to


class Relaxation:
    """Least cost of members over the room they have, where options may be mixed in fractions."""

    def __init__(self, hulls: Sequence[Hull]) -> None:
        """One hull a group of members."""
        steps = sorted(
            (step.cost / step.size, number, step.size, step.cost)
            for number, hull in enumerate(hulls)
            for step in hull.steps
        )
        self._bases = np.array([(hull.size, hull.cost) for hull in hulls]).reshape(-1, 2)
        self._owners = np.array([number for _, number, _, _ in steps], dtype=np.intp)
        self._steps = np.array([(size, cost) for _, _, size, cost in steps]).reshape(-1, 2)

    def of(self, counts: Sequence[int]) -> Curve:
        """The least cost of so many members of every group."""
        number = np.asarray(counts, dtype=np.float64)
        size, cost = (number @ self._bases).tolist()
        along = np.zeros((len(self._steps) + 1, 2))
        np.cumsum(self._steps * number[self._owners][:, None], axis=0, out=along[1:])
        return Curve(size, along[:, 0], cost + along[:, 1])


@dataclass(frozen=True, slots=True)
class Curve:
    """Least cost over room.

    Attributes:
        least_size: Room that there must be.
        rooms: Room beyond it, rising.
        costs: At these rooms; on straight lines between them.
    """

    least_size: float
    rooms: Floats
    costs: Floats

    def least(self, room: Floats) -> Floats:
        """Least cost for every room; rooms below the least size count as that."""
        found = np.interp(room - self.least_size, self.rooms, self.costs)
        return np.asarray(found, dtype=np.float64)


def frontier(rows: Floats) -> NDArray[np.intp]:
    """Indices of the rows that no other is below or equal to in every column; of equals the first.

    Args:
        rows: [rows, columns].
    """
    if rows.shape[1] <= 2:
        order = np.lexsort(rows.T[::-1])
        last = rows[order, -1]
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = last[1:] < np.minimum.accumulate(last)[:-1]
        return order[keep]
    # A row has a smaller sum than those it beats, and the smallest ones beat most.
    scale = np.maximum(np.abs(rows).max(axis=0, initial=0.0), 1e-300)
    order = np.argsort((rows / scale).sum(axis=1), kind="stable")
    columns = np.ascontiguousarray(rows[order].T)
    found = []
    while len(order):
        some = columns[:, :_BLOCK]
        best = ~np.triu(~_below(some, some), 1).any(axis=0)
        found.append(order[:_BLOCK][best])
        columns, order = columns[:, _BLOCK:], order[_BLOCK:]
        left = _below(some[:, best], columns).all(axis=0)
        columns, order = columns[:, left], order[left]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.intp)


_BLOCK = 32
"""Rows that are compared with all others at once."""


def _below(first: Floats, second: Floats) -> NDArray[np.bool_]:
    """[first, second] whether a column of the second is below one of the first in any row."""
    found = second[0] < first[0][:, None]
    for a, b in zip(first[1:], second[1:], strict=True):
        found |= b < a[:, None]
    return np.asarray(found)


def best_choices(
    groups: Sequence[Group], capacity: float, most: float = np.inf, gap: float = 0.0
) -> tuple[Choice, ...]:
    """All choices within the capacity that no other beats in every measure.

    Args:
        groups: Members and their options; measures in the same order in each.
        capacity: For the sum of sizes and the peak.
        most: Choices whose total is above it may be left out.
        gap: Choices may be left out for one that is dearer by no more than this part of them in
            every measure.
    """
    cheapest = _cheapest(groups, capacity)
    if cheapest is not None:
        return (cheapest,)
    measures = _independent(groups)
    known = _known(groups, measures, capacity)
    bounds = np.array([choice.costs[measures] for choice in known]) / (1 + gap)
    whole = _Merge(groups, capacity, most, measures)
    for remaining in whole.members():
        whole.extend(remaining, bounds)
        if not len(whole.sizes):
            break
    found = [*known, *(whole.choice(int(i)) for i in range(len(whole.sizes)))]
    if not found:
        return ()
    rows = np.array([choice.costs[measures] for choice in found]) / whole.scale
    return tuple(found[index] for index in frontier(np.round(rows, _DIGITS)).tolist())


def _known(groups: Sequence[Group], measures: Sequence[int], capacity: float) -> list[Choice]:
    """Good choices: greedy ones for every measure, and for the totals."""
    ways = [[own.hulls[measure] for _, own in groups] for measure in measures]
    if len(measures) > 1:
        ways.append([own.total_hull for _, own in groups])
    found = (_greedy(groups, hulls, capacity) for hulls in ways)
    return [choice for choice in found if choice is not None]


def _cheapest(groups: Sequence[Group], capacity: float) -> Choice | None:
    """The choice of options that are cheapest in every measure, if there are such and they fit."""
    options = []
    for _, own in groups:
        least = np.flatnonzero((own.costs <= own.costs.min(axis=0)).all(axis=1))
        if not least.size:
            return None
        options.append(int(least[np.argmin(own.sizes[least] + own.peaks[least])]))
    found = _choice(groups, [[(at, n)] for at, (n, _) in zip(options, groups, strict=True)])
    return found if found.size <= capacity else None


def _choice(groups: Sequence[Group], taken: Sequence[Sequence[tuple[int, int]]]) -> Choice:
    """The choice that takes (option, members) of every group."""
    counts = []
    costs = np.zeros(groups[0][1].costs.shape[1])
    size, peak = 0.0, 0.0
    for (_, options), own in zip(groups, taken, strict=True):
        row = [0] * len(options.sizes)
        for option, count in own:
            if count:
                row[option] += count
                costs = costs + count * options.costs[option]
                size += count * float(options.sizes[option])
                peak = max(peak, float(options.peaks[option]))
        counts.append(tuple(row))
    return Choice(counts=tuple(counts), costs=costs, size=size + peak)


def _independent(groups: Sequence[Group]) -> list[int]:
    """Measures that differ between options, and not in the same proportion as an earlier one."""
    differences = np.concatenate([own.costs - own.costs[0] for _, own in groups])
    found: list[int] = []
    directions: list[Floats] = []
    for measure in range(differences.shape[1]):
        column = differences[:, measure]
        length = float(np.abs(column).max(initial=0.0))
        if length == 0:
            continue
        direction = column / length
        if not any(np.allclose(direction, other, rtol=0, atol=1e-12) for other in directions):
            found.append(measure)
            directions.append(direction)
    return found or [0]


def _greedy(groups: Sequence[Group], hulls: Sequence[Hull], capacity: float) -> Choice | None:
    """A good choice: steps along hulls, the steepest first, while they fit."""
    corners = [[hull.start, *(s.option for s in hull.steps)] for hull in hulls]
    room = capacity - max(
        float(own.peaks[corner].max()) for (_, own), corner in zip(groups, corners, strict=True)
    )
    room -= sum(count * hull.size for (count, _), hull in zip(groups, hulls, strict=True))
    if room < 0:
        return None
    members = [[n] + [0] * len(hull.steps) for (n, _), hull in zip(groups, hulls, strict=True)]
    steps = [
        (step.cost / step.size, number, corner, step)
        for number, hull in enumerate(hulls)
        for corner, step in enumerate(hull.steps)
    ]
    for _, number, corner, step in sorted(steps, key=lambda item: item[:3]):
        moved = min(members[number][corner], int(room // step.size))
        members[number][corner] -= moved
        members[number][corner + 1] += moved
        room -= moved * step.size
    found = _choice(
        groups,
        [list(zip(own, counts, strict=True)) for own, counts in zip(corners, members, strict=True)],
    )
    return found if found.size <= capacity else None


class _Merge:
    """Partial choices of the first members: sizes, peaks and costs, and where they came from."""

    def __init__(
        self, groups: Sequence[Group], capacity: float, most: float, measures: list[int]
    ) -> None:
        self.groups = groups
        self.capacity = capacity
        self.most = most * (1 + 1e-12)
        self.measures = measures
        self.sizes = np.zeros(1)
        self.peaks = np.zeros(1)
        self.totals = np.zeros(1)
        self.costs = np.zeros((1, len(measures)))
        self.trail: list[tuple[int, NDArray[np.intp], NDArray[np.intp]]] = []
        sums = sum(n * np.abs(own.costs[:, measures]).max(axis=0) for n, own in groups)
        self.scale = np.maximum(sums, 1e-300)
        self.relaxed = [Relaxation([own.hulls[m] for _, own in groups]) for m in measures]
        self.relaxed_totals = Relaxation([own.total_hull for _, own in groups])

    def members(self) -> Iterator[tuple[int, ...]]:
        """Members of every group that remain behind each one that is added."""
        counts = [count for count, _ in self.groups]
        for number, (count, _) in enumerate(self.groups):
            for _ in range(count):
                counts[number] -= 1
                self.group = number
                yield tuple(counts)

    def extend(self, remaining: tuple[int, ...], bounds: Floats) -> None:
        """Add one member of the current group."""
        _, group = self.groups[self.group]
        sizes = (self.sizes[:, None] + group.sizes).ravel()
        peaks = np.maximum(self.peaks[:, None], group.peaks).ravel()
        totals = (self.totals[:, None] + group.totals).ravel()
        left = [(n, own) for n, (_, own) in zip(remaining, self.groups, strict=True) if n]
        least = sum(n * own.total_hull.size for n, own in left)
        peak = max((float(own.peaks.min()) for _, own in left), default=0.0)
        room = self.capacity - np.maximum(peaks, peak) - sizes
        index = np.flatnonzero(room >= least - 1e-12 * self.capacity)
        if self.most < np.inf and index.size:
            possible = totals[index] + self.relaxed_totals.of(remaining).least(room[index])
            index = index[possible <= self.most]
        added = group.costs[:, self.measures]
        costs = (self.costs[:, None, :] + added).reshape(-1, len(self.measures))
        if index.size and len(bounds):
            index = index[~self._hopeless(remaining, room[index], costs[index], bounds)]
        if index.size:
            columns = [sizes[index] / max(self.capacity, 1e-300), *(costs[index] / self.scale).T]
            if group.peaks.any() or self.peaks.any():
                columns.append(peaks[index] / max(self.capacity, 1e-300))
            index = index[frontier(np.round(np.stack(columns, axis=1), _DIGITS))]
        self.trail.append((self.group, index // len(group.sizes), index % len(group.sizes)))
        self.sizes, self.peaks, self.totals = sizes[index], peaks[index], totals[index]
        self.costs = costs[index]

    def _hopeless(
        self, remaining: tuple[int, ...], room: Floats, costs: Floats, bounds: Floats
    ) -> NDArray[np.bool_]:
        """Whether some whole choice that is known beats all that they can become."""
        least = np.empty_like(costs)
        for column, relaxed in enumerate(self.relaxed):
            least[:, column] = costs[:, column] + relaxed.of(remaining).least(room)
        slack = 1e-12 * self.scale
        no_cheaper = (least[:, None, :] >= bounds[None] - slack).all(axis=2)
        dearer = (least[:, None, :] > bounds[None] + slack).any(axis=2)
        return np.asarray((no_cheaper & dearer).any(axis=1))

    def choice(self, index: int) -> Choice:
        """The whole choice of one row."""
        counts = [[0] * len(own.sizes) for _, own in self.groups]
        for group, parents, options in reversed(self.trail):
            counts[group][int(options[index])] += 1
            index = int(parents[index])
        return _choice(self.groups, [list(enumerate(own)) for own in counts])
