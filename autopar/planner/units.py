"""The forward in units: what the inter-op program deals out to the stages.

A unit is a copy of a repeated block, a part of one where copies are few, or a stretch of what does
not repeat. Units that run the same nodes and read them alike are of one kind, so that one of them
stands for all.
"""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from autopar.ir.graph import PARAMETER
from autopar.planner.outline import course_of
from autopar.search.analysis import Analysis
from autopar.search.stages import forward_order, homes, owners_of


@dataclass(frozen=True, eq=False)
class Units:
    """The forward in pieces that follow each other.

    Attributes:
        analysis: The step.
        starts: Position of the first node of every unit in the order of the forward, and its end.
        kinds: Of every unit; the same number for those that are alike.
    """

    analysis: Analysis
    starts: tuple[int, ...]
    kinds: tuple[int, ...]

    @cached_property
    def home(self) -> Mapping[str, int]:
        """Unit of every node that a cut divides, and of the backward."""
        return homes(self.analysis, self.starts[1:-1])

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """Unit of every parameter that is read."""
        return owners_of(self.analysis, self.home)

    def of(self, name: str) -> Collection[int]:
        """Unit of a node or parameter; of what depends on the batch alone, all that read it."""
        node = self.analysis.graph.by_name[name]
        found = self.owners.get(node.target) if node.op == PARAMETER else self.home.get(name)
        return self.readers[name] if found is None else (found,)

    @cached_property
    def places(self) -> Mapping[str, tuple[Collection[int], ...]]:
        """Of every node and parameter its units, as of `of`, and those that read what it makes."""
        names = (node.name for node in self.analysis.graph.nodes)
        return {name: (self.of(name), self.readers[name]) for name in names}

    @cached_property
    def readers(self) -> Mapping[str, frozenset[int]]:
        """Units that read what a node makes, themselves or what is made of it and the batch."""
        found: dict[str, set[int]] = {node.name: set() for node in self.analysis.graph.nodes}
        for node in reversed(self.analysis.graph.nodes):
            home = self.home.get(node.name)
            for ref in node.operands:
                root = self.analysis.root(ref).root.node
                if home is not None:
                    found[root].add(home)
                elif root not in self.home:
                    found[root] |= found[node.name]
        return {name: frozenset(units) for name, units in found.items()}

    @cached_property
    def shown(self) -> Mapping[int, int]:
        """Of every kind, the unit that stands for it: one in the middle."""
        found: dict[int, list[int]] = {}
        for unit, kind in enumerate(self.kinds):
            found.setdefault(kind, []).append(unit)
        return {kind: own[len(own) // 2] for kind, own in found.items()}


WIDE = 4


"""Of the bytes that cross at the narrowest place near it, how many may cross between two units."""


def units_of(analysis: Analysis, seconds: Sequence[float], most: int) -> Units:
    """The forward in units of about equal length, or of whole copies where these are shorter.

    They begin and end where little crosses.

    Args:
        analysis: The step.
        seconds: Of every node of the forward, its backward included.
        most: Of units, beside whole copies and what does not repeat.
    """
    order = forward_order(analysis)
    crossing = course_of(analysis).crossing_bytes.tolist()
    sources = [analysis.graph.by_name[name].source for name in order]
    for at, (before, behind) in enumerate(pairwise(sources), start=1):
        if before == behind:
            # The backward of both runs where the later one ran, and would read across the border.
            crossing[at] = sys.maxsize
    copies = [analysis.copies.of.get(name) for name in order]
    blocks = [None if copy is None else (copy.run, copy.index) for copy in copies]
    bounds = [at for at, (a, b) in enumerate(pairwise(blocks), start=1) if a != b]
    longest_s = sum(seconds) / most
    starts, whats = [0], list[Hashable]()
    for first, end in pairwise([0, *bounds, len(order)]):
        families = tuple(None if c is None else c.family for c in copies[first:end])
        block = blocks[first]
        what: Hashable = first
        if block is not None:
            pinned = block in analysis.copies.pinned
            what = (block[0], families, analysis.copies.alike[block], pinned and block)
        ends = _ends(seconds[first:end], crossing[first : end + 1], longest_s)
        starts += [first + stop for stop in ends]
        whats += [(what, part) for part in range(len(ends))]
    starts, whats = _joined(starts, whats, crossing)
    return Units(analysis, tuple(starts), _numbered(whats))


def divided(units: Units, cuts: Collection[int]) -> Units:
    """The units with more borders: parts of alike units at the same places of them are alike.

    Args:
        units: Of the forward.
        cuts: Positions in its order at which a unit is to begin.
    """
    starts = sorted({*units.starts, *cuts})
    whats: list[Hashable] = []
    for first, end in pairwise(starts):
        own = bisect.bisect_right(units.starts, first) - 1
        begin = units.starts[own]
        whats.append((units.kinds[own], first - begin, end - begin))
    return Units(units.analysis, tuple(starts), _numbered(whats))


def narrows(units: Units) -> tuple[int, ...]:
    """Inside units, where no more crosses than at either end, and less than half of one of them."""
    crossing = course_of(units.analysis).crossing_bytes.tolist()
    found = []
    for first, end in pairwise(units.starts):
        at = min(range(first + 1, end), key=crossing.__getitem__, default=first)
        ends = [crossing[end]] * (end < units.starts[-1]) + [crossing[first]] * (first > 0)
        if crossing[at] <= min(ends, default=0) and 2 * crossing[at] <= max(ends, default=0):
            found.append(at)
    return tuple(found)


def _numbered(whats: Sequence[Hashable]) -> tuple[int, ...]:
    """A number for each, the same for those that are equal."""
    known: dict[Hashable, int] = {}
    return tuple(known.setdefault(what, len(known)) for what in whats)


def _ends(seconds: Sequence[float], crossing: Sequence[int], longest_s: float) -> list[int]:
    """Ends of parts of a stretch that are about as long as asked for, where least crosses."""
    sums = list(itertools.accumulate(seconds, initial=0.0))
    count = max(1, min(len(seconds), round(sums[-1] / longest_s) if longest_s else 1))
    ends = []
    for part in range(1, count):
        low, middle, high = (sums[-1] * (part + off) / count for off in (-0.5, 0.0, 0.5))
        near = [at for at in range(1, len(seconds)) if low <= sums[at] <= high]
        if near:
            ends.append(min(near, key=lambda at: (crossing[at], abs(sums[at] - middle))))
    return sorted({*ends, len(seconds)})


def _joined(
    starts: Sequence[int], whats: Sequence[Hashable], crossing: Sequence[int]
) -> tuple[list[int], list[Hashable]]:
    """The units without borders at which much more crosses than at the ones beside them."""
    found, joined = [starts[0]], list[Hashable]()
    parts: tuple[Hashable, ...] = ()
    for unit, what in enumerate(whats):
        parts += (what,)
        beside = [crossing[at] for at in starts[max(unit, 1) : unit + 3] if at < starts[-1]]
        wide = unit + 1 < len(whats) and crossing[starts[unit + 1]] > WIDE * min(beside)
        if not wide:
            found.append(starts[unit + 1])
            joined.append(parts)
            parts = ()
    return found, joined
