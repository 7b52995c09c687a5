"""Pipelines: plans of the whole step, cut into stages.

The step is planned over the mesh of every stage (once for stages that are alike), and its forward
is cut where the chunks take equally long, each on its own devices, and little crosses.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.cost.node import NodeCost
from autopar.errors import HintError, UnsupportedError
from autopar.ir.graph import PARAMETER, Ref
from autopar.plan.records import Plan, StagePlan
from autopar.planner.cuts import CutHint, least_starts
from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import Size, schedule_named
from autopar.search.analysis import Analysis
from autopar.search.stages import (
    Pipeline,
    balanced_cuts,
    bounded_cuts,
    forward_order,
    last_firsts,
    split_lanes,
)

SLACK = 0.02
"""Of the longest stage: what a cut may cost for fewer bytes to cross."""


FORWARD, WEIGHT = 1 / 3, 1 / 3
"""Parts of a microbatch's seconds, where only their sum is known: products have two in the
backward, one of them for the gradient of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a pipeline is asked for.

    Attributes:
        schedule: Name of its schedule.
        num_stages: Groups of ranks.
        num_chunks: Chunks of the model that each holds.
        hints: Where to cut.
    """

    schedule: str
    num_stages: int
    num_chunks: int
    hints: tuple[CutHint, ...] = ()

    @property
    def lanes(self) -> tuple[int, ...]:
        """Stage of every chunk."""
        spec = schedule_named(self.schedule)
        count = self.num_stages * self.num_chunks
        return tuple(spec.lane_of_chunk(chunk, self.num_stages) for chunk in range(count))

    def check(self, microbatches: int) -> None:
        """Refuse what the schedule cannot do.

        Raises:
            UnsupportedError: It does not exist for these numbers.
        """
        size = Size(lanes=self.num_stages, chunks=self.num_chunks, microbatches=microbatches)
        schedule_named(self.schedule).check(size)

    def fits(self, microbatches: int) -> bool:
        """Whether the schedule can do so many microbatches."""
        try:
            self.check(microbatches)
        except UnsupportedError:
            return False
        return True


@functools.cache
def filled_s(layout: Layout, count: int, forward: float, send_share: float) -> float:
    """Makespan of a schedule, for a microbatch of one second a stage.

    Args:
        layout: Stages, chunks and schedule.
        count: Microbatches.
        forward: Part of the second that is the forward.
        send_share: Seconds of a message.
    """
    spec = schedule_named(layout.schedule)
    rows = spec.generate(layout.num_stages, layout.num_chunks, count)
    each = 1 / layout.num_chunks
    time = ChunkTime(forward * each, (1 - forward) * each, WEIGHT * each)
    return simulate(rows, [time] * len(layout.lanes), send_share).makespan_s


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What stages that are alike have in common.

    Attributes:
        whole: A plan of the whole step on the mesh of such a stage.
        cost: Prices nodes and collectives on its devices.
    """

    whole: StagePlan
    cost: NodeCost


@dataclass(frozen=True, slots=True)
class Lane:
    """A stage's ranks: what kind they are, and the global number of the first."""

    kind: Kind
    first_rank: int


