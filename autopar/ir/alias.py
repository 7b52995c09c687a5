"""Views as second names: every view resolved to the value it looks at.

Views (reshapes, transposes, permutes) do no work and move no data, so neither the search nor the
plan decides anything about them. A need for a sharding of a view is a need for the corresponding
sharding of its root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Alias:
    """A value read through views.

    Attributes:
        root: The value that owns the data.
        chain: Names of the view nodes between them, from the root outwards.
    """

    root: Ref
    chain: tuple[str, ...] = ()


def resolve_aliases(graph: Graph, is_alias: Callable[[Node], bool]) -> Mapping[Ref, Alias]:
    """The alias of every output of every view node; other values are absent."""
    found: dict[Ref, Alias] = {}
    for node in graph.nodes:
        if is_alias(node):
            source = node.operands[0]
            below = found.get(source, Alias(source))
            found[Ref(node.name)] = Alias(below.root, (*below.chain, node.name))
    return found


def through(
    sharding: Sharding | None,
    chain: tuple[str, ...],
    move: Callable[[str, Sharding], Sharding | None],
) -> Sharding | None:
    """A sharding carried along a chain of views by ``move(node, sharding)``."""
    for name in chain:
        if sharding is None:
            return None
        sharding = move(name, sharding)
    return sharding
