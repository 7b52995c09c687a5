"""The choices of a step on a mesh, and what may run again or leave the device beside them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost, local_bytes
from autopar.ir.graph import PARAMETER, Ref
from autopar.ir.sharding import Mesh, Sharding
from autopar.options import OptimizerSpec
from autopar.rules.strategies import Strategy
from autopar.search.analysis import Analysis
from autopar.search.offers import Offers
from autopar.search.recompute import recompute_of
from autopar.search.regions import Entry, merge_regions, places
from autopar.search.restrict import Restrictions, below
from autopar.search.ways import Ways
from cost_models.cluster import Device


@dataclass(frozen=True, slots=True)
class Updates:
    """What the update of parameters holds and moves.

    Attributes:
        optimizer: Its state, and what it makes for a moment.
        bytes_per_s: Memory bandwidth at which it runs.
    """

    optimizer: OptimizerSpec
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Pending:
    """Microbatches of which weight gradients wait while another one's backward runs.

    Attributes:
        most: On the stage on which most do.
        last: On the stage that holds the end of the model.
    """

    most: float = 0.0
    last: float = 0.0


class Space:
    """What the solver may choose, class by class, and what of it may be made again or go away.

    Attributes:
        offers: Strategies of every class while everything is on the device.
        ways: From layout to layout.
        classes: Classes of nodes with their strategies, in the order of the folding.
        entries: Classes that choose together, with their choices.
        places: Entry of every class, and its place in that.
        all_entries: Entries with all their choices.
        recompute: What may run again.
        rerun_of: Number of its rerun, by class that may run again.
        leaves: Whether values may wait in host memory.
        pending: What waits for weight gradients.
        more_moments: Positions of nodes at which memory is counted too.
    """

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        cost: NodeCost,
        updates: Updates,
        restrictions: Restrictions,
        num_stages: int,
    ) -> None:
        self.num_stages = num_stages
        self.analysis = analysis
        self.graph = analysis.graph
        self.mesh = mesh
        self.cost = cost
        self.updates = updates
        self.restrictions = restrictions
        self.gradients = dict(analysis.graph.gradients)
        self.offers = Offers(analysis, mesh, restrictions)
        self.ways = Ways(mesh, cost)
        self.classes = self.offers.classes
        self.all_entries = merge_regions(
            analysis,
            [c.strategies for c in self.classes],
            lambda ref, sharding: self.offers.at_root(analysis.root(ref), sharding),
            in_loop=mesh.time_axis is not None,
        )
        self.entries = self.all_entries
        self.places = places(self.entries)
        self.recompute = recompute_of(analysis, in_loop=mesh.time_axis is not None, allowed=False)
        self.rerun_of: dict[int, int] = {}
        self.more_moments: set[int] = set()
        self.pending = Pending()
        self.leaves = False

    @property
    def may_leave(self) -> bool:
        """Whether the optimizer can update state that is in host memory."""
        return self.updates.optimizer.host_bucket_elements is not None

    def apart(self, pending: Pending) -> Space:
        """The same, to be changed without this one.

        Args:
            pending: As of `with_reruns`.
        """
        found = copy.copy(self)
        found.more_moments, found.pending = set(self.more_moments), pending
        return found

    def allow_reruns(self, near: Sequence[Sequence[int]], every: int) -> None:
        """Let what can run again in the backward do so.

        Args:
            near: Choices of every entry.
            every: Of how many copies of a block one keeps what it hands on.
        """
        self.entries = tuple(
            Entry(entry.classes, tuple(entry.choices[number] for number in numbers))
            for entry, numbers in zip(self.all_entries, near, strict=True)
        )
        self.recompute = recompute_of(
            self.analysis, in_loop=self.mesh.time_axis is not None, allowed=True, every=every
        )
        self.rerun_of = {c: n for n, c in enumerate(sorted(self.recompute.classes))}
        self.leaves = has_host_memory(self.cost.device)
        if self.leaves and self.restrictions.homes is None:
            self._offer_homes()
            self._offer_casts()

    def _offer_homes(self) -> None:
        """Offer parameters host memory as their home, under each of their choices."""
        classes, entries = list(self.offers.classes), list(self.entries)
        for number, made in enumerate(self.offers.classes):
            trained = made.node.op == PARAMETER and made.node.target in self.gradients
            if made.node.op != PARAMETER or (trained and not self.may_leave):
                continue
            index, _ = self.places[number]
            assert entries[index].classes == (number,)
            there = tuple(replace(s, on_host=True) for s in made.strategies)
            classes[number] = replace(made, strategies=(*made.strategies, *there))
            more = tuple((own + len(there),) for (own,) in entries[index].choices)
            entries[index] = Entry((number,), (*entries[index].choices, *more))
        self.classes, self.entries = tuple(classes), tuple(entries)

    def _offer_casts(self) -> None:
        """Offer what microbatches cast of parameters at home to wait there, or to be cast in each.

        Otherwise it is cast before the loop, and stays.
        """
        if self.mesh.time_axis is None:
            return
        classes, entries = list(self.classes), list(self.entries)
        for number, made in enumerate(self.classes):
            if made.node.name not in self.analysis.casts:
                continue
            read = self.graph.by_name[made.node.operands[0].node]
            index, _ = self.places[number]
            if read.op != PARAMETER or entries[index].classes != (number,):
                continue
            stored = self.classes[self.class_of(read.name)].strategies
            homes = {s.outputs[0] for s in stored if s.on_host}
            own = tuple(made.strategies[n] for (n,) in entries[index].choices)
            there = tuple(s for s in own if s.operands[0] in homes and s.operands == s.outputs)
            more = tuple(replace(s, on_host=True, again=a) for s in there for a in (False, True))
            classes[number] = replace(made, strategies=(*made.strategies, *more))
            first = len(made.strategies)
            added = tuple((first + n,) for n in range(len(more)))
            entries[index] = Entry((number,), (*entries[index].choices, *added))
        self.classes, self.entries = tuple(classes), tuple(entries)

    def class_of(self, name: str) -> int:
        return self.analysis.folding.of[name]

    def strategies_of(self, number: int) -> list[Strategy]:
        """Strategy of a class under every choice of its entry."""
        index, place = self.places[number]
        own = self.classes[number].strategies
        return [own[choice[place]] for choice in self.entries[index].choices]

    def needed(self, reader: int, port: object, ref: Ref) -> list[Sharding]:
        """Sharding of the root that each choice of the reading class needs."""
        alias = self.analysis.root(ref)
        needed = []
        for strategy in self.strategies_of(reader):
            wanted = strategy.operands[port] if isinstance(port, int) else strategy.outputs[0]
            at_root = self.offers.at_root(alias, wanted)
            assert at_root is not None, (ref, wanted)
            needed.append(at_root)
        return needed

    def bytes_of(self, number: int, index: int) -> tuple[float, ...]:
        """Bytes of what one member of a class makes, under every choice of its entry.

        Of a pipeline's stages one holds it, while the problem counts what all hold.
        """
        kind = self.classes[number].node.outputs[index]
        return tuple(
            0.0 if s.on_host else float(self.num_stages * local_bytes(kind, s.outputs[index]))
            for s in self.strategies_of(number)
        )

    @property
    def num_live(self) -> int:
        """Microbatches of which the first stage of a pipeline holds what is kept."""
        return min(self.num_stages, self.mesh.microbatches)

    def matching(self, names: Sequence[str], patterns: Sequence[str]) -> set[str]:
        by_name = self.graph.by_name
        return {n for n in names if any(below(p, by_name[n].source.module) for p in patterns)}

    def at_home(self, names: Sequence[str]) -> set[str]:
        """Nodes of parameters, and of casts of them, that hints put into host memory."""
        if not self.leaves:
            return set()
        owners = {name: self.analysis.owner(Ref(name)) for name in names}
        patterns = self.restrictions.offload_parameters
        return {
            name
            for name, owner in owners.items()
            if owner.op == PARAMETER and any(below(pattern, owner.target) for pattern in patterns)
        }

    def home_order(self, names: Sequence[str]) -> tuple[str, ...]:
        """Members of a class of parameters, or casts, in the order in which they leave the device.

        Those that hints name are in front; of the others as many as may be lie evenly between the
        rest, so that there is time between them to bring them.
        """
        must = self.at_home(names)
        place = {name: spread(at) for at, name in enumerate(names)}
        return tuple(sorted(names, key=lambda name: (name not in must, place[name])))

    def leave_order(self, group: Sequence[Ref]) -> tuple[Ref, ...]:
        """Values of a class, those that leave first in front."""
        names = [ref.node for ref in group]
        must = self.matching(names, self.restrictions.offload)
        may_not = self.matching(names, self.restrictions.keep) - must
        rank = {name: 0 if name in must else 2 if name in may_not else 1 for name in names}
        return tuple(sorted(group, key=lambda ref: rank[ref.node]))


def spread(number: int) -> float:
    """A fraction for every number, such that those of any first few lie evenly spread in 0 to 1.

    Source:
        van der Corput, Proc. Akad. Wetensch. Amsterdam 38, 1935: its binary digits, reversed.
    """
    found, part = 0.0, 0.5
    while number:
        found += part * (number & 1)
        number, part = number >> 1, part / 2
    return found


def has_host_memory(device: Device) -> bool:
    """Whether what leaves a device's memory for its host's frees any."""
    return not device.unified_memory and device.host_memory_bytes > 0
