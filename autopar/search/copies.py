"""Copies: which nodes stand at the same place of a repeated block, and in which copy.

Folding says which nodes are alike; here their copies get numbers, so that an edge between two
places joins copies at one distance: the backward of layer 3 reads the forward of layer 3, the norm
of layer 4 the sum of layer 3. Views, buffers and constants that one copy reads alone belong to it.
`Copies.alike` tells which copies read alike, ``pinned`` which are read from outside.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.alias import Alias
from autopar.ir.graph import PARAMETER, SOURCE_OPS, Graph, Node, Ref
from autopar.search.fold import Folding, like

MIN_COPIES = 6
"""Fewest members of a class whose copies are worth a number."""

REACH = 2
"""Most copies that an edge may cross."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Where a node stands.

    Attributes:
        run: Blocks whose copies are numbered together.
        family: Place in the block.
        index: Number of the copy.
    """

    run: int
    family: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The numbered copies of a graph.

    Attributes:
        of: Place of every node of a repeated block.
        at: Node by run, family and index.
        alike: For every copy, as (run, index), a number: the same if its nodes are those of another
            copy and read the same as seen from it.
        parameters: Node of every parameter by name.
        pinned: Copies, as (run, index), that something outside the blocks reads.
    """

    of: Mapping[str, Copy]
    at: Mapping[tuple[int, int, int], str]
    alike: Mapping[tuple[int, int], int]
    parameters: Mapping[str, str]
    pinned: frozenset[tuple[int, int]]


def find_copies(graph: Graph, aliases: Mapping[Ref, Alias], folding: Folding) -> Copies:
    """The copies of a folded graph.

    Args:
        graph: The captured step.
        aliases: Its views.
        folding: Its classes.
    """
    of = _numbered(graph, aliases, folding)
    families: dict[Hashable, int] = {}
    _add_views(graph, aliases, of, families, len(folding.classes))
    _add_read_by_one(graph, aliases, of, families, len(folding.classes))
    alike, pinned = _alike(graph, of)
    return Copies(
        of=of,
        at={(c.run, c.family, c.index): name for name, c in of.items()},
        alike=alike,
        parameters={node.target: node.name for node in graph.sources(PARAMETER)},
        pinned=pinned,
    )


def _numbered(graph: Graph, aliases: Mapping[Ref, Alias], folding: Folding) -> dict[str, Copy]:
    """Copies of the members of classes: numbers spread along edges from run to run."""
    # The classes of a run count alike; any other class (of parameters) by itself.
    run_of = {number: ("run", run) for number, run in folding.run_of.items()}
    place = {
        name: (run_of.get(number, ("class", number)), k)
        for number, names in enumerate(folding.classes)
        if len(names) >= MIN_COPIES
        for k, name in enumerate(names)
    }
    lines = _lines(graph, aliases, folding, place)
    numbers: dict[_Run, tuple[int, int, int]] = {}
    for start, _ in dict.fromkeys(place.values()):
        if start in numbers:
            continue
        numbers[start] = (len(numbers), 1, 0)
        waiting = [start]
        while waiting:
            near = waiting.pop()
            run, own_sign, own_shift = numbers[near]
            for new, (sign, shift) in lines.get(near, {}).items():
                if new not in numbers:
                    # k = sign * k_new + shift, and index = own_sign * k + own_shift.
                    numbers[new] = (run, own_sign * sign, own_sign * shift + own_shift)
                    waiting.append(new)
    of = {}
    for name, (own, k) in place.items():
        run, sign, shift = numbers[own]
        of[name] = Copy(run, folding.of[name], sign * k + shift)
    return of


_Run = tuple[str, int]


def _lines(
    graph: Graph,
    aliases: Mapping[Ref, Alias],
    folding: Folding,
    place: Mapping[str, tuple[_Run, int]],
) -> Mapping[_Run, Mapping[_Run, tuple[int, int]]]:
    """For runs joined by edges: commonest (sign, shift) with ``k = sign * k_other + shift``."""
    last: dict[tuple[int, int], tuple[int, int]] = {}
    votes: dict[tuple[_Run, _Run], Counter[tuple[int, int]]] = defaultdict(Counter)
    for node, port, ref in _reads(graph):
        reader = place.get(node)
        root = place.get((aliases[ref].root if ref in aliases else ref).node)
        if reader is None or root is None or reader[0] == root[0]:
            continue
        # What one class reads at one port is met copy by copy.
        key = (folding.of[node], port)
        before = last.get(key)
        last[key] = (reader[1], root[1])
        if before is not None and reader[1] - before[0] == 1:
            sign = root[1] - before[1]
            if abs(sign) == 1:
                votes[reader[0], root[0]][sign, reader[1] - sign * root[1]] += 1
    found: dict[_Run, dict[_Run, tuple[int, int]]] = defaultdict(dict)
    for (reader_run, root_run), counted in votes.items():
        (sign, shift), _ = counted.most_common(1)[0]
        found[reader_run][root_run] = (sign, shift)
        found[root_run][reader_run] = (sign, -sign * shift)
    return found


