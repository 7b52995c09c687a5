"""Which tensors of a program own memory, and how long.

Counted by storage: a view shares its operand's, a reshape that cannot be a view copies. An
instruction's results are allocated before its operands are released; a value is released after its
last reader, as FX's generated code does. A collective other than an all-reduce (which works on a
copy) holds its operand until it is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Phase, Ref, TensorType
from autopar.lower.program import ALL_REDUCE, COLLECTIVES, WAIT, Program
from autopar.lower.strides import Strides, dense, result_strides, view_strides


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """The memory of a program's values.

    Attributes:
        owner: The value whose storage each value lies in.
        num_bytes: Of every storage made by the program.
        made: Instruction that makes each of them.
        last: Instruction after which it is released; the number of instructions for results.
        copies: Names of the reshapes that copy.
    """

    owner: Mapping[Ref, Ref]
    num_bytes: Mapping[Ref, int]
    made: Mapping[Ref, int]
    last: Mapping[Ref, int]
    copies: frozenset[str]


def storages(program: Program) -> Storages:
    """The memory of every value of a program."""
    walk = _Walk(program)
    for at in range(len(program.instructions)):
        walk.step(at)
    for ref in program.results:
        walk.last[walk.owner[ref]] = len(program.instructions)
    return Storages(
        owner=walk.owner,
        num_bytes=walk.num_bytes,
        made=walk.made,
        last=walk.last,
        copies=frozenset(walk.copies),
    )


class _Walk:
    """Working state of `storages`."""

    def __init__(self, program: Program) -> None:
        self.instructions = program.instructions
        self.owner: dict[Ref, Ref] = {}
        self.types: dict[Ref, TensorType] = {}
        self.strides: dict[Ref, Strides] = {}
        self.num_bytes: dict[Ref, int] = {}
        self.made: dict[Ref, int] = {}
        self.last: dict[Ref, int] = {}
        self.sent: dict[str, Ref] = {}
        self.copies: set[str] = set()
        for item in program.inputs:
            ref = Ref(item.name)
            self.owner[ref] = ref
            self.types[ref] = item.local_type
            self.strides[ref] = dense(item.local_type.shape)

    def step(self, at: int) -> None:
        instruction = self.instructions[at]
        operands = instruction.operands
        for ref in operands:
            self.last[self.owner[ref]] = at
        if instruction.op in COLLECTIVES and instruction.op != ALL_REDUCE:
            self.sent[instruction.name] = self.owner[operands[0]]
        elif instruction.op == WAIT:
            held = self.sent.get(operands[0].node)
            if held is not None:
                self.last[held] = at
        strides = None
        if instruction.view:
            source = operands[0]
            shape, own = self.types[source].shape, self.strides[source]
            strides = view_strides(instruction, shape, own)
            if strides is None:
                self.copies.add(instruction.name)
        for index, kind in enumerate(instruction.outputs):
            ref = Ref(instruction.name, index)
            self.types[ref] = kind
            if strides is not None:
                self.owner[ref] = self.owner[operands[0]]
                self.strides[ref] = strides
                continue
            self.owner[ref] = ref
            self.num_bytes[ref] = kind.num_bytes
            self.made[ref] = self.last[ref] = at
        if strides is None:
            read = [(self.types[ref].shape, self.strides[ref]) for ref in operands]
            for index, found in enumerate(result_strides(instruction, read)):
                self.strides[Ref(instruction.name, index)] = found


def live_bytes(program: Program, memory: Storages) -> list[int]:
    """Bytes live while each instruction runs, without what enters the program."""
    changes = [0] * (len(program.instructions) + 2)
    for ref, size in memory.num_bytes.items():
        changes[memory.made[ref]] += size
        changes[memory.last[ref] + 1] -= size
    found, now = [], 0
    for at in range(len(program.instructions)):
        now += changes[at]
        found.append(now)
    return found


def kinds_at(program: Program, memory: Storages, at: int) -> tuple[int, int]:
    """Bytes live at an instruction that the forward saved, and those of finished gradients."""
    finished = {memory.owner[ref] for ref in program.gradients.values()}
    saved = gradients = 0
    for ref, size in memory.num_bytes.items():
        made, last = memory.made[ref], memory.last[ref]
        if not made <= at <= last:
            continue
        if ref in finished:
            gradients += size
        elif program.instructions[made].phase is Phase.FORWARD and _read_late(program, last, made):
            saved += size
    return saved, gradients


def _read_late(program: Program, last: int, made: int) -> bool:
    if last >= len(program.instructions):
        return True
    return program.instructions[last].phase is Phase.BACKWARD and made < last
