"""Pointwise regions: elementwise classes that read each other choose one sharding together.

An elementwise op that reads another's result in the same phase never gains from resharding it
between them, so the two become one entry of the problem. Partial values pass only through ops that
are linear in everything they read; elsewhere they would be carried far for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import SOURCE_OPS, Ref
from autopar.ir.sharding import Partial, Sharding
from autopar.rules.notation import Rule
from autopar.rules.strategies import Strategy
from autopar.search.analysis import Analysis

AtRoot = Callable[[Ref, Sharding], Sharding | None]
"""Sharding of the root of a value that gives this sharding of the value."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Classes that choose together.

    Attributes:
        classes: Indices of the classes.
        choices: For every joint choice, the strategy of each class by number.
    """

    classes: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


def is_elementwise(rule: Rule) -> bool:
    """Whether every output element depends on one element of each operand."""
    if rule.alias or rule.expand is not None or len(rule.outputs) != 1 or rule.whole:
        return False
    out = rule.outputs[0]
    if any(len(dim) > 1 for dim in out):
        return False
    named = {dim for dim in out if dim}
    return all(
        len(dim) <= 1 and (not dim or dim in named) for dims in rule.operands for dim in dims
    )


def useful_partials(
    rule: Rule,
    strategies: Sequence[Strategy],
    can_be_partial: Sequence[bool],
    *,
    carries: bool = False,
) -> tuple[Strategy, ...]:
    """The strategies without those that carry partial values where it gains nothing.

    A partial operand is kept where its producer can make one, and the op is a sum, or elementwise
    and linear in everything it reads that is not a scalar: gradients of branches are added before
    they are reduced, and casts move behind the reduction.

    Args:
        rule: The node's rule.
        strategies: Its strategies.
        can_be_partial: For each operand, whether its producer can make it partial.
        carries: Whether the node reads terms that may be summed behind it only: then they pass
            wherever the op is linear in them.
    """
    big = frozenset(i for i, dims in enumerate(rule.operands) if any(dims))
    passes = is_elementwise(rule) or is_sum(rule)

    def useful(strategy: Strategy) -> bool:
        for axis in range(len(strategy.outputs[0])):
            partial = {
                i for i, own in enumerate(strategy.operands) if isinstance(own[axis], Partial)
            }
            if not partial:
                continue
            if not (passes or carries) or not all(can_be_partial[i] for i in partial):
                return False
            if big and partial != big and not carries:
                return False
        return True

    return tuple(s for s in strategies if useful(s))


def is_sum(rule: Rule) -> bool:
    """Whether the op only sums dims of one operand away."""
    if rule.flops or rule.expand is not None or rule.alias or len(rule.operands) != 1:
        return False
    if len(rule.outputs) != 1 or rule.whole:
        return False
    read = {factor for dim in rule.operands[0] for factor in dim}
    made = {factor for dim in rule.outputs[0] for factor in dim}
    return made < read


def merge_regions(
    analysis: Analysis,
    strategies: Sequence[Sequence[Strategy]],
    at_root: AtRoot,
    *,
    in_loop: bool,
) -> tuple[Entry, ...]:
    """The entries of the problem.

    Args:
        analysis: The step.
        strategies: Strategies of every class.
        at_root: Maps shardings of views to their roots.
        in_loop: Whether microbatches are planned. What is made of the batch alone may then be read
            a microbatch at a time here and over the whole batch there, so it chooses by itself.
    """
    merger = _Merger(analysis, strategies, at_root, in_loop)
    return merger.run()


class _Merger:
    """Working state of `merge_regions`."""

    def __init__(
        self,
        analysis: Analysis,
        strategies: Sequence[Sequence[Strategy]],
        at_root: AtRoot,
        in_loop: bool,
    ) -> None:
        self.apart = analysis.data if in_loop else frozenset()
        self.analysis = analysis
        self.strategies = strategies
        self.at_root = at_root
        self.entry_of = list(range(len(strategies)))
        self.entries: dict[int, Entry] = {
            c: Entry((c,), tuple((n,) for n in range(len(own)))) for c, own in enumerate(strategies)
        }

    def run(self) -> tuple[Entry, ...]:
        for number, members in enumerate(self.analysis.folding.classes):
            if self._joins(number):
                for port, ref in enumerate(self.analysis.graph.by_name[members[0]].operands):
                    self._try(number, port, ref)
        return tuple(self.entries.values())

    def _joins(self, number: int) -> bool:
        node = self.analysis.graph.by_name[self.analysis.folding.classes[number][0]]
        if node.op in SOURCE_OPS or node.name in self.analysis.steady:
            return False
        if not is_elementwise(self.analysis.rules[node.name]):
            return False
        return not any(_is_partial(s) for s in self.strategies[number])

    def _try(self, reader: int, port: int, ref: Ref) -> None:
        """Join a reader with the class of what it reads at ``port``, where that loses nothing."""
        graph, folding = self.analysis.graph, self.analysis.folding
        root = self.analysis.root(ref).root
        maker = folding.of[root.node]
        if self.entry_of[maker] == self.entry_of[reader] or not self._joins(maker):
            return
        node = graph.by_name[folding.classes[reader][0]]
        if graph.by_name[root.node].phase is not node.phase:
            return
        if graph.type_of(ref).shape != node.outputs[0].shape:
            return
        if (root.node in self.apart) != (node.name in self.apart):
            return
        if not self._always(reader, port, maker):
            return
        joined = self._joined(self.entries[self.entry_of[maker]], reader, port, maker, ref)
        least = min(
            len(self.entries[self.entry_of[maker]].choices),
            len(self.entries[self.entry_of[reader]].choices),
        )
        if joined is None or len(joined.choices) < least:
            return
        self._replace(joined)

    def _always(self, reader: int, port: int, maker: int) -> bool:
        """Whether every member of the reader reads a member of the maker there."""
        graph, folding = self.analysis.graph, self.analysis.folding
        for name in folding.classes[reader]:
            root = self.analysis.root(graph.by_name[name].operands[port]).root
            if folding.of[root.node] != maker:
                return False
        return True

    def _joined(self, first: Entry, reader: int, port: int, maker: int, ref: Ref) -> Entry | None:
        second = self.entries[self.entry_of[reader]]
        place, own = first.classes.index(maker), second.classes.index(reader)
        by_sharding: dict[Sharding | None, list[tuple[int, ...]]] = {}
        for choice in second.choices:
            wanted = self.strategies[reader][choice[own]].operands[port]
            by_sharding.setdefault(self.at_root(ref, wanted), []).append(choice)
        choices = []
        for choice in first.choices:
            given = self.strategies[maker][choice[place]].outputs[0]
            choices += [choice + other for other in by_sharding.get(given, ())]
        if not choices:
            return None
        return Entry(first.classes + second.classes, tuple(choices))

    def _replace(self, joined: Entry) -> None:
        for old in {self.entry_of[number] for number in joined.classes}:
            del self.entries[old]
        new = joined.classes[0]
        self.entries[new] = joined
        for number in joined.classes:
            self.entry_of[number] = new


def _is_partial(strategy: Strategy) -> bool:
    return any(isinstance(axis, Partial) for s in strategy.outputs for axis in s)


def places(entries: Sequence[Entry]) -> Mapping[int, tuple[int, int]]:
    """Class to (entry, position in it)."""
    return {
        number: (index, place)
        for index, entry in enumerate(entries)
        for place, number in enumerate(entry.classes)
    }
