"""Ranks that run the same program.

Under even splits all ranks do; under uneven ones, ranks whose pieces have the same sizes. One of
each kind is lowered and simulated, however many there are. Where the queries of a causal attention
are split, a later rank's see more keys: the last of a kind stands for all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.cost.kernel import QUERIES, is_causal
from autopar.ir.graph import INPUT, PARAMETER, Graph, TensorType
from autopar.ir.sharding import Atom, Sharding, Split, atoms
from autopar.plan.records import StagePlan


def distinct_coordinates(graph: Graph, stage: StagePlan) -> tuple[tuple[int, ...], ...]:
    """Mesh coordinates of one rank of each kind; the kind of rank 0 first."""
    pieces, late = _pieces(graph, (stage,)), _late_axes(graph, (stage,))
    kinds = []
    for axis, size in enumerate(stage.mesh.sizes):
        uneven = [atom for atom in pieces[axis] if _is_uneven(atom, size)]
        found: dict[tuple[int, ...], int] = {}
        for coordinate in range(size if uneven or axis in late else 1):
            kind = tuple(atom.local(coordinate) for atom in uneven)
            found[kind] = coordinate if axis in late else found.get(kind, coordinate)
        kinds.append(tuple(found.values()))
    return tuple(itertools.product(*kinds))


def slowest_coordinates(graph: Graph, stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """Mesh coordinates of a rank that takes most of what is split, in the first microbatch.

    Args:
        graph: The captured step.
        stages: Chunks of the ranks of one mesh.
    """
    mesh = stages[0].mesh
    found = list(mesh.fullest)
    late = _late_axes(graph, stages)
    pieces = _pieces(graph, stages) if late else {}
    for axis in late:
        kinds = [
            tuple(atom.local(coordinate) for atom in pieces[axis])
            for coordinate in range(mesh.sizes[axis])
        ]
        found[axis] = max(c for c, kind in enumerate(kinds) if kind == kinds[found[axis]])
    return tuple(found)


def _is_uneven(atom: Atom, ranks: int) -> bool:
    return bool(atom.shares) or atom.chunk * ranks != atom.size


def _pieces(graph: Graph, stages: Sequence[StagePlan]) -> Mapping[int, set[Atom]]:
    """How every axis splits what the plans name."""
    found: dict[int, set[Atom]] = {axis: set() for axis in range(len(stages[0].mesh.sizes))}
    for kind, sharding in {own for stage in stages for own in _values(graph, stage)}:
        for dim in atoms(kind.shape, sharding):
            for atom in dim:
                if atom.axis is not None:
                    found[atom.axis].add(atom)
    return found


def _late_axes(graph: Graph, stages: Iterable[StagePlan]) -> set[int]:
    """Axes that split the queries of a causal attention."""
    found: set[int] = set()
    for plan in (plan for stage in stages for plan in stage.nodes):
        node = graph.by_name.get(plan.name)
        if node is None or not is_causal(node.op, node.args):
            continue
        for axis, split in enumerate(plan.outputs[0]):
            if isinstance(split, Split) and split.dim == QUERIES:
                found.add(axis)
    return found


def _values(graph: Graph, stage: StagePlan) -> Iterator[tuple[TensorType, Sharding]]:
    """Type and sharding of everything that the plan names."""
    by_name = graph.by_name
    stored = {plan.name: plan.stored for plan in stage.parameters}
    for node in graph.sources(PARAMETER):
        if node.target in stored:
            yield node.outputs[0], stored[node.target]
    for node in graph.sources(INPUT):
        if node.target in stage.inputs:
            yield node.outputs[0], stage.inputs[node.target]
    for plan in stage.nodes:
        captured = by_name.get(plan.name)
        if captured is not None:
            yield from zip(map(graph.type_of, captured.operands), plan.operands, strict=True)
            yield from zip(captured.outputs, plan.outputs, strict=True)
