"""Parameters read in another dtype than they are stored in, and gradients that come back so."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.alias import Alias
from autopar.ir.graph import PARAMETER, Graph, Node, Phase, Ref

CAST = "aten._to_copy.default"


def parameter_casts(graph: Graph) -> Mapping[str, str]:
    """Every node that casts a parameter as it is, and that parameter's node."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == CAST and node.phase is Phase.FORWARD:
            read = node.operands[0].node
            owner = found.get(read, read)
            if graph.by_name[owner].op == PARAMETER:
                found[node.name] = owner
    return found


def gradient_values(graph: Graph, aliases: Mapping[Ref, Alias]) -> frozenset[Ref]:
    """Every gradient, and what it is a cast of; roots of views."""
    found: set[Ref] = set()
    for ref in graph.gradients.values():
        root = aliases.get(ref, Alias(ref)).root
        found.add(root)
        while graph.by_name[root.node].op == CAST:
            read = graph.by_name[root.node].operands[0]
            root = aliases.get(read, Alias(read)).root
            found.add(root)
    return frozenset(found)


def owner_of(node: Node, casts: Mapping[str, str], graph: Graph) -> Node:
    """The parameter that a node casts; the node itself if it casts none."""
    owner = casts.get(node.name)
    return node if owner is None else graph.by_name[owner]
