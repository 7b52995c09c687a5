"""Places of the backward at which memory is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from autopar.cost.node import local_bytes
from autopar.ir.graph import PARAMETER, Phase, Ref
from autopar.ir.sharding import WHOLE
from autopar.search.problem import Moment
from autopar.search.space import Space


class Moments:
    """Moments of a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.analysis = space.analysis
        self.graph = space.graph
        self.mesh = space.mesh
        self.recompute = space.recompute
        self.classes = space.classes
        self.places = space.places
        self.rerun_of = space.rerun_of

    def all(self, roots: Sequence[tuple[Ref, ...]]) -> tuple[Moment, ...]:
        """Places of the backward at which memory is counted."""
        index = {ref: number for number, group in enumerate(roots) for ref in group}
        found = sorted({*self.recompute.reads.moments, *self.space.more_moments})
        return tuple(self._moment(at, roots, index) for at in found)

    def _moment(
        self,
        at: int,
        roots: Sequence[tuple[Ref, ...]],
        index: Mapping[Ref, int],
    ) -> Moment:
        kept, back = [], []
        for number, group in enumerate(roots):
            if count := self.recompute.kept(group, at):
                share = self._share_held(group, at)
                kept.append((number, share * count / len(group)))
                back.append((number, share * self.recompute.back(group, at) / len(group)))
        held: dict[int, tuple[float, ...]] = {}
        needed, through = set(), []
        for number, rerun in self.rerun_of.items():
            if number in self.recompute.handed_on and self.recompute.reads.is_late(at):
                if together := self.recompute.remade_together(number, at):
                    needed.add(rerun)
                    held[rerun] = self._handed_on_bytes(number, together)
                continue
            if not self.recompute.reads.is_late(at) or not self.recompute.may_be_needed(number, at):
                continue
            if self.recompute.needed_by(number, at):
                needed.add(rerun)
            else:
                through += [
                    (rerun, self.rerun_of[reader], index[ref])
                    for ref, reader in self.recompute.readers(number, at)
                    if self.recompute.may_be_needed(reader, at)
                ]
            if live := self.recompute.held(number, at):
                columns = [self.space.bytes_of(number, ref.index) for ref in live]
                held[rerun] = tuple(map(sum, zip(*columns, strict=True)))
        passing = dict(self._passing(at))
        if pending := self._pending(at):
            needed |= self._wait(pending, (passing, held))
        return Moment(
            name=self.graph.nodes[at].name,
            kept=tuple(kept),
            gradients=tuple(self._gradients_by(at)),
            needed=frozenset(needed),
            through=tuple(through),
            held=tuple(held.items()),
            passing=tuple(passing.items()),
            back=tuple(back) if self.space.leaves else (),
        )

    def _share_held(self, group: Sequence[Ref], at: int) -> float:
        """Of the microbatches that keep a value, the share that still does at a moment.

        Between the parts of a split backward it is what weight gradients read.
        """
        pending = self._pending(at)
        if not pending or any(map(self.recompute.reads.waits, group)):
            return 1.0
        return max(0.0, 1.0 - pending / self.space.num_live)

    def _pending(self, at: int) -> float:
        """Microbatches of which weight gradients wait at a moment of the backward."""
        if not self.recompute.reads.is_late(at):
            return 0.0
        repeats = self.graph.nodes[at].name in self.analysis.copies.of
        return self.space.pending.most if repeats else self.space.pending.last

    def _wait(
        self,
        pending: float,
        into_both: tuple[dict[int, tuple[float, ...]], dict[int, tuple[float, ...]]],
    ) -> set[int]:
        """Add what waits for weight gradients, of microbatches that are through with the rest.

        Args:
            pending: So many microbatches.
            into_both: Bytes of what the backward makes, by entry, and of what has run again, by
                rerun; those that have are returned.
        """
        (passing, held), again = into_both, set()
        for (number, index), count in self.recompute.waiting.items():
            kind = self.classes[number].node.outputs[index]
            own = tuple(
                pending * count * local_bytes(kind, s.outputs[index])
                for s in self.space.strategies_of(number)
            )
            rerun = self.rerun_of.get(number)
            key, into = (self.places[number][0], passing) if rerun is None else (rerun, held)
            _add(into, key, own)
            if rerun is not None:
                again.add(rerun)
        return again

    def _handed_on_bytes(self, number: int, copies: int) -> tuple[float, ...]:
        """Bytes, under every choice, of what so many copies hand on.

        For the share of the members that runs again: the solver multiplies by it.
        """
        made = self.classes[number]
        share = len(self.recompute.handed_on[number]) / len(made.members)
        columns = [self.space.bytes_of(number, index) for index in range(len(made.node.outputs))]
        return tuple(copies * sum(sizes) / share for sizes in zip(*columns, strict=True))

    def _passing(self, at: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Bytes, under every choice, of what entries make and read in the phase of a moment."""
        found: dict[int, tuple[float, ...]] = {}
        for number, index, count in self.recompute.reads.passing(at):
            entry, _ = self.places[number]
            _add(found, entry, [count * size for size in self.space.bytes_of(number, index)])
        for number in self._made_once:
            entry, _ = self.places[number]
            _add(found, entry, self._once_bytes(number, at))
        return tuple(found.items())

    @cached_property
    def _made_once(self) -> tuple[int, ...]:
        """Classes of the backward that read the batch alone: before a loop, they may be made once.

        In a loop of two microbatches the second is through with them as if there were none. Of a
        pipeline the last stage has them, which holds least else.
        """
        if self.mesh.microbatches <= 2 or self.space.num_stages > 1:
            return ()
        return tuple(
            number
            for number, made in enumerate(self.classes)
            if made.node.phase is Phase.BACKWARD and made.node.name in self.analysis.data
        )

    def _once_bytes(self, number: int, at: int) -> tuple[float, ...]:
        """Bytes, under every choice, of what is made before the loop and not read at a moment."""
        made, found = self.classes[number], [0.0] * len(self.space.strategies_of(number))
        time = self.mesh.time_axis
        assert time is not None
        for index in range(len(made.node.outputs)):
            spans = [self.recompute.reads.lives.get(Ref(name, index)) for name in made.members]
            away = sum(not span[0] <= at <= span[1] for span in spans if span is not None)
            sizes = zip(
                self.space.strategies_of(number), self.space.bytes_of(number, index), strict=True
            )
            for choice, (strategy, num_bytes) in enumerate(sizes):
                if strategy.outputs[index][time] == WHOLE:
                    found[choice] += away * num_bytes
        return tuple(found)

    def _gradients_by(self, at: int) -> Iterable[tuple[int, float]]:
        """(entry, share) of the gradients that are made by a position of the backward.

        Behind a loop of microbatches they are made when it is over.
        """
        if self.mesh.time_axis is not None:
            return
        for number, made in enumerate(self.classes):
            if made.node.op != PARAMETER or made.node.target not in self.space.gradients:
                continue
            names = [self.graph.by_name[name].target for name in made.members]
            refs = [self.analysis.root(self.space.gradients[name]).root for name in names]
            done = sum(self.recompute.reads.made_by(ref, at) for ref in refs)
            if done:
                yield self.places[number][0], done / len(names)


def _add(into: dict[int, tuple[float, ...]], key: int, sizes: Sequence[float]) -> None:
    """Add bytes under every choice to those of an entry, or of a rerun."""
    before = into.get(key, (0.0,) * len(sizes))
    into[key] = tuple(b + s for b, s in zip(before, sizes, strict=True))
