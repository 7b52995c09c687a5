"""The sharding problem by exhaustion: every choice, kept layout and directed Steiner tree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from autopar.search.problem import Arc, Choices, Problem, Value


def steiner_s(value: Value, sources: frozenset[int], needed: frozenset[int]) -> float:
    """Least seconds of arcs that lead from any of the sources to every needed layout."""
    terminals = tuple(sorted(needed - sources))
    if not terminals:
        return 0.0
    start = value.num_layouts
    arcs = (*value.arcs, *(Arc(start, source, 0.0) for source in sources))
    value = replace(value, num_layouts=start + 1, arcs=arcs)
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

    return tree(full, start)


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
    for choice in itertools.product(*map(_choices, problem.nodes)):
        for again in itertools.product((False, True), repeat=len(problem.reruns)):
            places = itertools.product(_places(problem, again), _state_places(problem, choice))
            for (keeps, away), states in places:
                if not _fits(problem, choice, again, keeps, away, states):
                    continue
                total = _link_s(problem, choice, again, keeps, away, states)
                total += sum(n.seconds[c] for n, c in zip(problem.nodes, choice, strict=True))
                total += sum(
                    r.seconds[choice[r.node]]
                    for r, runs in zip(problem.reruns, again, strict=True)
                    if runs
                )
                total += sum(
                    _value_s(problem, v, choice, again, k)
                    for v, k in zip(problem.values, keeps, strict=True)
                )
                if total < float("inf") and (best is None or total < best):
                    best = total
    return best


def _choices(node: Choices) -> list[int]:
    """What a node may pick."""
    everything = range(len(node.seconds))
    return [c for c in everything if not node.least_host or node.host_bytes[c]]


Again = Sequence[bool]
"""Whether each rerun runs."""

Away = Sequence[bool]
"""Whether each value is in host memory between its phases."""


def _places(problem: Problem, again: Again) -> Iterator[tuple[Sequence[int | None], Away]]:
    """What is kept of every value, and whether it is away."""
    for keeps in itertools.product(*_keep_options(problem, again)):
        options = []
        for value, keep in zip(problem.values, keeps, strict=True):
            may = problem.link is not None and value.leave is not None and keep is not None
            least = value.leave.least if problem.link and value.leave and value.crosses else 0
            options.append([n for n in (False, True) if n >= least and (may or not n)])
        yield from ((keeps, away) for away in itertools.product(*options))


def _state_places(problem: Problem, choice: Sequence[int]) -> Iterator[float]:
    """Bytes of state in host memory, of every choice of nodes whose state is."""
    may = [
        n.state_bytes[c] for n, c in zip(problem.nodes, choice, strict=True) if any(n.state_bytes)
    ]
    if problem.link is None or not may:
        yield 0.0
    elif problem.link.least_states:
        yield sum(may)
    else:
        for away in itertools.product((False, True), repeat=len(may)):
            yield sum(size for size, gone in zip(may, away, strict=True) if gone)


def _link_s(
    problem: Problem,
    choice: Sequence[int],
    again: Again,
    keeps: Sequence[int | None],
    away: Away,
    states: float,
) -> float:
    """Seconds that copies add; infinite if host memory is too small."""
    link = problem.link
    gone = [
        (v, v.leave, k)
        for v, k, gone in zip(problem.values, keeps, away, strict=True)
        if gone and v.leave is not None and k is not None
    ]
    if link is None:
        return 0.0
    homes = sum(n.host_bytes[c] for n, c in zip(problem.nodes, choice, strict=True) if n.host_bytes)
    if states + homes + sum(v.kept_bytes[k] for v, _, k in gone) > link.host_limit_bytes:
        return float("inf")
    copied = sum(leave.seconds[k] for _, leave, k in gone)
    early = sum(seconds[choice[n]] for n, seconds in link.early)
    late = sum(seconds[choice[n]] for n, seconds in link.late)
    late += sum(
        r.seconds[choice[r.node]] for r, runs in zip(problem.reruns, again, strict=True) if runs
    )
    brought_early, brought_late, delivered = _over_link(problem, choice, again, keeps)
    to_first, to_second = link.beside
    exposed = sum(
        max(0.0, max(ins + to_first * outs, outs + to_second * ins) - link.hides * hidden)
        for ins, outs, hidden in (
            (brought_early, copied, early),
            (copied + brought_late, delivered, late),
        )
    )
    exposed += states * link.state_s_per_byte
    return exposed + sum(leave.lost_s[k] for _, leave, k in gone)


def _over_link(
    problem: Problem, choice: Sequence[int], again: Again, keeps: Sequence[int | None]
) -> tuple[float, float, float]:
    """Link seconds of arcs: from homes in the forward and the backward, and to them.

    There is one arc from every home, or to it.
    """
    early = late = out = 0.0
    for value, keep in zip(problem.values, keeps, strict=True):
        made = value.gives[choice[value.producer]]
        first, second = _needed(problem, value, choice, again, keep)
        for arc in value.arcs:
            if value.late:
                out += arc.link_s * (arc.head in first)
            else:
                early += arc.link_s * (arc.tail == made and bool(first - {made}))
                late += arc.link_s * (arc.tail == keep and bool(second - {made}))
    return early, late, out


def _needed(
    problem: Problem, value: Value, choice: Sequence[int], again: Again, keep: int | None
) -> tuple[set[int], set[int]]:
    """Layouts of a value that are needed in its two phases."""
    early = {n.layouts[choice[n.node]] for n in value.forward} | set(value.fixed_needs)
    if keep is not None:
        early.add(keep)
    late = {n.layouts[choice[n.node]] for n in value.backward}
    late |= {a.layouts[choice[problem.reruns[a.rerun].node]] for a in value.again if again[a.rerun]}
    return early, late


def _keep_options(problem: Problem, again: Again) -> list[list[int | None]]:
    """What may be kept of every value."""
    found: list[list[int | None]] = []
    for value in problem.values:
        layouts = [n for n in range(value.num_layouts) if n not in value.no_keep]
        remade = value.rerun is not None and again[value.rerun]
        if not value.crosses or (value.rerun is not None and problem.reruns[value.rerun].least):
            layouts = []
        if not value.backward:
            found.append([None, *layouts])
        elif remade:
            found.append([None])
        else:
            found.append([*layouts])
    return found


def _fits(
    problem: Problem,
    choice: Sequence[int],
    again: Again,
    keeps: Sequence[int | None],
    away: Away,
    states: float,
) -> bool:
    if problem.memory_limit_bytes is None:
        return True
    nodes = list(zip(problem.nodes, choice, strict=True))
    resident = problem.fixed_bytes + sum(n.resident_bytes[c] for n, c in nodes) - states
    gradients = [n.gradient_bytes[c] for n, c in nodes]
    kept = [
        0.0 if k is None or (v.persistent and v.gives[choice[v.producer]] == k) else v.kept_bytes[k]
        for v, k in zip(problem.values, keeps, strict=True)
    ]
    here = [0.0 if gone else size for size, gone in zip(kept, away, strict=True)]
    made = [n.update_bytes[c] for n, c in nodes if n.update_bytes]
    sums = [sum(here), sum(gradients) + sum(made)]
    for moment in problem.moments:
        ran = {n for n in moment.needed if again[n]}
        while True:
            more = {
                maker
                for maker, reader, number in moment.through
                if reader in ran and keeps[number] is None
            }
            if more <= ran:
                break
            ran |= more
        held = [h[choice[problem.reruns[n].node]] for n, h in moment.held if n in ran and again[n]]
        sums.append(
            sum(share * here[number] for number, share in moment.kept)
            + sum(share * kept[number] for number, share in moment.back if away[number])
            + sum(share * gradients[number] for number, share in moment.gradients)
            + sum(size[choice[number]] for number, size in moment.passing)
            + sum(held)
        )
    return resident + max(sums) <= problem.memory_limit_bytes


def _value_s(
    problem: Problem, value: Value, choice: Sequence[int], again: Again, keep: int | None
) -> float:
    made = value.gives[choice[value.producer]]
    early, late = _needed(problem, value, choice, again, keep)
    total = steiner_s(value, frozenset({made}), frozenset(early))
    there = set() if keep is None else {keep}
    if value.rerun is not None and again[value.rerun]:
        there.add(made)
    if late and not there:
        return float("inf")
    return total + steiner_s(value, frozenset(there), frozenset(late))