def cut(
    analysis: Analysis,
    lanes: Sequence[Lane],
    layout: Layout,
    settled: Plan | None = None,
) -> Pipeline:
    """Plans of the whole step, cut into the chunks of a pipeline.

    Args:
        analysis: The step.
        lanes: The ranks of every stage.
        layout: Stages, chunks and schedule.
        settled: A plan whose chunks hold the parameters already; they stay where they are.

    Raises:
        HintError: There are fewer ops than chunks, or hints cannot be met.
        UnsupportedError: No cut leaves every parameter on its settled chunk, or a stage would own
            none.
    """
    order = forward_order(analysis)
    held = layout.lanes
    if len(held) > len(order):
        chunks = "" if layout.num_chunks == 1 else f" of {layout.num_chunks} chunks"
        raise HintError(
            f"cannot cut {len(order)} ops into {layout.num_stages} stages{chunks}: every piece "
            f"needs one; use fewer stages{chunks and ' or chunks'}"
        )
    wholes = [replace(lane.kind.whole, first_rank=lane.first_rank) for lane in lanes]
    by_kind = {
        kind: seconds_by_forward(analysis, kind, order)
        for kind in dict.fromkeys(lane.kind for lane in lanes)
    }
    seconds = [by_kind[lanes[stage].kind] for stage in held]
    least = None if settled is not None else least_starts(analysis, layout.hints, held)
    crossing, read = _crossing(analysis, order), _first_reads(analysis, order)
    if settled is None:
        for most in _where_stages_own(len(order), held, frozenset(read.values())):
            found = _cuts(crossing, seconds, least, most)
            made = None if found is None else split_lanes(analysis, wholes, found, held)
            if made is not None and stage_without_parameter(made.stages) is None:
                return made
        raise UnsupportedError(
            f"cannot cut the model into {len(lanes)} stages: one would hold no parameter, so that "
            "its ranks have nothing to train; use fewer stages"
        )
    cuts = _cuts(crossing, seconds, None, None)
    assert cuts is not None, "cuts anywhere are there"
    owners = {p.name: n for n, stage in enumerate(settled.stages) for p in stage.parameters}
    moved = []
    for number, position in enumerate(cuts, start=1):
        low = max((at + 1 for name, at in read.items() if owners[name] < number), default=1)
        high = min((at for name, at in read.items() if owners[name] >= number), default=len(order))
        moved.append(min(max(position, low), high))
    return _with_owners(split_lanes(analysis, wholes, moved, held), wholes, owners, read)


def stage_without_parameter(chunks: Sequence[StagePlan]) -> int | None:
    """The first stage of a pipeline that owns no parameter, by the chunks of all stages."""
    owned: dict[int, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.first_rank):
        owned[chunk.first_rank] = owned.get(chunk.first_rank, 0) + len(chunk.parameters)
    return next((n for n, count in enumerate(owned.values()) if not count), None)


def _where_stages_own(
    count: int, held: Sequence[int], read: Collection[int]
) -> Iterator[Sequence[Sequence[int]] | None]:
    """Where chunks may begin at last: anywhere, then so that one of each stage owns a parameter.

    Args:
        count: Number of forward nodes.
        held: Stage of every chunk.
        read: Positions of the forward nodes that are the first to read a parameter.
    """
    yield None
    firsts = [held.index(stage) for stage in set(held)]
    lasts = [len(held) - 1 - held[::-1].index(stage) for stage in set(held)]
    for chunks in (firsts, lasts):
        yield last_firsts(count, read, chunks, len(held))


def _cuts(
    crossing: Sequence[tuple[int, bool]],
    seconds: Sequence[Sequence[float]],
    least: Sequence[Sequence[int]] | None,
    most: Sequence[Sequence[int]] | None,
) -> tuple[int, ...] | None:
    """Cuts where chunks take equally long and little crosses; None if none are within bounds."""
    count = len(crossing) - 1
    if least is None and most is None and all(own is seconds[0] for own in seconds):
        return _narrowed(crossing, seconds, balanced_cuts(seconds[0], len(seconds)), None, None)
    anywhere = [[0] * (count + 1)] * len(seconds)
    found = bounded_cuts(seconds, anywhere if least is None else least, most)
    return found and _narrowed(crossing, seconds, found, least, most)


def _first_reads(analysis: Analysis, order: Sequence[str]) -> Mapping[str, int]:
    """Position of the first forward node that reads each parameter, itself or what is made of it.

    What is made of parameters alone runs where it is read.
    """
    place = {name: position for position, name in enumerate(order)}
    graph = analysis.graph
    first: dict[str, int] = {}
    for node in reversed(graph.nodes):
        at = place.get(node.name)
        if at is None:
            continue
        roots = [analysis.root(ref).root.node for ref in node.operands]
        if node.name not in analysis.looped and not any(root in place for root in roots):
            at = first.get(node.name, at)
        for root in roots:
            first[root] = min(first.get(root, at), at)
    return {
        node.target: first[node.name] for node in graph.sources(PARAMETER) if node.name in first
    }


