"""Options for alike layers in a row, where neighbours of different options pay a transition.

Layers are alike, so only their number at each option counts, and the order of the options: layers
of one option stand together, and so do those of options between which a transition is free. So the
layers visit some of these *groups* of options once each; the cheapest way through the groups is
paid, and the counts are a knapsack (`knapsack.best_choices`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.knapsack import Floats, Options, Relaxation, best_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Alike layers in a row.

    Attributes:
        count: How many.
        sizes: Bytes of a layer at each option; seconds: its seconds.
        transitions_s: [option, option] seconds between neighbours, symmetric, no shorter by way of
            a third option.
        capacity: For the sum of the sizes.
    """

    count: int
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    transitions_s: tuple[tuple[float, ...], ...]
    capacity: float


@dataclass(frozen=True, slots=True)
class Assigned:
    """The optimum: seconds with transitions, and how many layers take each option."""

    seconds: float
    counts: tuple[int, ...]


def assign(layers: Layers) -> Assigned | None:
    """The assignment of least seconds; None if it is proven that nothing fits."""
    best: Assigned | None = None
    for bound_s, path_s, chosen in sorted(_ways(layers)):
        if best is not None and bound_s >= best.seconds:
            break
        most_s = np.inf if best is None else best.seconds - path_s
        options = _options(layers, chosen)
        for choice in best_choices([(layers.count, options)], layers.capacity, most_s):
            seconds = float(choice.costs[0]) + path_s
            if best is None or seconds < best.seconds:
                counts = dict(zip(chosen, choice.counts[0], strict=True))
                every = tuple(counts.get(i, 0) for i in range(len(layers.sizes)))
                best = Assigned(seconds, every)
    return best


def _ways(layers: Layers) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """Sets of groups to visit: a bound of their seconds, those of transitions, their options."""
    groups = _groups(layers.transitions_s)
    for number in range(1, min(len(groups), layers.count) + 1):
        for some in itertools.combinations(groups, number):
            chosen = tuple(sorted(itertools.chain(*some)))
            curve = Relaxation([_options(layers, chosen).total_hull]).of([layers.count])
            if curve.least_size <= layers.capacity:
                least = curve.least(np.array([layers.capacity]))
                path_s = _path_s(layers.transitions_s, [group[0] for group in some])
                yield float(least[0]) + path_s, path_s, chosen


def _groups(transitions_s: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """Options between which transitions are free."""
    groups: list[list[int]] = []
    for option, row in enumerate(transitions_s):
        own = next((group for group in groups if row[group[0]] == 0), None)
        if own is None:
            groups.append([option])
        else:
            own.append(option)
    return [tuple(group) for group in groups]


def _path_s(transitions_s: Sequence[Sequence[float]], stops: Sequence[int]) -> float:
    """The cheapest way that visits every stop once."""
    return min(
        sum(transitions_s[a][b] for a, b in itertools.pairwise(order))
        for order in itertools.permutations(stops)
    )


def _options(layers: Layers, chosen: Sequence[int]) -> Options:
    def column(values: Sequence[float]) -> Floats:
        return np.array([values[option] for option in chosen], dtype=np.float64)

    seconds = column(layers.seconds)
    return Options(
        sizes=column(layers.sizes),
        peaks=np.zeros(len(chosen)),
        costs=seconds[:, None],
        totals=seconds,
    )
