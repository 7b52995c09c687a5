"""Runs programs of several microbatches: prologue, loop, epilogue.

The loop's values are joined as they come, in place where their memory is theirs alone, so one
total is alive beside the microbatch that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.ir.graph import Ref
from autopar.lower.program import (
    ACCUMULATE,
    LOOP,
    Instruction,
    Program,
    Section,
)
from autopar.lower.unroll import totals_of
from autopar.runtime.host import settle
from autopar.runtime.module import AxisGroup, Part, build_module, build_part

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Built:
    """Programs as something to call.

    Attributes:
        run: Takes a tensor for each program input, in order; returns `Program.results`.
        modules: The FX modules it runs.
        doing: What it runs now, in words; empty where only the module says it.
    """

    run: Run
    modules: tuple[fx.GraphModule, ...]
    doing: Callable[[], str] = str


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
    """A prologue, a body for each size of microbatch, an epilogue."""

    def __init__(
        self,
        programs: Sequence[Program],
        groups: tuple[AxisGroup, ...],
        device: torch.device,
    ) -> None:
        first = programs[0]
        assert len(programs) == first.microbatches, (len(programs), first.microbatches)
        given = tuple(Ref(entry.name) for entry in first.inputs)
        prologue = part_of(first, Section.PROLOGUE)
        bodies = [part_of(program, *LOOP) for program in programs]
        joins = [i for i in part_of(first, Section.EPILOGUE) if i.op == ACCUMULATE]
        totals = totals_of(first)
        self._device = device
        self._reduces = [reduce_of(joins, ref) for ref in totals]
        epilogue = tuple(
            as_alias(i) if i.op == ACCUMULATE else i for i in part_of(first, Section.EPILOGUE)
        )
        read_late = {ref for i in epilogue for ref in i.operands}.union(first.results)
        read = read_late.union(ref for body in bodies for i in body for ref in i.operands)
        shared = tuple(ref for ref in (*given, *_results(prologue)) if ref in read)
        self._late = [n for n, ref in enumerate(shared) if ref in read_late]
        late = tuple(shared[n] for n in self._late)

        def built(
            instructions: tuple[Instruction, ...], ins: tuple[Ref, ...], outs: tuple[Ref, ...]
        ) -> Run:
            module = build_part(Part(instructions, ins, outs), groups, device)
            self.modules += (module,)
            return module.forward

        self.modules: tuple[fx.GraphModule, ...] = ()
        self._prologue = built(prologue, given, shared)
        by_body: dict[tuple[Instruction, ...], Run] = {}
        for program, body in zip(programs, bodies, strict=True):
            if body not in by_body:
                # The same totals may have other names where pieces are uneven.
                by_body[body] = built(body, shared, totals_of(program))
        self._bodies = [by_body[body] for body in bodies]
        self._epilogue = built(epilogue, (*late, *totals), first.results)

    def run(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Results of the step; what the last microbatch reads last is freed while it runs."""
        shared = list(self._prologue(0, list(values)))
        late = [shared[n] for n in self._late]
        totals: list[Tensor] = []
        for number, body in enumerate(self._bodies):
            box = list(shared)
            if number == len(self._bodies) - 1:
                shared.clear()
            made = body(number, box)
            arrived(made, self._device)
            if number == 0:
                totals = owned(made, (*values, *shared, *late))
            else:
                list(map(join, totals, made, self._reduces))
            del made
        box = [*late, *totals]
        late.clear()
        totals.clear()
        return self._epilogue(0, box)


def part_of(program: Program, *sections: Section) -> tuple[Instruction, ...]:
    return tuple(i for i in program.instructions if i.section in sections)


def _results(instructions: Sequence[Instruction]) -> list[Ref]:
    return [Ref(i.name, index) for i in instructions for index in range(len(i.outputs))]


def reduce_of(joins: Sequence[Instruction], ref: Ref) -> str:
    reduces = {str(i.args[1]) for i in joins if i.operands[0] == ref}
    assert len(reduces) == 1, (ref, reduces)
    return reduces.pop()


def as_alias(join: Instruction) -> Instruction:
    """The accumulated value, which enters the epilogue joined already."""
    return Instruction(
        name=join.name,
        op="aten.alias.default",
        args=join.operands,
        outputs=join.outputs,
        origin=join.origin,
        section=join.section,
    )


def owned(made: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The first terms, copied where joining into them would write into something else."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    found = []
    for tensor in made:
        pointer = tensor.untyped_storage().data_ptr()
        alone = pointer not in taken and tensor.is_contiguous()
        found.append(tensor if alone else tensor.clone(memory_format=torch.contiguous_format))
        taken.add(pointer)
    return found


def arrived(terms: Iterable[Tensor], device: torch.device) -> None:
    """Wait for the terms that were copied to host memory, where they are added up."""
    if any(term.device.type != device.type for term in terms):
        settle(device)


def join(total: Tensor, term: Tensor, reduce: str) -> None:
    if reduce == "sum":
        total.add_(term)
    elif reduce == "max":
        torch.maximum(total, term, out=total)
    else:
        assert reduce == "min", reduce
        torch.minimum(total, term, out=total)
