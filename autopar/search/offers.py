"""What every class of nodes may choose on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import HintError, UnsupportedError
from autopar.ir.alias import Alias, through
from autopar.ir.graph import INPUT, PARAMETER, SOURCE_OPS, Node, Ref
from autopar.ir.sharding import Mesh, Partial, Sharding, is_legal, whole
from autopar.rules.strategies import Strategy, strategies
from autopar.search.analysis import Analysis
from autopar.search.layouts import plain_shardings, reads_terms
from autopar.search.regions import useful_partials
from autopar.search.restrict import Restrictions, RoleFilter, parameter_allows, zero_allows

STEADY_BYTES = 1 << 22
"""Values of ids and positions up to this size are simply made whole on every rank."""


@dataclass(frozen=True, slots=True)
class Class:
    """A class of nodes with the shardings behind its choices."""

    members: tuple[str, ...]
    node: Node
    strategies: tuple[Strategy, ...]


class Offers:
    """Strategies of every class, those first that nothing downstream rules out.

    Attributes:
        classes: In the order of the folding.
        carried: Values whose terms of a sum must be carried on.
        roles: What the roles of the mesh's axes allow.

    Raises:
        HintError: The hints leave a class without a strategy.
        UnsupportedError: A node needs the whole batch in the middle of a loop of microbatches.
    """

    def __init__(self, analysis: Analysis, mesh: Mesh, restrictions: Restrictions) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.mesh = mesh
        self.restrictions = restrictions
        self.roles = RoleFilter(analysis, mesh)
        self.gradients = dict(analysis.graph.gradients)
        self.partial_outputs: set[tuple[int, int]] = set()
        classes: list[Class] = []
        for number, names in enumerate(analysis.folding.classes):
            made = self._class(names)
            classes.append(made)
            for strategy in made.strategies:
                for index, sharding in enumerate(strategy.outputs):
                    if any(isinstance(axis, Partial) for axis in sharding):
                        self.partial_outputs.add((number, index))
        self.classes = tuple(classes)
        self.carried = self._carried()

    def at_root(self, alias: Alias, sharding: Sharding) -> Sharding | None:
        rules, sizes = self.analysis.rules, self.mesh.sizes
        return through(
            sharding,
            tuple(reversed(alias.chain)),
            lambda name, s: rules[name].carry_back(s, sizes),
        )

    def _class(self, names: tuple[str, ...]) -> Class:
        node = self.graph.by_name[names[0]]
        if node.op in SOURCE_OPS:
            return Class(names, node, self._source_choices(node, names))
        rule = self.analysis.rules[node.name]
        types = self.analysis.operand_types(node)
        everything = whole(self.mesh)
        small = sum(t.num_bytes for t in node.outputs) <= STEADY_BYTES
        if node.name in self.analysis.steady and small:
            only = Strategy((everything,) * len(types), (everything,) * len(node.outputs))
            return Class(names, node, (only,))
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
        return Class(names, node, kept)

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
        return ref is None or self.at_root(self.analysis.root(ref), stored) is not None

    def _reachable(self, node: Node, strategy: Strategy) -> bool:
        """Whether every operand's sharding exists on the value behind its views."""
        for ref, sharding in zip(node.operands, strategy.operands, strict=True):
            alias = self.analysis.root(ref)
            at_root = self.at_root(alias, sharding)
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


def describe_mesh(mesh: Mesh) -> str:
    """``2 x 4 (dp, tp)`` and the like."""
    sizes = " x ".join(str(size) for size in mesh.sizes)
    return f"{sizes} ({', '.join(mesh.names)})"
