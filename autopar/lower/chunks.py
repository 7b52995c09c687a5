"""The chunks that one rank of a pipeline holds, as one program.

Every chunk is lowered on its own; what one of them sends to another on the same rank is the same
value in both, so that it is neither sent nor copied. Inputs that several read enter once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.cost.reshard import CollectiveSeconds
from autopar.ir.graph import Graph, Ref
from autopar.lower.overlap import overlap
from autopar.lower.program import LOOP, Instruction, Message, Program, Section
from autopar.lower.simulate import Prices
from autopar.lower.spmd import Crossing, Facts, facts_of, lower
from autopar.lower.unroll import with_refs
from autopar.plan.records import StagePlan
from autopar.rules.notation import Rule


def lower_chunks(
    graph: Graph,
    rules: Mapping[str, Rule],
    chunks: Mapping[int, StagePlan],
    coordinates: Sequence[int],
    collective_s: CollectiveSeconds,
    crossing: Crossing,
    facts: Facts | None = None,
) -> tuple[Program, ...]:
    """The program of every chunk of a rank, in their order.

    Args:
        graph: The captured step.
        rules: Rule of every node that is not a source.
        chunks: Number and shardings of the chunks that the rank holds.
        coordinates: The rank's coordinates on their mesh.
        collective_s: Prices collectives.
        crossing: What crosses all chunks of the pipeline.
        facts: Of the graph, where it is lowered several times.
    """
    first, facts = min(chunks), facts or facts_of(graph, rules)
    return tuple(
        lower(
            graph,
            rules,
            chunk,
            coordinates,
            collective_s,
            replace(crossing, chunk=number, suffix="" if number == first else f".{number}"),
            facts,
        )
        for number, chunk in sorted(chunks.items())
    )


def on_one_rank(
    graph: Graph,
    programs: Sequence[Program],
    chunks: Collection[int],
    cost: Prices | None = None,
) -> Program:
    """The programs of a rank's chunks as one, its collectives and copies spread over the compute.

    Args:
        graph: The captured step.
        programs: As of `lower_chunks`.
        chunks: Their numbers.
        cost: As of `overlap`.
    """
    return overlap(programs[0] if len(programs) == 1 else _joined(graph, programs, chunks), cost)


def _joined(graph: Graph, programs: Sequence[Program], chunks: Collection[int]) -> Program:
    sent = {m.number: m.ref for p in programs for m in p.sends if m.peer in chunks}
    taken = {m.ref: sent[m.number] for p in programs for m in p.receives if m.peer in chunks}
    change = {ref: _source(ref, taken) for ref in taken}

    def now(ref: Ref) -> Ref:
        return change.get(ref, ref)

    def remote(messages: Sequence[Message]) -> list[Message]:
        return [replace(m, ref=now(m.ref)) for m in messages if m.peer not in chunks]

    losses = [p.loss for p in programs if p.loss is not None]
    assert len(losses) <= 1, losses
    inputs = {item.name: item for p in programs for item in p.inputs}
    aux = {name: now(ref) for p in programs for name, ref in p.aux}
    place = {node.name: position for position, node in enumerate(graph.nodes)}
    place |= {name: place[ref.node] for name, ref in graph.gradients.items()}
    everything = [with_refs(i, change) if change else i for p in programs for i in p.instructions]
    # Behind the loop, chunks read each other in both directions: in the order of the step.
    behind = [i for i in everything if i.section is Section.EPILOGUE]
    behind.sort(key=lambda i: place.get(i.origin, len(place)))
    behind = _readable(behind)
    before = [i for i in everything if i.section is not Section.EPILOGUE]
    # Every value is made before it is read: forwards along the chunks, backwards against them.
    before.sort(key=lambda i: (_SECTIONS.index(i.section), i.chunk * _WAY.get(i.section, 0)))
    return replace(
        programs[0],
        inputs=tuple(inputs.values()),
        instructions=(*before, *behind),
        loss=now(losses[0]) if losses else None,
        aux=tuple(aux.items()),
        gradients={name: now(ref) for p in programs for name, ref in p.gradients.items()},
        mutations={name: now(ref) for p in programs for name, ref in p.mutations.items()},
        sends=tuple(m for p in programs for m in remote(p.sends)),
        receives=tuple(m for p in programs for m in remote(p.receives)),
    )


def _readable(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Instructions in their order, but for those that make what an earlier one reads.

    What brings a result to all ranks has no place in the step, and others may read it.
    """
    makers = {i.name: i for i in instructions}
    found: dict[str, Instruction] = {}
    waiting = list(reversed(instructions))
    while waiting:
        last = waiting[-1]
        read = [makers[ref.node] for ref in last.operands if ref.node in makers]
        unmade = [maker for maker in reversed(read) if maker.name not in found]
        if unmade:
            waiting += unmade
        else:
            found.setdefault(last.name, last)
            waiting.pop()
    return list(found.values())


_SECTIONS = (Section.PROLOGUE, *LOOP)
_WAY = {Section.FORWARD: 1, Section.BACKWARD: -1, Section.WEIGHT_GRADIENT: -1}


def _source(ref: Ref, taken: Mapping[Ref, Ref]) -> Ref:
    """The value that a received one is, through any number of chunks."""
    while ref in taken:
        ref = taken[ref]
    return ref
