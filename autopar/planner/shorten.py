"""The step without most of its layers, for what is asked of every plan that is tried.

Copies of a block that a plan treats alike take equally long and hold equally much. All but a few of
them are left out of the graph and the plan; what remains is lowered, and the simulator gives the
copies that are missing their turns (`autopar.lower.stretch`). What runs is the whole program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import PARAMETER, Graph, Node, Ref, replace_refs
from autopar.lower.stretch import ONCE, Place, Repeats
from autopar.plan.records import StagePlan, Transfer
from autopar.search.analysis import Analysis
from autopar.search.copies import REACH, Copies

WORTH = 8
"""Copies that are worth leaving out: short stretches save little, and seldom repeat exactly."""


@dataclass(frozen=True, slots=True)
class Short:
    """A step with few copies of its blocks.

    Attributes:
        graph: The step without the others.
        stages: Its plan.
        repeats: The copies that are missing.
    """

    graph: Graph
    stages: tuple[StagePlan, ...]
    repeats: Repeats = ONCE


def shorten(
    analysis: Analysis,
    stages: tuple[StagePlan, ...],
    transfers: Sequence[Transfer] = (),
    *,
    worth: int = WORTH,
    beside: int = REACH,
) -> Short:
    """The step and a plan without the copies in the middle of blocks that the plan treats alike.

    Args:
        analysis: The step.
        stages: The plan.
        transfers: What crosses stages; copies that make it stay.
        worth: Fewest copies to leave out of a stretch; at least `REACH`, or edges could reach
            across the gap.
        beside: Copies that stay on either side of a gap; at least `REACH`.
    """
    copies = analysis.copies
    pinned = set(copies.pinned)
    for transfer in transfers:
        place = copies.of.get(_name(transfer.value))
        if place is not None:
            pinned.add((place.run, place.index))
    spans = list(_spans(copies, _treated(copies, stages), pinned, worth, beside))
    if not spans:
        return Short(analysis.graph, stages)
    return _Shortener(analysis, stages, spans, beside).run()


def _name(value: str) -> str:
    """The node of a value written as text."""
    return value.partition(":")[0]


def _treated(copies: Copies, stages: Sequence[StagePlan]) -> Mapping[tuple[int, int], Hashable]:
    """What a plan decides about every copy, as seen from the copy."""
    rows: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
    known: dict[Hashable, int] = {}
    seen: dict[Hashable, int] = {}

    def decide(name: str, where: Hashable, *what: Hashable) -> None:
        """Add a decision about a node; one and the same object is looked up once."""
        place = copies.of.get(name)
        if place is None:
            return
        key = (where, *map(id, what))
        number = seen.get(key)
        if number is None:
            number = seen[key] = known.setdefault((where, what), len(known))
        rows[place.run, place.index].append((place.family, number))

    for number, stage in enumerate(stages):
        again, away = frozenset(stage.recomputed), frozenset(stage.offloaded)
        for plan in stage.nodes:
            decide(plan.name, (number, plan.name in again), plan.operands, plan.outputs)
        for parameter in stage.parameters:
            where = (number, parameter.state_on_host, parameter.on_host)
            decide(copies.parameters[parameter.name], where, parameter.stored)
        for value, shardings in stage.kept.items():
            place = (number, value.partition(":")[2], value in away)
            decide(_name(value), place, shardings)
        for value, sharding in stage.added_up.items():
            decide(_name(value), (number, value.partition(":")[2], "added up"), sharding)
    return {copy: (edges, frozenset(rows[copy])) for copy, edges in copies.alike.items()}


def _spans(
    copies: Copies,
    treated: Mapping[tuple[int, int], Hashable],
    pinned: set[tuple[int, int]],
    worth: int,
    beside: int,
) -> Iterator[tuple[int, range]]:
    """(run, copies to leave out) of every stretch of copies that are treated alike."""
    runs: dict[int, list[int]] = defaultdict(list)
    for run, index in treated:
        runs[run].append(index)
    for run, found in runs.items():
        first, last = min(found), max(found)
        start = first
        for index in range(first, last + 2):
            same = treated.get((run, index)) == treated.get((run, start))
            if same and index <= last:
                continue
            inner = [i for i in range(start + beside, index - beside) if (run, i) not in pinned]
            longest = _longest(inner)
            if len(longest) >= worth:
                yield run, longest
            start = index


def _longest(indices: list[int]) -> range:
    """The longest run of numbers that follow each other."""
    best = range(0)
    start = 0
    for at in range(len(indices)):
        if at and indices[at] != indices[at - 1] + 1:
            start = at
        if at + 1 - start > len(best):
            best = range(indices[start], indices[at] + 1)
    return best


class _Shortener:
    """Working state of `shorten`."""

    def __init__(
        self,
        analysis: Analysis,
        stages: Sequence[StagePlan],
        spans: Sequence[tuple[int, range]],
        beside: int,
    ) -> None:
        self.beside = beside
        self.graph = analysis.graph
        self.copies = analysis.copies
        self.stages = stages
        self.spans = spans
        self.out = {(run, index): span for run, span in spans for index in span}

    def run(self) -> Short:
        nodes = tuple(self._glued(node) for node in self.graph.nodes if self._stays(node.name))
        there = {node.name for node in nodes}
        gradients = {
            name: self._moved(self.copies.parameters[name], ref)
            for name, ref in self.graph.gradients.items()
            if self.copies.parameters[name] in there
        }
        graph = replace(self.graph, nodes=nodes, gradients=gradients)
        stages = tuple(self._stage(stage, there) for stage in self.stages)
        return Short(graph, stages, self._repeats(nodes))

    def _stage(self, stage: StagePlan, there: Container[str]) -> StagePlan:
        """A stage without what is not there."""
        names = self.copies.parameters
        return replace(
            stage,
            nodes=tuple(plan for plan in stage.nodes if plan.name in there),
            parameters=tuple(plan for plan in stage.parameters if names[plan.name] in there),
            kept={
                value: shardings for value, shardings in stage.kept.items() if _name(value) in there
            },
            recomputed=tuple(name for name in stage.recomputed if name in there),
            offloaded=tuple(value for value in stage.offloaded if _name(value) in there),
            added_up={v: sharding for v, sharding in stage.added_up.items() if _name(v) in there},
        )

    def _stays(self, name: str) -> bool:
        place = self.copies.of.get(name)
        return place is None or (place.run, place.index) not in self.out

    def _glued(self, node: Node) -> Node:
        """The node, reading copies that are there."""
        if all(self._stays(ref.node) for ref in node.operands):
            return node
        refs = iter([self._moved(node.name, ref) for ref in node.operands])
        args = tuple(replace_refs(arg, refs) for arg in node.args)
        kwargs = tuple((key, replace_refs(arg, refs)) for key, arg in node.kwargs)
        return replace(node, args=args, kwargs=kwargs)

    def _moved(self, reader: str, ref: Ref) -> Ref:
        """What a reader reads: of a copy that is missing, that beyond the gap."""
        if self._stays(ref.node):
            return ref
        read = self.copies.of[ref.node]
        span = self.out[read.run, read.index]
        behind = self.copies.of[reader].index > span[-1]
        index = read.index + (-len(span) if behind else len(span))
        return Ref(self.copies.at[read.run, read.family, index], ref.index)

    def _repeats(self, nodes: Sequence[Node]) -> Repeats:
        beside, most = {}, self.beside
        for block, (run, span) in enumerate(self.spans):
            near = (*range(span[0] - most, span[0]), *range(span[-1] + 1, span[-1] + 1 + most))
            beside.update({(run, index): (block, n) for n, index in enumerate(near)})
        places: dict[str, Place] = {}
        targets: dict[str, Place] = {}
        for node in nodes:
            copy = self.copies.of.get(node.name)
            if copy is not None and (copy.run, copy.index) in beside:
                block, number = beside[copy.run, copy.index]
                places[node.name] = (block, copy.family, number)
                if node.op == PARAMETER:
                    # Its gradient is brought home under its own name, another place.
                    targets[node.target] = (block, -1 - copy.family, number)
        return Repeats(
            places=targets | places,
            more=tuple(len(span) for _, span in self.spans),
            typical=most - 1,
        )
