"""What memory holds when, value by value, for any choice of what runs again and how often.

A ledger knows the nodes of a stage in the order in which they run. Told which forward nodes run
again, and before which nodes of the backward what they made is dropped, it goes through the
backward as lowering does, and says what is held at the peak and how long all that runs again takes.
It knows nothing of pieces in several layouts, of what expansions make in between, nor of
collectives and copies on their way: a change to few values hardly changes those, so differences are
what it is asked for. What is found with it is lowered and simulated before it is believed.

Forward nodes that may run again fall into *parts* between which none reads another; of repeated
blocks each copy is one. What a part holds depends on its own choice alone, so that a change costs
one walk through one part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost.node import NodeCost, local_bytes
from autopar.ir.graph import SOURCE_OPS, Node, Phase, Ref
from autopar.ir.sharding import Sharding
from autopar.lower.simulate import Simulation
from autopar.plan.records import StagePlan
from autopar.search.analysis import Analysis

OPERANDS = 1 << 10
"""More operands than any node has: they are made again one after the other."""


@dataclass(frozen=True, slots=True)
class Own:
    """The choice of one part.

    Attributes:
        again: Its nodes that run again when the backward first needs what they make.
        dropped: (backward node, one of them): what it made is dropped before that node.
    """

    again: frozenset[str] = frozenset()
    dropped: frozenset[tuple[str, str]] = frozenset()


Choice = tuple[Own, ...]
"""What runs again, part by part."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a choice holds and costs.

    Attributes:
        peak_bytes: Most bytes at once; ``peak_at`` when.
        over_bytes: Bytes above a limit, added up over every time that bytes come or go.
        seconds: Of all that runs again, in all microbatches.
    """

    peak_bytes: int
    peak_at: int
    over_bytes: float
    seconds: float


@dataclass(slots=True)
class Life:
    """What a node made when it ran again.

    Attributes:
        node: The node.
        made: When.
        reads: When it is read and the backward node that runs then or that others run again for.
    """

    node: str
    made: int
    reads: list[tuple[int, str]]


_Row = tuple[int, ...]
"""Of a value, when it is made, last read in that phase, first and last read by the backward; its
bytes in that phase, from there on, and while the backward reads it."""

_FIRST, _LAST = 2, 3
"""Places in a row of what may change."""

_LATER = 1 << 60
"""When the backward first reads what it does not read: behind everything."""


@dataclass(frozen=True, slots=True, eq=False)
class _Walked:
    """What one part does.

    Attributes:
        events: What its values hold.
        others: Shape [3, values]: places of values of others that it reads, and when first and
            last.
        lives: All that ran again; ``seconds`` how long it took.
    """

    events: NDArray[np.int64]
    others: NDArray[np.int64]
    lives: tuple[Life, ...]
    seconds: float


class Ledger:
    """The values of one stage on a rank that holds most.

    Attributes:
        parts: Nodes of every part, in order; ``part_of`` the number of each node's.
    """

    def __init__(
        self,
        analysis: Analysis,
        stage: StagePlan,
        cost: NodeCost,
        kept: Mapping[Ref, tuple[Sharding, ...]],
        simulation: Simulation,
    ) -> None:
        """The ledger of a stage.

        Args:
            analysis: The step.
            stage: Its plan.
            cost: Prices nodes.
            kept: In which shardings each value is kept that may be made again.
            simulation: Of the stage.
        """
        self._values = _Values(analysis, stage, cost, kept)
        may = dict.fromkeys(ref.node for ref in kept)
        self.parts = _parts(may, self._values)
        self.part_of = {name: n for n, names in enumerate(self.parts) for name in names}
        self._late = self._late_reads()
        self._walked: dict[tuple[int, Own], _Walked] = {}
        rest = [ref for ref in self._values.sizes if ref.node not in self.part_of]
        self._place = {ref: at for at, ref in enumerate(rest)}
        self._rest = np.array([self._values.row(ref) for ref in rest], dtype=np.int64).T
        self._beside = np.zeros((2, 0), dtype=np.int64)
        self._agree(self.choice(stage), simulation)

    def choice(self, stage: StagePlan) -> Choice:
        """What a stage of these nodes chooses."""
        found = [Own(frozenset(stage.recomputed).intersection(names)) for names in self.parts]
        for reader, names in stage.forgotten.items():
            for name in names:
                own = found[self.part_of[name]]
                dropped = own.dropped | {(reader, name)}
                found[self.part_of[name]] = replace(own, dropped=dropped)
        return tuple(found)

    def held(self, choice: Choice, limit_bytes: float = math.inf) -> Held:
        """What a choice holds, also above a limit, and costs."""
        walked = [self._walk(part, own) for part, own in enumerate(choice)]
        times, levels = self._levels(walked)
        at = int(levels.argmax())
        return Held(
            peak_bytes=int(levels[at]),
            peak_at=int(times[at]) // 2,
            over_bytes=float(np.maximum(levels - limit_bytes, 0).sum()),
            seconds=sum(one.seconds for one in walked),
        )

    def _levels(self, walked: Sequence[_Walked]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When bytes come or go, in order, and what is held from then on."""
        rest = self._rest.copy()
        for place, first, last in (one.others for one in walked):
            np.minimum.at(rest[_FIRST], place, first)
            np.maximum.at(rest[_LAST], place, last)
        own = (one.events for one in walked)
        events = np.concatenate([_events(rest), self._beside, *own], axis=1)
        order = np.argsort(events[0], kind="stable")
        return events[0][order], events[1][order].cumsum()

    def _agree(self, choice: Choice, simulation: Simulation) -> None:
        """Add at every node what the simulation of a choice holds there beside what is known."""
        values = self._values
        simulated = np.zeros(len(values.position), dtype=np.int64)
        at, waiting = 0, 0
        for name, phase, held in simulation.profile:
            again = phase is Phase.BACKWARD and name in values.early
            if again or name not in values.position:
                # What runs again does so for the next node of the backward.
                waiting = max(waiting, held)
                continue
            at = values.position[name]
            simulated[at] = max(simulated[at], waiting, held)
            waiting = 0
        known = np.flatnonzero(simulated)
        if not len(known):
            return
        times, levels = self._levels([self._walk(n, own) for n, own in enumerate(choice)])
        where = times // (2 * values.time(1, 0))
        own = np.zeros(len(values.position) + 1, dtype=np.int64)
        np.maximum.at(own, where, levels)
        more = np.diff(simulated[known] - own[known], prepend=0)
        starts = np.array([values.time(at, 0) for at in known.tolist()], dtype=np.int64)
        self._beside = np.stack([2 * starts, more])

    def lives(self, choice: Choice) -> Iterator[Life]:
        """All that runs again."""
        for part, own in enumerate(choice):
            yield from self._walk(part, own).lives

    def start(self, name: str) -> int:
        """When the first runs again for a node of the backward."""
        return self._values.time(self._values.position[name], 0)

    def reads(self, name: str) -> Sequence[Ref]:
        """Values that a node reads, views seen through."""
        return self._values.reads[name]

    def inputs(self, name: str) -> Iterator[str]:
        """Nodes of its part whose results a node reads."""
        return (ref.node for ref in self.reads(name) if ref.node in self.part_of)

    def late(self, name: str) -> list[str]:
        """Nodes of the backward that read values of a node's part."""
        return [reader for reader, _ in self._late[self.part_of[name]]]

    def plain(self, part: int, own: Own) -> Own:
        """The choice of a part without nodes that never run again and drops that change nothing."""
        lives: dict[str, list[Life]] = defaultdict(list)
        for life in self._walk(part, own).lives:
            lives[life.node].append(life)
        more = ((life.reads[0][1], name) for name, one in lives.items() for life in one[1:])
        return Own(frozenset(lives), frozenset(more))

    def read_late(self, name: str) -> bool:
        """Whether the backward itself reads what a node makes."""
        return any(ref in self._values.late for ref in self._values.outputs[name])

    def _late_reads(self) -> list[list[tuple[str, list[tuple[int, Ref]]]]]:
        """For every part, nodes of the backward and (operand, value of the part) that they read."""
        found: list[list[tuple[str, list[tuple[int, Ref]]]]] = [[] for _ in self.parts]
        for name, refs in self._values.reads.items():
            if name in self._values.early:
                continue
            own: dict[int, list[tuple[int, Ref]]] = defaultdict(list)
            for index, ref in enumerate(refs):
                if ref.node in self.part_of:
                    own[self.part_of[ref.node]].append((index, ref))
            for part, reads in own.items():
                found[part].append((name, reads))
        return found

    def _walk(self, part: int, own: Own) -> _Walked:
        if (part, own) not in self._walked:
            walk = _Walk(self._values, own)
            for name, reads in self._late[part]:
                walk.step(name, reads)
            self._walked[part, own] = walk.result(self.parts[part], self._place)
        return self._walked[part, own]


