"""What the search knows of a captured step before any mesh is chosen.

Rules, views, classes of repeated nodes, the places where dims may be cut, and which pieces of
which factors come from the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir.alias import Alias, resolve_aliases
from autopar.ir.casts import owner_of, parameter_casts
from autopar.ir.graph import INPUT, PARAMETER, SOURCE_OPS, Graph, Node, Ref, TensorType
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.strategies import Dims, cut_sets, trace_factor
from autopar.rules.table import rule_for
from autopar.search.collection import no_collection
from autopar.search.copies import Copies, find_copies
from autopar.search.fold import Folding, fold, signature
from autopar.search.sums import carried_terms

Pieces = Mapping[str, Mapping[str, frozenset[tuple[int, int]]]]
"""Node to factor to pieces (outer, size) of it."""


Readers = Mapping[tuple[object, ...], tuple[str, Ref]]
"""(class, port) of every reader of a value to (reading node, value as it reads it)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """A captured step, analysed.

    Attributes:
        graph: The step.
        rules: Rule of every node that is not a source.
        aliases: Every view resolved to its root.
        folding: Classes of repeated nodes.
        copies: Their blocks, copy by copy.
        read: Values that are read, those of one class and with the same readers together.
        cuts: Where factors may be cut.
        batch: Pieces that come from the batch dim of the inputs.
        turns: Those of them that microbatches may split: all, unless modules are computed from each
            microbatch alone, where the microbatches are the outermost piece.
        sequence: Pieces that come from the sequence dim of the inputs.
        minor: Pieces that every heavy op keeps whole (head widths, image planes): splitting them
            elsewhere would only be undone.
        steady: Nodes that depend on no parameter and no floating-point input.
        data: Nodes that depend on no parameter: what a prologue may compute over the whole batch.
        looped: Nodes that a microbatch loop runs: they read parameters and split the batch.
        behind: Nodes that read what the loop makes and feed nothing back into it.
        carried: Values whose terms are not summed: they are narrower than their gradient asks for.
        casts: Nodes that cast a parameter, and the parameter's node.
    """

    graph: Graph
    rules: Mapping[str, Rule]
    aliases: Mapping[Ref, Alias]
    folding: Folding
    copies: Copies
    read: tuple[tuple[tuple[Ref, ...], Readers], ...]
    cuts: Pieces
    batch: Pieces
    turns: Pieces
    sequence: Pieces
    minor: Pieces
    steady: frozenset[str]
    data: frozenset[str]
    looped: frozenset[str]
    behind: frozenset[str]
    carried: frozenset[Ref]
    casts: Mapping[str, str]

    def root(self, ref: Ref) -> Alias:
        """The value that owns the data of ``ref`` and the views between them."""
        return self.aliases.get(ref, Alias(ref))

    def owner(self, ref: Ref) -> Node:
        """The parameter that a value is, or is a cast of; else the node that makes it."""
        return owner_of(self.graph.by_name[ref.node], self.casts, self.graph)

    def reads_carried(self, node: Node) -> bool:
        """Whether a node reads terms that are summed behind it."""
        return any(self.root(ref).root in self.carried for ref in node.operands)

    def operand_types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.graph.type_of(ref) for ref in node.operands)


@no_collection()
def analyse(
    graph: Graph, extra: Mapping[str, RuleMaker] | None = None, *, folded: bool = True
) -> Analysis:
    """The analysis of a captured step.

    Args:
        graph: The step.
        extra: Rules of the user by op.
        folded: Whether repeated blocks become classes.

    Raises:
        MissingRuleError: An op has no rule.
    """
    rules = _rules(graph, extra or {})
    aliases = resolve_aliases(graph, lambda n: n.op not in SOURCE_OPS and rules[n.name].alias)
    dims = Dims(graph, rules)
    batch = trace_factor(graph, rules, _starts(graph, 0), dims=dims)
    turns = batch
    if graph.alone:
        starts = _starts(graph, 0).items()
        first = {ref: (dim, outer, graph.microbatches) for ref, (dim, outer, _) in starts}
        turns = trace_factor(graph, rules, first, dims=dims)
    data = _without(graph, lambda node: node.op == PARAMETER)
    carried = carried_terms(graph, rules, aliases, batch)
    folding = fold(graph, aliases, carried, enabled=folded)
    looped = frozenset(name for name, pieces in turns.items() if pieces and name not in data)
    return Analysis(
        graph=graph,
        rules=rules,
        aliases=aliases,
        folding=folding,
        copies=find_copies(graph, aliases, folding),
        read=_read(graph, aliases, folding),
        cuts=cut_sets(graph, rules, dims=dims),
        batch=batch,
        turns=turns,
        sequence=trace_factor(graph, rules, _starts(graph, 1), dims=dims),
        minor=_minor(graph, rules, dims),
        steady=_without(graph, lambda node: node.op == PARAMETER or _is_floating_input(node)),
        data=data,
        looped=looped,
        behind=_behind(graph, looped),
        carried=carried,
        casts=parameter_casts(graph),
    )


