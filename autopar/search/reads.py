"""Where the values of a step are made and read, whatever runs again: what `recompute` asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import SOURCE_OPS, Node, Phase, Ref
from autopar.search.analysis import Analysis
from autopar.search.stages import awaited

FORWARD_MOMENTS, BACKWARD_MOMENTS = 4, 10
"""Moments at which memory is counted, beside the end of the forward and the update."""

NO_READERS: tuple[Sequence[str], Sequence[int]] = ((), ())


@lru_cache(maxsize=8)
def reads_of(analysis: Analysis) -> Reads:
    """`Reads` of a step, made once."""
    return Reads(analysis)


class Reads:
    """Where the values of a step are made and read.

    Views are seen through; positions are places of nodes in the step.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    @cached_property
    def copy(self) -> Mapping[str, int]:
        """Number of the copy that a node stands in: its place in its class."""
        return {
            name: copy for names in self.analysis.folding.classes for copy, name in enumerate(names)
        }

    @cached_property
    def results(self) -> frozenset[str]:
        """Nodes that make what the step hands out, gradients of parameters apart."""
        graph = self.analysis.graph
        refs = [ref for _, ref in graph.aux] + list(graph.mutations.values())
        if graph.loss is not None:
            refs.append(graph.loss)
        return frozenset(self.analysis.root(ref).root.node for ref in refs)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Place of every node in the step."""
        return {node.name: at for at, node in enumerate(self.analysis.graph.nodes)}

    @cached_property
    def reading(self) -> Mapping[Ref, tuple[list[str], list[int]]]:
        """Of every value, the forward nodes and the positions of backward nodes that read it."""
        found: dict[Ref, tuple[list[str], list[int]]] = {}
        for node in self.analysis.graph.nodes:
            if node.op in SOURCE_OPS or Ref(node.name) in self.analysis.aliases:
                continue
            for ref in node.operands:
                early, late = found.setdefault(self.analysis.root(ref).root, ([], []))
                if node.phase is Phase.FORWARD:
                    early.append(node.name)
                else:
                    late.append(self.position[node.name])
        return found

    @cached_property
    def _roots(self) -> Mapping[str, list[Ref]]:
        """Values that every node makes and that something reads."""
        found = defaultdict[str, list[Ref]](list)
        for ref in sorted(self.reading, key=lambda ref: ref.index):
            found[ref.node].append(ref)
        return found

    def roots(self, name: str) -> Sequence[Ref]:
        """Values that a node makes and that something reads."""
        return self._roots.get(name, ())

    @cached_property
    def _readers(self) -> Mapping[str, tuple[list[str], list[int]]]:
        """Of every node, `early` and `late`."""
        both = {name: [self.reading[ref] for ref in refs] for name, refs in self._roots.items()}
        return {
            name: ([r for early, _ in own for r in early], [r for _, late in own for r in late])
            for name, own in both.items()
        }

    def early(self, name: str) -> Sequence[str]:
        """Forward nodes that read what a node makes."""
        return self._readers.get(name, NO_READERS)[0]

    def late(self, name: str) -> Sequence[int]:
        """Positions of the backward nodes that read what a node makes."""
        return self._readers.get(name, NO_READERS)[1]

    @cached_property
    def lives(self) -> Mapping[Ref, tuple[int, int]]:
        """Of every value that a node makes, where it is made and last read in that phase.

        Gradients of parameters are left out: memory holds them from the backward on.
        """
        graph = self.analysis.graph
        gradients = {self.analysis.root(ref).root for ref in graph.gradients.values()}
        found = {}
        for ref, (early, late) in self.reading.items():
            node = graph.by_name[ref.node]
            if node.op in SOURCE_OPS or ref in gradients:
                continue
            made = self.position[ref.node]
            reads = [self.position[n] for n in early] if node.phase is Phase.FORWARD else late
            found[ref] = (made, max(reads, default=made))
        return found

    @cached_property
    def _lives_of(self) -> Mapping[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Of every class and output, where its members' values are made and last read."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for ref, life in self.lives.items():
            found.setdefault((self.analysis.folding.of[ref.node], ref.index), []).append(life)
        return {
            key: (np.array([a for a, _ in lives]), np.array([b for _, b in lives]))
            for key, lives in found.items()
        }

    def passing(self, moment: int) -> Iterator[tuple[int, int, int]]:
        """(class, output, number) of values that live at a moment of the phase that makes them."""
        for (number, index), (made, last) in self._lives_of.items():
            if count := int(np.count_nonzero((made <= moment) & (moment <= last))):
                yield number, index, count

    def first_reads(self, ref: Ref) -> tuple[int | None, int | None]:
        """Where each phase first reads a value: the forward, and the backward by itself."""
        early, late = self.reading.get(ref, ([], []))
        return min(map(self.position.__getitem__, early), default=None), min(late, default=None)

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Positions of nodes at which memory is counted, in order.

        Of what does not repeat, of the last copies of the forward and of the first ones of the
        backward: where most passes through, in every part of them.
        """
        classes = self.analysis.folding.classes
        by_name = self.analysis.graph.by_name
        forward = [names[-1] for names in classes if self._runs(by_name[names[-1]], Phase.FORWARD)]
        backward = [names[0] for names in classes if self._runs(by_name[names[0]], Phase.BACKWARD)]
        found = [*self._fullest(forward, FORWARD_MOMENTS)]
        found += self._fullest(backward, BACKWARD_MOMENTS)
        return tuple(sorted(set(found)))

    def _fullest(self, names: list[str], parts: int) -> Iterator[int]:
        """Of each of as many parts of the nodes, the position at which most passes through."""
        order = sorted(self.position[name] for name in names)
        for part in range(parts):
            own = order[len(order) * part // parts : len(order) * (part + 1) // parts]
            if own:
                yield max(own, key=self._passing_bytes.__getitem__)

    @cached_property
    def _passing_bytes(self) -> list[int]:
        """Bytes of whole values that pass each position."""
        graph = self.analysis.graph
        changes = [0] * (len(graph.nodes) + 1)
        for ref, (made, last) in self.lives.items():
            size = graph.type_of(ref).num_bytes
            changes[made] += size
            changes[last + 1] -= size
        return list(accumulate(changes))

    @staticmethod
    def _runs(node: Node, phase: Phase) -> bool:
        return node.phase is phase and node.op not in SOURCE_OPS

    def waits(self, ref: Ref) -> bool:
        """Whether gradients of parameters read a value that the rest of the backward may not."""
        return ref in self.waiting

    @cached_property
    def awaited(self) -> frozenset[str]:
        """Nodes of the backward that the backward of an earlier op reads."""
        return awaited(self.analysis)

    @cached_property
    def waiting(self) -> frozenset[Ref]:
        """Values that the others read: gradients of parameters."""
        found: set[Ref] = set()
        for node in self.analysis.graph.nodes:
            is_late = node.phase is Phase.BACKWARD and node.op not in SOURCE_OPS
            if is_late and node.name not in self.awaited:
                found.update(self.analysis.root(ref).root for ref in node.operands)
        return frozenset(found)

    def is_late(self, moment: int) -> bool:
        """Whether a moment is one of the backward."""
        return self.analysis.graph.nodes[moment].phase is Phase.BACKWARD

    def made_by(self, ref: Ref, moment: int) -> bool:
        """Whether a value of the backward has been made by a moment."""
        return self.position.get(ref.node, moment + 1) <= moment