class _Values:
    """What a stage makes and reads, whatever it chooses.

    Attributes:
        position: Place of every node that runs, in order.
        early: The nodes of the forward.
        reads: Values that every node reads, each once, views seen through; those made here.
        outputs: What every node makes.
        sizes: Bytes of every value as it is made; ``kept`` as it is kept for the backward.
        last: When a value is last read in the phase that makes it; results at the end.
        late: (first, last) time at which the backward reads a value of the forward.
        away: Values that wait for the backward in host memory.
        seconds: Of the nodes of the forward that may run again.
    """

    def __init__(
        self,
        analysis: Analysis,
        stage: StagePlan,
        cost: NodeCost,
        kept: Mapping[Ref, tuple[Sharding, ...]],
    ) -> None:
        plans = {plan.name: plan for plan in stage.nodes}
        nodes = [node for node in analysis.graph.nodes if _runs(node, analysis, plans)]
        self.position = {node.name: at for at, node in enumerate(nodes)}
        self.early = {node.name for node in nodes if node.phase is Phase.FORWARD}
        self.reads = {node.name: self._roots(analysis, node) for node in nodes}
        self.outputs = {n.name: [Ref(n.name, i) for i in range(len(n.outputs))] for n in nodes}
        self.sizes: dict[Ref, int] = {}
        self.kept: dict[Ref, int] = {}
        for node in nodes:
            for ref, kind, made in zip(
                self.outputs[node.name], node.outputs, plans[node.name].outputs, strict=True
            ):
                self.sizes[ref] = local_bytes(kind, made)
                held = kept.get(ref) or stage.kept.get(str(ref)) or (made,)
                self.kept[ref] = sum(local_bytes(kind, sharding) for sharding in held)
        self.away = {ref for ref in self.sizes if str(ref) in set(stage.offloaded)}
        self.last = {ref: self.time(self.position[ref.node]) for ref in self.sizes}
        self.late: dict[Ref, tuple[int, int]] = {}
        for name, refs in self.reads.items():
            now = self.time(self.position[name])
            for ref in refs:
                if name not in self.early and ref.node in self.early:
                    self.late[ref] = (self.late.get(ref, (now,))[0], now)
                else:
                    self.last[ref] = now
        self._hold_results(analysis, stage, self.time(len(nodes)))
        self.seconds = {}
        for name in {ref.node for ref in kept}:
            node, plan = analysis.graph.by_name[name], plans[name]
            rule, types = analysis.rules[name], analysis.operand_types(node)
            own_s = cost.seconds(node, rule, types, plan.operands, plan.outputs)
            least_s = cost.device.host_op_s * stage.mesh.microbatches
            self.seconds[name] = max(own_s, least_s) if own_s else 0.0

    def _hold_results(self, analysis: Analysis, stage: StagePlan, end: int) -> None:
        """Results stay to the end: gradients as their parameters are stored, others as made."""
        graph, stored = analysis.graph, {plan.name: plan for plan in stage.parameters}
        for name, ref in graph.gradients.items():
            root = analysis.root(ref).root
            if name in stored and root in self.sizes:
                plan = stored[name]
                held = 0 if plan.on_host else local_bytes(graph.type_of(ref), plan.stored)
                self.kept[root], self.late[root] = held, (end, end)
        own = (
            *([] if graph.loss is None else [graph.loss]),
            *(ref for _, ref in graph.aux),
            *graph.mutations.values(),
        )
        for ref in own:
            root = analysis.root(ref).root
            if root in self.sizes:
                self.last[root] = end

    def time(self, position: int, operand: int = OPERANDS - 1, again: int = 0) -> int:
        """When a node runs, or one runs again for an operand of it."""
        return (position * OPERANDS + operand) * (len(self.position) + 1) + again

    def _roots(self, analysis: Analysis, node: Node) -> tuple[Ref, ...]:
        roots = dict.fromkeys(analysis.root(ref).root for ref in node.operands)
        return tuple(ref for ref in roots if ref.node in self.position)

    def row(self, ref: Ref, *, again: bool = False) -> _Row:
        """What `_events` asks of a value, if what the backward reads of it is made again or not."""
        first, last = (_LATER, 0) if again else self.late.get(ref, (_LATER, 0))
        made, early = self.time(self.position[ref.node]), self.last[ref]
        between = 0 if ref in self.away else self.kept[ref]
        return made, early, first, last, self.sizes[ref], between, self.kept[ref]