def _with_owners(
    pipeline: Pipeline,
    wholes: Sequence[StagePlan],
    owners: Mapping[str, int],
    read: Mapping[str, int],
) -> Pipeline:
    """The pipeline with every parameter on its settled stage, which must be the one that reads it.

    Raises:
        UnsupportedError: Another stage reads a parameter first.
    """
    for number, stage in enumerate(pipeline.stages):
        for parameter in stage.parameters:
            if parameter.name in read and owners[parameter.name] != number:
                raise UnsupportedError(
                    f"cannot run this batch or mode on the pipeline: stage {number} would be the "
                    f"first to read parameter {parameter.name!r}, which stage "
                    f"{owners[parameter.name]} holds; compile a module of its own for it"
                )
    own = {whole.first_rank: whole.parameters for whole in wholes}
    stages = tuple(
        replace(
            stage,
            parameters=tuple(p for p in own[stage.first_rank] if owners[p.name] == number),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=stages)


def seconds_by_forward(analysis: Analysis, kind: Kind, order: Sequence[str]) -> list[float]:
    """Seconds of every forward node with the backward of its module and line."""
    place = {name: position for position, name in enumerate(order)}
    by_source: dict[object, int] = {}
    graph = analysis.graph
    for name in order:
        by_source[graph.by_name[name].source] = place[name]
    found = [0.0] * len(order)
    for plan in kind.whole.nodes:
        node = graph.by_name[plan.name]
        at = place.get(node.name, by_source.get(node.source))
        if at is None:
            continue
        types = analysis.operand_types(node)
        rule = analysis.rules[node.name]
        found[at] += kind.cost.seconds(node, rule, types, plan.operands, plan.outputs)
    return found


def _narrowed(
    crossing: Sequence[tuple[int, bool]],
    seconds: Sequence[Sequence[float]],
    cuts: Sequence[int],
    least: Sequence[Sequence[int]] | None,
    most: Sequence[Sequence[int]] | None,
) -> tuple[int, ...]:
    """The cuts moved, within the slack and what hints ask for, to where least crosses."""
    count = len(crossing) - 1
    found = list(cuts)

    def longest() -> float:
        pieces = pairwise([0, *found, count])
        return max(sum(own[a:b]) for own, (a, b) in zip(seconds, pieces, strict=True))

    def met() -> bool:
        pieces = enumerate(pairwise([0, *found, count]))
        return all(
            (least is None or a >= least[chunk][b]) and (most is None or a <= most[chunk][b])
            for chunk, (a, b) in pieces
        )

    even_s = 1 / sum(1 / max(sum(own), _LEAST_S) for own in seconds)
    allowed = longest() + SLACK * even_s
    for index in range(len(found)):
        low = found[index - 1] + 1 if index else 1
        high = found[index + 1] if index + 1 < len(found) else count
        start = found[index]
        best = start
        for position in range(low, high):
            found[index] = position
            if crossing[position] < crossing[best] and met() and longest() <= allowed:
                best = position
        found[index] = best
    return tuple(found)


_LEAST_S = 1e-30
"""Instead of no seconds at all, where speeds are compared."""


def _crossing(analysis: Analysis, order: Sequence[str]) -> list[tuple[int, bool]]:
    """What a cut at every position costs: bytes that cross; whether it goes through a block.

    Stages of whole blocks are alike, so that they are lowered once.
    """
    copies = [analysis.copies.of.get(name) for name in order]
    blocks = [None if copy is None else (copy.run, copy.index) for copy in copies]
    inside = [a is not None and a == b for a, b in pairwise([None, *blocks, None])]
    return list(zip(crossing_bytes(analysis, order), inside, strict=True))


def least_crossing_bytes(analysis: Analysis) -> int:
    """Fewest bytes of a whole batch that cross a cut through the forward."""
    found = crossing_bytes(analysis, forward_order(analysis))
    return min(found[1:-1], default=0)


def crossing_bytes(analysis: Analysis, order: Sequence[str]) -> list[int]:
    """For every position, bytes made before it in the forward and read from it on."""
    place = {name: position for position, name in enumerate(order)}
    last: dict[Ref, int] = {}
    for name in order:
        for ref in analysis.graph.by_name[name].operands:
            last[analysis.root(ref).root] = place[name]
    found = [0] * (len(order) + 1)
    for root, until in last.items():
        if root.node in place:
            for position in range(place[root.node] + 1, until + 1):
                found[position] += analysis.graph.type_of(root).num_bytes
    return found
