"""The values of a step: who makes and reads them in which layout, and the ways between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.cost.node import local_bytes
from autopar.cost.reshard import ALL_REDUCE, SLICE, replaced
from autopar.ir.graph import PARAMETER, SOURCE_OPS, Node, Phase, Ref
from autopar.ir.sharding import WHOLE, Partial, Sharding, whole
from autopar.rules.strategies import Strategy
from autopar.search.analysis import Readers
from autopar.search.layouts import Home, Layouts
from autopar.search.prices import AGAIN_S, Prices
from autopar.search.problem import Again, Arc, Leave, Need, Value
from autopar.search.space import Space
from cost_models.overlap import compute_copy


class Values:
    """Values of a space."""

    def __init__(self, space: Space, prices: Prices) -> None:
        self.space = space
        self.analysis = space.analysis
        self.graph = space.graph
        self.mesh = space.mesh
        self.cost = space.cost
        self.recompute = space.recompute
        self.classes = space.classes
        self.prices = prices

    def all(self) -> tuple[tuple[Value, ...], list[tuple[Ref, ...]], list[Layouts]]:
        """The value classes, their members and their layouts."""
        values, roots, layouts = [], [], []
        for group, readers in self.analysis.read:
            made = self._value(group, readers)
            if made is not None:
                values.append(made[0])
                layouts.append(made[1])
                roots.append(group)
        return tuple(values), roots, layouts

    def _value(
        self,
        group: Sequence[Ref],
        readers: Readers,
    ) -> tuple[Value, Layouts] | None:
        root = group[0]
        node = self.graph.by_name[root.node]
        producer = self.space.class_of(root.node)
        layouts = Layouts(node.outputs[root.index])
        entry, _ = self.space.places[producer]
        gives = tuple(
            layouts.number(s.outputs[root.index]) for s in self.space.strategies_of(producer)
        )
        forward: list[Need] = []
        backward: list[Need] = []
        again: list[Again] = []
        fixed: list[int] = []
        delivered: dict[int, list[Sharding | Home]] = {}
        for key, (reader, ref) in readers.items():
            if key[0] == "result":
                fixed.append(layouts.number(whole(self.mesh)))
                continue
            assert isinstance(key[0], int)
            needed = self.space.needed(key[0], key[1], ref)
            need = Need(self.space.places[key[0]][0], tuple(layouts.number(s) for s in needed))
            late = key[1] == "gradient" or self.graph.by_name[reader].phase is Phase.BACKWARD
            crosses = late and node.phase is Phase.FORWARD
            if not late and key[0] in self.space.rerun_of:
                again.append(Again(self.space.rerun_of[key[0]], need.layouts))
            if not crosses and need.node == entry and need.layouts == gives:
                continue
            if key[1] == "gradient":
                delivered[len(forward)] = self._where(key[0], needed)
            elif reader in self.analysis.casts:
                delivered[len(forward)] = self._read_there(key[0], needed)
            (backward if crosses else forward).append(need)
        if not (forward or backward or fixed or again):
            return None
        joined = root not in self.space.offers.carried
        wanted = frozenset(fixed)
        wanted |= {layout for need in (*forward, *backward) for layout in need.layouts}
        wanted |= {layout for need in again for layout in need.layouts}
        arcs = tuple(
            Arc(a.tail, a.head, a.seconds * len(group), a.held_bytes * len(group))
            for a in self.space.ways.between(layouts, wanted, self._time_arcs(root), joined)
        )
        owned = self.analysis.owner(root).op == PARAMETER
        if owned:
            gives = self._numbers(self._where(producer, self._given(producer)), layouts)
        for at, wanted_at in delivered.items():
            forward[at] = replace(forward[at], layouts=self._numbers(wanted_at, layouts))
        arcs += tuple(self._copies(node, layouts, group, readers))
        held = 1 if node.op in SOURCE_OPS else self.space.num_live
        rerun, made_by = self._rerun_of(group), self.classes[producer]
        size = [local_bytes(layouts.kind, s) * len(group) * held for s in layouts.index]
        size += [0] * len(layouts.homes)
        return (
            Value(
                name=str(root),
                producer=entry,
                gives=gives,
                num_layouts=len(layouts.all),
                arcs=arcs,
                forward=tuple(dict.fromkeys(forward)),
                backward=tuple(dict.fromkeys(backward)),
                kept_bytes=tuple(float(s) for s in size),
                persistent=node.op in SOURCE_OPS,
                divisible=len(group) > 1 or (rerun is not None and len(made_by.members) > 1),
                fixed_needs=tuple(sorted(set(fixed))),
                no_keep=self._not_kept(node, layouts),
                rerun=rerun,
                again=tuple(dict.fromkeys(again)),
                leave=self._leave(group, layouts, bool(backward)) if backward or again else None,
                late=node.phase is Phase.BACKWARD,
                homes=tuple(layouts.homes.values()) if owned else (),
                least_home=self._must_stream([ref.node for ref in group], layouts),
            ),
            layouts,
        )

    def _must_stream(self, names: Sequence[str], layouts: Layouts) -> float:
        """Share of parameters that hints have brought from their home for every phase."""
        return len(self.space.at_home(names)) / len(names) if layouts.homes else 0.0

    def _given(self, number: int) -> list[Sharding]:
        """Sharding that each choice of a class of parameters, or of casts of them, makes."""
        return [s.outputs[0] for s in self.space.strategies_of(number)]

    def _where(self, number: int, shardings: Sequence[Sharding]) -> list[Sharding | Home]:
        """Shardings under every choice of a class of parameters, on the host or the device."""
        own = zip(self.space.strategies_of(number), shardings, strict=True)
        return [Home(sharding, s.again) if s.on_host else sharding for s, sharding in own]

    def _read_there(self, number: int, needed: Sequence[Sharding]) -> list[Sharding | Home]:
        """What each choice of a class of casts reads: of those at home there, the home."""
        own = zip(self.space.strategies_of(number), needed, strict=True)
        return [Home(sharding) if s.on_host else sharding for s, sharding in own]

    @staticmethod
    def _numbers(places: Sequence[Sharding | Home], layouts: Layouts) -> tuple[int, ...]:
        return tuple(layouts.home(p) if isinstance(p, Home) else layouts.index[p] for p in places)

    def _copies(
        self, node: Node, layouts: Layouts, group: Sequence[Ref], readers: Readers
    ) -> Iterator[Arc]:
        """The ways of parameters from their homes, or of gradients to them, in all microbatches.

        Terms of microbatches are added up in host memory. A cast comes as it waits there, or the
        parameter comes and is cast.
        """
        device, time = self.cost.device, self.mesh.time_axis
        slow, count = compute_copy(device.kind), len(group)
        comes = self.analysis.owner(group[0]).op == PARAMETER
        for home, there in layouts.homes.items():
            here, adds_up = layouts.index[home.sharding], False
            if not comes:
                here, adds_up = self._added_up_in(group[0], home.sharding, layouts)
            casts = self.analysis.casts if node.op == PARAMETER else ()
            # What is only cast, and stays, is so once, before the loop.
            alone = all(reader in casts for reader, _ in readers.values())
            once = time is not None and (alone if comes else not adds_up)
            often = count if once else count * self.mesh.microbatches
            kind = self.graph.type_of(node.operands[0]) if home.again else layouts.kind
            link_s = often * local_bytes(kind, home.sharding) / device.host_link_bytes_per_s
            lost_s = slow.second * (1 - 1 / slow.first) * link_s
            seconds = lost_s + often * max(device.host_op_s, AGAIN_S)
            if home.again:
                seconds += often * self.prices.each_s(
                    node, Strategy((home.sharding,), (home.sharding,))
                )
            if once:
                # Before the loop, or behind it, there is no compute beside.
                seconds, link_s = seconds + link_s, 0.0
            elif count == 1:
                seconds += self._unhidden_s(group[0], link_s)
            tail, head = (there, here) if comes else (here, there)
            yield Arc(tail, head, seconds, link_s=link_s, adds_up=adds_up)

    def _added_up_in(self, root: Ref, sharding: Sharding, layouts: Layouts) -> tuple[int, bool]:
        """The layout in which gradients go to their home, and whether they are added up there.

        Those that are narrower than their terms may be summed in are added up before.
        """
        time = self.mesh.time_axis
        if root in self.space.offers.carried:
            time = None
        axes = () if time is None else dict.fromkeys(s[time] for s in layouts.index)
        for axis in axes:
            if isinstance(axis, Partial) and time is not None:
                term = layouts.index.get(replaced(sharding, time, axis))
                if term is not None:
                    return term, True
        return layouts.index[sharding], False

    def _unhidden_s(self, ref: Ref, link_s: float) -> float:
        """Seconds of a copy that there is no compute for, in a phase on average.

        That of a parameter is read before there was any, or of a gradient that is made too late.
        """
        forward, backward = self._compute_before
        if self.analysis.owner(ref).op != PARAMETER:
            left_s = backward[-1] - backward[self.recompute.reads.position[ref.node]]
            return max(0.0, link_s - left_s)
        reads = zip(self.recompute.reads.first_reads(ref), (forward, backward), strict=True)
        late = [max(0.0, link_s - before[at]) for at, before in reads if at is not None]
        return sum(late) / max(1, len(late))

    @cached_property
    def _compute_before(self) -> tuple[list[float], list[float]]:
        """Least compute seconds of the forward, and of the backward, before every node."""
        own: tuple[list[float], list[float]] = ([], [])
        least = {
            name: min(self.prices.seconds(made, made.strategies)) / len(made.members)
            for made in self.classes
            if made.node.op not in SOURCE_OPS
            for name in made.members
        }
        for node in self.graph.nodes:
            for phase, found in zip((Phase.FORWARD, Phase.BACKWARD), own, strict=True):
                found.append(least.get(node.name, 0.0) if node.phase is phase else 0.0)
        forward, backward = (list(itertools.accumulate(each, initial=0.0)) for each in own)
        return forward, backward

    def _rerun_of(self, group: Sequence[Ref]) -> int | None:
        """The rerun that makes some of a class of values again."""
        if not any(self.recompute.runs_again(ref.node) for ref in group):
            return None
        return self.space.rerun_of.get(self.space.class_of(group[0].node))

    def _not_kept(self, node: Node, layouts: Layouts) -> frozenset[int]:
        """Partial values are not kept; under ZeRO-3 no gathered parameter is."""
        found = {
            number
            for sharding, number in layouts.index.items()
            if any(isinstance(axis, Partial) for axis in sharding)
        }
        owner = self.analysis.owner(Ref(node.name))
        if owner.op == PARAMETER and self.space.restrictions.zero == 3:
            axes = [a for a, role in enumerate(self.mesh.roles) if role in ("dp", "cp")]
            axes = axes or ([] if any(self.mesh.roles) else list(range(len(self.mesh.sizes))))
            stored = {
                s.outputs[0] for s in self.classes[self.space.class_of(owner.name)].strategies
            }
            for axis in axes:
                if all(s[axis] != WHOLE for s in stored):
                    found |= {n for s, n in layouts.index.items() if s[axis] == WHOLE}
        return frozenset(found)

    def _time_arcs(self, root: Ref) -> str:
        """How a value may change on the time axis.

        What the loop makes is accumulated behind it; all else is read a microbatch at a time.
        """
        return ALL_REDUCE if self.space.offers.roles.made_in_loop(root) else SLICE

    def _leave(self, group: Sequence[Ref], layouts: Layouts, surely: bool) -> Leave | None:
        """How a class of values may wait for the backward in host memory.

        Args:
            group: Its members.
            layouts: Of the value.
            surely: Whether the backward reads it, if nothing runs again.
        """
        names = [ref.node for ref in group]
        if not self.space.leaves or not all(self.recompute.may_leave(name) for name in names):
            return None
        device, times = self.cost.device, len(group) * self.mesh.microbatches
        slow = compute_copy(device.kind)
        seconds = tuple(
            times * local_bytes(layouts.kind, s) / device.host_link_bytes_per_s
            for s in layouts.index
        )
        # Beside a copy, compute takes `first` times as long and the copy `second` times.
        lost = 2 * slow.second * (1 - 1 / slow.first)
        issue_s = 2 * times * max(device.host_op_s, AGAIN_S)
        must = self.space.matching(names, self.space.restrictions.offload)
        may_not = self.space.matching(names, self.space.restrictions.keep) - must
        return Leave(
            seconds=seconds,
            lost_s=tuple(lost * s + issue_s for s in seconds),
            least=len(must) / len(names) if surely else 0.0,
            most=1.0 - len(may_not) / len(names),
        )
