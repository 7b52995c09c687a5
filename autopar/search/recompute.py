"""What may run again in the backward, and what memory then holds when.

A forward node is *recomputable* if nothing but the loop it stands in reads it: results, what is
made of the batch or of parameters before the loop, and what one copy of a repeated block hands to
the next (its checkpoint) are kept. Memory is counted at *moments*: places of the step. Of what is
kept, a moment holds what is still to be read; of what ran again, what was needed by then and will
be read again; of everything else, what is made and still read in the same phase.

With *sparse* checkpoints every k-th copy of a block alone keeps what it hands on. The k copies
behind a checkpoint first run forward again together, holding what they hand on alone, and then each
once more where its own backward needs it: k - 1 values handed on, and the inside of one block.

Folded blocks
are seen through the copy whose backward runs at the moment: the last one where nothing else is
said, whose backward runs first, while everything kept of the others still waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import SOURCE_OPS, Node, Phase, Ref
from autopar.search.analysis import Analysis
from autopar.search.stages import awaited

FORWARD_MOMENTS, BACKWARD_MOMENTS = 4, 10
"""Moments at which memory is counted, beside the end of the forward and the update."""

NEVER = -1


@lru_cache(maxsize=8)
def recompute_of(analysis: Analysis, *, in_loop: bool, allowed: bool, every: int = 1) -> Recompute:
    """`Recompute` of a step, made once."""
    return Recompute(analysis, in_loop, allowed, every)


@dataclass(frozen=True, eq=False)
class Recompute:
    """What may be recomputed of a step, and when its values are needed.

    Attributes:
        analysis: The step.
        in_loop: Whether microbatches are planned: what runs before the loop is not recomputed.
        allowed: Whether anything is.
        every: Of how many copies of a block one keeps what it hands on.
    """

    analysis: Analysis
    in_loop: bool
    allowed: bool
    every: int = 1

    @cached_property
    def classes(self) -> frozenset[int]:
        """Classes of forward nodes that may run again."""
        if not self.allowed:
            return frozenset()
        folding = self.analysis.folding
        return frozenset(
            number
            for number, names in enumerate(folding.classes)
            if all(self._recomputable(name) for name in names)
        )

    def _recomputable(self, name: str) -> bool:
        analysis = self.analysis
        node = analysis.graph.by_name[name]
        if node.op in SOURCE_OPS or node.phase is not Phase.FORWARD:
            return False
        if name in analysis.data or name in analysis.behind or name in self._results:
            return False
        if self.in_loop and name not in analysis.looped:
            return False
        return not any(
            self._hands_on(name, reader) and not self._may_hand_on(name, reader)
            for reader in self._forward_readers(name)
        )

    def _hands_on(self, maker: str, reader: str) -> bool:
        """Whether a value goes from one copy of a repeated block to another, or out of it."""
        of, classes = self.analysis.folding.of, self.analysis.folding.classes
        made_by, read_by = classes[of[maker]], classes[of[reader]]
        if len(made_by) == 1:
            return False
        return len(made_by) != len(read_by) or self._copy[maker] != self._copy[reader]

    def _may_hand_on(self, maker: str, reader: str) -> bool:
        """Whether a value that goes to the next copy, or out of the last one, may run again."""
        if self.every == 1:
            return False
        copies = self.analysis.copies.of
        made, read = copies.get(maker), copies.get(reader)
        if made is None:
            return False
        if read is not None and made.run == read.run:
            return abs(read.index - made.index) == 1
        return maker == self.analysis.folding.classes[self.analysis.folding.of[maker]][-1]

    @cached_property
    def handed_on(self) -> Mapping[int, frozenset[str]]:
        """Of every class that hands on and may run again, the members that do: not every k-th."""
        found = {}
        for number in self.classes if self.every > 1 else ():
            names = self.analysis.folding.classes[number]
            pairs = ((name, reader) for name in names for reader in self._forward_readers(name))
            if any(self._hands_on(*pair) for pair in pairs):
                found[number] = frozenset(
                    name for at, name in enumerate(names[:-1], start=1) if at % self.every
                )
        return found

    @cached_property
    def dense(self) -> Mapping[int, float]:
        """Of every class that runs again to hand something on, the share of copies that do so."""
        found: dict[int, float] = {}
        of, by_name = self.analysis.folding.of, self.analysis.graph.by_name
        for number, again in self.handed_on.items():
            names = self.analysis.folding.classes[number]
            waiting, seen = [sorted(again)[0]] if again else [], set()
            while waiting:
                name = waiting.pop()
                for ref in by_name[name].operands:
                    maker = self.analysis.root(ref).root.node
                    inside = self.runs_again(maker) and of[maker] not in self.handed_on
                    if inside and maker not in seen:
                        seen.add(maker)
                        waiting.append(maker)
            for name in seen:
                share = len(again) / len(names)
                found[of[name]] = max(found.get(of[name], 0.0), share)
        return found

    def own_need(self, number: int) -> bool:
        """Whether a class runs again for the backward of its own copy, not to hand on alone."""
        return number in self._needed_inside

    @cached_property
    def _needed_inside(self) -> frozenset[int]:
        of, found = self.analysis.folding.of, set()
        for name in self._forward_backwards:
            if name not in of:
                continue
            inside = (of[r] for r in self._forward_readers(name) if of.get(r) in self.classes)
            if self._late(name) or any(r in found and r not in self.handed_on for r in inside):
                found.add(of[name])
        return frozenset(found)

    def forgotten(self, recomputed: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """Backward node to what ran again to hand something on, and is dropped before it.

        Args:
            recomputed: What runs again.
        """
        copies, found = self.analysis.copies.of, dict[str, list[str]]()
        handing = {
            (copies[name].run, copies[name].index)
            for names in self.handed_on.values()
            for name in names
        }
        inside: dict[tuple[int, int], list[str]] = {}
        for name in recomputed:
            place = copies.get(name)
            handed = self.analysis.folding.of[name] in self.handed_on
            if place is not None and not handed and (place.run, place.index) in handing:
                inside.setdefault((place.run, place.index), []).append(name)
        for names in inside.values():
            first = min((at for name in names for at in self._late(name)), default=NEVER)
            if first != NEVER:
                found.setdefault(self.analysis.graph.nodes[first].name, []).extend(names)
        return {reader: tuple(names) for reader, names in found.items()}

    @cached_property
    def _copy(self) -> Mapping[str, int]:
        """Number of the copy that a node stands in: its place in its class."""
        return {
            name: copy for names in self.analysis.folding.classes for copy, name in enumerate(names)
        }

    def may_leave(self, name: str) -> bool:
        """Whether what a node makes can wait for the backward in host memory."""
        analysis = self.analysis
        node = analysis.graph.by_name[name]
        if node.op in SOURCE_OPS or node.phase is not Phase.FORWARD:
            return False
        if name in self._results or name in analysis.data:
            return False
        if self.in_loop and name not in analysis.looped:
            return False
        return not any(reader in analysis.behind for reader in self._forward_readers(name))

    @cached_property
    def _results(self) -> frozenset[str]:
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
    def _reading(self) -> Mapping[Ref, tuple[list[str], list[int]]]:
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

    def _roots(self, name: str) -> list[Ref]:
        """Values that a node makes and that something reads."""
        node = self.analysis.graph.by_name[name]
        refs = (Ref(name, index) for index in range(len(node.outputs)))
        return [ref for ref in refs if ref in self._reading]

    def _forward_readers(self, name: str) -> list[str]:
        return [reader for ref in self._roots(name) for reader in self._reading[ref][0]]

    def _late(self, name: str) -> list[int]:
        """Positions of the backward nodes that read what a node makes."""
        return [at for ref in self._roots(name) for at in self._reading[ref][1]]

    def runs_again(self, name: str) -> bool:
        """Whether a node may run again."""
        number = self.analysis.folding.of.get(name)
        return number in self.classes and name in self.handed_on.get(number, (name,))

    @cached_property
    def _first_needed(self) -> Mapping[str, int]:
        """When a node has run again at the latest, if it does: before its first direct reader."""
        found: dict[str, int] = {}
        for name in self._forward_backwards:
            direct = self._late(name)
            later = [found[r] for r in self._forward_readers(name) if self.runs_again(r)]
            found[name] = min(direct) if direct else max(later, default=NEVER)
        return found

    @cached_property
    def _earliest(self) -> Mapping[str, int]:
        """When a node may have to run again at the earliest; a large number for never."""
        found: dict[str, int] = {}
        never = len(self.analysis.graph.nodes)
        for name in self._forward_backwards:
            later = [found[r] for r in self._forward_readers(name) if self.runs_again(r)]
            found[name] = min([*self._late(name), *later], default=never)
        return found

    @property
    def _forward_backwards(self) -> list[str]:
        """Forward nodes that are not views or sources, the last first."""
        return [
            node.name
            for node in reversed(self.analysis.graph.nodes)
            if node.phase is Phase.FORWARD
            and node.op not in SOURCE_OPS
            and Ref(node.name) not in self.analysis.aliases
        ]

    def last_read(self, ref: Ref) -> int:
        """Position behind which the backward reads a value no more; `NEVER` if it does not."""
        return self._last_read.get(ref, NEVER)

    @cached_property
    def _last_read(self) -> Mapping[Ref, int]:
        found: dict[Ref, int] = {}
        for ref, (early, late) in self._reading.items():
            again = [self._first_needed[name] for name in early if self.runs_again(name)]
            found[ref] = max([*late, *again], default=NEVER)
        return found

    def copy_at(self, number: int, moment: int) -> str:
        """The member of a class that a moment is about: of the copy whose backward runs there."""
        names = self.analysis.folding.classes[number]
        return names[max(0, len(names) - 1 - self._copies_done(moment))]

    def _copies_done(self, moment: int) -> int:
        """How many copies of its block have had their backward by a moment."""
        name = self.analysis.graph.nodes[moment].name
        return self._copy.get(name, 0) if self.is_late(moment) else 0

    def needed_by(self, number: int, moment: int) -> bool:
        """Whether the backward itself has read, by a moment, what the class's copy there makes."""
        return min(self._late(self.copy_at(number, moment)), default=moment + 1) <= moment

    def readers(self, number: int, moment: int) -> list[tuple[Ref, int]]:
        """(value, class) of what may run again and reads what the class's copy there makes."""
        of = self.analysis.folding.of
        return [
            (ref, of[reader])
            for ref in self._roots(self.copy_at(number, moment))
            for reader in self._reading[ref][0]
            if self.runs_again(reader) and self.copy_at(of[reader], moment) == reader
        ]

    def held(self, number: int, moment: int) -> list[Ref]:
        """Values of the class's copy there that are read at or behind a moment of the backward."""
        roots = self._roots(self.copy_at(number, moment))
        return [ref for ref in roots if self._stays(ref) and self.last_read(ref) >= moment]

    def _stays(self, ref: Ref) -> bool:
        """Whether what is made again waits for a reader: it is made for its first one, at once."""
        early, late = self._reading[ref]
        return bool(late) or sum(self.runs_again(name) for name in early) > 1

    def may_be_needed(self, number: int, moment: int) -> bool:
        """Whether the class's copy there can have run again by a moment."""
        return self._earliest[self.copy_at(number, moment)] <= moment

    def remade_together(self, number: int, moment: int) -> int:
        """Of how many copies a moment holds what they hand on and that ran again, at most."""
        last = max(self.handed_on[number], key=self.position.__getitem__, default=None)
        return self.every - 1 if last is not None and self._earliest[last] <= moment else 0

    def passing(self, moment: int) -> Iterator[tuple[int, int, int]]:
        """(class, output, number) of values that live at a moment of the phase that makes them."""
        for (number, index), (made, last) in self._lives_of.items():
            if count := int(np.count_nonzero((made <= moment) & (moment <= last))):
                yield number, index, count

    @cached_property
    def _lives_of(self) -> Mapping[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Of every class and output, where its members' values are made and last read."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for ref, life in self._lives.items():
            found.setdefault((self.analysis.folding.of[ref.node], ref.index), []).append(life)
        return {
            key: (np.array([a for a, _ in lives]), np.array([b for _, b in lives]))
            for key, lives in found.items()
        }

    def kept(self, group: tuple[Ref, ...], moment: int) -> int:
        """Of how many values what is kept is held at a moment, beside what passes."""
        made, last, until, _ = self._spans_of(group)
        return int(np.count_nonzero((made <= moment) & (last < moment) & (moment <= until)))

    def back(self, group: tuple[Ref, ...], moment: int) -> int:
        """Of how many of them the backward has begun to read by then."""
        made, last, until, again = self._spans_of(group)
        held = (made <= moment) & (last < moment) & (moment <= until)
        return int(np.count_nonzero(held & (again <= moment)))

    def _spans_of(self, group: tuple[Ref, ...]) -> NDArray[np.int64]:
        """Where values are made, last read in that phase, last read, first read in the backward."""
        if group not in self._spans:
            spans = [
                (*self._lives.get(r, (NEVER, NEVER)), self.last_read(r), self._first_read(r))
                for r in group
            ]
            self._spans[group] = np.array(spans).T
        return self._spans[group]

    def _first_read(self, ref: Ref) -> int:
        """Where the backward first reads a value, itself or to run something again."""
        early, late = self._reading.get(ref, ([], []))
        again = [self._earliest[name] for name in early if self.runs_again(name)]
        return min(late or again, default=len(self.analysis.graph.nodes))

    def first_reads(self, ref: Ref) -> tuple[int | None, int | None]:
        """Where each phase first reads a value: the forward, and the backward by itself."""
        early, late = self._reading.get(ref, ([], []))
        return min(map(self.position.__getitem__, early), default=None), min(late, default=None)

    @cached_property
    def _spans(self) -> dict[tuple[Ref, ...], NDArray[np.int64]]:
        """Where values are made and read, as asked for."""
        return {}

    @cached_property
    def _lives(self) -> Mapping[Ref, tuple[int, int]]:
        """Of every value that a node makes, where it is made and last read in that phase.

        Gradients of parameters are left out: memory holds them from the backward on.
        """
        graph = self.analysis.graph
        gradients = {self.analysis.root(ref).root for ref in graph.gradients.values()}
        found = {}
        for ref, (early, late) in self._reading.items():
            node = graph.by_name[ref.node]
            if node.op in SOURCE_OPS or ref in gradients:
                continue
            made = self.position[ref.node]
            reads = [self.position[n] for n in early] if node.phase is Phase.FORWARD else late
            found[ref] = (made, max(reads, default=made))
        return found

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
        for ref, (made, last) in self._lives.items():
            size = graph.type_of(ref).num_bytes
            changes[made] += size
            changes[last + 1] -= size
        return list(accumulate(changes))

    @staticmethod
    def _runs(node: Node, phase: Phase) -> bool:
        return node.phase is phase and node.op not in SOURCE_OPS

    def waits(self, ref: Ref) -> bool:
        """Whether gradients of parameters read a value that the rest of the backward may not."""
        return ref in self._waiting

    @property
    def waiting(self) -> Mapping[tuple[int, int], int]:
        """(class, output) of such values that are made in the backward, or may run again there.

        With the number of members.
        """
        found: dict[tuple[int, int], int] = {}
        for ref in self._waiting:
            node = self.analysis.graph.by_name[ref.node]
            late = node.phase is Phase.BACKWARD and node.op not in SOURCE_OPS
            if (late and node.name in self._awaited) or self.runs_again(ref.node):
                key = self.analysis.folding.of[ref.node], ref.index
                found[key] = found.get(key, 0) + 1
        return found

    @cached_property
    def _awaited(self) -> frozenset[str]:
        return awaited(self.analysis)

    @cached_property
    def _waiting(self) -> frozenset[Ref]:
        found: set[Ref] = set()
        for node in self.analysis.graph.nodes:
            is_late = node.phase is Phase.BACKWARD and node.op not in SOURCE_OPS
            if is_late and node.name not in self._awaited:
                found.update(self.analysis.root(ref).root for ref in node.operands)
        return frozenset(found)

    def is_late(self, moment: int) -> bool:
        """Whether a moment is one of the backward."""
        return self.analysis.graph.nodes[moment].phase is Phase.BACKWARD

    def made_by(self, ref: Ref, moment: int) -> bool:
        """Whether a value of the backward has been made by a moment."""
        return self.position.get(ref.node, moment + 1) <= moment