class _Walk:
    """Working state of a walk through the backward of one part."""

    def __init__(self, values: _Values, own: Own) -> None:
        self.values = values
        self.again = own.again
        self.dropped: dict[str, list[str]] = defaultdict(list)
        for reader, name in own.dropped:
            self.dropped[reader].append(name)
        self.now: dict[str, Life] = {}
        self.lives: list[Life] = []
        self.since: dict[Ref, int] = {}
        self.until: dict[Ref, int] = {}
        self.rows: list[_Row] = []

    def step(self, name: str, reads: list[tuple[int, Ref]]) -> None:
        """A node of the backward reads values of the part."""
        for own in self.dropped.get(name, ()):
            self._drop(own)
        position = self.values.position[name]
        for index, ref in reads:
            if ref.node in self.again and ref.node not in self.now:
                self._run_again(ref.node, name, position, index)
            self._read(ref, self.values.time(position), name)

    def _run_again(self, name: str, reader: str, position: int, operand: int) -> None:
        wanted, waiting = dict[str, int](), [name]
        while waiting:
            one = waiting.pop()
            if one not in wanted and one not in self.now:
                again = self.values.position[one]
                wanted[one] = self.values.time(position, operand, again)
                reads = self.values.reads[one]
                waiting += [ref.node for ref in reads if ref.node in self.again]
        for one, now in wanted.items():
            self.now[one] = Life(one, now, [])
        for one, now in wanted.items():
            for ref in self.values.reads[one]:
                self._read(ref, now, reader)

    def _read(self, ref: Ref, now: int, reader: str) -> None:
        self.since.setdefault(ref, now)
        self.until[ref] = max(now, self.until.get(ref, 0))
        if ref.node in self.now:
            self.now[ref.node].reads.append((now, reader))

    def _drop(self, name: str) -> None:
        life = self.now.pop(name, None)
        if life is not None:
            self.lives.append(life)
            for ref in self.values.outputs[name]:
                until, size = max(life.made, self.until.pop(ref, 0)), self.values.sizes[ref]
                self.rows.append((life.made, until, _LATER, 0, size, 0, 0))

    def result(self, names: tuple[str, ...], place: Mapping[Ref, int]) -> _Walked:
        """What was done, the part's nodes and the places of values of others given."""
        for name in list(self.now):
            self._drop(name)
        for ref in (ref for name in names for ref in self.values.outputs[name]):
            row = self.values.row(ref, again=ref.node in self.again)
            if ref in self.until:
                row = (*row[:_FIRST], self.since[ref], self.until[ref], *row[_LAST + 1 :])
            self.rows.append(row)
        others = [(place[r], self.since[r], now) for r, now in self.until.items() if r in place]
        return _Walked(
            events=_events(np.array(self.rows, dtype=np.int64).T),
            others=np.array(others, dtype=np.int64).reshape(-1, 3).T,
            lives=tuple(self.lives),
            seconds=sum(self.values.seconds[life.node] for life in self.lives),
        )


