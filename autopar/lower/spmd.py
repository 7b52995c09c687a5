"""The program of one rank from the captured step and a plan.

Nodes are lowered in order. Each operand is brought from the shardings in which it is there to the
one its node needs, by the cheapest steps; what was made so is there for later needs of the same
phase. From the forward into the backward a value lives only in the shardings the plan keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.node import work_share
from autopar.cost.reshard import CollectiveSeconds, cheapest_path
from autopar.ir.alias import Alias, resolve_aliases, through
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
from autopar.ir.sharding import Sharding, Split, local_shape, whole
from autopar.lower.builder import Builder
from autopar.lower.program import Program, ProgramInput
from autopar.lower.reshard import emit_step
from autopar.plan.records import NodePlan, StagePlan
from autopar.rules.local import LocalOp
from autopar.rules.notation import Rule

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
) -> Program:
    """The program of the rank with these mesh coordinates.

    Args:
        graph: The captured step.
        rules: Rule of every node that is not a source.
        stage: Shardings of everything it runs.
        coordinates: The rank's coordinates on the stage's mesh.
        collective_s: Prices collectives, for the choice between ways of resharding.
    """
    lowering = _Lowering(
        graph=graph,
        rules=rules,
        stage=stage,
        build=Builder(stage.mesh, tuple(coordinates)),
        collective_s=collective_s,
        aliases=resolve_aliases(graph, lambda node: is_view(node, rules)),
        plans={plan.name: plan for plan in stage.nodes},
        stored={plan.name: plan.stored for plan in stage.parameters},
    )
    return lowering.run()


def is_view(node: Node, rules: Mapping[str, Rule]) -> bool:
    """Whether a node only renames its operand's dims."""
    return node.op not in SOURCE_OPS and rules[node.name].alias


