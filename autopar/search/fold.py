"""Folding: nodes that repeat block after block become one class with a count.

The nodes are read as a sequence of signatures (op, constants, shapes, views in front of the
operands). A run in which ``s[i] == s[i + period]`` is a repeated block; nodes at the same place of
its copies are one class. Any partition into classes of equal signatures is a correct restriction
(all members choose alike, costs are summed over the members); runs decide only how good it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.ir.alias import Alias
from autopar.ir.graph import BUFFER, PARAMETER, SOURCE_OPS, STREAM, Arg, Const, Graph, Node, Ref

MIN_RUN = 8
"""Shortest period times copies beyond the first that is worth folding, in nodes."""


@dataclass(frozen=True, slots=True)
class Folding:
    """Classes of nodes.

    Attributes:
        classes: Members of each class by name, in graph order; the first represents it.
        of: Class of every node that is not a view.
        run_of: Run of every class that is a place of a repeated block: the n-th members of its
            classes are copy n.
    """

    classes: tuple[tuple[str, ...], ...]
    of: Mapping[str, int]
    run_of: Mapping[int, int] = field(default_factory=dict)


def fold(
    graph: Graph,
    aliases: Mapping[Ref, Alias],
    carried: Collection[Ref] = (),
    *,
    enabled: bool = True,
) -> Folding:
    """The classes of a graph.

    Args:
        graph: The captured step.
        aliases: Its views.
        carried: Values that search treats in a way of their own; nodes that make them are not like
            others.
        enabled: False gives every node a class of its own.
    """
    nodes = [n for n in graph.nodes if n.op not in SOURCE_OPS and Ref(n.name) not in aliases]
    sources = [n for n in graph.nodes if n.op in SOURCE_OPS]
    if not enabled:
        names = [n.name for n in (*sources, *nodes)]
        return Folding(tuple((name,) for name in names), {n: i for i, n in enumerate(names)})
    ids: dict[Hashable, int] = {}
    signs = np.array(
        [
            ids.setdefault((signature(n, graph, aliases, like), _marks(n, carried)), len(ids))
            for n in nodes
        ],
        dtype=np.int64,
    )
    groups = list(range(len(nodes)))
    starts: dict[int, int] = {}
    _fold_runs(signs, 0, len(nodes), groups, starts)
    keys: dict[str, Hashable] = {n.name: g for n, g in zip(nodes, groups, strict=True)}
    readers: dict[str, set[tuple[Hashable, int]]] = {}
    for node in nodes:
        for port, ref in enumerate(node.operands):
            root = aliases[ref].root if ref in aliases else ref
            readers.setdefault(root.node, set()).add((keys[node.name], port))
    made_for = {
        (op, name): (keys.get(_root(ref, aliases).node), _root(ref, aliases).index)
        for op, results in ((PARAMETER, graph.gradients), (BUFFER, graph.mutations))
        for name, ref in results.items()
    }
    for node in sources:
        own: Hashable = node.name
        if node.op in (PARAMETER, BUFFER):
            read = frozenset(readers.get(node.name, set()))
            if read:
                own = (node.op, node.outputs, read, made_for.get((node.op, node.target)))
        keys[node.name] = ("source", own)
    members: dict[Hashable, list[str]] = {}
    for node in (*sources, *nodes):
        members.setdefault(keys[node.name], []).append(node.name)
    classes = tuple(tuple(names) for names in members.values())
    return Folding(
        classes=classes,
        of={name: i for i, names in enumerate(classes) for name in names},
        run_of={i: starts[key] for i, key in enumerate(members) if key in starts},
    )


def _marks(node: Node, marked: Collection[Ref]) -> tuple[int, ...]:
    return tuple(i for i in range(len(node.outputs)) if marked and Ref(node.name, i) in marked)


def _root(ref: Ref, aliases: Mapping[Ref, Alias]) -> Ref:
    return aliases[ref].root if ref in aliases else ref


def signature(
    node: Node,
    graph: Graph,
    aliases: Mapping[Ref, Alias],
    said: Callable[[Arg], Hashable] | None = None,
) -> Hashable:
    """What must agree for two nodes to have the same rule, or the same strategies and costs.

    Args:
        node: One of them.
        graph: Whose it is.
        aliases: Views to look through.
        said: What counts of an argument: by default all that rules may read, of a class `like`.
    """
    constants_in = said or constants_of
    operands: list[Hashable] = []
    for ref in node.operands:
        alias = aliases.get(ref)
        if alias is None:
            operands.append((graph.type_of(ref), ()))
        else:
            views = tuple(
                (view.op, tuple(constants_in(arg) for arg in view.args), view.outputs)
                for view in (graph.by_name[name] for name in alias.chain)
            )
            operands.append((graph.type_of(alias.root), views))
    constants = tuple(constants_in(arg) for arg in node.args)
    named = tuple((key, constants_in(arg)) for key, arg in node.kwargs)
    return node.op, node.phase, constants, named, tuple(operands), node.outputs


def constants_of(arg: Arg) -> Hashable:
    """What of an argument rules may read: all but which values it names."""
    if isinstance(arg, Ref):
        return "*"
    if isinstance(arg, tuple):
        return tuple(constants_of(item) for item in arg)
    if isinstance(arg, Const) and arg.kind == STREAM:
        return STREAM
    return (type(arg).__name__, arg)


def like(arg: Arg) -> Hashable:
    """What of an argument must agree for two nodes to be split and priced alike.

    Of a factor, a probability or an eps that is whether it is zero, so that blocks which drop
    their paths with growing probability are alike.
    """
    if isinstance(arg, tuple):
        return tuple(like(item) for item in arg)
    if isinstance(arg, float):
        return ("float", arg == 0)
    return constants_of(arg)


def _fold_runs(
    signs: NDArray[np.int64], start: int, stop: int, groups: list[int], starts: dict[int, int]
) -> None:
    """Fold the best run of ``[start, stop)``, then what lies before and behind it.

    Args:
        signs: Signature of every node, as a number.
        start: First node.
        stop: Behind the last one.
        groups: Is told the group of every node.
        starts: Is told the start of the run of every group.
    """
    if stop - start < 2 * MIN_RUN:
        return
    best = _best_run(signs[start:stop])
    if best is None:
        return
    first, period, copies = best
    first += start
    starts.update(dict.fromkeys(range(first, first + period), first))
    for copy in range(1, copies):
        for place in range(period):
            groups[first + copy * period + place] = groups[first + place]
    _fold_runs(signs, start, first, groups, starts)
    _fold_runs(signs, first + copies * period, stop, groups, starts)


def _best_run(signs: NDArray[np.int64]) -> tuple[int, int, int] | None:
    """(first, period, copies) of the run that folds most nodes away; None if none is worth it."""
    best: tuple[int, int, int] | None = None
    best_saved = MIN_RUN - 1
    for period in _periods(signs):
        same = signs[:-period] == signs[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        if not len(edges):
            continue
        starts, stops = edges[::2], edges[1::2]
        longest = int(np.argmax(stops - starts))
        length = int(stops[longest] - starts[longest])
        copies = length // period + 1
        saved = (copies - 1) * period
        if copies > 1 and saved > best_saved:
            best, best_saved = (int(starts[longest]), period, copies), saved
    return best


def _periods(signs: NDArray[np.int64]) -> Sequence[int]:
    """Candidate periods, ascending: distances between neighbouring equal signatures."""
    order = np.argsort(signs, kind="stable")
    near = np.diff(order)[np.diff(signs[order]) == 0]
    counted = np.bincount(near[near > 0]) if len(near) else np.zeros(1, dtype=np.int64)
    found = np.flatnonzero(counted)
    common = found[np.argsort(-counted[found], kind="stable")][:64]
    return [int(period) for period in sorted(common)]
