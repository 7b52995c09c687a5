"""Runs programs of several microbatches: prologue, loop, epilogue.

The loop's values are joined as they come, in place where their memory is theirs alone, so one
total is alive beside the microbatch that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.ir.graph import Ref
from autopar.lower.program import (
    ACCUMULATE,
    LOOP,
    MICROBATCH,
    Instruction,
    Program,
    Section,
)
from autopar.runtime.module import AxisGroup, build_module, build_part

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Built:
    """Programs as something to call.

    Attributes:
        run: Takes a tensor for each program input, in order; returns `Program.results`.
        modules: The FX modules it runs.
    """

    run: Run
    modules: tuple[fx.GraphModule, ...]


def build(
    programs: Sequence[Program], groups: tuple[AxisGroup, ...], device: torch.device
) -> Built:
    """What runs a step.

    Args:
        programs: This rank's program of every microbatch; their prologues and epilogues are equal.
        groups: The group of each mesh axis, in mesh order.
        device: What device constants mean.
    """
    if len(programs) == 1:
        module = build_module(programs[0], groups, device)
        return Built(module.forward, (module,))
    loop = _Loop(programs, groups, device)
    return Built(loop.run, loop.modules)


class _Loop:
    def __init__(
        self,
        programs: Sequence[Program],
        groups: tuple[AxisGroup, ...],
        device: torch.device,
    ) -> None:
        first = programs[0]
        assert len(programs) == first.microbatches, (len(programs), first.microbatches)
        given = [Ref(entry.name) for entry in first.inputs]
        prologue = _of(first, Section.PROLOGUE)
        bodies = [_of(program, *LOOP) for program in programs]
        epilogue = _of(first, Section.EPILOGUE)
        joins = [i for i in epilogue if i.op == ACCUMULATE]
        totals = list(dict.fromkeys(i.operands[0] for i in joins))
        self._reduces = [_reduce_of(joins, ref) for ref in totals]
        made = [*given, *_results(prologue)]
        read = {ref for part in (*bodies, epilogue) for i in part for ref in i.operands}
        self._shared = [ref for ref in made if ref in read or ref in first.results]

        def part(instructions: Sequence[Instruction], ins: list[Ref], outs: Sequence[Ref]) -> Run:
            module = build_part(instructions, ins, outs, groups, device)
            self.modules += (module,)
            return module.forward

        self.modules: tuple[fx.GraphModule, ...] = ()
        self._prologue = part(prologue, given, self._shared)
        by_body: dict[tuple[Instruction, ...], Run] = {}
        for body in bodies:
            if body not in by_body:
                by_body[body] = part(body, self._shared, totals)
        self._bodies = [by_body[body] for body in bodies]
        self._numbered = [any(i.op == MICROBATCH for i in body) for body in bodies]
        rest = [_as_alias(i) if i.op == ACCUMULATE else i for i in epilogue]
        self._epilogue = part(rest, [*self._shared, *totals], first.results)

    def run(self, *values: Tensor) -> tuple[Tensor, ...]:
        shared = self._prologue(*values)
        totals: list[Tensor] = []
        for number, body in enumerate(self._bodies):
            numbers = (number,) if self._numbered[number] else ()
            made = body(*numbers, *shared)
            if number == 0:
                totals = _owned(made, (*values, *shared))
            else:
                for total, term, reduce in zip(totals, made, self._reduces, strict=True):
                    _join(total, term, reduce)
            del made
        return self._epilogue(*shared, *totals)


def _of(program: Program, *sections: Section) -> tuple[Instruction, ...]:
    return tuple(i for i in program.instructions if i.section in sections)


def _results(instructions: Sequence[Instruction]) -> list[Ref]:
    return [Ref(i.name, index) for i in instructions for index in range(len(i.outputs))]


def _reduce_of(joins: Sequence[Instruction], ref: Ref) -> str:
    reduces = {str(i.args[1]) for i in joins if i.operands[0] == ref}
    assert len(reduces) == 1, (ref, reduces)
    return reduces.pop()


def _as_alias(join: Instruction) -> Instruction:
    """The accumulated value, which enters the epilogue joined already."""
    return Instruction(
        name=join.name,
        op="aten.alias.default",
        args=join.operands,
        outputs=join.outputs,
        origin=join.origin,
        section=join.section,
    )


def _owned(made: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The first terms, copied where joining into them would write into something else."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    found = []
    for tensor in made:
        pointer = tensor.untyped_storage().data_ptr()
        alone = pointer not in taken and tensor.is_contiguous()
        found.append(tensor if alone else tensor.clone(memory_format=torch.contiguous_format))
        taken.add(pointer)
    return found


def _join(total: Tensor, term: Tensor, reduce: str) -> None:
    if reduce == "sum":
        total.add_(term)
    elif reduce == "max":
        torch.maximum(total, term, out=total)
    else:
        assert reduce == "min", reduce
        torch.minimum(total, term, out=total)
