"""A program of several microbatches as one list of instructions, for the simulator.

The loop is written out as often as asked; what it makes of a value in every microbatch is added in
place to what the first one made, as the runtime does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import Ref, replace_refs
from autopar.lower.program import ACCUMULATE, LOOP, MICROBATCH, Instruction, Program, Section

JOIN = "aten.add_.Tensor"


def unroll(program: Program, times: int) -> Program:
    """The program with its loop written out ``times`` times.

    Args:
        program: Of any number of microbatches; of one it is returned as it is.
        times: Microbatches to write out.
    """
    if program.microbatches == 1:
        return program
    loop = [i for i in program.instructions if i.section in LOOP]
    after = [i for i in program.instructions if i.section is Section.EPILOGUE]
    totals = list(dict.fromkeys(i.operands[0] for i in after if i.op == ACCUMULATE))
    made = {i.name for i in loop}
    found = [i for i in program.instructions if i.section is Section.PROLOGUE]
    for number in range(times):
        found += [_renamed(i, made, number) for i in loop]
        if number:
            found += _joins(totals, loop, number)
    joined = {ref: Ref(f"{ref.node}@0", ref.index) for ref in totals}
    found += [_behind(i, joined) for i in after]
    return replace(program, instructions=tuple(found), microbatches=1)


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


def _joins(totals: Sequence[Ref], loop: Sequence[Instruction], number: int) -> list[Instruction]:
    by_name = {i.name: i for i in loop}
    found = []
    for ref in totals:
        source = by_name[ref.node]
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


def _behind(instruction: Instruction, joined: dict[Ref, Ref]) -> Instruction:
    if instruction.op != ACCUMULATE:
        return instruction
    ref = joined[instruction.operands[0]]
    return replace(instruction, op="aten.alias.default", args=(ref,), view=True)
