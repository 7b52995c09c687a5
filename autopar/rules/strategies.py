"""Legal strategies of a node, and where factors may be cut.

On one mesh axis a node is computed whole, or with partial operands it is linear in, or with one
factor split. Several axes are the product of these; two axes on the same piece of a factor nest,
the second inside the first.

A *cut* ``(outer, size)`` of a factor of size D says that it may be split at the piece of ``size``
after ``outer`` rows; ``inner = D / (outer * size)`` places follow within the piece. ``(1, D)`` is
always a cut, the plain contiguous one; ``(batch, sequence)`` of a merged batch * sequence factor
splits it by sequence. `cut_sets` finds the cuts of a graph by following dims through its nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import CONSTANT, SOURCE_OPS, Graph, Ref, TensorType
from autopar.ir.sharding import (
    WHOLE,
    AxisSharding,
    Mesh,
    Sharding,
    Split,
    is_legal,
)
from autopar.rules.notation import Rule, axis_effect, linear_effect

Cut = tuple[int, int]
"""(outer, size) of a piece of a factor or a dim."""

Cuts = frozenset[Cut]
Allow = Callable[[int, str, int, int], bool]
"""Whether mesh axis ``axis`` may split ``factor`` at ``outer`` in chunks of ``block``."""

MAX_CUTS = 8
"""Cuts kept of a factor or dim; those found later, farther away in the graph, are dropped."""

_NO_CUTS: Cuts = frozenset()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One legal choice of shardings for a node, in the order of its operands and outputs.

    Attributes:
        operands: Of every operand.
        outputs: Of every output.
        on_host: Of a parameter, or a cast of one, whether its home is host memory.
        again: Of a cast, whether that is so of the parameter alone, which is cast in every phase.
    """

    operands: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    on_host: bool = False
    again: bool = False


_Effect = tuple[tuple[AxisSharding, ...], tuple[AxisSharding, ...]]


@dataclass(frozen=True, slots=True)
class _Option:
    """What one axis may do: split ``factor`` at a piece, or (no factor) ``effect``."""

    factor: str | None
    cut: Cut
    effect: _Effect | None = None


@dataclass(frozen=True, slots=True)
class _Taken:
    """A piece of a factor that earlier axes split into ``parts``."""

    cut: Cut
    parts: int


def strategies(
    rule: Rule,
    operand_types: Sequence[TensorType],
    output_types: Sequence[TensorType],
    mesh: Mesh,
    cuts: Mapping[str, Cuts] | None = None,
    allow: Allow | None = None,
) -> tuple[Strategy, ...]:
    """All legal strategies of a node over a mesh, each once, in a fixed order.

    Args:
        rule: The node's rule.
        operand_types: Global types of its operands.
        output_types: Global types of its outputs.
        mesh: The mesh; an axis of one rank leaves the node whole. Its time axis splits no factor
            whose parts would be joined inside the node, since microbatches run one by one, and
            cuts each of the mesh's ``rows`` of a factor, or the factor before the other axes where
            microbatches are ``in_turn``.
        cuts: Where each factor may be cut besides ``(1, D)``.
        allow: Further restriction of an axis to factors; default none.
    """
    lister = _Lister(rule, tuple(operand_types), tuple(output_types), mesh, allow)
    options = _options(rule, cuts or {})
    found: dict[Strategy, None] = {}
    for walked in lister.walk(options, 0, {}):
        placed = dict(zip(lister.order, walked, strict=True))
        effects = [placed[axis] for axis in range(len(mesh.sizes))]
        operands = tuple(zip(*(e[0] for e in effects), strict=True))
        outputs = tuple(zip(*(e[1] for e in effects), strict=True))
        strategy = Strategy(
            operands or ((),) * len(operand_types), outputs or ((),) * len(output_types)
        )
        if strategy not in found and lister.fits(strategy):
            found[strategy] = None
    return tuple(found)


def _options(rule: Rule, cuts: Mapping[str, Cuts]) -> tuple[_Option, ...]:
    """What any one axis may do, before sizes are looked at."""
    nothing: _Effect = ((WHOLE,) * len(rule.operands), (WHOLE,) * len(rule.outputs))
    options = [_Option(None, (1, 1), nothing)]
    options += [_Option(None, (1, 1), linear_effect(rule, s)) for s in rule.linear]
    for factor in rule.factors():
        whole_cut = (1, rule.sizes[factor])
        options.append(_Option(factor, whole_cut))
        others = sorted(cuts.get(factor, _NO_CUTS) - {whole_cut})
        options += [_Option(factor, cut) for cut in others if _usable(rule, factor, cut)]
    return tuple(options)


