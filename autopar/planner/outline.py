"""Where a pipeline is cut, and about what it takes, before any of it is lowered.

The forward is cut where all chunks take equally long, each on its own devices, and little crosses.
Where messages are slow, a cut that fewer bytes cross may be worth chunks that are less alike: what
beginning behind a cut costs is then weighed with what a chunk computes. The schedule's timeline
says which of both is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import PARAMETER, Phase, Ref
from autopar.planner.cuts import least_starts
from autopar.planner.layout import Layout
from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import rows_of
from autopar.search.analysis import Analysis
from autopar.search.stages import (
    awaited,
    balanced_cuts,
    bounded_cuts,
    forward_order,
    last_firsts,
    places,
)
from cost_models.cluster import Cluster
from cost_models.collectives import collective_s, pair_link

SLACKS = (0.02, 0.1, 0.3)
"""Of the longest chunk: what a cut may cost for fewer bytes to cross; more than the first where
messages are slow."""

_MORE = ((SLACKS[1], False), (SLACKS[2], False), (SLACKS[0], True))
"""(slack, whether messages are weighed) of other cuts that are tried then."""

Seconds = NDArray[np.float64]
"""Seconds of the step at every position of the forward, in rows: of the forward, of the gradients
that earlier ops wait for, and of those that none does."""


@lru_cache(maxsize=8)
def course_of(analysis: Analysis) -> Course:
    """`Course` of a step, made once."""
    return Course(analysis)


@dataclass(frozen=True, eq=False)
class Course:
    """The forward of a step in its order, with the backward of each of its ops.

    Attributes:
        analysis: The step.
    """

    analysis: Analysis

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Forward nodes that a cut divides."""
        return forward_order(self.analysis)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Position of every forward node, and of the backward nodes of its module and line."""
        return places(self.analysis)

    @cached_property
    def awaited(self) -> frozenset[str]:
        """Backward nodes that the backward of an earlier op reads, through any others."""
        return awaited(self.analysis)

    @cached_property
    def first_reads(self) -> Mapping[str, int]:
        """Position of the first forward node that reads each parameter, or what is made of it.

        What is made of parameters alone runs where it is read.
        """
        place = {name: position for position, name in enumerate(self.order)}
        analysis, graph = self.analysis, self.analysis.graph
        first: dict[str, int] = {}
        for node in reversed(graph.nodes):
            at = place.get(node.name)
            if at is None:
                continue
            roots = [analysis.root(ref).root.node for ref in node.operands]
            if node.name not in analysis.looped and not any(root in place for root in roots):
                at = first.get(node.name, at)
            for root in roots:
                first[root] = min(first.get(root, at), at)
        return {
            node.target: first[node.name] for node in graph.sources(PARAMETER) if node.name in first
        }

    def seconds(self, by_name: Mapping[str, float]) -> Seconds:
        """Seconds of nodes, added up where they belong in the forward.

        Args:
            by_name: Seconds of every node that is not a source.
        """
        found = np.zeros((3, len(self.order)))
        nodes = self.analysis.graph.by_name
        for name, seconds in by_name.items():
            at = self.place.get(name)
            if at is not None:
                late = nodes[name].phase is Phase.BACKWARD
                found[late + (late and name not in self.awaited), at] += seconds
        return found

    @cached_property
    def inside(self) -> tuple[bool, ...]:
        """For every position, whether a cut there goes through a repeated block.

        Stages of whole blocks are alike, so that they are lowered once.
        """
        copies = [self.analysis.copies.of.get(name) for name in self.order]
        blocks = [None if copy is None else (copy.run, copy.index) for copy in copies]
        return tuple(a is not None and a == b for a, b in pairwise([None, *blocks, None]))

    @cached_property
    def price(self) -> NDArray[np.int64]:
        """What a cut at every position costs: bytes, and of as many, going through a block."""
        found: NDArray[np.int64] = 2 * self.crossing_bytes + np.array(self.inside)
        return found

    @cached_property
    def crossing_bytes(self) -> NDArray[np.int64]:
        """For every position, bytes of a batch made before it in the forward and read behind it."""
        graph = self.analysis.graph
        at = {name: position for position, name in enumerate(self.order)}
        last: dict[Ref, int] = {}
        for name in self.order:
            for ref in graph.by_name[name].operands:
                last[self.analysis.root(ref).root] = at[name]
        changes = np.zeros(len(self.order) + 2, dtype=np.int64)
        for root, until in last.items():
            if root.node in at:
                size = graph.type_of(root).num_bytes
                changes[at[root.node] + 1] += size
                changes[until + 1] -= size
        return np.cumsum(changes)[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the stages of a pipeline are.

    Attributes:
        cluster: The network.
        first: Global number of the first rank of every stage; ``count`` how many it has.
    """

    cluster: Cluster
    first: tuple[int, ...]
    count: tuple[int, ...]

    def sends_s(self, source: int, target: int, num_bytes: NDArray[np.int64]) -> Seconds:
        """Seconds of messages from a stage to another, each rank sending its part.

        Args:
            source: Stage.
            target: Stage; nothing is sent to itself.
            num_bytes: Of every message.
        """
        if source == target:
            return np.zeros(len(num_bytes))
        link = pair_link(self.cluster, self.first[source], self.first[target])
        parts = min(self.count[source], self.count[target])
        sizes, which = np.unique(num_bytes, return_inverse=True)
        return np.array([collective_s("send", int(n / parts), link) for n in sizes])[which]


