"""Ranks that run the same program.

Under even splits all ranks do; under uneven ones, ranks whose pieces have the same sizes. One of
each kind is lowered and simulated, however many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autopar.ir.graph import INPUT, PARAMETER, SOURCE_OPS, Graph, TensorType
from autopar.ir.sharding import Atom, Sharding, atoms
from autopar.plan.records import StagePlan


def distinct_coordinates(graph: Graph, stage: StagePlan) -> tuple[tuple[int, ...], ...]:
    """Mesh coordinates of one rank of each kind; those of rank 0 first."""
    uneven: list[set[Atom]] = [set() for _ in stage.mesh.sizes]
    for kind, sharding in set(_values(graph, stage)):
        for pieces in atoms(kind.shape, sharding):
            for atom in pieces:
                if atom.axis is not None and (
                    atom.shares or atom.chunk * stage.mesh.sizes[atom.axis] != atom.size
                ):
                    uneven[atom.axis].add(atom)
    kinds = []
    for size, cut in zip(stage.mesh.sizes, uneven, strict=True):
        first: dict[tuple[int, ...], int] = {}
        for coordinate in range(size if cut else 1):
            first.setdefault(tuple(atom.local(coordinate) for atom in cut), coordinate)
        kinds.append(tuple(first.values()))
    return tuple(itertools.product(*kinds))


def _values(graph: Graph, stage: StagePlan) -> Iterator[tuple[TensorType, Sharding]]:
    """Type and sharding of everything that the plan names."""
    plans = {plan.name: plan for plan in stage.nodes}
    stored = {plan.name: plan.stored for plan in stage.parameters}
    for node in graph.nodes:
        if node.op == PARAMETER:
            yield node.outputs[0], stored[node.target]
        elif node.op == INPUT and node.target in stage.inputs:
            yield node.outputs[0], stage.inputs[node.target]
        elif node.op not in SOURCE_OPS and node.name in plans:
            plan = plans[node.name]
            yield from zip(map(graph.type_of, node.operands), plan.operands, strict=True)
            yield from zip(node.outputs, plan.outputs, strict=True)