def _usable(rule: Rule, factor: str, cut: Cut) -> bool:
    outer, size = cut
    if size <= 1 or rule.sizes[factor] % (outer * size):
        return False
    return outer == 1 or factor not in rule.contiguous


class _Lister:
    """Walks the product of the axes of one node's strategies."""

    def __init__(
        self,
        rule: Rule,
        operand_types: tuple[TensorType, ...],
        output_types: tuple[TensorType, ...],
        mesh: Mesh,
        allow: Allow | None,
    ) -> None:
        self.rule = rule
        self.operand_types = operand_types
        self.output_types = output_types
        self.mesh = mesh
        self.allow = allow
        # What the time axis cuts first, the others cut further.
        axes = range(len(mesh.sizes))
        self.order = tuple(sorted(axes, key=lambda axis: mesh.in_turn and axis != mesh.time_axis))
        self.effects: dict[tuple[str, int, int, int, tuple[int, ...]], _Effect | None] = {}

    def walk(
        self, options: Sequence[_Option], at: int, taken: Mapping[str, tuple[_Taken, ...]]
    ) -> Iterator[tuple[_Effect, ...]]:
        """Effects of every axis of ``order`` from ``at`` on, given what earlier ones took."""
        if at == len(self.order):
            yield ()
            return
        axis = self.order[at]
        for option in options if self.mesh.sizes[axis] > 1 else options[:1]:
            if option.factor is None:
                assert option.effect is not None
                for rest in self.walk(options, at + 1, taken):
                    yield (option.effect, *rest)
                continue
            placed = self.take(axis, option, taken.get(option.factor, ()))
            if placed is None:
                continue
            effect, pieces = placed
            for rest in self.walk(options, at + 1, {**taken, option.factor: pieces}):
                yield (effect, *rest)

    def take(
        self, axis: int, option: _Option, taken: tuple[_Taken, ...]
    ) -> tuple[_Effect, tuple[_Taken, ...]] | None:
        """The effect of splitting a piece by one more axis; None if that is not legal."""
        assert option.factor is not None
        if axis == self.mesh.time_axis and option.factor in self.rule.synced:
            return None
        outer, size = option.cut
        ranks, before = self.mesh.sizes[axis], 1
        for piece in taken:
            if piece.cut == option.cut:
                before = piece.parts
            elif not _apart(piece.cut, option.cut):
                return None
        if axis == self.mesh.time_axis:
            if self.mesh.rows % before and self.mesh.rows > 1:
                return None
            before = max(before, self.mesh.rows)
        shares = self.mesh.shares_of(axis)
        parts = sum(shares) or ranks
        if (before > 1 or shares) and size % (before * parts):
            return None
        inner = self.rule.sizes[option.factor] // (outer * size)
        block = -(-size // (before * parts)) * inner
        effect = self.effect(option.factor, outer * before, block, ranks, shares)
        if effect is None:
            return None
        if self.allow is not None and not self.allow(axis, option.factor, outer * before, block):
            return None
        others = tuple(piece for piece in taken if piece.cut != option.cut)
        return effect, (*others, _Taken(option.cut, before * parts))

    def effect(
        self, factor: str, outer: int, block: int, ranks: int, shares: tuple[int, ...]
    ) -> _Effect | None:
        """What one axis does alone, if that is legal for every operand and output."""
        key = (factor, outer, block, ranks, shares)
        if key not in self.effects:
            self.effects[key] = self.new_effect(factor, outer, block, ranks, shares)
        return self.effects[key]

    def new_effect(
        self, factor: str, outer: int, block: int, ranks: int, shares: tuple[int, ...]
    ) -> _Effect | None:
        row = self.rule.sizes[factor] // outer
        equal = block * ranks == row and not shares
        if row < ranks or (not equal and factor in self.rule.even):
            return None
        found = axis_effect(self.rule, factor, outer, block, shares)
        if equal:
            return found
        axis = Mesh(("a",), (ranks,))
        shapes = [t.shape for t in (*self.operand_types, *self.output_types)]
        fits = all(
            is_legal(shape, (part,), axis)
            for shape, part in zip(shapes, found[0] + found[1], strict=True)
        )
        return found if fits else None

    def fits(self, strategy: Strategy) -> bool:
        """Whether every value's sharding is legal; single axes on a dim were checked before."""
        if len(self.mesh.sizes) == 1:
            return True
        values = zip(
            (*self.operand_types, *self.output_types),
            strategy.operands + strategy.outputs,
            strict=True,
        )
        return all(_one_a_dim(s) or is_legal(kind.shape, s, self.mesh) for kind, s in values)


def _apart(first: Cut, second: Cut) -> bool:
    """Whether two pieces of a factor do not overlap."""
    (outer, size), (following, _) = sorted((first, second))
    return following % (outer * size) == 0


def _one_a_dim(sharding: Sharding) -> bool:
    """Whether no dim is split by two axes."""
    dims = [axis.dim for axis in sharding if type(axis) is Split]
    return len(dims) == len(set(dims))


def split_factors(rule: Rule, strategy: Strategy, mesh: Mesh) -> frozenset[str]:
    """The factors that a strategy splits on some axis."""
    found = set()
    for dims, sharding in zip(
        rule.operands + rule.outputs, strategy.operands + strategy.outputs, strict=True
    ):
        for axis, ranks in zip(sharding, mesh.sizes, strict=True):
            if isinstance(axis, Split):
                factor = rule.factor_of(dims, axis, ranks)
                if factor is not None:
                    found.add(factor[0])
    return frozenset(found)


def needs_expansion(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether the rank's program is ``rule.expand`` instead of the op with local sizes."""
    return bool(rule.expand_on) and bool(split_factors(rule, strategy, mesh) & rule.expand_on)


# Cuts of a whole graph: dims of values and factors of nodes exchange the pieces they know.


_Near = Mapping[int, Mapping[tuple[int, int], None]]
"""For classes, (other class, places before it), in order."""


class Dims:
    """Classes of dims and factors that are the same index, and how merged ones contain others.

    A dim that is one factor belongs to the factor's class; only merged dims link two classes. What
    depends on no input, parameter or buffer (zeros, an arange) is made once for all that want one
    of its shape, so that its dims learn from each of them and teach none.
    """

    def __init__(self, graph: Graph, rules: Mapping[str, Rule]) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.first_dim: dict[Ref, int] = {}
        self.factors: dict[str, dict[str, int]] = {}
        self.links: list[tuple[int, int, int]] = []
        self.taught: list[tuple[int, int]] = []
        self._made_alone: set[str] = set()
        for node in graph.nodes:
            for index, kind in enumerate(node.outputs):
                self.first_dim[Ref(node.name, index)] = self._add(kind.shape)
        for node in graph.nodes:
            rule = rules.get(node.name)
            alone = node.op == CONSTANT or node.op not in SOURCE_OPS
            if alone and all(ref.node in self._made_alone for ref in node.operands):
                self._made_alone.add(node.name)
            if rule is not None:
                values = node.operands + tuple(Ref(node.name, i) for i in range(len(node.outputs)))
                self._join(node.name, rule, values)

    def _add(self, sizes: Sequence[int]) -> int:
        first = len(self.parent)
        self.parent.extend(range(first, first + len(sizes)))
        self.size.extend(sizes)
        return first

    def _join(self, name: str, rule: Rule, values: Sequence[Ref]) -> None:
        own: dict[str, int] = {}
        for ref, dims in zip(values, rule.operands + rule.outputs, strict=True):
            first = self.first_dim[ref]
            if ref.node in self._made_alone and name not in self._made_alone:
                first = self._read(first, len(dims))
            for at, dim in enumerate(dims):
                if len(dim) == 1:
                    self._one(rule, own, dim[0], first + at)
                elif dim:
                    self._merged(rule, own, dim, first + at)
        self.factors[name] = own

    def _read(self, made: int, count: int) -> int:
        """Dims of a value as one of its readers has them, which teach those of the value."""
        first = self._add(self.size[made : made + count])
        self.taught += [(first + at, made + at) for at in range(count)]
        return first

    def _one(self, rule: Rule, own: dict[str, int], factor: str, dim: int) -> None:
        if factor in rule.whole:
            return
        if factor in own:
            self._unite(own[factor], dim)
        else:
            own[factor] = dim

    def _merged(self, rule: Rule, own: dict[str, int], dim: tuple[str, ...], at: int) -> None:
        before = 1
        for factor in dim:
            size = rule.sizes[factor]
            if factor not in rule.whole:
                if factor not in own:
                    own[factor] = self._add((size,))
                self.links.append((at, own[factor], before))
            before *= size

    def find(self, dim: int) -> int:
        parent = self.parent
        while parent[dim] != dim:
            parent[dim] = parent[parent[dim]]
            dim = parent[dim]
        return dim

    def _unite(self, first: int, second: int) -> None:
        a, b = self.find(first), self.find(second)
        if a != b:
            self.parent[max(a, b)] = min(a, b)

    def spread(self, start: Iterable[tuple[int, Cut]], limit: int) -> dict[int, dict[Cut, None]]:
        """Every class's cuts, from the first ones, through the links to a fixpoint."""
        inner, outer = self._links
        known: dict[int, dict[Cut, None]] = {}
        queue = deque((self.find(dim), cut) for dim, cut in start)
        while queue:
            at, cut = queue.popleft()
            have = known.setdefault(at, {})
            if cut in have or len(have) >= limit:
                continue
            have[cut] = None
            for part, before in inner.get(at, ()):
                piece = _inside(cut, before, self.size[part])
                if piece is not None:
                    queue.append((part, piece))
            for merged, before in outer.get(at, ()):
                queue.append((merged, (cut[0] * before, cut[1])))
            queue.extend((made, cut) for made in self._taught.get(at, ()))
        return known

    @cached_property
    def _links(self) -> tuple[_Near, _Near]:
        """Classes of the factors in a class of merged dims, and of the dims around a factor."""
        inner: dict[int, dict[tuple[int, int], None]] = {}
        outer: dict[int, dict[tuple[int, int], None]] = {}
        for merged, part, before in self.links:
            a, b = self.find(merged), self.find(part)
            inner.setdefault(a, {})[(b, before)] = None
            outer.setdefault(b, {})[(a, before)] = None
        return inner, outer

    @cached_property
    def _taught(self) -> Mapping[int, Mapping[int, None]]:
        """Classes of the dims that a reader's teach, in order."""
        found: dict[int, dict[int, None]] = {}
        for reader, made in self.taught:
            found.setdefault(self.find(reader), {})[self.find(made)] = None
        return found

    def by_node(self, known: Mapping[int, Mapping[Cut, None]]) -> dict[str, dict[str, Cuts]]:
        shared = {at: frozenset(cuts) for at, cuts in known.items()}
        return {
            name: {f: shared.get(at, _NO_CUTS) for f, at in own.items()}
            for name, own in self._found.items()
        }

    @cached_property
    def _found(self) -> Mapping[str, Mapping[str, int]]:
        """Class of every factor of every node."""
        return {
            name: {f: self.find(dim) for f, dim in own.items()}
            for name, own in self.factors.items()
        }


def _inside(cut: Cut, before: int, own: int) -> Cut | None:
    """A cut of a dim as a cut of the factor that lies after ``before`` places; None if across."""
    outer, size = cut
    if outer % before or (before * own) % (outer * size):
        return None
    return outer // before, size


def cut_sets(
    graph: Graph,
    rules: Mapping[str, Rule],
    limit: int = MAX_CUTS,
    dims: Dims | None = None,
) -> dict[str, dict[str, Cuts]]:
    """Cuts of every factor of every node.

    Merged dims teach the dims of their factors, and those teach all dims that are the same index:
    a [batch * sequence] dim learns ``(1, batch)`` and ``(batch, sequence)``, a hidden dim its
    heads. Factors that a node keeps whole pass nothing on.

    Args:
        graph: The captured step.
        rules: Rule of each node by name; nodes without one join nothing.
        limit: Cuts kept of one dim; the nearest in the graph come first.
        dims: Of the graph, if they are known already.
    """
    dims = dims or Dims(graph, rules)
    roots = [i for i in range(len(dims.parent)) if dims.find(i) == i and dims.size[i] > 1]
    known = dims.spread(((i, (1, dims.size[i])) for i in roots), limit)
    return dims.by_node(known)


def trace_factor(
    graph: Graph,
    rules: Mapping[str, Rule],
    start: Mapping[Ref, tuple[int, int, int]],
    limit: int = MAX_CUTS,
    dims: Dims | None = None,
) -> dict[str, dict[str, Cuts]]:
    """Pieces of factors that are the same index as given pieces of some values' dims.

    Started at the batch dims of the inputs it finds every batch factor: forward through the
    nodes, and back into values made for them (an expanded gradient, an arange). A piece that a
    merged dim cuts across is dropped, and a factor kept whole passes nothing on.

    Args:
        graph: The captured step.
        rules: Rule of each node by name.
        start: (dim, outer, size) of the piece of each value to start from.
        limit: Pieces kept of one dim.
        dims: Of the graph, if they are known already.
    """
    dims = dims or Dims(graph, rules)
    first = [
        (dims.first_dim[ref] + dim, (outer, size)) for ref, (dim, outer, size) in start.items()
    ]
    found = dims.by_node(dims.spread(first, limit))
    return {name: {f: c for f, c in own.items() if c} for name, own in found.items()}
