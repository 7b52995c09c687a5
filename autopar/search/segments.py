"""What a run of blocks can be as one stage: least seconds by relaxation, best choices exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.search.interproblem import Point
from autopar.search.knapsack import Floats, Options, Relaxation, best_choices, frontier
from autopar.search.timeline import COSTS


def costs_of(points: Sequence[Point]) -> Floats:
    """[points, COSTS]: seconds of forward, backward, weight gradient, behind and ahead of them."""
    rows = [(p.forward_s, p.backward_s, p.weight_s, p.reduce_s, p.before_s) for p in points]
    return np.array(rows, dtype=np.float64).reshape(len(rows), COSTS)


class Counts:
    """How many blocks of each class are in a run of a chain."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.classes = sorted(set(blocks))
        row = np.array([[block == own for own in self.classes] for block in blocks], dtype=np.int64)
        self._before = np.concatenate((np.zeros((1, len(self.classes)), dtype=np.int64), row))
        self._before = self._before.cumsum(axis=0)
        self._known: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def __call__(self, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """(class, blocks) of those that occur from block `first` up to block `end`."""
        found = self._known.get((first, end))
        if found is None:
            counts = self._before[end] - self._before[first]
            found = tuple(
                (self.classes[i], int(counts[i])) for i in np.flatnonzero(counts).tolist()
            )
            self._known[first, end] = found
        return found


class Segments:
    """Runs of blocks on one kind of place that holds so many microbatches.

    Points that others beat are left out first; their numbers are those of the fronts.
    """

    def __init__(
        self,
        fronts: Mapping[int, Sequence[Point]],
        live: float,
        memory_bytes: float,
        measures: Callable[[Floats], Floats],
        gap: float = 0.0,
    ) -> None:
        """Fronts by class; `measures` of [points, COSTS] decide which choice beats another.

        Choices are within `gap` of the best, as in `knapsack.best_choices`.
        """
        self.memory_bytes = memory_bytes
        self.gap = gap
        self.costs = {own: costs_of(points) for own, points in fronts.items()}
        self.kept: dict[int, list[int]] = {}
        self._options: dict[int, Options] = {}
        for own, points in fronts.items():
            sizes = np.array(
                [p.resident_bytes + p.late_bytes + live * p.saved_bytes for p in points]
            )
            peaks = np.array([p.transient_bytes for p in points])
            costs = measures(self.costs[own])
            chosen = sorted(frontier(np.column_stack((costs, sizes, peaks))).tolist())
            self.kept[own] = chosen
            self._options[own] = Options(
                sizes=sizes[chosen],
                peaks=peaks[chosen],
                costs=costs[chosen],
                totals=self.costs[own][chosen, :2].sum(axis=1),
            )
        able = {own: options for own, options in self._options.items() if len(options.sizes)}
        self._numbers = {own: number for number, own in enumerate(able)}
        self._relaxed = Relaxation([options.total_hull for options in able.values()])
        self._least: dict[tuple[tuple[int, int], ...], float] = {}
        self._choices: dict[
            tuple[tuple[int, int], ...], tuple[float, tuple[tuple[Floats, Taken], ...]]
        ] = {}

    def least_s(self, counts: tuple[tuple[int, int], ...]) -> float:
        """Least seconds of a microbatch's forward and backward, if points may be mixed.

        Infinite where the run cannot fit.
        """
        found = self._least.get(counts)
        if found is None:
            found = self._least[counts] = self._relaxed_s(counts)
        return found

    def _relaxed_s(self, counts: tuple[tuple[int, int], ...]) -> float:
        members = [0] * len(self._numbers)
        peak = 0.0
        for own, count in counts:
            if own not in self._numbers:
                return float("inf")
            members[self._numbers[own]] = count
            peak = max(peak, float(self._options[own].peaks.min()))
        curve = self._relaxed.of(members)
        room = self.memory_bytes - peak
        if curve.least_size > room + 1e-12 * self.memory_bytes:
            return float("inf")
        return float(curve.least(np.array([room]))[0])

    def choices(
        self, counts: tuple[tuple[int, int], ...], most_s: float = np.inf
    ) -> tuple[tuple[Floats, Taken], ...]:
        """Choices that no other beats: their [COSTS] costs, and (class, blocks of every point).

        Those whose forward and backward take longer than `most_s` may be left out.
        """
        found = self._choices.get(counts)
        if found is None or found[0] < most_s:
            found = self._choices[counts] = most_s, self._exact(counts, most_s)
        return found[1]

    def _exact(
        self, counts: tuple[tuple[int, int], ...], most_s: float
    ) -> tuple[tuple[Floats, Taken], ...]:
        if any(own not in self._numbers for own, _ in counts):
            return ()
        groups = [(number, self._options[own]) for own, number in counts]
        found = []
        for choice in best_choices(groups, self.memory_bytes, most_s, self.gap):
            costs = np.zeros(COSTS)
            taken = []
            for (own, _), kept in zip(counts, choice.counts, strict=True):
                row = [0] * len(self.costs[own])
                for index, members in zip(self.kept[own], kept, strict=True):
                    row[index] = members
                    costs = costs + members * self.costs[own][index]
                taken.append((own, tuple(row)))
            found.append((costs, tuple(taken)))
        return tuple(found)


Taken = tuple[tuple[int, tuple[int, ...]], ...]
"""(class, how many of its blocks take each point)."""
