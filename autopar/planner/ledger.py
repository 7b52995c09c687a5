"""What memory holds when, value by value, for any choice of what runs again and how often.

A ledger knows the nodes of a stage in the order in which they run. Told which forward nodes run
again, and before which nodes of the backward what they made is dropped, it goes through the
backward as lowering does, and says what is held at the peak and how long all that runs again takes.
It knows nothing of pieces in several layouts, of what expansions make in between, nor of
collectives and copies on their way: a change to few values hardly changes those, so differences are
what it is asked for. What is found with it is lowered and simulated before it is believed.

A stage runs its sections for many microbatches, in the order that its schedule's row says. What one
microbatch makes in a section is what it holds there; what others hold meanwhile is what each
section leaves behind it, times the microbatches that are there: those numbers come from the row.

Forward nodes that may run again fall into *parts* between which none reads another; of repeated
blocks each copy is one. What a part holds depends on its own choice alone, so that a change costs
one walk through one part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost.node import NodeCost, local_bytes
from autopar.ir.graph import SOURCE_OPS, Node, Phase, Ref
from autopar.ir.sharding import WHOLE, Mesh, Sharding
from autopar.lower.live import Moment
from autopar.lower.program import LOOP, Section
from autopar.lower.unroll import Row
from autopar.plan.records import StagePlan, Transfer
from autopar.search.analysis import Analysis

OPERANDS = 1 << 10
"""More operands than any node has: they are made again one after the other."""


_Place = tuple[Section, int]
"""A section of a chunk."""

BEFORE, BEHIND = (Section.PROLOGUE, -1), (Section.EPILOGUE, -1)
"""What runs once, of all chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A stage that was lowered.

    Attributes:
        chunks: Plan of each of its chunks, by number.
        row: What its ranks do in their loop, in order.
        profile: What they hold when; empty where that is not known.
        transfers: What crosses the chunks of the step.
    """

    chunks: Mapping[int, StagePlan]
    row: Row
    profile: tuple[Moment, ...]
    transfers: tuple[Transfer, ...] = ()


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

_FIRST, _LAST, _SIZE = 2, 3, 4
"""Places in a row of what may change, and of the bytes that are made."""

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
        stage: Lowered,
        cost: NodeCost,
        kept: Mapping[Ref, tuple[Sharding, ...]],
    ) -> None:
        """The ledger of a stage.

        Args:
            analysis: The step.
            stage: As it was lowered.
            cost: Prices nodes.
            kept: In which shardings each value is kept that may be made again.
        """
        self._values = _Values(analysis, stage, cost, kept)
        may = dict.fromkeys(ref.node for ref in kept)
        self.parts = _parts(may, self._values)
        self.part_of = {name: n for n, names in enumerate(self.parts) for name in names}
        self._late = self._late_reads()
        self._walked: dict[tuple[int, Own], _Walked] = {}
        rest = [ref for ref in self._values.sizes if ref.node not in self.part_of]
        rest.sort(key=self._values.is_shared)
        self._num_own = sum(not self._values.is_shared(ref) for ref in rest)
        self._place = {ref: at for at, ref in enumerate(rest)}
        self._rest = np.array([self._values.row(ref) for ref in rest], dtype=np.int64).T
        self._beside = np.zeros((3, 0), dtype=np.int64)
        self._states = _states(stage.row, self._values.sections)
        self._agree(self.choice(stage.chunks), stage.profile)

    def choice(self, chunks: Mapping[int, StagePlan]) -> Choice:
        """What chunks of these nodes choose."""
        again = {name for plan in chunks.values() for name in plan.recomputed}
        found = [Own(frozenset(again.intersection(names))) for names in self.parts]
        for chunk, plan in chunks.items():
            for reader, names in plan.forgotten.items():
                before = self._values.names.get((chunk, reader), reader)
                for name in names:
                    own = found[self.part_of[name]]
                    dropped = own.dropped | {(before, name)}
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
        """When bytes come or go, in order, and what is held from then on, at most.

        That is what one microbatch makes in a section, and what others hold meanwhile.
        """
        rest = self._rest.copy()
        for place, first, last in (one.others for one in walked):
            np.minimum.at(rest[_FIRST], place, first)
            np.maximum.at(rest[_LAST], place, last)
        rest, shared = rest[:, : self._num_own], rest[:, self._num_own :]
        own = np.concatenate([_events(rest), *(one.events for one in walked)], axis=1)
        events = np.concatenate([np.pad(own, ((0, 1), (0, 0))), self._beside], axis=1)
        events = events[:, np.argsort(events[0], kind="stable")]
        starts = np.searchsorted(events[0], 2 * np.array(self._values.starts))
        passed = np.concatenate([[0], events[1].cumsum()])
        more = self._meanwhile(np.diff(passed[starts]), shared) - passed[starts[:-1]]
        levels = passed[1:] + events[2].cumsum()
        levels[: starts[-1]] += np.repeat(more, np.diff(starts))
        return events[0], levels

    def _meanwhile(self, left: NDArray[np.int64], shared: NDArray[np.int64]) -> NDArray[np.int64]:
        """What is held at most when each section begins.

        Args:
            left: What one microbatch leaves of each.
            shared: Rows of what is made before the loop.
        """
        values = self._values
        sections, totals = values.sections, [*values.totals.values()]
        chunks = np.array([chunk for _, chunk in sections])
        held = [left[: at + 1][chunks[: at + 1] == own].sum() for at, own in enumerate(chunks)]
        lent = np.zeros(len(sections), dtype=np.int64)
        until = np.searchsorted(values.starts[1:-1], shared[_LAST], side="right")
        np.add.at(lent, until, shared[_SIZE])
        most = [(own @ [*held, *totals, *lent]).max(initial=0) for own in self._states]
        stays = int(lent[-1]) if sections[-1] == BEHIND else 0
        starts = dict(zip(sections, stays + np.array(most), strict=True))
        starts |= {BEFORE: 0, BEHIND: stays + sum(totals)}
        return np.array([starts[own] for own in sections], dtype=np.int64)

    def _agree(self, choice: Choice, profile: Sequence[Moment]) -> None:
        """Add at every node what the programs of a choice hold there beside what is known."""
        values = self._values
        simulated = np.zeros(len(values.position), dtype=np.int64)
        at, waiting = 0, 0
        there = here = values.sections[0]
        for moment in profile:
            # What is reduced behind the loop may be so at once where there is none.
            here = (moment.section, moment.chunk) if moment.section in LOOP else here
            if here != there:
                simulated[at], waiting, there = max(simulated[at], waiting), 0, here
            name = values.names.get((moment.chunk, moment.origin))
            again = moment.phase is Phase.BACKWARD and name in values.early
            if name is None or again:
                # What runs again does so for the next node of the backward.
                waiting = max(waiting, moment.num_bytes)
                continue
            at = values.position[name]
            simulated[at] = max(simulated[at], waiting, moment.num_bytes)
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
        self._beside = np.stack([2 * starts, np.zeros_like(more), more])

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
        names: (chunk, node) to what the ledger calls it: by its name, where no earlier chunk of the
            stage runs it too.
        position: Place of every node that runs, in the order of ``sections``.
        sections: What runs before the loop, all of every chunk in it, what runs behind the loop.
        starts: When each of them begins, and their end.
        early: The nodes of the forward.
        reads: Values that every node reads, each once, views seen through; those made here.
        outputs: What every node makes.
        sizes: Bytes of every value as it is made; ``kept`` as it is kept for the backward.
        totals: Of every section, bytes of what microbatches add up to.
        last: When a value is last read in the phase that makes it; results at the end.
        late: (first, last) time at which the backward reads a value of the forward.
        away: Values that wait for the backward in host memory.
        seconds: Of the nodes of the forward that may run again.
    """

    def __init__(
        self,
        analysis: Analysis,
        stage: Lowered,
        cost: NodeCost,
        kept: Mapping[Ref, tuple[Sharding, ...]],
    ) -> None:
        runs = _runs(analysis, stage)
        self.names = {(run.chunk, run.node.name): run.name for run in runs}
        self.position = {run.name: at for at, run in enumerate(runs)}
        self.sections = tuple(dict.fromkeys(run.place for run in runs))
        self.early = {run.name for run in runs if run.node.phase is Phase.FORWARD}
        self.reads = {run.name: self._roots(analysis, run) for run in runs}
        self.outputs = {run.name: [Ref(run.name, index) for index in run.made] for run in runs}
        self.away: set[Ref] = set()
        self.sizes: dict[Ref, int] = {}
        self.kept: dict[Ref, int] = {}
        for run in runs:
            plan = stage.chunks[run.chunk]
            for index, made in run.made.items():
                ref, kind = Ref(run.name, index), run.node.outputs[index]
                value = str(Ref(run.node.name, index))
                self.sizes[ref] = local_bytes(kind, made)
                held = kept.get(ref) or plan.kept.get(value) or (made,)
                self.kept[ref] = sum(local_bytes(kind, sharding) for sharding in held)
                if value in plan.offloaded:
                    self.away.add(ref)
        first = {run.place: at for at, run in reversed([*enumerate(runs)])}
        self.starts = [self.time(at, 0) for at in (*sorted(first.values()), len(runs))]
        self.totals = dict.fromkeys(self.sections, 0)
        self._section_of = {run.name: run.place for run in runs}
        self.last = {ref: self.time(self.position[ref.node]) for ref in self.sizes}
        self.late: dict[Ref, tuple[int, int]] = {}
        for name, refs in self.reads.items():
            for ref in refs:
                self._read(ref, name)
        self._hold_sent(stage)
        self._hold_results(analysis, stage)
        self.seconds = {}
        by_name = {run.name: run for run in runs}
        for name in {ref.node for ref in kept}:
            run = by_name[name]
            rule, types = analysis.rules[run.node.name], analysis.operand_types(run.node)
            made_as = tuple(run.made.values())
            own_s = cost.seconds(run.node, rule, types, run.operands, made_as)
            least_s = cost.device.host_op_s * stage.chunks[run.chunk].mesh.microbatches
            self.seconds[name] = max(own_s, least_s) if own_s else 0.0

    def _read(self, ref: Ref, name: str) -> None:
        """A node reads a value."""
        now = self.time(self.position[name])
        making, using = self._section_of[ref.node], self._section_of[name]
        early = name in self.early or ref.node not in self.early
        if making != using == BEHIND and not self.is_shared(ref):
            self._add_up(ref, self.kept[ref])
        elif self.is_shared(ref) or not early:
            self.late[ref] = (self.late.get(ref, (now,))[0], now)
        else:
            self.last[ref] = now

    def is_shared(self, ref: Ref) -> bool:
        """Whether a value is made before the loop, for all microbatches."""
        return self._section_of[ref.node] == BEFORE

    def _add_up(self, ref: Ref, num_bytes: int) -> int:
        """Have a value read behind the loop: what microbatches make is added up.

        Returns:
            Until when the term of a microbatch is held.
        """
        section = self._section_of[ref.node]
        if self.is_shared(ref):
            self.late[ref] = (self.end, self.end)
        elif section == BEHIND:
            self.last[ref] = self.end
        else:
            self.totals[section] += num_bytes
            self.last[ref] = self._end_of(section)
        return self.last[ref]

    def _end_of(self, section: _Place) -> int:
        return self.starts[self.sections.index(section) + 1] - 1

    def _hold_sent(self, stage: Lowered) -> None:
        """What other ranks read is sent when its section is over."""
        for transfer in stage.transfers:
            value, index = _value(transfer)
            name = self.names.get((transfer.source, value))
            if name is not None and transfer.target not in stage.chunks:
                ref = Ref(name, index)
                self.last[ref] = max(self.last[ref], self._end_of(self._section_of[name]))

    def _hold_results(self, analysis: Analysis, stage: Lowered) -> None:
        """Results stay to the end: gradients as their parameters are stored, others as made."""
        graph = analysis.graph
        for chunk, plan in stage.chunks.items():
            stored = {own.name: own for own in plan.parameters}
            for name, ref in graph.gradients.items():
                root = self._here(analysis, ref, chunk)
                if name in stored and root is not None:
                    own, before = stored[name], self.last[root]
                    held = 0 if own.on_host else local_bytes(graph.type_of(ref), own.stored)
                    end = self._add_up(root, held)
                    self.last[root], self.kept[root], self.late[root] = before, held, (end, end)
            results = (
                *([] if graph.loss is None else [graph.loss]),
                *(ref for _, ref in graph.aux),
                *graph.mutations.values(),
            )
            for ref in results:
                root = self._here(analysis, ref, chunk)
                if root is not None:
                    self._add_up(root, self.sizes[root])

    @property
    def end(self) -> int:
        """Behind everything."""
        return self.time(len(self.position))

    def time(self, position: int, operand: int = OPERANDS - 1, again: int = 0) -> int:
        """When a node runs, or one runs again for an operand of it."""
        return (position * OPERANDS + operand) * (len(self.position) + 1) + again

    def _here(self, analysis: Analysis, ref: Ref, chunk: int) -> Ref | None:
        """A value that a chunk has, views seen through; None where it enters the program."""
        root = analysis.root(ref).root
        name = self.names.get((chunk, root.node))
        return None if name is None else Ref(name, root.index)

    def _roots(self, analysis: Analysis, run: _Run) -> tuple[Ref, ...]:
        roots = (self._here(analysis, ref, run.chunk) for ref in run.reads)
        return tuple(dict.fromkeys(root for root in roots if root is not None))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A node that a chunk runs, or one of another chunk whose results it receives.

    Attributes:
        name: What the ledger calls it.
        node: The node.
        chunk: Number of the chunk; ``place`` the section that the node is in.
        operands: Their shardings; those of ``reads``, which is empty for what is received.
        made: Shardings of its outputs, by their index.
    """

    name: str
    node: Node
    chunk: int
    place: _Place
    reads: tuple[Ref, ...]
    operands: tuple[Sharding, ...]
    made: Mapping[int, Sharding]


def _runs(analysis: Analysis, stage: Lowered) -> list[_Run]:
    """What the chunks of a stage run, section by section."""
    seen = defaultdict[tuple[str, Phase, int], list[Section]](list)
    for moment in stage.profile:
        seen[moment.origin, moment.phase, moment.chunk].append(moment.section)
    found: list[_Run] = []
    taken: set[str] = set()
    for chunk, plan in sorted(stage.chunks.items()):
        plans = {own.name: own for own in plan.nodes}
        received = _received(stage, chunk)
        for node in analysis.graph.nodes:
            own, arrives = plans.get(node.name), received.get(node.name)
            if (own is None and arrives is None) or node.op in SOURCE_OPS:
                continue
            if Ref(node.name) in analysis.aliases:
                continue
            made = (arrives or {}) if own is None else dict(enumerate(own.outputs))
            operands = () if own is None else own.operands
            loops = _loops(plan.mesh, (*operands, *made.values()))
            usual = Section.BACKWARD if node.phase is Phase.BACKWARD else Section.FORWARD
            own_sections = (s for s in seen[node.name, node.phase, chunk] if (s in LOOP) == loops)
            section = next(own_sections, usual if loops else Section.PROLOGUE)
            found.append(
                _Run(
                    name=f"{node.name}.{chunk}" if node.name in taken else node.name,
                    node=node,
                    chunk=chunk,
                    place=(section, chunk if loops else -1),
                    reads=() if own is None else node.operands,
                    operands=operands,
                    made=made,
                )
            )
        taken.update(run.node.name for run in found)
    place = {node.name: at for at, node in enumerate(analysis.graph.nodes)}
    order = list(Section)

    def key(run: _Run) -> tuple[bool, int, int, int]:
        section, chunk = run.place
        return run.place == BEHIND, chunk, order.index(section), place[run.node.name]

    return sorted(found, key=key)


def _loops(mesh: Mesh, shardings: Iterable[Sharding]) -> bool:
    """Whether a node of these shardings runs once a microbatch."""
    time = mesh.time_axis
    return time is None or any(sharding[time] != WHOLE for sharding in shardings)


def _received(stage: Lowered, chunk: int) -> Mapping[str, Mapping[int, Sharding]]:
    """Nodes of the forward of chunks before, and how what they make arrives, by output."""
    found: dict[str, dict[int, Sharding]] = {}
    for transfer in stage.transfers:
        if transfer.target == chunk and transfer.source < chunk:
            name, index = _value(transfer)
            found.setdefault(name, {})[index] = transfer.arrival
    return found


def _value(transfer: Transfer) -> tuple[str, int]:
    """Node and output that a transfer names."""
    name, _, index = transfer.value.partition(":")
    return name, int(index or 0)


def _states(row: Row, sections: Sequence[_Place]) -> list[NDArray[np.int64]]:
    """Of how many microbatches something is held while each section runs, at most: rows of each.

    First, for every section, microbatches that are through with it, but not yet with the next one
    of its chunk. Then, for every section, whether any is through with it, and whether any is not.
    """
    turns = Counter(turn[:2] for turn in row)
    total = np.array([turns[own] for own in sections], dtype=np.int64)
    place = {own: at for at, own in enumerate(sections)}
    chunks = [*(chunk for _, chunk in sections), -1]
    goes_on = [a == b >= 0 for a, b in pairwise(chunks)]
    done = np.zeros(len(chunks), dtype=np.int64)
    found: list[list[NDArray[np.int64]]] = [[] for _ in sections]
    for turn in row:
        at = place.get(turn[:2])
        if at is not None:
            between = np.where(goes_on, done[:-1] - done[1:], 0)
            found[at].append(np.concatenate([between, done[:-1] > 0, done[:-1] < total]))
            done[at] += 1
    return [_most(np.array(own).reshape(-1, 3 * len(sections))) for own in found]


def _most(states: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that hold no less than any other."""
    rows = np.unique(states, axis=0)
    covered = (rows[:, None] <= rows[None]).all(axis=2).sum(axis=1) > 1
    largest: NDArray[np.int64] = rows[~covered]
    return largest


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
