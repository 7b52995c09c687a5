"""The program of one rank from the captured step and a plan.

Nodes are lowered in order. Each operand is brought from the shardings in which it is there to the
one its node needs, by the cheapest steps; what was made so is there for later needs of the same
phase. From the forward into the backward a value lives only in the shardings the plan keeps. What
the plan recomputes does not live on at all: its nodes run again before the first backward node that
needs them, in the order of the graph, from what is kept; where the plan forgets what they made,
they run once more for the next one that needs it. What it offloads is copied to host memory
at the end of the forward, and back before the first backward node that needs it. A parameter whose
home is host memory is brought to the device in every section that reads it, as one that is split is
gathered there; its gradient goes to the host as soon as it is reduced. What is cast of it before
the loop of microbatches is cast in every section anew, or waits in host memory as it was cast,
unless the plan keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.node import own_part
from autopar.cost.reshard import CollectiveSeconds, Step, cheapest_path, replaced
from autopar.errors import UnsupportedError
from autopar.ir.alias import Alias, resolve_aliases, through
from autopar.ir.casts import gradient_values, parameter_casts
from autopar.ir.graph import (
    INPUT,
    PARAMETER,
    SOURCE_OPS,
    Graph,
    Node,
    Phase,
    Ref,
    TensorType,
)
from autopar.ir.sharding import WHOLE, Mesh, Partial, Sharding, local_shape, whole
from autopar.lower.builder import Builder
from autopar.lower.pieces import Side, sent_parts, taken_parts
from autopar.lower.program import LOOP, Instruction, Message, Program, ProgramInput, Section
from autopar.lower.reshard import emit_step
from autopar.plan.records import NodePlan, StagePlan, Transfer
from autopar.rules.local import LocalOp
from autopar.rules.notation import Rule
from autopar.rules.strategies import Strategy, needs_expansion

_LOCAL_NAMES: Mapping[str, str] = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}
"""Captured strides are not trusted: a view of a local tensor may have to copy."""


def lower(
    graph: Graph,
    rules: Mapping[str, Rule],
    stage: StagePlan,
    coordinates: Sequence[int],
    collective_s: CollectiveSeconds,
    crossing: Crossing | None = None,
    facts: Facts | None = None,
) -> Program:
    """The program of the rank with these mesh coordinates.

    Args:
        graph: The captured step.
        rules: Rule of every node that is not a source.
        stage: Shardings of everything it runs.
        coordinates: The rank's coordinates on the stage's mesh.
        collective_s: Prices collectives, for the choice between ways of resharding.
        crossing: Which chunk of a pipeline it is and what crosses; None for the only one.
        facts: Of the graph, where it is lowered several times.
    """
    crossing, facts = crossing or Crossing(), facts or facts_of(graph, rules)
    lowering = _Lowering(
        graph=graph,
        rules=rules,
        stage=stage,
        build=Builder(stage.mesh, tuple(coordinates), crossing.chunk, crossing.suffix),
        collective_s=collective_s,
        facts=facts,
        aliases=facts.aliases,
        plans={plan.name: plan for plan in stage.nodes},
        stored={plan.name: plan.stored for plan in stage.parameters},
        at_home=frozenset(plan.name for plan in stage.parameters if plan.on_host),
        casts=facts.casts,
        crossing=crossing,
    )
    return lowering.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What lowering asks of a step, whatever the plan.

    Attributes:
        aliases: Every view resolved to its root.
        casts: Nodes that cast a parameter, and the parameter's node.
        gradients: Every gradient, and what it is a cast of.
        forward_ends: For forward nodes, the values that no later one makes or reads.
    """

    aliases: Mapping[Ref, Alias]
    casts: Mapping[str, str]
    gradients: frozenset[Ref]
    forward_ends: Mapping[str, Sequence[Ref]]


def facts_of(graph: Graph, rules: Mapping[str, Rule]) -> Facts:
    """The facts of a captured step."""
    aliases = resolve_aliases(graph, lambda node: is_view(node, rules))
    last: dict[Ref, str] = {}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and node.op not in SOURCE_OPS:
            made = (Ref(node.name, index) for index in range(len(node.outputs)))
            read = (aliases.get(ref, Alias(ref)).root for ref in node.operands)
            last.update((ref, node.name) for ref in (*made, *read))
    ends: dict[str, list[Ref]] = {}
    for ref, name in last.items():
        ends.setdefault(name, []).append(ref)
    return Facts(
        aliases=aliases,
        casts=parameter_casts(graph),
        gradients=gradient_values(graph, aliases),
        forward_ends=ends,
    )