def _reads(graph: Graph) -> Iterable[tuple[str, int, Ref]]:
    """Reader, port and value of every edge; a parameter reads its gradient."""
    for node in graph.nodes:
        for port, ref in enumerate(node.operands):
            yield node.name, port, ref
    names = {n.target: n.name for n in graph.sources(PARAMETER)}
    for target, ref in graph.gradients.items():
        yield names[target], 0, ref


def _add_views(
    graph: Graph,
    aliases: Mapping[Ref, Alias],
    of: dict[str, Copy],
    families: dict[Hashable, int],
    first: int,
) -> None:
    """Views of what belongs to a copy belong to it."""
    seen: dict[tuple[Ref, Hashable], int] = {}
    for node in graph.nodes:
        if Ref(node.name) not in aliases:
            continue
        source = node.operands[0]
        copy = of.get(source.node)
        if copy is None:
            continue
        what = _what(node)
        ordinal = seen[source, what] = seen.get((source, what), -1) + 1
        key = ("view", copy.run, copy.family, source.index, what, ordinal)
        family = families.setdefault(key, first + len(families))
        of[node.name] = Copy(copy.run, family, copy.index)


def _add_read_by_one(
    graph: Graph,
    aliases: Mapping[Ref, Alias],
    of: dict[str, Copy],
    families: dict[Hashable, int],
    first: int,
) -> None:
    """Views, buffers and constants that only one copy reads belong to it."""
    readers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, port, ref in _reads(graph):
        readers[ref.node].append((name, port))
    results = {ref.node for ref in graph.results}
    for node in reversed(graph.nodes):
        moves = node.op in SOURCE_OPS or Ref(node.name) in aliases
        if not moves or node.name in of or node.name in results or not readers[node.name]:
            continue
        copies = [of.get(name) for name, _ in readers[node.name]]
        whose = {None if c is None else (c.run, c.index) for c in copies}
        if len(whose) != 1 or None in whose:
            continue
        ((run, index),) = (w for w in whose if w is not None)
        read = frozenset((of[name].family, port) for name, port in readers[node.name])
        key = ("read", run, _what(node), read)
        family = families.setdefault(key, first + len(families))
        of[node.name] = Copy(run, family, index)


def _what(node: Node) -> Hashable:
    constants = tuple(like(arg) for arg in node.args)
    named = tuple((key, like(arg)) for key, arg in node.kwargs)
    return node.op, node.phase, constants, named, node.outputs


def _alike(
    graph: Graph, of: Mapping[str, Copy]
) -> tuple[dict[tuple[int, int], int], frozenset[tuple[int, int]]]:
    """Copies whose nodes read alike, numbered, and those read from outside."""
    rows: dict[str, list[Hashable]] = {name: [] for name in of}
    pinned = {
        (of[ref.node].run, of[ref.node].index)
        for ref in (graph.loss, *(r for _, r in graph.aux), *graph.mutations.values())
        if ref is not None and ref.node in of
    }
    for name, _, ref in _reads(graph):
        reader, read = of.get(name), of.get(ref.node)
        if reader is not None and read is not None and reader.run == read.run:
            distance = reader.index - read.index
            if abs(distance) <= REACH:
                rows[name].append((read.family, distance, ref.index))
                continue
        if reader is not None:
            rows[name].append(ref)
        if read is not None:
            pinned.add((read.run, read.index))
    blocks: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
    for name, row in rows.items():
        copy = of[name]
        blocks[copy.run, copy.index].append((copy.family, tuple(row)))
    numbers: dict[Hashable, int] = {}
    alike = {
        copy: numbers.setdefault(frozenset(block), len(numbers)) for copy, block in blocks.items()
    }
    return alike, frozenset(pinned)