@dataclass(frozen=True, slots=True)
class Outline:
    """A pipeline before it is lowered.

    Attributes:
        cuts: First positions of chunks 1 and on.
        seconds: Of the step.
    """

    cuts: tuple[int, ...]
    seconds: float


def outline(
    course: Course,
    by_stage: Sequence[Seconds],
    layouts: Sequence[Layout],
    microbatches: int,
    ranks: Ranks,
) -> Outline:
    """The fastest of the ways to cut a step.

    Args:
        course: The forward, and what crosses.
        by_stage: For every stage, what the whole step takes on its ranks, all microbatches
            together.
        layouts: Schedules of the same chunks, the fastest of which counts.
        microbatches: Of the step.
        ranks: Of the stages.

    Raises:
        HintError: Hints cannot be met.
    """
    chunks = _Chunks(course, by_stage, layouts, microbatches, ranks)
    found: list[Outline] = []
    for most in _where_stages_own(course, chunks.lanes):
        found += chunks.fastest(layouts, most)
        own = [outline for outline in found if chunks.all_own(outline.cuts)]
        if own:
            return min(own, key=lambda outline: outline.seconds)
    return found[0]


Bounds = Sequence[Sequence[int]] | None


def _where_stages_own(course: Course, lanes: Sequence[int]) -> Iterator[Bounds]:
    """Where chunks may begin at last: anywhere, then so that one of each stage owns a parameter.

    Args:
        course: The forward.
        lanes: Stage of every chunk.
    """
    yield None
    firsts = [lanes.index(stage) for stage in set(lanes)]
    lasts = [len(lanes) - 1 - lanes[::-1].index(stage) for stage in set(lanes)]
    read = frozenset(course.first_reads.values())
    for chunks in (firsts, lasts):
        yield last_firsts(len(course.order), read, chunks, len(lanes))


