"""A program of several microbatches as one list of instructions, for the simulator.

The loop is written out in the order of a schedule's row; what it makes of a value in every
microbatch is added in place to what the first one made, as the runtime does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Ref, replace_refs
from autopar.lower.program import (
    ACCUMULATE,
    LOOP,
    MICROBATCH,
    Instruction,
    Message,
    Program,
    Section,
)

JOIN = "aten.add_.Tensor"


Turn = tuple[Section, int]
"""A section of the loop and the microbatch it runs for."""


def in_order(microbatches: int) -> tuple[Turn, ...]:
    """Microbatches one after the other, each forward then backward."""
    return tuple((section, number) for number in range(microbatches) for section in LOOP)


def unroll(program: Program, row: Sequence[Turn]) -> Program:
    """The program with its loop written out in the order of ``row``.

    Args:
        program: Of any number of microbatches, or a stage of a pipeline.
        row: Sections and microbatches in order; microbatch 0 comes first of each section.
    """
    loop = [i for i in program.instructions if i.section in LOOP]
    after = [i for i in program.instructions if i.section is Section.EPILOGUE]
    totals = list(dict.fromkeys(i.operands[0] for i in after if i.op == ACCUMULATE))
    section_of = {i.name: i.section for i in loop}
    section_of |= {m.ref.node: m.section for m in program.receives if m.section in LOOP}
    made = set(section_of)
    found = [_received(m, "") for m in program.receives if m.section is Section.PROLOGUE]
    found += [i for i in program.instructions if i.section is Section.PROLOGUE]
    types = {i.name: i for i in loop}
    for section, number in row:
        arriving = [m for m in program.receives if m.section is section]
        found += [_received(m, f"@{number}") for m in arriving]
        found += [_renamed(i, made, number) for i in loop if i.section is section]
        if number:
            here = [ref for ref in totals if section_of[ref.node] is section]
            found += _joins(here, types, number)
    found += [_received(m, "") for m in program.receives if m.section is Section.EPILOGUE]
    first = {ref: Ref(f"{ref.node}@0", ref.index) for ref in _refs(loop, program)}
    found += [_behind(i, first) for i in after]
    return replace(
        program,
        instructions=tuple(found),
        receives=(),
        sends=(),
        loss=None if program.loss is None else first.get(program.loss, program.loss),
        aux=tuple((name, first.get(ref, ref)) for name, ref in program.aux),
        gradients={name: first.get(ref, ref) for name, ref in program.gradients.items()},
        mutations={name: first.get(ref, ref) for name, ref in program.mutations.items()},
        microbatches=1,
    )


def _refs(loop: Sequence[Instruction], program: Program) -> list[Ref]:
    """Every value of the loop."""
    found = [Ref(i.name, index) for i in loop for index in range(len(i.outputs))]
    return found + [m.ref for m in program.receives if m.section in LOOP]


def _received(message: Message, suffix: str) -> Instruction:
    """The buffer into which a message is received."""
    return Instruction(
        name=f"{message.ref.node}{suffix}",
        op="aten.empty.memory_format",
        args=(message.local_type.shape,),
        outputs=(message.local_type,),
        origin=message.value,
        section=message.section,
    )


def _renamed(instruction: Instruction, made: set[str], number: int) -> Instruction:
    """An instruction of the loop in one microbatch."""

    def own(refs: Sequence[Ref]) -> Iterator[Ref]:
        return (Ref(f"{r.node}@{number}", r.index) if r.node in made else r for r in refs)

    refs = own(instruction.operands)
    args = tuple(replace_refs(arg, refs) for arg in instruction.args)
    kwargs = tuple((key, replace_refs(arg, refs)) for key, arg in instruction.kwargs)
    name = f"{instruction.name}@{number}"
    if instruction.op == MICROBATCH:
        start = int(str(args[1])) * number
        rows = (args[0], 1, start, start + int(str(args[2])))
        return replace(instruction, name=name, op="aten.slice.Tensor", args=rows, view=True)
    return replace(instruction, name=name, args=args, kwargs=kwargs)


def _joins(
    totals: Sequence[Ref], made_by: Mapping[str, Instruction], number: int
) -> list[Instruction]:
    found = []
    for ref in totals:
        source = made_by.get(ref.node)
        if source is None:
            continue
        total, term = Ref(f"{ref.node}@0", ref.index), Ref(f"{ref.node}@{number}", ref.index)
        found.append(
            Instruction(
                name=f"{ref.node}_{ref.index}+{number}",
                op=JOIN,
                args=(total, term),
                outputs=(source.outputs[ref.index],),
                origin=source.origin,
                phase=source.phase,
                view=True,
                section=source.section,
            )
        )
    return found


def _behind(instruction: Instruction, first: Mapping[Ref, Ref]) -> Instruction:
    if instruction.op == ACCUMULATE:
        ref = first.get(instruction.operands[0], instruction.operands[0])
        return replace(instruction, op="aten.alias.default", args=(ref,), view=True)
    return with_refs(instruction, first)


def with_refs(instruction: Instruction, change: Mapping[Ref, Ref]) -> Instruction:
    """The instruction with the values it reads replaced as ``change`` says."""
    refs = (change.get(ref, ref) for ref in instruction.operands)
    args = tuple(replace_refs(arg, refs) for arg in instruction.args)
    kwargs = tuple((key, replace_refs(arg, refs)) for key, arg in instruction.kwargs)
    return replace(instruction, args=args, kwargs=kwargs)
