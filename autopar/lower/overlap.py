"""Collectives started early and waited for late.

Waits, and the views behind them, sink to the first instruction that reads the data; a reduction of
gradients so runs beside the rest of the backward. A gather of a parameter starts one gather ahead
of its use, so at most one gathered copy waits. The order of collectives changes alike on every
rank, since it is read from the instructions alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import Ref
from autopar.lower.program import ALL_GATHER, WAIT, Instruction, Program


def overlap(program: Program) -> Program:
    """The program with its collectives spread over the compute beside them."""
    sunk = _sink_waits(program.instructions)
    return replace(program, instructions=tuple(_gather_ahead(sunk)))


def _sink_waits(instructions: Sequence[Instruction]) -> list[Instruction]:
    held: dict[str, Instruction] = {}
    found: list[Instruction] = []

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
            continue
        for ref in instruction.operands:
            release(ref.node)
        found.append(instruction)
    for name in list(held):
        release(name)
    return found


def _gather_ahead(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Every parameter gather moved in front of the wait of the one before it, phase by phase."""
    by_name = {i.name: i for i in instructions}
    gathers = [i for i in instructions if _is_parameter_gather(i, by_name)]
    waits = {i.operands[0].node: i.name for i in instructions if i.op == WAIT}
    first_of = {}
    for phase in dict.fromkeys(i.phase for i in instructions):
        first_of[phase] = next(i.name for i in instructions if i.phase is phase)
    before: dict[str, list[str]] = {}
    previous: Instruction | None = None
    for gather in gathers:
        alone = previous is None or previous.phase is not gather.phase
        place = first_of[gather.phase] if alone else waits[previous.name]  # type: ignore[union-attr]
        before.setdefault(place, []).append(gather.name)
        previous = gather
    emitted: set[str] = set()
    for instruction in instructions:
        for name in before.get(instruction.name, ()):
            yield from _chain(name, by_name, emitted)
        if instruction.name not in emitted:
            emitted.add(instruction.name)
            yield instruction


def _is_parameter_gather(instruction: Instruction, by_name: dict[str, Instruction]) -> bool:
    """Whether it gathers what enters the program, through local ops only."""
    if instruction.op != ALL_GATHER or instruction.purpose != "parameters":
        return False
    stack: list[Ref] = list(instruction.operands)
    while stack:
        ref = stack.pop()
        source = by_name.get(ref.node)
        if source is None:
            continue
        if source.op == WAIT or not _moves_only(source):
            return False
        stack += source.operands
    return True


def _moves_only(instruction: Instruction) -> bool:
    return instruction.view or instruction.op in (
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
