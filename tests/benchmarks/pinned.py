"""Plans as frameworks have them: nothing is searched.

Parameters lie as the framework puts them. Every op runs where its operands lie: of the strategies
that need no more than joining operands that are split or partial, the cheapest. Partial sums of
activations are joined at once, or added to other partial ones first, as one fused product would;
with sequence parallelism they are scattered over the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.node import NodeCost
from autopar.cost.reshard import cheapest_path, step_s
from autopar.ir.alias import Alias, through
from autopar.ir.graph import INPUT, PARAMETER, SOURCE_OPS, Node, Phase, Ref
from autopar.ir.sharding import WHOLE, AxisSharding, Mesh, Partial, Sharding, Split, whole
from autopar.plan.records import NodePlan, ParameterPlan, StagePlan
from autopar.rules.strategies import Strategy, strategies
from autopar.search.analysis import Analysis

COLUMNS = ("q", "k", "v", "qkv", "up", "gate", "head", "embedding")
ROWS = ("o", "down")


def stored_shardings(analysis: Analysis, mesh: Mesh) -> dict[str, Sharding]:
    """Megatron's split of parameters over ``tp``, FSDP's of what is left over ``dp``."""
    found = {}
    for node in analysis.graph.sources(PARAMETER):
        shape = node.outputs[0].shape
        module = node.target.rsplit(".", 2)[-2]
        axes: list[AxisSharding] = [WHOLE] * len(mesh.sizes)
        rows = {0: 1}
        for axis in reversed(range(len(mesh.sizes))):
            role, size = mesh.roles[axis], mesh.sizes[axis]
            if role == "tp" and size > 1 and module in (*COLUMNS, *ROWS):
                dim = 0 if module in COLUMNS else 1
                axes[axis] = Split(dim, 1, -(-shape[dim] // size))
                rows[dim] = size
        for axis, role in enumerate(mesh.roles):
            if role == "dp" and mesh.sizes[axis] > 1:
                outer = rows.get(0, 1)
                length = -(-shape[0] // outer)
                axes[axis] = Split(0, outer, -(-length // mesh.sizes[axis]))
        found[node.target] = tuple(axes)
    return found


def pin(
    analysis: Analysis,
    mesh: Mesh,
    cost: NodeCost,
    stored: Mapping[str, Sharding],
    *,
    sequence_parallel: bool = False,
) -> StagePlan:
    """The plan in which every op runs where its operands lie."""
    return _Pinner(
        analysis=analysis,
        mesh=mesh,
        cost=cost,
        stored=stored,
        sequence_parallel=sequence_parallel,
    ).run()


@dataclass(kw_only=True)
class _Pinner:
    analysis: Analysis
    mesh: Mesh
    cost: NodeCost
    stored: Mapping[str, Sharding]
    sequence_parallel: bool
    there: dict[Ref, list[Sharding]] = field(default_factory=dict)
    kept: dict[str, tuple[Sharding, ...]] = field(default_factory=dict)
    plans: list[NodePlan] = field(default_factory=list)
    phase: Phase = Phase.FORWARD

    def run(self) -> StagePlan:
        graph = self.analysis.graph
        inputs = {}
        for node in graph.nodes:
            if node.phase is not self.phase:
                self._enter_backward()
            if node.op == PARAMETER:
                self.there[Ref(node.name)] = [self.stored[node.target]]
            elif node.op == INPUT:
                sharding = self._batch(node)
                inputs[node.target] = sharding
                self.there[Ref(node.name)] = [sharding]
            elif node.op in SOURCE_OPS:
                self.there[Ref(node.name)] = [whole(self.mesh)]
            elif Ref(node.name) not in self.analysis.aliases:
                self._node(node)
        parameters = tuple(
            ParameterPlan(name=n.target, type=n.outputs[0], stored=self.stored[n.target])
            for n in graph.sources(PARAMETER)
        )
        return StagePlan(
            mesh=self.mesh,
            inputs=inputs,
            parameters=parameters,
            nodes=tuple(self.plans),
            kept=self.kept,
        )

    def _batch(self, node: Node) -> Sharding:
        size = node.outputs[0].shape[0]
        return tuple(
            Split(0, 1, -(-size // ranks)) if role == "dp" and ranks > 1 else WHOLE
            for role, ranks in zip(self.mesh.roles, self.mesh.sizes, strict=True)
        )

    def _enter_backward(self) -> None:
        self.phase = Phase.BACKWARD
        for ref, found in self.there.items():
            joined = [s for s in found if not any(isinstance(a, Partial) for a in s)]
            first = joined[:1]
            self.kept[str(ref)] = tuple(first)
            self.there[ref] = first or found

    def _node(self, node: Node) -> None:
        rule = self.analysis.rules[node.name]
        types = self.analysis.operand_types(node)
        legal = strategies(
            rule, types, node.outputs, self.mesh, cuts=self.analysis.cuts.get(node.name, {})
        )
        roots = [self.analysis.root(ref) for ref in node.operands]
        best: tuple[float, int, Strategy, list[Sharding]] | None = None
        for place, strategy in enumerate(legal):
            needs = self._needs(node, roots, strategy)
            if needs is None:
                continue
            seconds = self.cost.seconds(node, rule, types, strategy.operands, strategy.outputs)
            for alias, need in zip(roots, needs, strict=True):
                seconds += self._reshard_s(alias.root, need)
            if best is None or (seconds, place) < best[:2]:
                best = (seconds, place, strategy, needs)
        assert best is not None, f"{node.name} ({node.op}) has no strategy where its operands lie"
        _, _, strategy, needs = best
        for alias, need in zip(roots, needs, strict=True):
            if need not in self.there[alias.root]:
                self.there[alias.root].append(need)
        for index, sharding in enumerate(strategy.outputs):
            self.there[Ref(node.name, index)] = [sharding]
        self.plans.append(
            NodePlan(name=node.name, operands=strategy.operands, outputs=strategy.outputs)
        )

    def _needs(
        self, node: Node, roots: Sequence[Alias], strategy: Strategy
    ) -> list[Sharding] | None:
        """Sharding of every operand's root, if it is near enough to where the root lies."""
        rules, sizes = self.analysis.rules, self.mesh.sizes
        needs = []
        for alias, sharding in zip(roots, strategy.operands, strict=True):
            need = through(
                sharding,
                tuple(reversed(alias.chain)),
                lambda name, s: rules[name].carry_back(s, sizes),
            )
            if need is None:
                return None
            needs.append(need)
        now = [self.there[alias.root] for alias in roots]
        moving = [
            found
            for alias, found in zip(roots, now, strict=True)
            if self.analysis.graph.by_name[alias.root.node].op != PARAMETER
        ]
        for axis in range(len(sizes)):
            followed = moving if self.mesh.roles[axis] == "dp" else now
            split = any(self._parts(s[axis]) for found in followed for s in found)
            outputs_split = any(isinstance(s[axis], Split) for s in strategy.outputs)
            if outputs_split and not split:
                return None
            sums = [f for f in now if any(isinstance(s[axis], Partial) for s in f)]
            joined = 1 < len(now) == len(sums)
            for alias, need, found in zip(roots, needs, now, strict=True):
                if joined and all(isinstance(n[axis], Partial) for n in needs):
                    continue
                if not any(self._near(alias.root, s[axis], need[axis], axis, split) for s in found):
                    return None
        return needs

    def _parts(self, axis: AxisSharding) -> bool:
        """Whether a value lies so on an axis that what reads it may work on parts."""
        return isinstance(axis, Split) or (self.sequence_parallel and isinstance(axis, Partial))

    def _near(
        self, root: Ref, now: AxisSharding, need: AxisSharding, axis: int, split: bool
    ) -> bool:
        source = self.analysis.graph.by_name[root.node]
        if source.op == PARAMETER:
            return need == (WHOLE if self.mesh.roles[axis] == "dp" else now)
        if need == WHOLE or (now == need and not self._is_late(now, axis)):
            return True
        if isinstance(now, Partial):
            return self.sequence_parallel and self._is_sequence(root, need)
        return now == WHOLE and split and isinstance(need, Split)

    def _is_late(self, now: AxisSharding, axis: int) -> bool:
        """Whether a sum would be joined later than Megatron does."""
        return isinstance(now, Partial) and self.mesh.roles[axis] == "tp"

    def _is_sequence(self, root: Ref, split: AxisSharding) -> bool:
        if not isinstance(split, Split):
            return False
        batch = next(iter(self.analysis.graph.sources(INPUT))).outputs[0].shape[0]
        shape = self.analysis.graph.type_of(root).shape
        return (split.dim == 1 and len(shape) == 3) or (
            split.dim == 0 and len(shape) == 2 and split.outer == batch
        )

    def _reshard_s(self, root: Ref, need: Sharding) -> float:
        if need in self.there[root]:
            return 0.0
        kind = self.analysis.graph.type_of(root)
        path = cheapest_path(kind, self.there[root], need, self.mesh, self.cost.collective_s)
        if path is None:
            return math.inf
        return sum(step_s(kind, step, self.mesh, self.cost.collective_s) for step in path)
