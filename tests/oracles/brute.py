"""The sharding problem by exhaustion: every choice, kept layout and directed Steiner tree."""

from __future__ import annotations

import itertools
from functools import cache

from autopar.search.problem import Problem, Value


def steiner_s(value: Value, source: int, needed: frozenset[int]) -> float:
    """Least seconds of arcs that lead from ``source`` to every needed layout."""
    terminals = tuple(sorted(needed - {source}))
    if not terminals:
        return 0.0
    distance = _distances(value)
    full = (1 << len(terminals)) - 1

    @cache
    def tree(mask: int, at: int) -> float:
        if mask & (mask - 1) == 0:
            return distance[at][terminals[mask.bit_length() - 1]]
        best = float("inf")
        for middle in range(value.num_layouts):
            sub = (mask - 1) & mask
            while sub:
                cost = distance[at][middle] + tree(sub, middle) + tree(mask ^ sub, middle)
                best = min(best, cost)
                sub = (sub - 1) & mask
        return best

    return tree(full, source)


def _distances(value: Value) -> list[list[float]]:
    size = range(value.num_layouts)
    distance = [[0.0 if i == j else float("inf") for j in size] for i in size]
    for arc in value.arcs:
        distance[arc.tail][arc.head] = min(distance[arc.tail][arc.head], arc.seconds)
    for middle in size:
        for i in size:
            for j in size:
                through = distance[i][middle] + distance[middle][j]
                distance[i][j] = min(distance[i][j], through)
    return distance


def brute_force(problem: Problem) -> float | None:
    """Least seconds of any choice within memory, None if there is none."""
    best: float | None = None
    limit = problem.memory_limit_bytes
    for choice in itertools.product(*(range(len(n.seconds)) for n in problem.nodes)):
        seconds = sum(n.seconds[c] for n, c in zip(problem.nodes, choice, strict=True))
        resident = problem.fixed_bytes + sum(
            n.resident_bytes[c] for n, c in zip(problem.nodes, choice, strict=True)
        )
        gradients = sum(n.gradient_bytes[c] for n, c in zip(problem.nodes, choice, strict=True))
        if limit is not None and resident + gradients > limit:
            continue
        for keeps in itertools.product(*(_keep_options(v) for v in problem.values)):
            saved = sum(
                0 if k is None or (v.persistent and v.gives[choice[v.producer]] == k)
                else v.kept_bytes[k]
                for v, k in zip(problem.values, keeps, strict=True)
            )  # fmt: skip
            if limit is not None and resident + saved > limit:
                continue
            total = seconds + sum(
                _value_s(v, choice, k) for v, k in zip(problem.values, keeps, strict=True)
            )
            if total < float("inf") and (best is None or total < best):
                best = total
    return best


def _keep_options(value: Value) -> list[int | None]:
    if not value.backward:
        return [None]
    return [n for n in range(value.num_layouts) if n not in value.no_keep]


def _value_s(value: Value, choice: tuple[int, ...], keep: int | None) -> float:
    early = {n.layouts[choice[n.node]] for n in value.forward} | set(value.fixed_needs)
    if keep is not None:
        early.add(keep)
    total = steiner_s(value, value.gives[choice[value.producer]], frozenset(early))
    if keep is not None:
        late = {n.layouts[choice[n.node]] for n in value.backward}
        total += steiner_s(value, keep, frozenset(late))
    return total