class _Chunks:
    """Working state of `outline`."""

    def __init__(
        self,
        course: Course,
        by_stage: Sequence[Seconds],
        layouts: Sequence[Layout],
        microbatches: int,
        ranks: Ranks,
    ) -> None:
        self.course, self.microbatches = course, microbatches
        self.lanes = layouts[0].lanes
        totals = {id(own): own.sum(axis=0) for own in by_stage}
        sums = {id(own): _sums(own) for own in by_stage}
        self.totals = [totals[id(by_stage[stage])] for stage in self.lanes]
        self.sums = [sums[id(by_stage[stage])] for stage in self.lanes]
        ahead = {id(own): own.sum(axis=0) for own in self.sums}
        self.ahead = [ahead[id(own)] for own in self.sums]
        self.alike = len(totals) == 1
        self.least = least_starts(course.analysis, layouts[0].hints, self.lanes)
        each = course.crossing_bytes // microbatches
        self.sends_s = [np.zeros(len(each))]
        known = {pair: ranks.sends_s(*pair, each) for pair in set(pairwise(self.lanes))}
        self.sends_s += [known[pair] for pair in pairwise(self.lanes)]

    def fastest(self, layouts: Sequence[Layout], most: Bounds) -> list[Outline]:
        """Outlines that are worth a look.

        Args:
            layouts: Schedules of the same chunks, the fastest of which counts.
            most: Where chunks may begin at last.
        """
        cuts = self.cuts(SLACKS[0], most)
        if cuts is None:
            return []
        found = Outline(cuts, self.step_s(cuts, layouts[:1]))
        if found.seconds <= (1 + SLACKS[0]) * self.step_s(cuts, layouts[:1], free=True):
            # Where messages cost no more, other cuts and schedules are not worth a look.
            return [found]
        more = [self.cuts(slack, most, weighed=weighed) for slack, weighed in _MORE]
        unlike = dict.fromkeys(own for own in (cuts, *more) if own is not None)
        return [Outline(own, self.step_s(own, layouts)) for own in unlike]

    def all_own(self, cuts: Sequence[int]) -> bool:
        """Whether every stage owns parameters: others have nothing to train."""
        reads = np.array(list(self.course.first_reads.values()))
        chunks = np.searchsorted(np.array(cuts), reads, side="right")
        return {self.lanes[chunk] for chunk in chunks.tolist()} == set(self.lanes)

    def step_s(
        self, cuts: Sequence[int], layouts: Sequence[Layout], *, free: bool = False
    ) -> float:
        """Seconds of the step under the fastest of some schedules.

        Args:
            cuts: First positions of chunks 1 and on.
            layouts: The schedules.
            free: Whether messages are.
        """
        times = []
        for number, (sums, (a, b)) in enumerate(zip(self.sums, self._pieces(cuts), strict=True)):
            forward_s, awaited_s, rest_s = ((sums[:, b] - sums[:, a]) / self.microbatches).tolist()
            # Nothing waits for the backward of the first chunk.
            awaited_s, rest_s = (awaited_s, rest_s) if number else (0.0, awaited_s + rest_s)
            times.append(ChunkTime(forward_s, awaited_s + rest_s, rest_s))
        sends_s = [0.0 if free else own for own in self._sends_at(cuts)]
        return min(
            simulate(
                rows_of(own.schedule, own.num_stages, own.num_chunks, self.microbatches),
                times,
                sends_s,
            ).makespan_s
            for own in layouts
            if own.fits(self.microbatches)
        )

    def _sends_at(self, cuts: Sequence[int]) -> list[float]:
        return [float(own[at]) for own, at in zip(self.sends_s[1:], cuts, strict=True)]

    @property
    def _even_s(self) -> float:
        """Seconds of a chunk if all took equally long."""
        return 1 / sum(1 / max(float(own[-1]), LEAST_S) for own in self.ahead)

    def cuts(self, slack: float, most: Bounds, *, weighed: bool = False) -> tuple[int, ...] | None:
        """Cuts for the least longest chunk, within a slack where least crosses nearby.

        Args:
            slack: Of the longest chunk.
            most: Where chunks may begin at last.
            weighed: Whether what a message in front of a chunk takes counts as the chunk's.
        """
        least = self.least
        if least is None and most is None and not weighed and self.alike:
            even = balanced_cuts(self.totals[0].tolist(), len(self.lanes))
            return self._narrowed(even, slack, most)
        anywhere = [[0] * (len(self.course.order) + 1)] * len(self.lanes)
        begins = [_BOTH_WAYS * self.microbatches * own for own in self.sends_s]
        found = bounded_cuts(
            self.totals, anywhere if least is None else least, most, begins if weighed else None
        )
        return found and self._narrowed(found, slack, most)

    def _pieces(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise([0, *cuts, len(self.course.order)]))

    def _narrowed(self, cuts: Sequence[int], slack: float, most: Bounds) -> tuple[int, ...]:
        """The cuts moved, within a slack and what hints ask for, to where least crosses nearby."""
        found = [0, *cuts, len(self.course.order)]
        pieces = zip(self.ahead, pairwise(found), strict=True)
        allowed = max(own[b] - own[a] for own, (a, b) in pieces) + slack * self._even_s
        for index in range(1, len(found) - 1):
            low, start, high = found[index - 1 : index + 2]
            before, behind = self.ahead[index - 1 : index + 1]
            fits = before[low + 1 : high] - before[low] <= allowed
            fits &= behind[high] - behind[low + 1 : high] <= allowed
            if self.least is not None:
                fits &= np.asarray(self.least[index - 1][low + 1 : high]) <= low
                fits[: max(0, self.least[index][high] - low - 1)] = False
            if most is not None:
                fits &= np.asarray(most[index - 1][low + 1 : high]) >= low
                fits[most[index][high] - low :] = False
            places = low + 1 + np.flatnonzero(fits)
            price = self.course.price[places]
            if len(places):
                nearest = np.lexsort((abs(places - start), price))[0]
                found[index] = int(places[nearest])
        return tuple(found[1:-1])


_BOTH_WAYS = 2
"""Messages of a microbatch over a cut."""

LEAST_S = 1e-30
"""Instead of no seconds at all, where speeds are compared."""


def _sums(seconds: Seconds) -> Seconds:
    """Seconds in front of every position."""
    return np.concatenate([np.zeros((3, 1)), np.cumsum(seconds, axis=1)], axis=1)