@dataclass(kw_only=True)
class _Lowering:
    """Working state of one call of `lower`."""

    graph: Graph
    rules: Mapping[str, Rule]
    stage: StagePlan
    build: Builder
    collective_s: CollectiveSeconds
    aliases: Mapping[Ref, Alias]
    plans: Mapping[str, NodePlan]
    stored: Mapping[str, Sharding]
    there: dict[Ref, dict[Sharding, Ref]] = field(default_factory=dict)
    views: dict[tuple[Ref, Sharding], Ref] = field(default_factory=dict)
    persistent: dict[Ref, Sharding] = field(default_factory=dict)
    inputs: list[ProgramInput] = field(default_factory=list)
    purposes: dict[Ref, str] = field(default_factory=dict)

    def run(self) -> Program:
        gradients = {self._root(ref).root for ref in self.graph.gradients.values()}
        self.purposes.update(dict.fromkeys(gradients, "gradients"))
        for node in self.graph.nodes:
            self._enter_phase(node.phase)
            if node.op in SOURCE_OPS:
                self._source(node)
            elif Ref(node.name) not in self.aliases:
                self._node(node)
        everything = whole(self.stage.mesh)
        self.build.origin = "results"
        loss = None if self.graph.loss is None else self._need(self.graph.loss, everything)
        aux = tuple((name, self._need(ref, everything)) for name, ref in self.graph.aux)
        gradients_out = {}
        for name, ref in self.graph.gradients.items():
            self.build.origin = name
            gradients_out[name] = self._need(ref, self.stored[name])
        mutations = {
            name: self._need(ref, everything) for name, ref in self.graph.mutations.items()
        }
        return Program(
            mesh=self.stage.mesh,
            coordinates=self.build.coordinates,
            inputs=tuple(self.inputs),
            instructions=self.build.instructions,
            loss=loss,
            aux=aux,
            gradients=gradients_out,
            mutations=mutations,
        )

    def _enter_phase(self, phase: Phase) -> None:
        if phase is self.build.phase:
            return
        self.build.phase = phase
        for root, shardings in self.there.items():
            kept = self.stage.kept.get(str(root), ())
            keep = {s for s in shardings if s in kept or s == self.persistent.get(root)}
            if keep:
                self.there[root] = {s: shardings[s] for s in keep}
        self.views.clear()

    def _source(self, node: Node) -> None:
        kind = node.outputs[0]
        sharding = whole(self.stage.mesh)
        if node.op == PARAMETER:
            sharding = self.stored[node.target]
        elif node.op == INPUT:
            sharding = self.stage.inputs.get(node.target, sharding)
        local = TensorType(
            local_shape(kind.shape, sharding, self.build.coordinates), kind.dtype
        )
        ref = self.build.add_input(node.name, local)
        self.there[Ref(node.name)] = {sharding: ref}
        self.persistent[Ref(node.name)] = sharding
        if node.op == PARAMETER:
            self.purposes[Ref(node.name)] = "parameters"
        self.inputs.append(
            ProgramInput(
                name=ref.node,
                kind=node.op,
                target=node.target,
                global_type=kind,
                sharding=sharding,
                local_type=local,
            )
        )

    def _node(self, node: Node) -> None:
        plan, rule = self.plans[node.name], self.rules[node.name]
        self.build.origin = node.name
        operands = tuple(
            self._need(ref, sharding)
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
        self.build.purpose = "activations"
        refs = self._expanded(op, rule) or self._plain(op, rule)
        for index, (ref, sharding) in enumerate(zip(refs, plan.outputs, strict=True)):
            self.there[Ref(node.name, index)] = {sharding: ref}

    def _expanded(self, op: LocalOp, rule: Rule) -> tuple[Ref, ...] | None:
        if rule.expand is None or not splits_factor(op, rule):
            return None
        rule.expand(self.build, op)
        results = self.build.take_results()
        return tuple(results[index] for index in range(len(op.node.outputs)))

    def _plain(self, op: LocalOp, rule: Rule) -> tuple[Ref, ...]:
        args, kwargs = rule.local_args(op) if rule.local_args else (op.args(), op.kwargs())
        outs = tuple(op.output_type(index) for index in range(len(op.node.outputs)))
        share = work_share(op.mesh, (*op.operands, *op.outputs))
        return self.build.call_many(
            _LOCAL_NAMES.get(op.node.op, op.node.op),
            tuple(args),
            outs,
            kwargs,
            name=op.node.name,
            flops=rule.flops // share,
        )

    def _root(self, ref: Ref) -> Alias:
        return self.aliases.get(ref, Alias(ref))

    def _need(self, ref: Ref, sharding: Sharding) -> Ref:
        """The rank's piece of a value under a sharding, resharded where it has to be."""
        alias = self._root(ref)
        found = self.views.get((ref, sharding))
        if found is not None:
            return found
        at_root = through(sharding, tuple(reversed(alias.chain)), self._back)
        assert at_root is not None, f"{ref} cannot be read as {sharding}"
        value = self._reshard(alias.root, at_root)
        now: Sharding = at_root
        for name in alias.chain:
            after = self._forth(name, now)
            assert after is not None
            key = (Ref(name), after)
            if key not in self.views:
                self.views[key] = self._view(name, value, now, after)
            value, now = self.views[key], after
        return value

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

    def _reshard(self, root: Ref, sharding: Sharding) -> Ref:
        there = self.there[root]
        if sharding in there:
            return there[sharding]
        kind = self.graph.type_of(root)
        path = cheapest_path(kind, tuple(there), sharding, self.stage.mesh, self.collective_s)
        assert path is not None, f"{root} cannot go from {tuple(there)} to {sharding}"
        self.build.purpose = self.purposes.get(root, "activations")
        for step in path:
            there[step.after] = emit_step(self.build, there[step.before], kind, step)
        return there[sharding]


def splits_factor(op: LocalOp, rule: Rule) -> bool:
    """Whether a strategy splits a factor that needs the rule's expansion."""
    sides = [(rule.operands, op.operands), (rule.outputs, op.outputs)]
    for all_dims, shardings in sides:
        for dims, sharding in zip(all_dims, shardings, strict=True):
            for axis, split in enumerate(sharding):
                if not isinstance(split, Split):
                    continue
                found = rule.factor_of(dims, split, op.mesh.sizes[axis])
                if found is not None and found[0] in rule.expand_on:
                    return True
    return False
