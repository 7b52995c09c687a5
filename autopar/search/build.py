"""From an analysed step and a mesh to the problem of the intra-op program."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost.node import NodeCost, local_bytes
from autopar.cost.reshard import (
    ALL_REDUCE,
    SLICE,
    Step,
    replaced,
    step_kind,
)
from autopar.errors import HintError, UnsupportedError
from autopar.ir.alias import Alias, through
from autopar.ir.graph import (
    DTYPE_BYTES,
    INPUT,
    PARAMETER,
    SOURCE_OPS,
    Node,
    Phase,
    Ref,
)
from autopar.ir.sharding import (
    WHOLE,
    AxisSharding,
    Mesh,
    Partial,
    Sharding,
    Split,
    is_legal,
    whole,
)
from autopar.rules.strategies import Strategy, strategies
from autopar.search.analysis import Analysis, Readers
from autopar.search.layouts import Home, Layouts, axis_order, leading, plain_shardings, reads_terms
from autopar.search.problem import (
    Again,
    Arc,
    Choices,
    Leave,
    Link,
    Moment,
    Need,
    Problem,
    Rerun,
    Solution,
    Value,
)
from autopar.search.recompute import Recompute, recompute_of
from autopar.search.regions import Entry, merge_regions, places, useful_partials
from autopar.search.restrict import (
    Restrictions,
    RoleFilter,
    below,
    parameter_allows,
    zero_allows,
)
from cost_models.cluster import Device
from cost_models.overlap import beside_s, both_copies, compute_copy, together_s

AGAIN_S = 1e-8
"""What running again costs beside its seconds: what takes none is kept if that does no harm."""


STEADY_BYTES = 1 << 22
"""Values of ids and positions up to this size are simply made whole on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What the update of a parameter holds and moves.

    Attributes:
        per_element: Optimizer state, bytes an element of the parameter.
        moments: Its tensors of the parameter's own dtype instead, if it is made of such.
        update_bytes_per_s: Memory bandwidth at which the update runs.
        gradient_bytes_per_element: Bytes of an element of the gradient; None for the parameter's.
        may_leave: Whether the optimizer can update state that is in host memory.
    """

    per_element: float
    update_bytes_per_s: float
    gradient_bytes_per_element: int | None = None
    moments: int | None = None
    may_leave: bool = False

    def of(self, dtype: str) -> float:
        """Optimizer state of one element of a parameter of this dtype, in bytes."""
        return self.per_element if self.moments is None else self.moments * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Pending:
    """Microbatches of which weight gradients wait while another one's backward runs.

    Attributes:
        most: On the stage on which most do.
        last: On the stage that holds the end of the model.
    """

    most: float = 0.0
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of nodes with the shardings behind its choices."""

    members: tuple[str, ...]
    node: Node
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A problem and what its numbers stand for.

    Attributes:
        problem: For the solver.
        classes: Classes of nodes, in the order of the folding.
        entries: Classes behind every entry of ``problem.nodes``.
        layouts: Shardings of every entry of ``problem.values``, by number.
        roots: Members of every entry of ``problem.values``.
        mesh: The mesh it was built for.
        reruns: Members of every entry of ``problem.reruns``, those that run again first in front.
        builder: What made it, for `with_reruns`.
    """

    problem: Problem
    classes: tuple[_Class, ...]
    entries: tuple[Entry, ...]
    layouts: tuple[tuple[Sharding | Home, ...], ...]
    roots: tuple[tuple[Ref, ...], ...]
    mesh: Mesh
    builder: _Builder = field(repr=False, compare=False)
    reruns: tuple[tuple[str, ...], ...] = ()

    @property
    def cost(self) -> NodeCost:
        """What its nodes were priced with."""
        return self.builder.cost

    @property
    def num_strategies(self) -> int:
        return sum(len(entry.choices) for entry in self.entries)


class _Builder:
    """Working state of one call of `build_problem`."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        cost: NodeCost,
        states: StateBytes,
        restrictions: Restrictions,
        num_stages: int,
    ) -> None:
        self.num_stages = num_stages
        self.analysis = analysis
        self.graph = analysis.graph
        self.mesh = mesh
        self.cost = cost
        self.states = states
        self.restrictions = restrictions
        self.roles = RoleFilter(analysis, mesh)
        self.gradients = dict(analysis.graph.gradients)
        self.partial_outputs: set[tuple[int, int]] = set()
        self.arcs_of: dict[Hashable, tuple[tuple[Sharding, ...], tuple[Arc, ...]]] = {}
        classes: list[_Class] = []
        for number, names in enumerate(analysis.folding.classes):
            made = self._class(names)
            classes.append(made)
            for strategy in made.strategies:
                for index, sharding in enumerate(strategy.outputs):
                    if any(isinstance(axis, Partial) for axis in sharding):
                        self.partial_outputs.add((number, index))
        self.classes = self.device_classes = tuple(classes)
        self.carried = self._carried()
        self.all_entries = merge_regions(
            analysis,
            [c.strategies for c in self.classes],
            lambda ref, sharding: self._at_root(analysis.root(ref), sharding),
            in_loop=mesh.time_axis is not None,
        )
        self.entries = self.all_entries
        self.places = places(self.entries)
        self.recompute = recompute_of(analysis, in_loop=mesh.time_axis is not None, allowed=False)
        self.rerun_of: dict[int, int] = {}
        self.more_moments: set[int] = set()
        self.pending = Pending()
        self.leaves = False

    def _class(self, names: tuple[str, ...]) -> _Class:
        node = self.graph.by_name[names[0]]
        if node.op in SOURCE_OPS:
            return _Class(names, node, self._source_choices(node, names))
        rule = self.analysis.rules[node.name]
        types = self.analysis.operand_types(node)
        everything = whole(self.mesh)
        small = sum(t.num_bytes for t in node.outputs) <= STEADY_BYTES
        if node.name in self.analysis.steady and small:
            only = Strategy((everything,) * len(types), (everything,) * len(node.outputs))
            return _Class(names, node, (only,))
        found = strategies(
            rule,
            types,
            node.outputs,
            self.mesh.even if self.roles.is_stored(node) else self.mesh,
            cuts=self.analysis.cuts.get(node.name, {}),
            allow=lambda axis, factor, outer, block: self.roles.allow(
                node, axis, factor, outer, block
            ),
        )
        legal = [s for s in found if self._reachable(node, s)]
        partial = [self._can_be_partial(names, port) for port in range(len(types))]
        carries = self.analysis.reads_carried(node)
        kept = useful_partials(rule, self.roles.required(node, legal), partial, carries=carries)
        if not kept and self.mesh.time_axis is not None:
            raise UnsupportedError(
                f"cannot run {self.mesh.microbatches} microbatches: {node.op!r} in {node.source} "
                "needs the whole batch in the middle of the step; use hint.microbatches(1), or "
                "hint.per_microbatch with the path of a module or function that may do with less"
            )
        if not kept:
            raise HintError(
                f"cannot shard {node.op!r} in {node.source}: the hints on its parameters leave "
                "no strategy; drop one of them"
            )
        return _Class(names, node, kept)

    def _can_be_partial(self, names: Sequence[str], port: int) -> bool:
        """Whether every producer of an operand of these nodes can make it partial."""
        for name in names:
            root = self.analysis.root(self.graph.by_name[name].operands[port]).root
            if (self.analysis.folding.of[root.node], root.index) not in self.partial_outputs:
                return False
        return True

    def _carried(self) -> frozenset[Ref]:
        """The values whose terms must be carried on: those that every reader can take as terms."""
        left = set(self.analysis.carried)
        for made in self.classes:
            for port in range(len(made.node.operands) if left else 0):
                if any(reads_terms(strategy, port) for strategy in made.strategies):
                    continue
                for name in made.members:
                    left.discard(self.analysis.root(self.graph.by_name[name].operands[port]).root)
        return frozenset(left)

    def _source_choices(self, node: Node, names: Sequence[str]) -> tuple[Strategy, ...]:
        everything = whole(self.mesh)
        if node.op == PARAMETER:
            found = self._stored(node, [self.graph.by_name[n].target for n in names])
        elif node.op == INPUT:
            found = self._input_choices(node)
        else:
            found = (everything,)
        return tuple(Strategy((), (sharding,)) for sharding in found)

    def _input_choices(self, node: Node) -> tuple[Sharding, ...]:
        """Whole, or the batch dim over any axes (nested in mesh order)."""
        dim = self.graph.batch_dims.get(node.target)
        shape = node.outputs[0].shape
        if dim is None:
            return (whole(self.mesh),)
        allowed = [role in ("", "dp") for role in self.mesh.roles]
        turns = self.mesh.turns
        found = plain_shardings(
            shape, self.mesh, dims=(dim,), axes=allowed, shares=True, turns=turns
        )
        return tuple(s for s in found if is_legal(shape, s, self.mesh))

    def _stored(self, node: Node, names: Sequence[str]) -> tuple[Sharding, ...]:
        shape = node.outputs[0].shape
        # Of a class that reaches over stages of unlike meshes, some are stored on others.
        stored = self.restrictions.stored
        if any(name in stored for name in names):
            return tuple(dict.fromkeys(stored[name] for name in names if name in stored))
        everything = plain_shardings(shape, self.mesh, dims=range(len(shape)))
        legal = [s for s in everything if is_legal(shape, s, self.mesh, empty=True)]
        hinted = [
            s
            for s in legal
            if all(parameter_allows(self.restrictions, self.mesh, name, s) for name in names)
            and all(self._gradient_fits(name, s) for name in names)
        ]
        trainable = names[0] in self.gradients
        zeroed = zero_allows(self.restrictions.zero if trainable else None, self.mesh, hinted)
        if not zeroed:
            raise HintError(
                f"cannot store parameter {names[0]!r} of shape {list(shape)} as the hints say: no "
                f"sharding over mesh {describe_mesh(self.mesh)} fits; choose another dim or axis"
            )
        return zeroed

    def _gradient_fits(self, name: str, stored: Sharding) -> bool:
        """Whether the gradient of a parameter can be brought to its stored sharding."""
        ref = self.gradients.get(name)
        return ref is None or self._at_root(self.analysis.root(ref), stored) is not None

    def _reachable(self, node: Node, strategy: Strategy) -> bool:
        """Whether every operand's sharding exists on the value behind its views."""
        for ref, sharding in zip(node.operands, strategy.operands, strict=True):
            alias = self.analysis.root(ref)
            at_root = self._at_root(alias, sharding)
            if at_root is None:
                return False
            root = self.graph.by_name[alias.root.node]
            if not is_legal(root.outputs[alias.root.index].shape, at_root, self.mesh):
                return False
            owner = self.analysis.owner(alias.root)
            if owner.op == PARAMETER and not parameter_allows(
                self.restrictions, self.mesh, owner.target, at_root
            ):
                return False
            if root.op in SOURCE_OPS and any(isinstance(axis, Partial) for axis in at_root):
                return False
        return True

    def _at_root(self, alias: Alias, sharding: Sharding) -> Sharding | None:
        rules, sizes = self.analysis.rules, self.mesh.sizes
        return through(
            sharding,
            tuple(reversed(alias.chain)),
            lambda name, s: rules[name].carry_back(s, sizes),
        )

    # -- values ---------------------------------------------------------------------------------

    def values(self) -> tuple[tuple[Value, ...], list[tuple[Ref, ...]], list[Layouts]]:
        """The value classes, their members and their layouts."""
        values, roots, layouts = [], [], []
        for group, readers in self.analysis.read:
            made = self._value(group, readers)
            if made is not None:
                values.append(made[0])
                layouts.append(made[1])
                roots.append(group)
        return tuple(values), roots, layouts

    def _class_of(self, name: str) -> int:
        return self.analysis.folding.of[name]

    def _value(
        self,
        group: Sequence[Ref],
        readers: Readers,
    ) -> tuple[Value, Layouts] | None:
        root = group[0]
        node = self.graph.by_name[root.node]
        producer = self._class_of(root.node)
        layouts = Layouts(node.outputs[root.index])
        entry, _ = self.places[producer]
        gives = tuple(layouts.number(s.outputs[root.index]) for s in self._strategies_of(producer))
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
            needed = self._needed(key[0], key[1], ref)
            need = Need(self.places[key[0]][0], tuple(layouts.number(s) for s in needed))
            late = key[1] == "gradient" or self.graph.by_name[reader].phase is Phase.BACKWARD
            crosses = late and node.phase is Phase.FORWARD
            if not late and key[0] in self.rerun_of:
                again.append(Again(self.rerun_of[key[0]], need.layouts))
            if not crosses and need.node == entry and need.layouts == gives:
                continue
            if key[1] == "gradient":
                delivered[len(forward)] = self._where(key[0], needed)
            elif reader in self.analysis.casts:
                delivered[len(forward)] = self._read_there(key[0], needed)
            (backward if crosses else forward).append(need)
        if not (forward or backward or fixed or again):
            return None
        joined = root not in self.carried
        wanted = frozenset(fixed)
        wanted |= {layout for need in (*forward, *backward) for layout in need.layouts}
        wanted |= {layout for need in again for layout in need.layouts}
        arcs = tuple(
            Arc(a.tail, a.head, a.seconds * len(group), a.held_bytes * len(group))
            for a in self._arcs(layouts, wanted, self._time_arcs(root), joined)
        )
        owned = self.analysis.owner(root).op == PARAMETER
        if owned:
            gives = self._numbers(self._where(producer, self._given(producer)), layouts)
        for at, wanted_at in delivered.items():
            forward[at] = replace(forward[at], layouts=self._numbers(wanted_at, layouts))
        arcs += tuple(self._copies(node, layouts, group, readers))
        held = 1 if node.op in SOURCE_OPS else self._num_live
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
        return len(self._at_home(names)) / len(names) if layouts.homes else 0.0

    def _given(self, number: int) -> list[Sharding]:
        """Sharding that each choice of a class of parameters, or of casts of them, makes."""
        return [s.outputs[0] for s in self._strategies_of(number)]

    def _where(self, number: int, shardings: Sequence[Sharding]) -> list[Sharding | Home]:
        """Shardings under every choice of a class of parameters, on the host or the device."""
        own = zip(self._strategies_of(number), shardings, strict=True)
        return [Home(sharding, s.again) if s.on_host else sharding for s, sharding in own]

    def _read_there(self, number: int, needed: Sequence[Sharding]) -> list[Sharding | Home]:
        """What each choice of a class of casts reads: of those at home there, the home."""
        own = zip(self._strategies_of(number), needed, strict=True)
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
                here, adds_up = self._added_up_in(home.sharding, layouts)
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
                seconds += often * self._each_s(node, Strategy((home.sharding,), (home.sharding,)))
            if once:
                # Before the loop, or behind it, there is no compute beside.
                seconds, link_s = seconds + link_s, 0.0
            elif count == 1:
                seconds += self._unhidden_s(group[0], link_s)
            tail, head = (there, here) if comes else (here, there)
            yield Arc(tail, head, seconds, link_s=link_s, adds_up=adds_up)

    def _added_up_in(self, sharding: Sharding, layouts: Layouts) -> tuple[int, bool]:
        """The layout in which gradients go to their home, and whether they are added up there."""
        time = self.mesh.time_axis
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
            name: min(self._seconds(made, made.strategies)) / len(made.members)
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
        return self.rerun_of.get(self._class_of(group[0].node))

    def _needed(self, reader: int, port: object, ref: Ref) -> list[Sharding]:
        """Sharding of the root that each choice of the reading class needs."""
        alias = self.analysis.root(ref)
        needed = []
        for strategy in self._strategies_of(reader):
            wanted = strategy.operands[port] if isinstance(port, int) else strategy.outputs[0]
            at_root = self._at_root(alias, wanted)
            assert at_root is not None, (ref, wanted)
            needed.append(at_root)
        return needed

    def _strategies_of(self, number: int) -> list[Strategy]:
        """Strategy of a class under every choice of its entry."""
        index, place = self.places[number]
        own = self.classes[number].strategies
        return [own[choice[place]] for choice in self.entries[index].choices]

    def _not_kept(self, node: Node, layouts: Layouts) -> frozenset[int]:
        """Partial values are not kept; under ZeRO-3 no gathered parameter is."""
        found = {
            number
            for sharding, number in layouts.index.items()
            if any(isinstance(axis, Partial) for axis in sharding)
        }
        owner = self.analysis.owner(Ref(node.name))
        if owner.op == PARAMETER and self.restrictions.zero == 3:
            axes = [a for a, role in enumerate(self.mesh.roles) if role in ("dp", "cp")]
            axes = axes or ([] if any(self.mesh.roles) else list(range(len(self.mesh.sizes))))
            stored = {s.outputs[0] for s in self.classes[self._class_of(owner.name)].strategies}
            for axis in axes:
                if all(s[axis] != WHOLE for s in stored):
                    found |= {n for s, n in layouts.index.items() if s[axis] == WHOLE}
        return frozenset(found)

    def _time_arcs(self, root: Ref) -> str:
        """How a value may change on the time axis.

        What the loop makes is accumulated behind it; all else is read a microbatch at a time.
        """
        return ALL_REDUCE if self.roles.made_in_loop(root) else SLICE

    def _arcs(
        self,
        layouts: Layouts,
        needed: frozenset[int],
        in_time: str,
        joined: bool,
    ) -> tuple[Arc, ...]:
        """Changes of layout of one member that lead to what is needed.

        Adds the layouts between those that are there. Terms are summed if ``joined``.
        """
        key = (layouts.kind, tuple(layouts.index), needed, in_time, joined)
        found = self.arcs_of.get(key)
        if found is None:
            everything = Layouts(layouts.kind, dict(layouts.index))
            self._add_between(everything)
            arcs = self._all_arcs(everything, in_time, joined)
            found = self.arcs_of[key] = leading(everything, arcs, needed, len(layouts.index))
        for sharding in found[0]:
            layouts.number(sharding)
        return found[1]

    def _add_between(self, layouts: Layouts) -> None:
        """Add the layouts that mix what those that are there do on every axis.

        An axis may also do nothing where it does several things, since it may not get from one to
        the other at once. There is no way from one split on the time axis to another, only from
        what is not split there to any: layouts of different splits do not mix.
        """
        time = self.mesh.time_axis
        loose: list[Sharding] = []
        groups: dict[AxisSharding, list[Sharding]] = {}
        for sharding in layouts.index:
            if time is not None and isinstance(sharding[time], Split):
                groups.setdefault(sharding[time], []).append(sharding)
            else:
                loose.append(sharding)
        # Whatever a layout that is not split may become, it may become before it is.
        before = {(*s[:time], WHOLE) for known in groups.values() for s in known} if loose else ()
        for known in ((*loose, *before), *((*own, *loose) for own in groups.values())):
            options = [{s[axis] for s in known} for axis in range(len(self.mesh.sizes))]
            for axis, own in enumerate(options):
                if len(own) > 1 and axis != time:
                    own.add(WHOLE)
            for mixed in itertools.product(*(sorted(own, key=axis_order) for own in options)):
                if is_legal(layouts.kind.shape, mixed, self.mesh, empty=True):
                    layouts.number(mixed)

    def _all_arcs(self, layouts: Layouts, in_time: str, joined: bool) -> list[Arc]:
        """Everything that one member may do from layout to layout."""
        kind, arcs = layouts.kind, []
        options = [
            sorted({s[axis] for s in layouts.index}, key=axis_order)
            for axis in range(len(self.mesh.sizes))
        ]
        for before, tail in layouts.index.items():
            for axis, choices in enumerate(options):
                if not joined and isinstance(before[axis], Partial):
                    continue
                for new in choices:
                    after = replaced(before, axis, new)
                    head = layouts.index.get(after)
                    what = None if head is None else step_kind(kind.shape, before, after, axis)
                    if what is None or head is None:
                        continue
                    if axis == self.mesh.time_axis and what != in_time:
                        continue
                    step = Step(what, axis, before, after)
                    seconds = self.cost.step_s(kind, step)
                    if seconds == float("inf"):
                        continue
                    added_up = axis == self.mesh.time_axis and what == ALL_REDUCE
                    held = float(local_bytes(kind, after)) if added_up else 0.0
                    arcs.append(Arc(tail, head, seconds, held))
        return arcs

    # -- recompute ------------------------------------------------------------------------------

    def apart(self, pending: Pending) -> _Builder:
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
        classes, entries = list(self.device_classes), list(self.entries)
        for number, made in enumerate(self.device_classes):
            trained = made.node.op == PARAMETER and made.node.target in self.gradients
            if made.node.op != PARAMETER or (trained and not self.states.may_leave):
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
            stored = self.classes[self._class_of(read.name)].strategies
            homes = {s.outputs[0] for s in stored if s.on_host}
            own = tuple(made.strategies[n] for (n,) in entries[index].choices)
            there = tuple(s for s in own if s.operands[0] in homes and s.operands == s.outputs)
            more = tuple(replace(s, on_host=True, again=a) for s in there for a in (False, True))
            classes[number] = replace(made, strategies=(*made.strategies, *more))
            first = len(made.strategies)
            added = tuple((first + n,) for n in range(len(more)))
            entries[index] = Entry((number,), (*entries[index].choices, *added))
        self.classes, self.entries = tuple(classes), tuple(entries)

    def reruns(self) -> tuple[tuple[Rerun, ...], tuple[tuple[str, ...], ...]]:
        """Classes that may run again, and their members in the order in which they are taken."""
        found, members = [], []
        for number in self.rerun_of:
            names = self.classes[number].members
            must = self._matching(names, self.restrictions.recompute)
            kept = (*self.restrictions.keep, *self.restrictions.offload)
            may_not = self._matching(names, kept) - must
            entry, _ = self.places[number]
            found.append(
                Rerun(
                    name=names[0],
                    node=entry,
                    count=len(names),
                    seconds=tuple(
                        seconds * self._runs(number) + len(names) * AGAIN_S
                        for seconds in self._seconds(
                            self.classes[number], self._strategies_of(number)
                        )
                    ),
                    least=len(must) / len(names),
                    most=1.0 - len(may_not) / len(names),
                )
            )
            again = self.recompute.handed_on.get(number)
            if again is not None:
                share = len(again) / len(names)
                found[-1] = replace(found[-1], least=share, most=share)
                must, may_not = set(again), set(names) - again
            rank = {name: 0 if name in must else 2 if name in may_not else 1 for name in names}
            members.append(tuple(sorted(names, key=rank.__getitem__)))
        return tuple(found), tuple(members)

    def _runs(self, number: int) -> float:
        """How often a member of a class runs again, if it does, on average over copies."""
        share = self.recompute.dense.get(number, 0.0)
        return 1.0 + share if self.recompute.own_need(number) else 1.0

    def _matching(self, names: Sequence[str], patterns: Sequence[str]) -> set[str]:
        by_name = self.graph.by_name
        return {n for n in names if any(below(p, by_name[n].source.module) for p in patterns)}

    # -- offload --------------------------------------------------------------------------------

    def _leave(self, group: Sequence[Ref], layouts: Layouts, surely: bool) -> Leave | None:
        """How a class of values may wait for the backward in host memory.

        Args:
            group: Its members.
            layouts: Of the value.
            surely: Whether the backward reads it, if nothing runs again.
        """
        names = [ref.node for ref in group]
        if not self.leaves or not all(self.recompute.may_leave(name) for name in names):
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
        must = self._matching(names, self.restrictions.offload)
        may_not = self._matching(names, self.restrictions.keep) - must
        return Leave(
            seconds=seconds,
            lost_s=tuple(lost * s + issue_s for s in seconds),
            least=len(must) / len(names) if surely else 0.0,
            most=1.0 - len(may_not) / len(names),
        )

    def leave_order(self, group: Sequence[Ref]) -> tuple[Ref, ...]:
        """Values of a class, those that leave first in front."""
        names = [ref.node for ref in group]
        must = self._matching(names, self.restrictions.offload)
        may_not = self._matching(names, self.restrictions.keep) - must
        rank = {name: 0 if name in must else 2 if name in may_not else 1 for name in names}
        return tuple(sorted(group, key=lambda ref: rank[ref.node]))

    def link(self) -> Link | None:
        """The link to host memory, if values may leave."""
        if not self.leaves:
            return None
        own = [self._choices(made) for made in self.classes]
        device = self.cost.device
        both = both_copies(device.kind)
        return Link(
            early=self._compute(own, Phase.FORWARD),
            late=self._compute(own, Phase.BACKWARD),
            host_limit_bytes=float(self.num_stages * device.host_memory_bytes),
            # Out and back at once; without that, the device would move it twice by itself.
            state_s_per_byte=max(
                0.0,
                together_s(1.0, 1.0, both) / device.host_link_bytes_per_s
                - 2 / self.states.update_bytes_per_s,
            )
            + AGAIN_S * 1e-9,
            beside=beside_s(both),
            least_states=float(self.restrictions.offload_states),
        )

    def _compute(
        self, own: Sequence[Choices], phase: Phase
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Seconds of a phase under every choice of the entries that run in it."""
        found = []
        for index, entry in enumerate(self.entries):
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
        casts = self.mesh.time_axis is not None and self.leaves
        return casts and self.classes[number].node.name in self.analysis.casts

    def moments(self, roots: Sequence[tuple[Ref, ...]]) -> tuple[Moment, ...]:
        """Places of the backward at which memory is counted."""
        index = {ref: number for number, group in enumerate(roots) for ref in group}
        recompute = self.recompute
        found = sorted({*recompute.reads.moments, *self.more_moments})
        return tuple(self._moment(recompute, at, roots, index) for at in found)

    def _moment(
        self,
        recompute: Recompute,
        at: int,
        roots: Sequence[tuple[Ref, ...]],
        index: Mapping[Ref, int],
    ) -> Moment:
        kept, back = [], []
        for number, group in enumerate(roots):
            if count := recompute.kept(group, at):
                share = self._share_held(recompute, group, at)
                kept.append((number, share * count / len(group)))
                back.append((number, share * recompute.back(group, at) / len(group)))
        held: dict[int, tuple[float, ...]] = {}
        needed, through = set(), []
        for number, rerun in self.rerun_of.items():
            if number in recompute.handed_on and recompute.reads.is_late(at):
                if together := recompute.remade_together(number, at):
                    needed.add(rerun)
                    held[rerun] = self._handed_on_bytes(number, together)
                continue
            if not recompute.reads.is_late(at) or not recompute.may_be_needed(number, at):
                continue
            if recompute.needed_by(number, at):
                needed.add(rerun)
            else:
                through += [
                    (rerun, self.rerun_of[reader], index[ref])
                    for ref, reader in recompute.readers(number, at)
                    if recompute.may_be_needed(reader, at)
                ]
            if live := recompute.held(number, at):
                columns = [self._bytes_of(number, ref.index) for ref in live]
                held[rerun] = tuple(map(sum, zip(*columns, strict=True)))
        passing = dict(self._passing(recompute, at))
        if pending := self._pending(at):
            needed |= self._wait(recompute, pending, (passing, held))
        return Moment(
            name=self.graph.nodes[at].name,
            kept=tuple(kept),
            gradients=tuple(self._gradients_by(recompute, at)),
            needed=frozenset(needed),
            through=tuple(through),
            held=tuple(held.items()),
            passing=tuple(passing.items()),
            back=tuple(back) if self.leaves else (),
        )

    def _share_held(self, recompute: Recompute, group: Sequence[Ref], at: int) -> float:
        """Of the microbatches that keep a value, the share that still does at a moment.

        Between the parts of a split backward it is what weight gradients read.
        """
        pending = self._pending(at)
        if not pending or any(map(recompute.reads.waits, group)):
            return 1.0
        return max(0.0, 1.0 - pending / self._num_live)

    def _pending(self, at: int) -> float:
        """Microbatches of which weight gradients wait at a moment of the backward."""
        if not self.recompute.reads.is_late(at):
            return 0.0
        repeats = self.graph.nodes[at].name in self.analysis.copies.of
        return self.pending.most if repeats else self.pending.last

    def _wait(
        self,
        recompute: Recompute,
        pending: float,
        into_both: tuple[dict[int, tuple[float, ...]], dict[int, tuple[float, ...]]],
    ) -> set[int]:
        """Add what waits for weight gradients, of microbatches that are through with the rest.

        Args:
            recompute: What may run again.
            pending: So many microbatches.
            into_both: Bytes of what the backward makes, by entry, and of what has run again, by
                rerun; those that have are returned.
        """
        (passing, held), again = into_both, set()
        for (number, index), count in recompute.waiting.items():
            kind = self.classes[number].node.outputs[index]
            own = tuple(
                pending * count * local_bytes(kind, s.outputs[index])
                for s in self._strategies_of(number)
            )
            rerun = self.rerun_of.get(number)
            key, into = (self.places[number][0], passing) if rerun is None else (rerun, held)
            before = into.get(key, (0.0,) * len(own))
            into[key] = tuple(b + o for b, o in zip(before, own, strict=True))
            if rerun is not None:
                again.add(rerun)
        return again

    @property
    def _num_live(self) -> int:
        """Microbatches of which the first stage of a pipeline holds what is kept."""
        return min(self.num_stages, self.mesh.microbatches)

    def _handed_on_bytes(self, number: int, copies: int) -> tuple[float, ...]:
        """Bytes, under every choice, of what so many copies hand on.

        For the share of the members that runs again: the solver multiplies by it.
        """
        made = self.classes[number]
        share = len(self.recompute.handed_on[number]) / len(made.members)
        columns = [self._bytes_of(number, index) for index in range(len(made.node.outputs))]
        return tuple(copies * sum(sizes) / share for sizes in zip(*columns, strict=True))

    def _passing(self, recompute: Recompute, at: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Bytes, under every choice, of what entries make and read in the phase of a moment."""
        found: dict[int, tuple[float, ...]] = {}
        for number, index, count in recompute.reads.passing(at):
            entry, _ = self.places[number]
            own = self._bytes_of(number, index)
            before = found.get(entry, (0.0,) * len(own))
            found[entry] = tuple(b + count * o for b, o in zip(before, own, strict=True))
        for number in self._made_once:
            entry, _ = self.places[number]
            own = self._once_bytes(number, at)
            before = found.get(entry, (0.0,) * len(own))
            found[entry] = tuple(b + o for b, o in zip(before, own, strict=True))
        return tuple(found.items())

    @cached_property
    def _made_once(self) -> tuple[int, ...]:
        """Classes of the backward that read the batch alone: before a loop, they may be made once.

        In a loop of two microbatches the second is through with them as if there were none. Of a
        pipeline the last stage has them, which holds least else.
        """
        if self.mesh.microbatches <= 2 or self.num_stages > 1:
            return ()
        return tuple(
            number
            for number, made in enumerate(self.classes)
            if made.node.phase is Phase.BACKWARD and made.node.name in self.analysis.data
        )

    def _once_bytes(self, number: int, at: int) -> tuple[float, ...]:
        """Bytes, under every choice, of what is made before the loop and not read at a moment."""
        made, found = self.classes[number], [0.0] * len(self._strategies_of(number))
        time = self.mesh.time_axis
        assert time is not None
        for index in range(len(made.node.outputs)):
            spans = [self.recompute.reads.lives.get(Ref(name, index)) for name in made.members]
            away = sum(not span[0] <= at <= span[1] for span in spans if span is not None)
            sizes = zip(self._strategies_of(number), self._bytes_of(number, index), strict=True)
            for choice, (strategy, num_bytes) in enumerate(sizes):
                if strategy.outputs[index][time] == WHOLE:
                    found[choice] += away * num_bytes
        return tuple(found)

    def _bytes_of(self, number: int, index: int) -> tuple[float, ...]:
        """Bytes of what one member of a class makes, under every choice of its entry.

        Of a pipeline's stages one holds it, while the problem counts what all hold.
        """
        kind = self.classes[number].node.outputs[index]
        return tuple(
            0.0 if s.on_host else float(self.num_stages * local_bytes(kind, s.outputs[index]))
            for s in self._strategies_of(number)
        )

    def _gradients_by(self, recompute: Recompute, at: int) -> Iterable[tuple[int, float]]:
        """(entry, share) of the gradients that are made by a position of the backward.

        Behind a loop of microbatches they are made when it is over.
        """
        if self.mesh.time_axis is not None:
            return
        for number, made in enumerate(self.classes):
            if made.node.op != PARAMETER or made.node.target not in self.gradients:
                continue
            names = [self.graph.by_name[name].target for name in made.members]
            refs = [self.analysis.root(self.gradients[name]).root for name in names]
            done = sum(recompute.reads.made_by(ref, at) for ref in refs)
            if done:
                yield self.places[number][0], done / len(names)

    # -- nodes ----------------------------------------------------------------------------------

    def _seconds(self, entry: _Class, chosen: Sequence[Strategy]) -> tuple[float, ...]:
        """Seconds of all members under each of the strategies."""
        return tuple(len(entry.members) * self._each_s(entry.node, s) for s in chosen)

    def _each_s(self, node: Node, strategy: Strategy) -> float:
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

    def choices(self) -> tuple[Choices, ...]:
        own = [self._choices(c) for c in self.classes]
        return tuple(_joined(own, entry) for entry in self.entries)

    def _choices(self, entry: _Class) -> Choices:
        count = len(entry.members)
        none = (0.0,) * len(entry.strategies)
        if entry.node.op not in SOURCE_OPS:
            waits = [s.on_host and not s.again for s in entry.strategies]
            return Choices(
                name=entry.node.name,
                count=count,
                seconds=self._seconds(entry, entry.strategies),
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

    def _parameter_choices(self, entry: _Class) -> Choices:
        count = len(entry.members)
        kind = entry.node.outputs[0]
        trainable = entry.node.target in self.gradients
        seconds, resident, gradients, states, there = [], [], [], [], []
        for strategy in entry.strategies:
            held = local_bytes(kind, strategy.outputs[0])
            elements = held / DTYPE_BYTES[kind.dtype]
            state = elements * self.states.of(kind.dtype) if trainable else 0.0
            own = self.states.gradient_bytes_per_element or DTYPE_BYTES[kind.dtype]
            gradient = elements * own if trainable else 0.0
            moved = 2 * (held + state) + gradient if trainable else 0.0
            update_s = moved / self.states.update_bytes_per_s
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
            # Beside the gradients that are added up, those of a microbatch arrive.
            arriving = gradient * (1 + (self.mesh.time_axis is not None))
            there.append((count - here) * (held + state + arriving))
        must = self._at_home(entry.members)
        return Choices(
            name=entry.node.name,
            count=count,
            seconds=tuple(seconds),
            resident_bytes=tuple(resident),
            gradient_bytes=tuple(gradients),
            divisible=count > 1,
            state_bytes=tuple(states) if self.leaves and self.states.may_leave else (),
            host_bytes=tuple(there) if any(there) else (),
            least_host=len(must) / count if any(there) else 0.0,
        )

    def home_order(self, names: Sequence[str]) -> tuple[str, ...]:
        """Members of a class of parameters, or casts, in the order in which they leave the device.

        Those that hints name are in front; of the others as many as may be lie evenly between the
        rest, so that there is time between them to bring them.
        """
        must = self._at_home(names)
        place = {name: spread(at) for at, name in enumerate(names)}
        return tuple(sorted(names, key=lambda name: (name not in must, place[name])))

    def _at_home(self, names: Sequence[str]) -> set[str]:
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


def _joined(own: Sequence[Choices], entry: Entry) -> Choices:
    """The choices of an entry, summed over its classes."""

    def total(name: str) -> tuple[float, ...]:
        columns = [getattr(own[number], name) for number in entry.classes]
        return tuple(
            sum(column[at] for column, at in zip(columns, choice, strict=True) if column)
            for choice in entry.choices
        )

    first = own[entry.classes[0]]
    return Choices(
        name=first.name,
        count=first.count,
        seconds=total("seconds"),
        resident_bytes=total("resident_bytes"),
        gradient_bytes=total("gradient_bytes"),
        divisible=first.divisible,
        state_bytes=total("state_bytes"),
        host_bytes=total("host_bytes") if any(own[n].host_bytes for n in entry.classes) else (),
        least_host=max(own[number].least_host for number in entry.classes),
    )


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


def describe_mesh(mesh: Mesh) -> str:
    """``2 x 4 (dp, tp)`` and the like."""
    sizes = " x ".join(str(size) for size in mesh.sizes)
    return f"{sizes} ({', '.join(mesh.names)})"


def build_problem(
    analysis: Analysis,
    mesh: Mesh,
    cost: NodeCost,
    states: StateBytes,
    restrictions: Restrictions,
    *,
    memory_limit_bytes: float | None = None,
    fixed_bytes: float = 0.0,
    num_stages: int = 1,
) -> Built:
    """The problem of sharding a step over a mesh.

    Args:
        analysis: The step.
        mesh: The mesh.
        cost: Prices nodes on it.
        states: Optimizer state and update.
        restrictions: What hints leave.
        memory_limit_bytes: Bytes a rank may use; None for no limit.
        fixed_bytes: Bytes used whatever is chosen.
        num_stages: Stages of the pipeline that the step will be cut into. Memory is counted over
            all of them, so ``memory_limit_bytes`` is that of as many ranks; of what is kept, the
            first stage holds as many microbatches as there are stages.

    Raises:
        HintError: The hints leave a node or parameter without a choice.
    """
    builder = _Builder(analysis, mesh, cost, states, restrictions, num_stages)
    nodes = builder.choices()
    values, roots, layouts = builder.values()
    problem = Problem(
        nodes=nodes,
        values=values,
        memory_limit_bytes=memory_limit_bytes,
        fixed_bytes=fixed_bytes,
        moments=builder.moments(roots),
    )
    return Built(
        problem,
        builder.classes,
        builder.entries,
        tuple(tuple(table.index) for table in layouts),
        tuple(roots),
        mesh,
        builder,
    )


def with_reruns(
    built: Built,
    solutions: Sequence[Solution] = (),
    *,
    every: int = 1,
    pending: Pending | None = None,
) -> Built:
    """The problem in which forward nodes may run again, and what is kept may leave the device.

    Args:
        built: The problem without.
        solutions: Solutions of that problem, or of one of its kind: every node may choose what one
            of them chooses. With none, every node has all its choices.
        every: Of how many copies of a block one keeps what it hands to the next.
        pending: What waits for weight gradients, if the backward is split.
    """
    builder = built.builder.apart(pending or Pending())
    near: list[list[int]] = [list(range(len(e.choices))) for e in builder.all_entries]
    if solutions:
        near = [
            sorted({n for s in solutions for n in _chosen(s, index)}) for index in range(len(near))
        ]
    builder.allow_reruns(near, every)
    values, roots, layouts = builder.values()
    reruns, members = builder.reruns()
    problem = replace(
        built.problem,
        nodes=builder.choices(),
        values=values,
        reruns=reruns,
        moments=builder.moments(roots),
        link=builder.link(),
    )
    return replace(
        built,
        problem=problem,
        entries=builder.entries,
        classes=builder.classes,
        layouts=tuple(table.all for table in layouts),
        roots=tuple(roots),
        builder=builder,
        reruns=members,
    )


def with_moment(built: Built, node: str) -> Built:
    """The problem in which memory is counted at one more node, or the same if it is already."""
    builder = built.builder
    if any(moment.name == node for moment in built.problem.moments):
        return built
    builder.more_moments.add(builder.recompute.reads.position[node])
    return replace(built, problem=replace(built.problem, moments=builder.moments(built.roots)))


def _chosen(solution: Solution, index: int) -> list[int]:
    """What the members of a node choose."""
    shares = solution.choice_shares.get(index, ((solution.choice[index], 1.0),))
    return [choice for choice, _ in shares]
