"""Seconds and bytes of what every class may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from autopar.cost.node import local_bytes
from autopar.ir.graph import DTYPE_BYTES, PARAMETER, SOURCE_OPS, Node, Phase
from autopar.rules.strategies import Strategy
from autopar.search.offers import Class
from autopar.search.problem import Choices, Link, Rerun
from autopar.search.regions import Entry
from autopar.search.space import Space
from cost_models.overlap import beside_s, both_copies, together_s

AGAIN_S = 1e-8
"""What running again costs beside its seconds: what takes none is kept if that does no harm."""


class Prices:
    """Prices of a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.analysis = space.analysis
        self.cost = space.cost
        self.mesh = space.mesh
        self.updates = space.updates
        self.classes = space.classes

    def choices(self) -> tuple[Choices, ...]:
        own = [self._choices(c) for c in self.classes]
        return tuple(_joined(own, entry) for entry in self.space.entries)

    def _choices(self, entry: Class) -> Choices:
        count = len(entry.members)
        none = (0.0,) * len(entry.strategies)
        if entry.node.op not in SOURCE_OPS:
            waits = [s.on_host and not s.again for s in entry.strategies]
            return Choices(
                name=entry.node.name,
                count=count,
                seconds=self.seconds(entry, entry.strategies),
                resident_bytes=none,
                gradient_bytes=none,
                divisible=any(waits) and count > 1,
                host_bytes=tuple(
                    count * waiting * float(local_bytes(entry.node.outputs[0], s.outputs[0]))
                    for waiting, s in zip(waits, entry.strategies, strict=True)
                )
                if any(waits)
                else (),
            )
        if entry.node.op != PARAMETER:
            return Choices(
                name=entry.node.name,
                count=count,
                seconds=none,
                resident_bytes=tuple(
                    float(count * local_bytes(entry.node.outputs[0], strategy.outputs[0]))
                    for strategy in entry.strategies
                ),
                gradient_bytes=none,
            )
        return self._parameter_choices(entry)

    def _parameter_choices(self, entry: Class) -> Choices:
        count = len(entry.members)
        kind = entry.node.outputs[0]
        trainable = entry.node.target in self.space.gradients
        optimizer = self.updates.optimizer
        every, each = optimizer.every_bytes(kind.dtype), optimizer.each_bytes(kind.dtype)[0]
        seconds, resident, gradients, states, made, there = [], [], [], [], [], []
        for strategy in entry.strategies:
            held = local_bytes(kind, strategy.outputs[0])
            elements = held / DTYPE_BYTES[kind.dtype]
            state = elements * optimizer.element_bytes(kind.dtype) if trainable else 0.0
            gradient = held if trainable else 0.0
            moved = 2 * (held + state) + gradient if trainable else 0.0
            update_s = moved / self.updates.bytes_per_s
            if strategy.on_host and trainable:
                link = self.cost.device.host_link_bytes_per_s
                both = both_copies(self.cost.device.kind)
                out = held + state
                update_s = max(update_s, together_s((out + gradient) / link, out / link, both))
            here = 0 if strategy.on_host else count
            seconds.append(count * update_s)
            resident.append(here * (held + state))
            gradients.append(here * gradient)
            states.append(here * state)
            apart = each if entry.node.name == self._largest else 0.0
            made.append(elements * (here * every + bool(here) * apart) if trainable else 0.0)
            # Beside the gradients that are added up, those of a microbatch arrive.
            arriving = gradient * (1 + (self.mesh.time_axis is not None))
            there.append((count - here) * (held + state + arriving))
        must = self.space.at_home(entry.members)
        return Choices(
            name=entry.node.name,
            count=count,
            seconds=tuple(seconds),
            resident_bytes=tuple(resident),
            gradient_bytes=tuple(gradients),
            divisible=count > 1,
            update_bytes=tuple(made) if any(made) else (),
            state_bytes=tuple(states) if self.space.leaves and self.space.may_leave else (),
            host_bytes=tuple(there) if any(there) else (),
            least_host=len(must) / count if any(there) else 0.0,
        )

    @cached_property
    def _largest(self) -> str:
        """The trained parameter with most bytes: what is made of one at a time is made of it."""
        sizes = {
            made.node.name: made.node.outputs[0].num_bytes
            for made in self.classes
            if made.node.op == PARAMETER and made.node.target in self.space.gradients
        }
        return max(sizes, key=sizes.__getitem__, default="")

    def seconds(self, entry: Class, chosen: Sequence[Strategy]) -> tuple[float, ...]:
        """Seconds of all members under each of the strategies."""
        return tuple(len(entry.members) * self.each_s(entry.node, s) for s in chosen)

    def each_s(self, node: Node, strategy: Strategy) -> float:
        """Seconds of one member.

        Of a cast that waits in host memory, also those of bringing the parameter and taking it
        there, before the loop; one that is made in every phase takes them where it is read.
        """
        if strategy.again:
            return 0.0
        rule, types = self.analysis.rules[node.name], self.analysis.operand_types(node)
        own_s = self.cost.seconds(node, rule, types, strategy.operands, strategy.outputs)
        if not strategy.on_host:
            return own_s
        device = self.cost.device
        brought, taken = (
            local_bytes(kind, sharding) / device.host_link_bytes_per_s
            for kind, sharding in zip(
                (*types, *node.outputs), (*strategy.operands, *strategy.outputs), strict=True
            )
        )
        both = both_copies(device.kind)
        return max(own_s, together_s(brought, taken, both)) + 2 * max(device.host_op_s, AGAIN_S)

    def reruns(self) -> tuple[tuple[Rerun, ...], tuple[tuple[str, ...], ...]]:
        """Classes that may run again, and their members in the order in which they are taken."""
        found, members = [], []
        for number in self.space.rerun_of:
            names = self.classes[number].members
            must = self.space.matching(names, self.space.restrictions.recompute)
            kept = (*self.space.restrictions.keep, *self.space.restrictions.offload)
            may_not = self.space.matching(names, kept) - must
            entry, _ = self.space.places[number]
            found.append(
                Rerun(
                    name=names[0],
                    node=entry,
                    count=len(names),
                    seconds=tuple(
                        seconds * self._runs(number) + len(names) * AGAIN_S
                        for seconds in self.seconds(
                            self.classes[number], self.space.strategies_of(number)
                        )
                    ),
                    least=len(must) / len(names),
                    most=1.0 - len(may_not) / len(names),
                )
            )
            again = self.space.recompute.handed_on.get(number)
            if again is not None:
                share = len(again) / len(names)
                found[-1] = replace(found[-1], least=share, most=share)
                must, may_not = set(again), set(names) - again
            rank = {name: 0 if name in must else 2 if name in may_not else 1 for name in names}
            members.append(tuple(sorted(names, key=rank.__getitem__)))
        return tuple(found), tuple(members)

    def _runs(self, number: int) -> float:
        """How often a member of a class runs again, if it does, on average over copies."""
        share = self.space.recompute.dense.get(number, 0.0)
        return 1.0 + share if self.space.recompute.own_need(number) else 1.0

    def link(self) -> Link | None:
        """The link to host memory, if values may leave."""
        if not self.space.leaves:
            return None
        own = [self._choices(made) for made in self.classes]
        device = self.cost.device
        both = both_copies(device.kind)
        return Link(
            early=self._compute(own, Phase.FORWARD),
            late=self._compute(own, Phase.BACKWARD),
            host_limit_bytes=float(self.space.num_stages * device.host_memory_bytes),
            # Out and back at once; without that, the device would move it twice by itself.
            state_s_per_byte=max(
                0.0,
                together_s(1.0, 1.0, both) / device.host_link_bytes_per_s
                - 2 / self.updates.bytes_per_s,
            )
            + AGAIN_S * 1e-9,
            beside=beside_s(both),
            least_states=float(self.space.restrictions.offload_states),
        )

    def _compute(
        self, own: Sequence[Choices], phase: Phase
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Seconds of a phase under every choice of the entries that run in it."""
        found = []
        for index, entry in enumerate(self.space.entries):
            places = [
                place
                for place, number in enumerate(entry.classes)
                if self.classes[number].node.phase is phase
                and self.classes[number].node.op not in SOURCE_OPS
                and not self._before_loop(number)
            ]
            if places:
                seconds = tuple(
                    sum(own[entry.classes[p]].seconds[choice[p]] for p in places)
                    for choice in entry.choices
                )
                found.append((index, seconds))
        return tuple(found)

    def _before_loop(self, number: int) -> bool:
        """Whether a class casts parameters before a loop of microbatches, where no copy hides."""
        casts = self.mesh.time_axis is not None and self.space.leaves
        return casts and self.classes[number].node.name in self.analysis.casts


def _joined(own: Sequence[Choices], entry: Entry) -> Choices:
    """The choices of an entry, summed over its classes."""

    def total(name: str) -> tuple[float, ...]:
        columns = [getattr(own[number], name) for number in entry.classes]
        return tuple(
            sum(column[at] for column, at in zip(columns, choice, strict=True) if column)
            for choice in entry.choices
        )

    def some(name: str) -> tuple[float, ...]:
        return total(name) if any(getattr(own[n], name) for n in entry.classes) else ()

    first = own[entry.classes[0]]
    return Choices(
        name=first.name,
        count=first.count,
        seconds=total("seconds"),
        resident_bytes=total("resident_bytes"),
        gradient_bytes=total("gradient_bytes"),
        update_bytes=some("update_bytes"),
        divisible=first.divisible,
        state_bytes=total("state_bytes"),
        host_bytes=some("host_bytes"),
        least_host=max(own[number].least_host for number in entry.classes),
    )
