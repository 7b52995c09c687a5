"""Invariants of a graph between stages; a broken one is our bug, so they are assertions."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.graph import (
    BUFFER,
    DTYPE_BYTES,
    INPUT,
    PARAMETER,
    SOURCE_OPS,
    Graph,
    Node,
    Phase,
    Ref,
    TensorType,
)


def verify(graph: Graph) -> None:
    """Assert that the graph is well formed.

    Names are unique; every value is made before it is read, and no forward node reads a backward
    value; whatever leaves the graph exists and has the type its name promises.
    """
    made: dict[str, Node] = {}
    for node in graph.nodes:
        assert node.name not in made, f"two nodes are called {node.name!r}"
        _verify_node(node)
        for ref in node.operands:
            _verify_read(ref, node, made)
        made[node.name] = node
    _verify_results(graph, made)
    _verify_names(graph)


def _verify_node(node: Node) -> None:
    assert node.name.isidentifier(), f"{node.name!r} is not an identifier"
    if node.op in SOURCE_OPS:
        assert node.target, f"{node.op} {node.name!r} has no target"
        assert not node.args and not node.kwargs, f"{node.op} {node.name!r} reads values"
        assert len(node.outputs) == 1, f"{node.op} {node.name!r} is not one value"
    else:
        assert not node.target, f"{node.name!r} is no source, yet has target {node.target!r}"
    keys = [key for key, _ in node.kwargs]
    assert keys == sorted(set(keys)), f"keyword arguments of {node.name!r} are not sorted: {keys}"
    for kind in node.outputs:
        _verify_type(kind, node.name)


def _verify_type(kind: TensorType, name: str) -> None:
    assert kind.dtype in DTYPE_BYTES, f"{name!r} has unknown dtype {kind.dtype!r}"
    for size in kind.shape:
        assert type(size) is int, f"{name!r} has a size of type {type(size).__name__}"
        assert size >= 0, f"{name!r} has negative size {size}"


def _verify_read(ref: Ref, reader: Node, made: dict[str, Node]) -> None:
    assert ref.node in made, f"{reader.name!r} reads {ref}, which is not made before it"
    source = made[ref.node]
    assert 0 <= ref.index < len(source.outputs), f"{reader.name!r} reads {ref}, which has no type"
    early = reader.phase is Phase.FORWARD and source.phase is Phase.BACKWARD
    assert not early, f"forward node {reader.name!r} reads the backward value {ref}"


def _verify_results(graph: Graph, made: dict[str, Node]) -> None:
    for ref in graph.results:
        assert ref.node in made, f"result {ref} is not made"
        assert 0 <= ref.index < len(made[ref.node].outputs), f"result {ref} has no type"
    if graph.loss is not None:
        kind = graph.type_of(graph.loss)
        assert kind.shape == (), f"loss {graph.loss} is {kind}, not 0-d"
        assert kind.is_floating, f"loss {graph.loss} is {kind}, not floating"
    names = [name for name, _ in graph.aux]
    assert len(names) == len(set(names)), f"two further results share a name: {names}"


def _verify_names(graph: Graph) -> None:
    """Gradients, mutations, aliases and batch dims speak of sources that exist."""
    parameters = _targets(graph.sources(PARAMETER))
    buffers = _targets(graph.sources(BUFFER))
    inputs = _targets(graph.sources(INPUT))
    for kind, results, owners in (
        ("gradient", graph.gradients, parameters),
        ("mutation", graph.mutations, buffers),
    ):
        for name, ref in results.items():
            assert name in owners, f"{kind} of {name!r}, which is no source"
            found, wanted = graph.type_of(ref), owners[name].outputs[0]
            assert found.shape == wanted.shape, f"{kind} of {name!r} is {found}, its owner {wanted}"
    for alias, owner in graph.aliases.items():
        assert owner in parameters or owner in buffers, f"{alias!r} is tied to unknown {owner!r}"
        assert alias not in parameters, f"alias {alias!r} is a parameter of its own"
        assert alias not in buffers, f"alias {alias!r} is a buffer of its own"
    for path, dim in graph.batch_dims.items():
        assert path in inputs, f"batch dim of {path!r}, which is no input"
        assert 0 <= dim < len(inputs[path].outputs[0].shape), f"{path!r} has no dim {dim}"


def _targets(nodes: Iterable[Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    for node in nodes:
        assert node.target not in found, f"{node.op} {node.target!r} enters twice"
        found[node.target] = node
    return found