def _events(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """When bytes come and go, and how many: shape [2, events]. What goes does so behind."""
    made, early, first, last, size, between, late = rows
    crosses = last > early
    between, late, first = between * crosses, late * crosses, np.minimum(first, last)
    times = (2 * made, 2 * early + 1, np.maximum(2 * first, 2 * early + 1), 2 * last + 1)
    changes = (size, between - size, late - between, -late)
    return np.stack([np.concatenate(times), np.concatenate(changes)])


def _runs(node: Node, analysis: Analysis, plans: Collection[str]) -> bool:
    placed = node.op not in SOURCE_OPS and node.name in plans
    return placed and Ref(node.name) not in analysis.aliases


def _parts(may: Collection[str], values: _Values) -> tuple[tuple[str, ...], ...]:
    """Nodes that may run again, those that read each other together, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(may, key=values.position.__getitem__):
        joined = {id(own): own for r in values.reads[name] if (own := found.get(r.node))}
        longest = max(joined.values(), key=len, default=[])
        for own in joined.values():
            if own is not longest:
                longest += own
                found.update(dict.fromkeys(own, longest))
        longest.append(name)
        found[name] = longest
    unique = {id(own): own for own in found.values()}
    order = values.position.__getitem__
    return tuple(tuple(sorted(own, key=order)) for own in unique.values())