def _rules(graph: Graph, extra: Mapping[str, RuleMaker]) -> Mapping[str, Rule]:
    """Rules, made once for nodes with the same signature."""
    made: dict[object, Rule] = {}
    rules: dict[str, Rule] = {}
    for node in graph.nodes:
        if node.op in SOURCE_OPS:
            continue
        key = signature(node, graph, {})
        rule = made.get(key)
        if rule is None:
            types = tuple(graph.type_of(ref) for ref in node.operands)
            rule = made[key] = rule_for(node, types, extra)
        rules[node.name] = rule
    return rules


def _read(
    graph: Graph, aliases: Mapping[Ref, Alias], folding: Folding
) -> tuple[tuple[tuple[Ref, ...], Readers], ...]:
    """Values with their readers, by class; a parameter reads its gradient."""
    found: dict[Ref, dict[tuple[object, ...], tuple[str, Ref]]] = {}

    def add(key: tuple[object, ...], reader: str, ref: Ref) -> None:
        root = aliases[ref].root if ref in aliases else ref
        found.setdefault(root, {})[key] = (reader, ref)

    of = folding.of
    for node in graph.nodes:
        if node.name in of:
            for port, ref in enumerate(node.operands):
                add((of[node.name], port), node.name, ref)
    names = {n.target: n.name for n in graph.sources(PARAMETER)}
    for name, ref in graph.gradients.items():
        add((of[names[name]], "gradient"), names[name], ref)
    results = [] if graph.loss is None else [graph.loss]
    for ref in (*results, *(r for _, r in graph.aux), *graph.mutations.values()):
        add(("result",), "", ref)
    groups: dict[object, list[Ref]] = {}
    for root, ports in found.items():
        groups.setdefault((of[root.node], root.index, frozenset(ports)), []).append(root)
    return tuple((tuple(group), found[group[0]]) for group in groups.values())


def _starts(graph: Graph, behind: int) -> Mapping[Ref, tuple[int, int, int]]:
    """(dim, outer, size) of the dim ``behind`` the batch dim of every input."""
    found = {}
    for node in graph.sources(INPUT):
        dim = graph.batch_dims.get(node.target)
        shape = node.outputs[0].shape
        if dim is not None and dim + behind < len(shape):
            found[Ref(node.name)] = (dim + behind, 1, shape[dim + behind])
    return found


def _minor(graph: Graph, rules: Mapping[str, Rule], dims: Dims) -> Pieces:
    """Pieces of whole factors of heavy ops that are split in no heavy op."""
    kept = _pieces_of_heavy(graph, rules, dims, whole=True)
    split = _pieces_of_heavy(graph, rules, dims, whole=False)
    return {
        name: {
            factor: pieces - split.get(name, {}).get(factor, frozenset())
            for factor, pieces in factors.items()
        }
        for name, factors in kept.items()
    }


def _pieces_of_heavy(
    graph: Graph, rules: Mapping[str, Rule], dims: Dims, *, whole: bool
) -> dict[str, dict[str, frozenset[tuple[int, int]]]]:
    """Pieces tied to whole dims, or to free dims, of the operands of ops that count FLOPs."""
    rounds: list[dict[Ref, tuple[int, int, int]]] = []
    for node in graph.nodes:
        rule = rules.get(node.name)
        if rule is None or not rule.flops:
            continue
        for ref, read in zip(node.operands, rule.operands, strict=True):
            shape = graph.type_of(ref).shape
            chosen = [
                d for d, f in enumerate(read) if len(f) == 1 and (f[0] in rule.whole) == whole
            ]
            for place, dim in enumerate(chosen):
                while len(rounds) <= place:
                    rounds.append({})
                rounds[place].setdefault(ref, (dim, 1, shape[dim]))
    found: dict[str, dict[str, frozenset[tuple[int, int]]]] = {}
    for starts in rounds:
        for name, factors in trace_factor(graph, rules, starts, dims=dims).items():
            own = found.setdefault(name, {})
            for factor, pieces in factors.items():
                own[factor] = own.get(factor, frozenset()) | pieces
    return found


def _is_floating_input(node: Node) -> bool:
    return node.op == INPUT and node.outputs[0].is_floating


def _without(graph: Graph, is_source: Callable[[Node], bool]) -> frozenset[str]:
    """Nodes that depend on none of the chosen sources."""
    moving: set[str] = set()
    for node in graph.nodes:
        if is_source(node) or any(ref.node in moving for ref in node.operands):
            moving.add(node.name)
    return frozenset(n.name for n in graph.nodes if n.name not in moving)


def _behind(graph: Graph, looped: frozenset[str]) -> frozenset[str]:
    """Nodes that depend on looped ones and that no looped one depends on."""
    after: set[str] = set()
    for node in graph.nodes:
        if any(ref.node in looped or ref.node in after for ref in node.operands):
            after.add(node.name)
    feeding: set[str] = set(looped)
    for node in reversed(graph.nodes):
        if node.name in feeding:
            feeding.update(ref.node for ref in node.operands)
    return frozenset(after - feeding)
