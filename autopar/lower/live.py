"""Which tensors of a program own memory, and how long.

Counted by storage: a view shares its operand's, a reshape that cannot be a view copies. An
instruction's results are allocated before its operands are released; a value is released after its
last reader, as FX's generated code does. A collective other than an all-reduce (which works on a
copy) holds its operand until it is waited for, and so does a copy to or from host memory. What is
in host memory is counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.capture.ops import runs_on_dense
from autopar.ir.graph import Phase, Ref, TensorType
from autopar.lower.program import (
    ALL_REDUCE,
    COLLECTIVES,
    COPIES,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    Instruction,
    Program,
    Section,
)
from autopar.lower.strides import Strides, dense, is_dense, result_strides, view_strides
from autopar.lower.unroll import JOIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Storages:
    """The memory of a program's values.

    Attributes:
        owner: The value whose storage each value lies in.
        num_bytes: Of every storage made by the program.
        made: Instruction that makes each of them.
        last: Instruction after which it is released; the number of instructions for results.
        copies: Names of the reshapes that copy.
        on_host: The storages in host memory.
    """

    owner: Mapping[Ref, Ref]
    num_bytes: Mapping[Ref, int]
    made: Mapping[Ref, int]
    last: Mapping[Ref, int]
    copies: frozenset[str]
    on_host: frozenset[Ref]


def storages(program: Program, last: dict[Ref, int] | None = None) -> Storages:
    """The memory of every value of a program.

    Args:
        program: The program.
        last: Is told every instruction that uses a storage, one after the other.
    """
    walk = _Walk(program, {} if last is None else last)
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
        on_host=frozenset(walk.on_host),
    )


HOLDING = (COLLECTIVES | COPIES) - {ALL_REDUCE}
"""Ops that hold their operand until they are waited for."""


class _Walk:
    """Working state of `storages`."""

    def __init__(self, program: Program, last: dict[Ref, int]) -> None:
        self.instructions = program.instructions
        self.owner: dict[Ref, Ref] = {}
        self.types: dict[Ref, TensorType] = {}
        self.strides: dict[Ref, Strides] = {}
        self.num_bytes: dict[Ref, int] = {}
        self.made: dict[Ref, int] = {}
        self.last = last
        self.sent: dict[str, Ref] = {}
        self.copies: set[str] = set()
        self.on_host: set[Ref] = set()
        entering = [(Ref(item.name), item.local_type) for item in program.inputs]
        entering += [(message.ref, message.local_type) for message in program.receives]
        for ref, kind in entering:
            self.owner[ref] = ref
            self.types[ref] = kind
            self.strides[ref] = dense(kind.shape)
        self.on_host |= {Ref(item.name) for item in program.inputs if item.on_host}

    def step(self, at: int) -> None:
        instruction = self.instructions[at]
        operands = instruction.operands
        for ref in operands:
            self.last[self.owner[ref]] = at
        if instruction.op in HOLDING:
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
            if instruction.op == TO_HOST or self._reads_host(instruction):
                self.on_host.add(ref)
        if strides is None:
            self._add_copies(at)
            read = [(self.types[ref].shape, self.strides[ref]) for ref in operands]
            for index, found in enumerate(result_strides(instruction, read)):
                self.strides[Ref(instruction.name, index)] = found

    def _add_copies(self, at: int) -> None:
        """Count the contiguous copies of operands that an op runs on, beside its results."""
        instruction = self.instructions[at]
        if instruction.view or not runs_on_dense(instruction.op):
            return
        given = (*instruction.args, *dict(instruction.kwargs).values())
        laid = [arg for arg in given if isinstance(arg, Ref)]
        strewn = [r for r in laid if not is_dense(self.types[r].shape, self.strides[r])]
        for index, ref in enumerate(strewn, len(instruction.outputs)):
            copy = Ref(instruction.name, index)
            self.num_bytes[copy] = self.types[ref].num_bytes
            self.made[copy] = self.last[copy] = at

    def _reads_host(self, instruction: Instruction) -> bool:
        """Whether it works on what is in host memory, so that it does so there."""
        if instruction.op == TO_DEVICE:
            return False
        return any(self.owner[ref] in self.on_host for ref in instruction.operands)


DEVICE, SAVED, GRADIENTS, HOST = range(4)
"""What `byte_changes` and `live_bytes` tell apart: all that the device holds, of it what was made
in the forward for the backward and finished gradients, and what the host holds."""


def byte_changes(program: Program, memory: Storages) -> NDArray[np.int64]:
    """Bytes that each instruction makes, and that are released behind it.

    Shape [instructions, 2, 4]: made and released; `DEVICE` and so on.
    """
    count = len(program.instructions)
    finished = {memory.owner[ref] for ref in program.gradients.values()}
    late = [i.phase is Phase.BACKWARD for i in program.instructions]
    late.append(True)
    found = np.zeros((count + 1, 2, 4), dtype=np.int64)
    sizes = np.fromiter(memory.num_bytes.values(), dtype=np.int64)
    made = [memory.made[ref] for ref in memory.num_bytes]
    last = [memory.last[ref] for ref in memory.num_bytes]
    kinds = [
        GRADIENTS if ref in finished else SAVED if late[until] and not late[since] else DEVICE
        for ref, since, until in zip(memory.num_bytes, made, last, strict=True)
    ]
    away = np.fromiter((ref in memory.on_host for ref in memory.num_bytes), dtype=bool)
    for at, places in enumerate((made, last)):
        np.add.at(found[:, at, HOST], places, np.where(away, sizes, 0))
        here = np.where(away, 0, sizes)
        np.add.at(found[:, at, DEVICE], places, here)
        own = np.where(np.asarray(kinds) == DEVICE, 0, here)
        np.add.at(found[:, at], (places, kinds), own)
    return found[:count]


def live_bytes(changes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes live while each instruction runs, without what enters the program.

    Args:
        changes: As of `byte_changes`, in the order in which instructions run.

    Returns:
        Shape [instructions, 4]: the kinds of `byte_changes`.
    """
    total = changes.cumsum(axis=0)
    released = np.roll(total[:, 1], 1, axis=0)
    released[:1] = 0
    live: NDArray[np.int64] = total[:, 0] - released
    return live


class Moment(NamedTuple):
    """Instructions of one captured node that follow each other.

    Attributes:
        origin: The node; ``phase``, ``section`` and ``chunk`` are theirs.
        num_bytes: Most bytes on the device while they run.
    """

    origin: str
    phase: Phase
    section: Section
    chunk: int
    num_bytes: int


def moments(instructions: Sequence[Instruction], live: NDArray[np.int64]) -> tuple[Moment, ...]:
    """What is held when, by captured nodes.

    What microbatches make is added up behind the last turn that reads it: that tells nothing of the
    node that made it.

    Args:
        instructions: In the order in which they run.
        live: Bytes on the device while each runs.
    """
    there = [at for at, own in enumerate(instructions) if own.op != JOIN]
    whose = [(i.origin, i.phase, i.section, i.chunk) for i in map(instructions.__getitem__, there)]
    first = [at for at, own in enumerate(whose) if at == 0 or own != whose[at - 1]]
    most = np.maximum.reduceat(live[there], first).tolist() if first else []
    return tuple(Moment(*whose[at], held) for at, held in zip(first, most, strict=True))
