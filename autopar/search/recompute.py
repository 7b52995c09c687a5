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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import SOURCE_OPS, Phase, Ref
from autopar.search.analysis import Analysis
from autopar.search.reads import Reads, reads_of

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
    def reads(self) -> Reads:
        """Where values are made and read."""
        return reads_of(self.analysis)

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
        if name in analysis.data or name in analysis.behind or name in self.reads.results:
            return False
        if self.in_loop and name not in analysis.looped:
            return False
        return not any(
            self._hands_on(name, reader) and not self._may_hand_on(name, reader)
            for reader in self.reads.early(name)
        )

    def _hands_on(self, maker: str, reader: str) -> bool:
        """Whether a value goes from one copy of a repeated block to another, or out of it."""
        of, classes = self.analysis.folding.of, self.analysis.folding.classes
        made_by, read_by = classes[of[maker]], classes[of[reader]]
        if len(made_by) == 1:
            return False
        return len(made_by) != len(read_by) or self.reads.copy[maker] != self.reads.copy[reader]

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
            pairs = ((name, reader) for name in names for reader in self.reads.early(name))
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
            inside = (of[r] for r in self.reads.early(name) if of.get(r) in self.classes)
            if self.reads.late(name) or any(r in found and r not in self.handed_on for r in inside):
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
            first = min((at for name in names for at in self.reads.late(name)), default=NEVER)
            if first != NEVER:
                found.setdefault(self.analysis.graph.nodes[first].name, []).extend(names)
        return {reader: tuple(names) for reader, names in found.items()}

    def may_leave(self, name: str) -> bool:
        """Whether what a node makes can wait for the backward in host memory."""
        analysis = self.analysis
        node = analysis.graph.by_name[name]
        if node.op in SOURCE_OPS or node.phase is not Phase.FORWARD:
            return False
        if name in self.reads.results or name in analysis.data:
            return False
        if self.in_loop and name not in analysis.looped:
            return False
        return not any(reader in analysis.behind for reader in self.reads.early(name))

    def runs_again(self, name: str) -> bool:
        """Whether a node may run again."""
        number = self.analysis.folding.of.get(name)
        return number in self.classes and name in self.handed_on.get(number, (name,))

    @cached_property
    def _first_needed(self) -> Mapping[str, int]:
        """When a node has run again at the latest, if it does: before its first direct reader."""
        found: dict[str, int] = {}
        for name in self._forward_backwards:
            direct = self.reads.late(name)
            later = [found[r] for r in self.reads.early(name) if self.runs_again(r)]
            found[name] = min(direct) if direct else max(later, default=NEVER)
        return found

    @cached_property
    def _earliest(self) -> Mapping[str, int]:
        """When a node may have to run again at the earliest; a large number for never."""
        found: dict[str, int] = {}
        never = len(self.analysis.graph.nodes)
        for name in self._forward_backwards:
            later = [found[r] for r in self.reads.early(name) if self.runs_again(r)]
            found[name] = min([*self.reads.late(name), *later], default=never)
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
        """Position behind which the backward reads a value no more; `NEVER` if it does not.

        What is made before a loop of microbatches is read in each: to the end.
        """
        return self._last_read.get(ref, NEVER)

    @cached_property
    def _last_read(self) -> Mapping[Ref, int]:
        found: dict[Ref, int] = {}
        for ref, (early, late) in self.reads.reading.items():
            again = [self._first_needed[name] for name in early if self.runs_again(name)]
            found[ref] = max([*late, *again], default=NEVER)
            if self.in_loop and ref.node in self.analysis.data:
                found[ref] = len(self.analysis.graph.nodes)
        return found

    def copy_at(self, number: int, moment: int) -> str:
        """The member of a class that a moment is about: of the copy whose backward runs there."""
        names = self.analysis.folding.classes[number]
        return names[max(0, len(names) - 1 - self._copies_done(moment))]

    def _copies_done(self, moment: int) -> int:
        """How many copies of its block have had their backward by a moment."""
        name = self.analysis.graph.nodes[moment].name
        return self.reads.copy.get(name, 0) if self.reads.is_late(moment) else 0

    def needed_by(self, number: int, moment: int) -> bool:
        """Whether the backward itself has read, by a moment, what the class's copy there makes."""
        return min(self.reads.late(self.copy_at(number, moment)), default=moment + 1) <= moment

    def readers(self, number: int, moment: int) -> list[tuple[Ref, int]]:
        """(value, class) of what may run again and reads what the class's copy there makes."""
        of = self.analysis.folding.of
        return [
            (ref, of[reader])
            for ref in self.reads.roots(self.copy_at(number, moment))
            for reader in self.reads.reading[ref][0]
            if self.runs_again(reader) and self.copy_at(of[reader], moment) == reader
        ]

    def held(self, number: int, moment: int) -> list[Ref]:
        """Values of the class's copy there that are read at or behind a moment of the backward."""
        roots = self.reads.roots(self.copy_at(number, moment))
        return [ref for ref in roots if self._stays(ref) and self.last_read(ref) >= moment]

    def _stays(self, ref: Ref) -> bool:
        """Whether what is made again waits for a reader: it is made for its first one, at once."""
        early, late = self.reads.reading[ref]
        return bool(late) or sum(self.runs_again(name) for name in early) > 1

    def may_be_needed(self, number: int, moment: int) -> bool:
        """Whether the class's copy there can have run again by a moment."""
        return self._earliest[self.copy_at(number, moment)] <= moment

    def remade_together(self, number: int, moment: int) -> int:
        """Of how many copies a moment holds what they hand on and that ran again, at most."""
        last = max(self.handed_on[number], key=self.reads.position.__getitem__, default=None)
        return self.every - 1 if last is not None and self._earliest[last] <= moment else 0

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
        if group[0] not in self._spans:
            spans = [
                (*self.reads.lives.get(r, (NEVER, NEVER)), self.last_read(r), self._first_read(r))
                for r in group
            ]
            self._spans[group[0]] = np.array(spans).T
        return self._spans[group[0]]

    def _first_read(self, ref: Ref) -> int:
        """Where the backward first reads a value, itself or to run something again."""
        early, late = self.reads.reading.get(ref, ([], []))
        again = [self._earliest[name] for name in early if self.runs_again(name)]
        return min(late or again, default=len(self.analysis.graph.nodes))

    @cached_property
    def _spans(self) -> dict[Ref, NDArray[np.int64]]:
        """Where the values of groups are made and read, by the first one, as asked for."""
        return {}

    @property
    def waiting(self) -> Mapping[tuple[int, int], int]:
        """(class, output) of such values that are made in the backward, or may run again there.

        With the number of members.
        """
        found: dict[tuple[int, int], int] = {}
        for ref in self.reads.waiting:
            node = self.analysis.graph.by_name[ref.node]
            late = node.phase is Phase.BACKWARD and node.op not in SOURCE_OPS
            if (late and node.name in self.reads.awaited) or self.runs_again(ref.node):
                key = self.analysis.folding.of[ref.node], ref.index
                found[key] = found.get(key, 0) + 1
        return found
