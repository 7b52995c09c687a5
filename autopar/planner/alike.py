"""Lanes of a pipeline that differ by names alone, so that one of them is lowered for all.

A lane is written down with numbers for names: nodes by their class and what they read, by place;
what enters by the order in which it is met; shardings, and what is kept and sent, as they are. Two
lanes with the same text run the same program under other names.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopar.ir.casts import gradient_values
from autopar.ir.graph import SOURCE_OPS, Node, Ref
from autopar.plan.records import StagePlan, Transfer
from autopar.search.analysis import Analysis
from autopar.search.stages import Pipeline


def texts(analysis: Analysis, pipeline: Pipeline, lanes: Sequence[int]) -> tuple[Hashable, ...]:
    """What every lane runs, without names; equal for lanes that are alike.

    Args:
        analysis: The step.
        pipeline: Its chunks.
        lanes: Lane of every chunk.
    """
    chunks: dict[int, dict[int, StagePlan]] = {}
    for number, (lane, stage) in enumerate(zip(lanes, pipeline.stages, strict=True)):
        chunks.setdefault(lane, {})[number] = stage
    meshes = [stage.mesh for stage in pipeline.stages]
    finished = gradient_values(analysis.graph, analysis.aliases)
    found = []
    for _, held in sorted(chunks.items()):
        writer = _Writer(analysis, finished)
        rows = [writer.chunk(at, held[number]) for at, number in enumerate(sorted(held))]
        order = {number: at for at, number in enumerate(sorted(held))}
        sent = [
            (
                _side(order, t.source, t.target),
                _side(order, t.target, t.source),
                meshes[t.source],
                meshes[t.target],
                writer.transfer(t, order),
            )
            for t in pipeline.transfers
            if t.source in held or t.target in held
        ]
        found.append((tuple(rows), tuple(sent), tuple(writer.entered)))
    return tuple(found)


def _side(order: Mapping[int, int], chunk: int, other: int) -> tuple[str, int]:
    """A chunk of the lane by its place, another by how far it is from the one of the lane."""
    return ("own", order[chunk]) if chunk in order else ("other", chunk - other)


class _Writer:
    """Numbers for names, in one lane.

    Attributes:
        entered: What of it comes from elsewhere, in the order in which it is met.
    """

    def __init__(self, analysis: Analysis, finished: frozenset[Ref]) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.finished = finished
        self.entered: list[Hashable] = []
        self._numbers: dict[str, int] = {}
        self._views: dict[str, int] = {}
        self._places: list[Mapping[str, int]] = []

    def chunk(self, at: int, stage: StagePlan) -> Hashable:
        """A chunk of the lane."""
        places = {plan.name: place for place, plan in enumerate(stage.nodes)}
        self._places.append(places)
        again = frozenset(stage.recomputed)
        nodes = tuple(
            (
                self.analysis.folding.of[plan.name],
                plan.operands,
                plan.outputs,
                plan.name in again,
                tuple(places.get(name) for name in stage.forgotten.get(plan.name, ())),
                tuple(self._read(at, ref) for ref in self.graph.by_name[plan.name].operands),
                tuple(ref in self.finished for ref in _outputs(self.graph.by_name[plan.name])),
            )
            for plan in stage.nodes
        )
        parameters = tuple(
            (
                self._source(self.analysis.copies.parameters[own.name]),
                own.stored,
                own.state_on_host,
                own.on_host,
                self._result(at, self.graph.gradients.get(own.name)),
            )
            for own in stage.parameters
        )
        results = (
            self._result(at, self.graph.loss),
            tuple((name, self._result(at, ref)) for name, ref in self.graph.aux),
            tuple(
                self._result(at, ref)
                for ref in self.graph.mutations.values()
                if self.analysis.root(ref).root.node in places
            ),
        )
        away = frozenset(stage.offloaded)
        kept = tuple((v in away, self._value(at, v), s) for v, s in stage.kept.items())
        added = tuple((self._value(at, v), s) for v, s in stage.added_up.items())
        known = (
            tuple(row for row in kept if row[1] is not None),
            tuple(row for row in added if row[0] is not None),
        )
        inputs = tuple(stage.inputs.items())
        return nodes, parameters, results, known, inputs, stage.mesh, stage.copy_room_bytes

    def transfer(self, transfer: Transfer, order: Mapping[int, int]) -> Hashable:
        """What crosses, from or to the lane."""
        name = transfer.value.partition(":")[0]
        node = self.graph.by_name[name]
        values = tuple(
            self._value(order[chunk], transfer.value)
            for chunk in (transfer.source, transfer.target)
            if chunk in order
        )
        made = (node.op in SOURCE_OPS, node.phase, node.outputs, name in self.analysis.data)
        return values, made, transfer.sharding, transfer.arrives

    def _read(self, at: int, ref: Ref) -> Hashable:
        """A value as a node of a chunk reads it."""
        root = self.analysis.root(ref).root
        view = -1
        if root != ref:
            view = self._views.setdefault(ref.node, len(self._views))
        place = self._places[at].get(root.node)
        if place is not None:
            return at, place, root.index, view
        return self._source(root.node), root.index, view

    def _result(self, at: int, ref: Ref | None) -> Hashable:
        """A result of the step, if the chunk makes it."""
        made = ref is not None and self.analysis.root(ref).root.node in self._places[at]
        return self._read(at, ref) if made and ref is not None else None

    def _value(self, at: int, value: str) -> Hashable:
        """A value written as text; None if the chunk has nothing to do with it."""
        name, _, index = value.partition(":")
        if name in self._places[at]:
            return at, self._places[at][name], index
        return (self._numbers[name], index) if name in self._numbers else None

    def _source(self, name: str) -> int:
        """Number of what the lane does not make."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            node = self.graph.by_name[name]
            # The batch is the same for all lanes; parameters and buffers are of any name.
            target = node.target if node.target in self.graph.batch_dims else ""
            summed = self.graph.summed.get(node.target, "")
            self.entered.append((node.op, node.outputs, node.phase, target, summed))
        return self._numbers[name]


def _outputs(node: Node) -> tuple[Ref, ...]:
    return tuple(Ref(node.name, index) for index in range(len(node.outputs)))