@dataclass(frozen=True, slots=True)
class Crossing:
    """A chunk of a pipeline among others.

    Attributes:
        chunk: Its number.
        transfers: Everything that crosses chunks.
        meshes: Mesh of every chunk.
        splits_backward: Whether what no other chunk waits for is a section of its own.
        suffix: Ends the names of its values, where a rank holds several chunks.
    """

    chunk: int = 0
    transfers: tuple[Transfer, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    splits_backward: bool = False
    suffix: str = ""


def is_view(node: Node, rules: Mapping[str, Rule]) -> bool:
    """Whether a node only renames its operand's dims."""
    return node.op not in SOURCE_OPS and rules[node.name].alias


BACKWARDS = (Section.BACKWARD, Section.WEIGHT_GRADIENT)
"""The sections that read what the forward kept."""

BEFORE = (Section.PROLOGUE, Section.FORWARD)
"""The sections that any part of the backward may read."""

_Place = tuple[Section, Sharding]
"""When a piece of a value is made, and its sharding."""


@dataclass(kw_only=True)
class _Lowering:
    """Working state of one call of `lower`."""

    graph: Graph
    rules: Mapping[str, Rule]
    stage: StagePlan
    build: Builder
    collective_s: CollectiveSeconds
    facts: Facts
    aliases: Mapping[Ref, Alias]
    plans: Mapping[str, NodePlan]
    stored: Mapping[str, Sharding]
    at_home: frozenset[str]
    casts: Mapping[str, str]
    crossing: Crossing
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    there: dict[Ref, dict[_Place, Ref]] = field(default_factory=dict)
    views: dict[tuple[Ref, _Place], Ref] = field(default_factory=dict)
    stored_at: dict[Ref, Sharding] = field(default_factory=dict)
    inputs: list[ProgramInput] = field(default_factory=list)
    purposes: dict[Ref, str] = field(default_factory=dict)
    gradients: dict[str, Ref] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    behind: dict[str, None] = field(default_factory=dict)
    recomputed: frozenset[str] = field(init=False)
    remade: set[str] = field(default_factory=set)
    offloaded: frozenset[str] = field(init=False)
    on_host: dict[Ref, dict[Sharding, Ref]] = field(default_factory=dict)
    homes: dict[Ref, Ref | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recomputed = frozenset(self.stage.recomputed) & self.plans.keys()
        self.offloaded = frozenset(self.stage.offloaded)

    def run(self) -> Program:
        self.purposes.update(dict.fromkeys(self.facts.gradients, "gradients"))
        self.purposes.update(dict.fromkeys(map(Ref, self.casts), "parameters"))
        self._receive()
        self.late = self._waited_for_by_none()
        early = [node for node in self.graph.nodes if node.name not in self.late]
        for node in early:
            if node.phase is not self.build.phase:
                self._keep(tuple(self.there))
                self._send(Phase.FORWARD, Section.PROLOGUE, Section.FORWARD)
                self.build.phase = node.phase
            if node.op in SOURCE_OPS:
                if node.op != PARAMETER or node.target in self.stored:
                    self._source(node)
            elif node.name in self.plans:
                self._node_or_later(node)
                self._keep(self.facts.forward_ends.get(node.name, ()))
        if self.build.phase is Phase.FORWARD:
            self._keep(tuple(self.there))
            self._send(Phase.FORWARD, Section.PROLOGUE, Section.FORWARD)
        self._send(Phase.BACKWARD, Section.BACKWARD)
        phase = Phase.BACKWARD if self.late else self.build.phase
        self.build.phase = phase
        for node in self.graph.nodes:
            if node.name in self.late:
                self._node_or_later(node)
        # Of the backward, what does not depend on the batch.
        self._send(Phase.BACKWARD, Section.PROLOGUE)
        self._behind_loop()
        self.build.phase = phase
        everything = whole(self.stage.mesh)
        self._enter("results", Section.EPILOGUE)
        loss = None
        if self.graph.loss is not None and self._makes(self.graph.loss):
            loss = self._result(self.graph.loss, everything)
        aux = tuple(
            (name, self._result(ref, everything))
            for name, ref in self.graph.aux
            if self._makes(ref)
        )
        for name in self.graph.gradients:
            if name in self.stored and name not in self.gradients:
                self._reduce_gradient(name)
        self._enter("buffers", Section.EPILOGUE)
        mutations = {
            name: self._result(ref, everything)
            for name, ref in self.graph.mutations.items()
            if self._makes(ref)
        }
        space = self.stage.mesh.space
        num_axes = len(space.sizes)
        return Program(
            mesh=space,
            coordinates=self.build.coordinates[:num_axes],
            inputs=tuple(self.inputs),
            instructions=self._instructions(),
            loss=loss,
            aux=aux,
            gradients={n: self.gradients[n] for n in self.graph.gradients if n in self.gradients},
            mutations=mutations,
            sends=tuple(self.sends),
            receives=tuple(self.receives),
            microbatches=self.stage.mesh.microbatches,
            microbatch=0 if self.time is None else self.build.coordinates[self.time],
            copy_room_bytes=self.stage.copy_room_bytes,
        )

    def _instructions(self) -> tuple[Instruction, ...]:
        """What was lowered, without copies to the host that nothing here brings back."""
        idle = {ref.node for refs in self.on_host.values() for ref in refs.values()}
        idle |= {i.operands[0].node for i in self.build.instructions if idle and i.name in idle}
        return tuple(i for i in self.build.instructions if i.name not in idle)

    def _waited_for_by_none(self) -> frozenset[str]:
        """Backward nodes that nothing sent to other chunks depends on, where they run apart."""
        if not self.crossing.splits_backward:
            return frozenset()
        own = {n.name for n in self.graph.nodes if n.phase is Phase.BACKWARD} & set(self.plans)
        stack = [
            _ref(transfer.value).node
            for transfer in self.crossing.transfers
            if transfer.source == self.crossing.chunk
            and self._section_of_making(transfer) is Section.BACKWARD
        ]
        waited: set[str] = set()
        while stack:
            name = stack.pop()
            if name in own and name not in waited:
                waited.add(name)
                stack += [self._root(r).root.node for r in self.graph.by_name[name].operands]
        return frozenset(own - waited)

    def _makes(self, ref: Ref) -> bool:
        """Whether this stage makes a value."""
        root = self._root(ref).root
        return root.node in self.plans or root in self.stored_at

    def _receive(self) -> None:
        """Say where values of other chunks come in."""
        for number, transfer in enumerate(self.crossing.transfers):
            if transfer.target != self.crossing.chunk:
                continue
            root = _ref(transfer.value)
            kind = self.graph.type_of(root)
            arrival = transfer.arrival
            local = TensorType(local_shape(kind.shape, arrival, self.build.coordinates), kind.dtype)
            section = self._section_of_transfer(transfer)
            name = f"{root.node}_{root.index}_received{self.crossing.suffix}"
            ref = self.build.add_input(name, local)
            self.build.sections[ref] = section
            self.there.setdefault(root, {})[section, arrival] = ref
            if section is Section.PROLOGUE:
                self.stored_at[root] = arrival
            self.receives.append(
                Message(
                    ref=ref,
                    value=transfer.value,
                    chunk=transfer.target,
                    peer=transfer.source,
                    section=section,
                    local_type=local,
                    number=number,
                    parts=taken_parts(kind.shape, *self._sides(transfer), self._place),
                )
            )

    @property
    def _place(self) -> int:
        """Number of this rank on its mesh."""
        space = self.stage.mesh.space
        return space.rank(self.build.coordinates[: len(space.sizes)])

    def _sides(self, transfer: Transfer) -> tuple[Side, Side]:
        """How a value leaves its chunk, and how it arrives, in the microbatch being lowered."""
        number = 0 if self.time is None else self.build.coordinates[self.time]
        source, target = (self.crossing.meshes[c] for c in (transfer.source, transfer.target))
        return Side(source, transfer.sharding, number), Side(target, transfer.arrival, number)

    def _send(self, phase: Phase, *sections: Section) -> None:
        """Bring what other chunks read of a phase into the sharding in which it leaves."""
        for number, transfer in enumerate(self.crossing.transfers):
            node = self.graph.by_name[_ref(transfer.value).node]
            made = Phase.FORWARD if node.op in SOURCE_OPS else node.phase
            if transfer.source == self.crossing.chunk and made is phase:
                section = self._section_of_making(transfer)
                if section in sections:
                    self._send_one(number, transfer, section)

    def _send_one(self, number: int, transfer: Transfer, section: Section) -> None:
        root = _ref(transfer.value)
        self._enter(root.node, section)
        _, ref = self._reshard(root, transfer.sharding, section)
        shape = self.graph.type_of(root).shape
        self.sends.append(
            Message(
                ref=ref,
                value=transfer.value,
                chunk=transfer.source,
                peer=transfer.target,
                section=section,
                local_type=self.build.types[ref],
                number=number,
                parts=sent_parts(shape, *self._sides(transfer), self._place),
            )
        )

    def _behind_loop(self) -> None:
        """Nodes of the epilogue and what leaves it, in the order of the captured step.

        That order is the same on all ranks, so none waits for what waits for it.
        """
        events: list[tuple[int, int]] = [(self._position[name], -1) for name in self.behind]
        for number, transfer in enumerate(self.crossing.transfers):
            made = self._section_of_making(transfer)
            if transfer.source == self.crossing.chunk and made is Section.EPILOGUE:
                events.append((self._position[_ref(transfer.value).node], number))
        for position, number in sorted(events):
            node = self.graph.nodes[position]
            self.build.phase = node.phase
            if number < 0:
                self._node(node)
            else:
                self._send_one(number, self.crossing.transfers[number], Section.EPILOGUE)

    def _section_of_making(self, transfer: Transfer) -> Section:
        """Section behind which a value leaves."""
        node = self.graph.by_name[_ref(transfer.value).node]
        if node.op in SOURCE_OPS:
            return Section.PROLOGUE
        loop = Section.FORWARD if node.phase is Phase.FORWARD else Section.BACKWARD
        if self.time is None or transfer.sharding[-1] != WHOLE:
            return loop
        return Section.EPILOGUE if self._reads_batch(node) else Section.PROLOGUE

    def _reads_batch(self, node: Node) -> bool:
        """Whether a value depends on the batch, and so, whole, on what the loop makes."""
        stack, seen = [node.name], {node.name}
        while stack:
            for ref in self.graph.by_name[stack.pop()].operands:
                if self.graph.by_name[ref.node].op == INPUT:
                    return True
                if ref.node not in seen:
                    seen.add(ref.node)
                    stack.append(ref.node)
        return False

    def _section_of_transfer(self, transfer: Transfer) -> Section:
        """Section before which a value comes in: what flows against the chunks is read late."""
        made = self._section_of_making(transfer)
        against = transfer.source > transfer.target
        return Section.BACKWARD if made is Section.FORWARD and against else made

    def _keep(self, roots: Sequence[Ref]) -> None:
        """Bring values that cross, and that the forward is through with, into what is kept.

        What is offloaded goes to the host in it.
        """
        for root in roots:
            places = self.there.get(root)
            if places is None or self._is_recomputed(root):
                continue
            for sharding in self.stage.kept.get(str(root), ()):
                if self._is_offloaded(root):
                    self._send_to_host(root, sharding)
                elif not any((s, sharding) in places for s in (Section.PROLOGUE, Section.FORWARD)):
                    self._enter(root.node, Section.FORWARD)
                    self._reshard(root, sharding, Section.FORWARD, lasting=True)

    def _send_to_host(self, root: Ref, sharding: Sharding) -> None:
        there = self.on_host.setdefault(root, {})
        if sharding in there or (Section.PROLOGUE, sharding) in self.there[root]:
            return
        self._enter(root.node, Section.FORWARD)
        _, ref = self._reshard(root, sharding, Section.FORWARD)
        self._enter(root.node, Section.FORWARD)
        self.build.purpose = "activations"
        there[sharding] = self.build.to_host(ref)

    def _fetch(self, root: Ref, section: Section) -> None:
        """Bring what is kept of a value back from the host, once."""
        before = self.build.origin, self.build.section, self.build.purpose
        self._enter(root.node, section)
        self.build.purpose = "activations"
        for sharding, ref in self.on_host.pop(root, {}).items():
            self.there[root][section, sharding] = self.build.to_device(ref)
        self.build.origin, self.build.section, self.build.purpose = before

    @property
    def time(self) -> int | None:
        return self.stage.mesh.time_axis

    def _enter(self, origin: str, section: Section) -> None:
        self.build.origin = origin
        self.build.section = section

    def _loops(self, *shardings: Sharding) -> bool:
        """Whether values of these shardings are made once a microbatch."""
        return self.time is not None and any(s[self.time] != WHOLE for s in shardings)

    def _section_of(self, node: Node, plan: NodePlan) -> Section:
        """When a node runs: in the loop, or behind it if it reads what the loop made, or before."""
        loop = Section.FORWARD if node.phase is Phase.FORWARD else Section.BACKWARD
        if node.name in self.late:
            loop = Section.WEIGHT_GRADIENT
        if self.time is None or self._loops(*plan.operands, *plan.outputs):
            return loop
        roots = [self._root(ref).root for ref in node.operands]
        if any(root.node in self.behind for root in roots):
            return Section.EPILOGUE
        made = {self._made_in(root) for root in roots}
        return Section.PROLOGUE if made <= {Section.PROLOGUE} else Section.EPILOGUE

    def _node_or_later(self, node: Node) -> None:
        """Lower a node, unless it runs behind the loop."""
        if self._section_of(node, self.plans[node.name]) is Section.EPILOGUE:
            self.behind[node.name] = None
        else:
            self._forget(node)
            if not self._cast_later(node):
                self._node(node)
            self._reduce_gradients(node)

    def _cast_later(self, node: Node) -> bool:
        """Whether a parameter at home in host memory comes, and is cast, where the cast is read.

        A cast that waits in host memory itself is made here, and is at home there too.
        """
        root, plan = Ref(node.name), self.plans[node.name]
        owner = self.casts.get(node.name)
        if self.time is None or owner is None or Ref(owner) not in self.homes:
            return False
        stays = self.stage.kept.get(str(root))
        if stays or self._section_of(node, plan) is not Section.PROLOGUE:
            return False
        self.homes[root], self.stored_at[root] = None, plan.outputs[0]
        self.there[root] = {}
        if str(root) in self.offloaded:
            self._node(node)
            made = self.there[root][Section.PROLOGUE, plan.outputs[0]]
            self._enter(node.name, Section.PROLOGUE)
            self.build.purpose = "parameters"
            self.homes[root] = self.build.to_host(made)
        return True

    def _made_in(self, root: Ref) -> Section:
        """Section of the node that makes a value."""
        if root in self.homes:
            return Section.PROLOGUE
        return next(iter(self.there[root]))[0]

    def _visible(self, root: Ref, section: Section) -> dict[Sharding, tuple[Section, Ref]]:
        """Where a value is when an instruction of ``section`` runs."""
        found: dict[Sharding, tuple[Section, Ref]] = {}
        if root in self.homes:
            stays = self.stage.kept.get(str(root), ())
            for (made, sharding), ref in self.there[root].items():
                if made is section or (made in BEFORE and sharding in stays):
                    found.setdefault(sharding, (made, ref))
            return found
        gone = self._is_recomputed(root) or self._is_offloaded(root)
        kept = () if gone else self.stage.kept.get(str(root))
        for (made, sharding), ref in self.there[root].items():
            kept_here = made is Section.FORWARD and (kept is None or sharding in kept)
            late = section in BACKWARDS and (kept_here or made is Section.BACKWARD)
            if made in (Section.PROLOGUE, section) or section is Section.EPILOGUE or late:
                found.setdefault(sharding, (made, ref))
        return found

    def _source(self, node: Node) -> None:
        kind = node.outputs[0]
        sharding = whole(self.stage.mesh)
        if node.op == PARAMETER:
            sharding = self.stored[node.target]
        elif node.op == INPUT:
            sharding = self.stage.inputs.get(node.target, sharding)
        local = TensorType(local_shape(kind.shape, sharding, self.build.coordinates), kind.dtype)
        ref = self.build.add_input(node.name, local)
        on_host = node.op == PARAMETER and node.target in self.at_home
        if on_host:
            self.homes[Ref(node.name)] = ref
        self.there[Ref(node.name)] = {} if on_host else {(Section.PROLOGUE, sharding): ref}
        self.stored_at[Ref(node.name)] = sharding
        if node.op == PARAMETER:
            self.purposes[Ref(node.name)] = "parameters"
        self.inputs.append(
            ProgramInput(
                name=ref.node,
                kind=node.op,
                target=node.target,
                global_type=kind,
                sharding=sharding[: len(self.stage.mesh.space.sizes)],
                local_type=local,
                on_host=on_host,
            )
        )

    def _is_recomputed(self, root: Ref) -> bool:
        """Whether the backward finds a value only by running its node again."""
        return root.node in self.recomputed and self._made_in(root) is Section.FORWARD

    def _is_offloaded(self, root: Ref) -> bool:
        """Whether the backward finds a value in host memory."""
        return (
            str(root) in self.offloaded
            and not self._is_recomputed(root)
            and self._made_in(root) is Section.FORWARD
        )

    def _forget(self, node: Node) -> None:
        """Drop what a backward node, and those behind it, are to find only by making it again."""
        for name in self.stage.forgotten.get(node.name, ()):
            self.remade.discard(name)
            for index in range(len(self.graph.by_name[name].outputs)):
                root = Ref(name, index)
                places = self.there.get(root, {})
                self.there[root] = {p: ref for p, ref in places.items() if p[0] not in BACKWARDS}
                for view in self._views_of.get(root, ()):
                    for key in [k for k in self.views if k[0] == view and k[1][0] in BACKWARDS]:
                        del self.views[key]

    @cached_property
    def _views_of(self) -> Mapping[Ref, tuple[Ref, ...]]:
        """Every view of a value."""
        found: dict[Ref, dict[Ref, None]] = {}
        for alias in self.aliases.values():
            found.setdefault(alias.root, {}).update(dict.fromkeys(map(Ref, alias.chain)))
        return {root: tuple(views) for root, views in found.items()}

    def _recompute(self, root: Ref, section: Section) -> None:
        """Run the node of a value again, behind those that it reads and that are not kept."""
        wanted: set[str] = set()
        waiting = [root.node]
        while waiting:
            name = waiting.pop()
            if name in wanted or name in self.remade:
                continue
            wanted.add(name)
            roots = (self._root(ref).root for ref in self.graph.by_name[name].operands)
            waiting += [r.node for r in roots if self._is_recomputed(r)]
        self.remade |= wanted
        before = self.build.origin, self.build.section, self.build.purpose
        for name in sorted(wanted, key=self._position.__getitem__):
            self._node(self.graph.by_name[name], section)
        self.build.origin, self.build.section, self.build.purpose = before

    @cached_property
    def _position(self) -> Mapping[str, int]:
        return {node.name: at for at, node in enumerate(self.graph.nodes)}

    def _node(self, node: Node, again: Section | None = None) -> None:
        """Lower a node where it belongs, or again in a later section."""
        plan, rule = self.plans[node.name], self.rules[node.name]
        section = again or self._section_of(node, plan)
        self._enter(node.name, section)
        operands = tuple(
            self._need(ref, sharding, section)
            for ref, sharding in zip(node.operands, plan.operands, strict=True)
        )
        op = LocalOp(
            node=node,
            operand_types=tuple(self.graph.type_of(ref) for ref in node.operands),
            operands=plan.operands,
            outputs=plan.outputs,
            mesh=self.stage.mesh,
            coordinates=self.build.coordinates,
            values=operands,
        )
        self._enter(node.name, section)
        self.build.purpose = "activations"
        own = own_part(rule.flops, op.mesh, (*op.operands, *op.outputs), op.coordinates)
        self.build.flops = {_LOCAL_NAMES.get(node.op, node.op): own}
        refs = self._expanded(op, rule) or self._plain(op, rule)
        self.build.flops = {}
        for index, (ref, sharding) in enumerate(zip(refs, plan.outputs, strict=True)):
            self.there.setdefault(Ref(node.name, index), {})[section, sharding] = ref

    def _expanded(self, op: LocalOp, rule: Rule) -> tuple[Ref, ...] | None:
        strategy = Strategy(op.operands, op.outputs)
        if rule.expand is None or not needs_expansion(rule, strategy, op.mesh):
            return None
        rule.expand(self.build, op)
        results = self.build.take_results()
        return tuple(results[index] for index in range(len(op.node.outputs)))

    def _plain(self, op: LocalOp, rule: Rule) -> tuple[Ref, ...]:
        args, kwargs = rule.local_args(op) if rule.local_args else (op.args(), op.kwargs())
        outs = tuple(op.output_type(index) for index in range(len(op.node.outputs)))
        return self.build.call_many(
            _LOCAL_NAMES.get(op.node.op, op.node.op),
            tuple(args),
            outs,
            kwargs,
            name=op.node.name,
        )

    def _root(self, ref: Ref) -> Alias:
        return self.aliases.get(ref, Alias(ref))

    def _result(self, ref: Ref, sharding: Sharding) -> Ref:
        """A value as the program returns it."""
        return self._need(ref, sharding, Section.EPILOGUE)

    def _reduce_gradients(self, node: Node) -> None:
        """Bring the gradients that a node completes into their stored shardings, at once.

        So their reduction runs beside the rest of the backward, and what is not reduced is freed.
        """
        for name in self._completes.get(node.name, ()):
            if name in self.stored:
                self._reduce_gradient(name)

    def _reduce_gradient(self, name: str) -> None:
        ref = self.graph.gradients[name]
        if name in self.at_home:
            self.gradients[name] = self._delivered(name, ref)
            return
        self._enter(name, Section.EPILOGUE)
        self.gradients[name] = self._result(ref, self.stored[name])

    def _delivered(self, name: str, ref: Ref) -> Ref:
        """A gradient in host memory.

        The terms of microbatches are added up there, if the plan adds them up as they are stored.
        """
        alias, stored = self._root(ref), self.stored[name]
        at_root = through(stored, tuple(reversed(alias.chain)), self._back)
        assert at_root is not None, f"{ref} cannot be read as {stored}"
        made = self._made_in(alias.root)
        terms = [s for when, s in self.there[alias.root] if when is made]
        time = self.time
        if (
            time is None
            or self.stage.added_up.get(str(alias.root)) != at_root
            or not isinstance(terms[0][time], Partial)
        ):
            self._enter(name, Section.EPILOGUE)
            value = self._result(ref, stored)
            self._enter(name, Section.EPILOGUE)
            self.build.purpose = "gradients"
            return self.build.to_host(value)
        self._enter(name, made)
        _, term = self._reshard(alias.root, replaced(at_root, time, terms[0][time]), made)
        self._enter(name, made)
        self.build.purpose = "gradients"
        term = self.build.to_host(term)
        self._enter(name, Section.EPILOGUE)
        total = self.build.accumulate(term, "sum")
        for view, before, after in self._along(alias, at_root):
            total = self._view(view, total, before, after)
        return total

    @cached_property
    def _completes(self) -> Mapping[str, list[str]]:
        """Node to the parameters whose gradients it is the last to add to."""
        found: dict[str, list[str]] = {}
        for name, ref in self.graph.gradients.items():
            found.setdefault(self._root(ref).root.node, []).append(name)
        return found

    def _need(self, ref: Ref, sharding: Sharding, section: Section) -> Ref:
        """The rank's piece of a value under a sharding, resharded where it has to be."""
        alias = self._root(ref)
        at_root = through(sharding, tuple(reversed(alias.chain)), self._back)
        assert at_root is not None, f"{ref} cannot be read as {sharding}"
        if alias.root.node in self.behind and section is not Section.EPILOGUE:
            raise self._needs_whole_batch(ref)
        made, value = self._reshard(alias.root, at_root, section)
        if made is Section.EPILOGUE is not section:
            raise self._needs_whole_batch(ref)
        when = section if made in LOOP else made
        for name, before, after in self._along(alias, at_root):
            key = (Ref(name), (when, after))
            if key not in self.views:
                self.build.section = when
                self.views[key] = self._view(name, value, before, after)
            value = self.views[key]
        return value

    def _along(self, alias: Alias, at_root: Sharding) -> Iterator[tuple[str, Sharding, Sharding]]:
        """Every view between a value and its root, and its shardings on both sides."""
        before = at_root
        for name in alias.chain:
            after = self._forth(name, before)
            assert after is not None
            yield name, before, after
            before = after

    def _needs_whole_batch(self, ref: Ref) -> UnsupportedError:
        reader = self.graph.by_name[self.build.origin]
        return UnsupportedError(
            f"cannot run microbatches: {reader.op!r} in {reader.source} reads {ref} over the whole "
            "batch in the middle of the step; use hint.microbatches(1)"
        )

    def _back(self, name: str, sharding: Sharding) -> Sharding | None:
        return self.rules[name].carry_back(sharding, self.stage.mesh.sizes)

    def _forth(self, name: str, sharding: Sharding) -> Sharding | None:
        return self.rules[name].carry(sharding, self.stage.mesh.sizes)

    def _view(self, name: str, value: Ref, before: Sharding, after: Sharding) -> Ref:
        node = self.graph.by_name[name]
        op = LocalOp(
            node=node,
            operand_types=(self.graph.type_of(node.operands[0]),),
            operands=(before,),
            outputs=(after,),
            mesh=self.stage.mesh,
            coordinates=self.build.coordinates,
            values=(value,),
        )
        return self._plain(op, self.rules[name])[0]

    def _reshard(
        self, root: Ref, sharding: Sharding, section: Section, *, lasting: bool = False
    ) -> tuple[Section, Ref]:
        """Section and piece of a value under a sharding, as seen from a section.

        Args:
            root: The value.
            sharding: What is asked for.
            section: Where.
            lasting: Whether the piece is kept for longer than what it is made of.
        """
        if section in BACKWARDS and self._is_recomputed(root):
            self._recompute(root, section)
        elif section in BACKWARDS and self._is_offloaded(root):
            self._fetch(root, section)
        visible = self._visible(root, section)
        if sharding in visible:
            return visible[sharding]
        kept = self.stage.kept.get(str(root))
        is_parameter = root in self.stored_at or root.node in self.casts
        again = is_parameter and kept is not None and sharding not in kept
        if root in self.homes:
            again = kept is None or sharding not in kept
        if self._made_in(root) is Section.PROLOGUE and not again and self.time is not None:
            # It is made before the loop, so from what is there before the loop.
            visible = self._visible(root, Section.PROLOGUE)
        if root in self.homes and not visible:
            visible = self._brought(
                root, section if again or self.time is None else Section.PROLOGUE
            )
            if sharding in visible:
                return visible[sharding]
        kind = self.graph.type_of(root)
        path = self._path(root, visible, sharding)
        if path is None and section in BACKWARDS:
            # A node that runs again may need what cannot be made of what is kept.
            visible |= {s: (m, r) for (m, s), r in self.there[root].items() if m in BEFORE}
            path = self._path(root, visible, sharding)
        assert path is not None, f"{root} cannot go from {tuple(visible)} to {sharding}"
        self.build.purpose = self.purposes.get(root, "activations")
        self.build.lasting = lasting or self.build.purpose == "gradients"
        for step in path:
            made, value = visible[step.before]
            when = self._when(step, made, section, again)
            self.build.section = when
            value = emit_step(self.build, value, kind, step)
            visible[step.after] = (when, value)
            self.there[root][when, step.after] = value
        self.build.lasting = False
        return visible[sharding]

    def _brought(self, root: Ref, section: Section) -> dict[Sharding, tuple[Section, Ref]]:
        """Bring a parameter from its home in host memory to the device, or cast what came."""
        before = self.build.origin, self.build.section
        stored, home = self.stored_at[root], self.homes[root]
        if home is None:
            self._node(self.graph.by_name[root.node], section)
        else:
            self._enter(root.node, section)
            self.build.purpose = "parameters"
            self.there[root][section, stored] = self.build.to_device(home)
        self.build.origin, self.build.section = before
        return {stored: (section, self.there[root][section, stored])}

    def _path(
        self, root: Ref, starts: Iterable[Sharding], target: Sharding
    ) -> tuple[Step, ...] | None:
        """The steps to a sharding; terms of microbatches are added up where the plan says."""

        def between(before: Sequence[Sharding], after: Sharding) -> tuple[Step, ...] | None:
            kind = self.graph.type_of(root)
            return cheapest_path(kind, before, after, self.stage.mesh, self.collective_s)

        found = tuple(starts)
        total = self.stage.added_up.get(str(root))
        terms = [s for s in found if self.time is not None and isinstance(s[self.time], Partial)]
        if total is None or not terms or self.time is None or target[self.time] != WHOLE:
            return between(found, target)
        if total in found:
            return between([s for s in found if s not in terms], target)
        term = replaced(total, self.time, terms[0][self.time])
        legs = (between(terms, term), between([term], total), between([total], target))
        first, second, third = legs
        return None if None in legs else (*(first or ()), *(second or ()), *(third or ()))

    def _when(self, step: Step, made: Section, section: Section, again: bool) -> Section:
        """Section in which a step runs.

        Args:
            step: The step.
            made: Section in which its operand was made.
            section: Section that needs the result.
            again: Whether what every microbatch could share is made anew in each, to save memory.
        """
        if self.time is None:
            return section
        if step.axis == self.time:
            return Section.EPILOGUE if isinstance(step.before[self.time], Partial) else section
        if self._loops(step.before):
            return made if section is Section.EPILOGUE else section
        if made is Section.EPILOGUE:
            return Section.EPILOGUE
        return section if again else Section.PROLOGUE


def _ref(text: str) -> Ref:
    """The value that `str` of a `Ref` names."""
    name, _, index = text.partition(":")
    return Ref(name, int(index or 0))
