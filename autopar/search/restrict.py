"""What hints leave of the strategies.

A role axis (made by ``hint.degrees``) takes some factors only, and nodes that could use it must:
``dp`` the batch; ``tp`` everything but the batch, and contractions with a parameter split one of
the parameter's dims; ``cp`` the sequence. Casts of parameters and gradients are split as these are
stored. Parameters named by a hint keep to what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial

from autopar.hint import Replicate, Shard
from autopar.ir.casts import CAST, gradient_values
from autopar.ir.graph import PARAMETER, Node, Ref
from autopar.ir.sharding import TIME, WHOLE, Mesh, Partial, Sharding, Split, Whole
from autopar.plan.records import ParameterPlan
from autopar.rules.strategies import Strategy, strategies
from autopar.search.analysis import Analysis

BATCH, TENSOR, CONTEXT = "dp", "tp", "cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """Hints as the search applies them.

    Attributes:
        zero: Forced ZeRO stage over the data-parallel axes, or None.
        parameters: ``hint.shard`` and ``hint.replicate``.
        stored: Stored shardings that are given, because the parameters exist; ``homes`` those of
            them that are at home in host memory, or whose state is.
        recompute: Modules whose activations run again in the backward; ``keep`` those whose are
            kept; ``offload`` those whose are kept in host memory.
        offload_states: Whether all optimizer state is in host memory.
        offload_parameters: Modules and parameters whose home is host memory.
    """

    zero: int | None = None
    parameters: tuple[Shard | Replicate, ...] = ()
    stored: Mapping[str, Sharding] = field(default_factory=dict)
    homes: Mapping[str, ParameterPlan] | None = None
    recompute: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    offload_states: bool = False
    offload_parameters: tuple[str, ...] = ()


class RoleFilter:
    """Decides which strategies of a node the roles of a mesh allow."""

    def __init__(self, analysis: Analysis, mesh: Mesh) -> None:
        self._analysis = analysis
        self._mesh = mesh
        self._any = any(mesh.roles)

    def allow(self, node: Node, axis: int, factor: str, outer: int, block: int) -> bool:
        """Whether this axis may split this factor so."""
        ranks = self._mesh.sizes[axis]
        size = self._analysis.rules[node.name].sizes[factor]
        if self._within(self._analysis.minor, node, factor, outer, block, ranks, size):
            return False
        role = self._mesh.roles[axis]
        if not role or (role != TIME and node.name in self._free):
            return True
        if role == TIME:
            return self._within(self._analysis.turns, node, factor, outer, block, ranks, size)
        batch = self._within(self._analysis.batch, node, factor, outer, block, ranks, size)
        if role == BATCH:
            return batch
        if role == CONTEXT:
            sequence = self._analysis.sequence
            return self._within(sequence, node, factor, outer, block, ranks, size)
        return not batch

    def is_stored(self, node: Node) -> bool:
        """Whether a node only casts what is stored, so that it is split as that is."""
        return node.name in self._free

    def required(self, node: Node, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """The strategies, without those that leave a role axis unused where it could be used."""
        left = tuple(strategies)
        if not self._any:
            return left
        for axis, role in enumerate(self._mesh.roles):
            if role == TIME:
                left = self._in_time(node, left, axis)
                continue
            if node.name in self._free:
                continue
            if role == BATCH:
                using = tuple(s for s in left if _splits(s, axis))
            elif role == TENSOR:
                using = tuple(s for s in left if self._splits_parameter(node, s, axis))
            else:
                continue
            left = using or left
        return left

    def _in_time(
        self, node: Node, strategies: Sequence[Strategy], axis: int
    ) -> tuple[Strategy, ...]:
        """The strategies that a microbatch loop can run.

        What the loop makes is read in the loop as it is, a microbatch at a time; only nodes behind
        the loop read it joined. What depends on the batch alone is made whole, or a microbatch at
        a time, never in parts.
        """
        analysis = self._analysis
        looped = node.name in analysis.looped
        left = [s for s in strategies if not looped or _splits(s, axis)]
        if node.name in analysis.data:
            return tuple(s for s in left if not _is_partial(s, axis))
        if node.name in analysis.behind:
            several = sum(len(analysis.graph.type_of(r).shape) > 0 for r in node.operands) > 1
            several = several and not analysis.reads_carried(node)
            return tuple(s for s in left if not (several and _is_partial(s, axis)))
        made = [self.made_in_loop(ref) for ref in node.operands]
        return tuple(
            s
            for s in left
            if all(not own or s.operands[port][axis] != WHOLE for port, own in enumerate(made))
        )

    def made_in_loop(self, ref: Ref) -> bool:
        """Whether a value depends on looped nodes."""
        name = self._analysis.root(ref).root.node
        return name in self._analysis.looped or name in self._after_loop

    @cached_property
    def _after_loop(self) -> frozenset[str]:
        found: set[str] = set()
        for node in self._analysis.graph.nodes:
            if any(r.node in found or r.node in self._analysis.looped for r in node.operands):
                found.add(node.name)
        return frozenset(found)

    def _splits_parameter(self, node: Node, strategy: Strategy, axis: int) -> bool:
        analysis = self._analysis
        rule = analysis.rules[node.name]
        if not rule.flops:
            return False
        for ref, sharding in zip(node.operands, strategy.operands, strict=True):
            root = analysis.owner(analysis.root(ref).root)
            if root.op == PARAMETER and len(root.outputs[0].shape) > 1:
                return isinstance(sharding[axis], Split)
        for index, sharding in enumerate(strategy.outputs):
            if Ref(node.name, index) in self._gradients:
                return isinstance(sharding[axis], Split)
        return False

    @cached_property
    def _free(self) -> frozenset[str]:
        """Casts between how a parameter or gradient is stored and used: split as it is stored."""
        by_name = self._analysis.graph.by_name
        made = {ref.node for ref in self._gradients if by_name[ref.node].op == CAST}
        return frozenset(made | set(self._analysis.casts))

    @cached_property
    def _gradients(self) -> frozenset[Ref]:
        return gradient_values(self._analysis.graph, self._analysis.aliases)

    @staticmethod
    def _within(
        pieces: object, node: Node, factor: str, outer: int, block: int, ranks: int, size: int
    ) -> bool:
        found = pieces.get(node.name, {}).get(factor, ())  # type: ignore[attr-defined]
        for piece_outer, piece_size in found:
            inner = size // (piece_outer * piece_size)
            row = size // outer
            end = min(row, block * ranks) if row % (block * ranks) == 0 else row
            if outer >= piece_outer and block >= inner and end <= inner * piece_size:
                return True
        return False


def needing_whole(analysis: Analysis, mesh: Mesh) -> frozenset[str]:
    """Paths of modules with an op that cannot run in the microbatches of a mesh."""
    roles = RoleFilter(analysis, mesh)
    found = set()
    for node in analysis.graph.nodes:
        if node.name not in analysis.rules or node.name in analysis.steady:
            continue
        if Ref(node.name) in analysis.aliases or node.source.module in found:
            continue
        choices = strategies(
            analysis.rules[node.name],
            analysis.operand_types(node),
            node.outputs,
            mesh,
            cuts=analysis.cuts.get(node.name, {}),
            allow=partial(roles.allow, node),
        )
        if not roles.required(node, choices):
            found.add(node.source.module)
    return frozenset(found)


def _splits(strategy: Strategy, axis: int) -> bool:
    return any(isinstance(s[axis], Split) for s in (*strategy.operands, *strategy.outputs))


def _is_partial(strategy: Strategy, axis: int) -> bool:
    return any(isinstance(s[axis], Partial) for s in (*strategy.operands, *strategy.outputs))


def matching(pattern: str, name: str) -> bool:
    """Whether a glob matches a parameter's name or the module that owns it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def below(pattern: str, module: str) -> bool:
    """Whether a glob matches the path of a module or of one that contains it."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def parameter_allows(restrictions: Restrictions, mesh: Mesh, name: str, sharding: Sharding) -> bool:
    """Whether the parameter hints allow a sharding of this parameter, stored or used."""
    for hint in restrictions.parameters:
        if not matching(hint.pattern, name):
            continue
        if isinstance(hint, Replicate):
            if any(not isinstance(axis, Whole) for axis in sharding):
                return False
            continue
        axis = axis_named(mesh, hint.axis)
        if axis is None:
            continue
        split = sharding[axis]
        if not (isinstance(split, Split) and split.dim == hint.dim):
            return False
    return True


def axis_named(mesh: Mesh, name: str) -> int | None:
    """Index of the axis with this name or role."""
    for axis, (own, role) in enumerate(zip(mesh.names, mesh.roles, strict=True)):
        if name in (own, role):
            return axis
    return None


def zero_allows(zero: int | None, mesh: Mesh, choices: Sequence[Sharding]) -> tuple[Sharding, ...]:
    """Stored shardings that a forced ZeRO stage leaves."""
    if zero is None:
        return tuple(choices)
    axes = [a for a, role in enumerate(mesh.roles) if role in (BATCH, CONTEXT)]
    if not any(mesh.roles):
        axes = list(range(len(mesh.sizes)))
    if zero == 0:
        return tuple(c for c in choices if all(c[a] == WHOLE for a in axes))
    best = max((sum(c[a] != WHOLE for a in axes) for c in choices), default=0)
    return tuple(c for c in choices if sum(c[a] != WHOLE for a in axes) == best)
