"""Collectives started early and waited for late.

Waits, and the views behind them, sink to the first instruction that reads the data. A reduction of
a gradient so runs beside the backward that follows; it is waited for when `IN_FLIGHT` later ones
are issued, and what it reads is free. A gather of a parameter starts one gather ahead of its use,
so at most one gathered copy waits. Ranks with uneven pieces differ in what they read and copy; the
order of collectives changes alike on all of them, since a gather moves behind another collective
that is told by the node it is for. Copies to host memory and back are placed last, by `copies`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import Phase, Ref
from autopar.lower.copies import spread_copies
from autopar.lower.program import (
    ALL_GATHER,
    COLLECTIVES,
    TO_DEVICE,
    WAIT,
    Instruction,
    Program,
    Section,
)
from autopar.lower.simulate import Prices, seconds_of

IN_FLIGHT = 2
"""Reductions of gradients that run at once; each holds the gradient that it reduces."""


def overlap(program: Program, cost: Prices | None = None) -> Program:
    """The program with its collectives and copies spread over the compute beside them.

    Args:
        program: Of one rank.
        cost: What its parts take; without it no compute runs beside copies.
    """
    sunk = _sink_waits(program.instructions)
    found = replace(program, instructions=tuple(_gather_ahead(sunk)))
    if not found.copies:
        return found
    return spread_copies(found, {} if cost is None else seconds_of(found, cost))


def _sink_waits(instructions: Sequence[Instruction]) -> list[Instruction]:
    held: dict[str, Instruction] = {}
    found: list[Instruction] = []
    reducing: deque[str] = deque()

    def release(name: str) -> None:
        instruction = held.pop(name, None)
        if instruction is None:
            return
        for ref in instruction.operands:
            release(ref.node)
        found.append(instruction)

    for instruction in instructions:
        late = instruction.view and any(ref.node in held for ref in instruction.operands)
        if instruction.op == WAIT or late:
            held[instruction.name] = instruction
            if instruction.op == WAIT and instruction.purpose == "gradients":
                reducing.append(instruction.name)
                if len(reducing) > IN_FLIGHT:
                    release(reducing.popleft())
            continue
        for ref in instruction.operands:
            release(ref.node)
        found.append(instruction)
    for name in list(held):
        release(name)
    return found


def _gather_ahead(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Every parameter gather moved to where the one before it is used, phase by phase."""
    by_name = {i.name: i for i in instructions}
    gathers = [i for i in instructions if _is_parameter_gather(i, by_name)]
    first_of: dict[Phase, str] = {}
    last_for: dict[tuple[str, Section], str] = {}
    for instruction in instructions:
        first_of.setdefault(instruction.phase, instruction.name)
        if instruction.op in COLLECTIVES:
            last_for[instruction.origin, instruction.section] = instruction.name
    ahead: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    previous: Instruction | None = None
    for gather in gathers:
        if previous is None or previous.phase is not gather.phase:
            ahead.setdefault(first_of[gather.phase], []).append(gather.name)
        else:
            place = last_for[previous.origin, previous.section]
            behind.setdefault(place, []).append(gather.name)
        previous = gather
    emitted: set[str] = set()
    for instruction in instructions:
        for name in ahead.get(instruction.name, ()):
            yield from _chain(name, by_name, emitted)
        if instruction.name not in emitted:
            emitted.add(instruction.name)
            yield instruction
        for name in behind.get(instruction.name, ()):
            yield from _chain(name, by_name, emitted)


def _is_parameter_gather(instruction: Instruction, by_name: dict[str, Instruction]) -> bool:
    """Whether it gathers what enters the program, through local ops and copies from the host."""
    if instruction.op != ALL_GATHER or instruction.purpose != "parameters":
        return False
    stack: list[Ref] = list(instruction.operands)
    while stack:
        ref = stack.pop()
        source = by_name.get(ref.node)
        if source is None:
            continue
        if source.op == WAIT:
            source = by_name[source.operands[0].node]
            if source.op != TO_DEVICE or source.purpose != "parameters":
                return False
        elif not _moves_only(source):
            return False
        stack += source.operands
    return True


def _moves_only(instruction: Instruction) -> bool:
    """Whether it computes nothing; all that one rank needs for its piece and another does not."""
    return instruction.view or instruction.op in (
        "aten.clone.default",
        "aten.constant_pad_nd.default",
        "aten.reshape.default",
        "aten._to_copy.default",
    )


def _chain(name: str, by_name: dict[str, Instruction], emitted: set[str]) -> Iterator[Instruction]:
    """The instruction and what it reads that is not emitted yet."""
    instruction = by_name.get(name)
    if instruction is None or name in emitted:
        return
    for ref in instruction.operands:
        yield from _chain(ref.node, by_name, emitted)
    emitted.add(name)
    yield instruction
