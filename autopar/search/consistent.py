"""Why no choices fit together, whatever memory there is."""

from __future__ import annotations

from autopar.search.problem import Problem, Value


def contradiction(problem: Problem) -> str | None:
    """Name of a value that cannot be brought to where it is read; None if none is found.

    Choices are struck out that no choice at the other end of a value goes with, until nothing
    changes (arc consistency); the value that leaves a node without any is the one.

    Args:
        problem: One without reruns that has no solution.
    """
    left = [set(range(len(node.seconds))) for node in problem.nodes]
    reached = [_reached(value) for value in problem.values]
    count = 0
    while (now := sum(map(len, left))) != count:
        count = now
        for value, reach in zip(problem.values, reached, strict=True):
            if not _strike_out(value, reach, left):
                return value.name
    return None


def _strike_out(value: Value, reach: list[set[int]], left: list[set[int]]) -> bool:
    """Leave what goes with some choice at the other end; False if that is none of a node's."""
    makes, gives = left[value.producer], value.gives
    makes -= {c for c in makes if not reach[gives[c]].issuperset(value.fixed_needs)}
    for need in (*value.forward, *value.backward):
        reads = left[need.node]
        wanted = {need.layouts[c] for c in reads}
        makes -= {c for c in makes if wanted.isdisjoint(reach[gives[c]])}
        there = {layout for c in makes for layout in reach[gives[c]]}
        reads -= {c for c in reads if need.layouts[c] not in there}
        if not reads:
            return False
    return bool(makes)


def _reached(value: Value) -> list[set[int]]:
    """For every layout of a value, those that it can become."""
    ahead: dict[int, list[int]] = {}
    for arc in value.arcs:
        ahead.setdefault(arc.tail, []).append(arc.head)
    found = []
    for start in range(value.num_layouts):
        seen, waiting = {start}, [start]
        while waiting:
            fresh = [head for head in ahead.get(waiting.pop(), ()) if head not in seen]
            seen.update(fresh)
            waiting += fresh
        found.append(seen)
    return found
