"""The program without tensors: its seconds and its live bytes.

One clock for compute and one for the collectives of each mesh axis. A collective starts when its
operand is ready and its axis is free; compute stops at a wait until it is done. Live bytes are
counted by storage: views share, an instruction's results are allocated before its operands are
released, and a value is released after its last reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.cost.reshard import CollectiveSeconds
from autopar.ir.graph import Phase, Ref
from autopar.lower.program import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    WAIT,
    Instruction,
    Program,
)

_KINDS = {
    ALL_REDUCE: "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_TO_ALL: "all_to_all",
}

InstructionSeconds = Callable[[Instruction, int], float]
"""Seconds of a compute instruction: (instruction, bytes it reads and writes)."""


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """Collectives of one kind, axis and purpose in a program."""

    kind: str
    axis: int
    purpose: str
    count: int
    tensor_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a program takes.

    Attributes:
        seconds: From its first instruction to its last.
        compute_s: Of its compute instructions.
        communication_s: Of its collectives.
        exposed_s: Compute idle in waits.
        peak_bytes: Most bytes live at once, without what enters the program.
        peak_at: Index of the instruction at the peak.
        saved_bytes: At the peak, bytes made in the forward that the backward reads.
        gradient_bytes: At the peak, bytes of finished gradients.
        input_bytes: Bytes that enter, by kind.
        collectives: What is communicated.
    """

    seconds: float
    compute_s: float
    communication_s: float
    exposed_s: float
    peak_bytes: int
    peak_at: int
    saved_bytes: int
    gradient_bytes: int
    input_bytes: Mapping[str, int]
    collectives: tuple[CollectiveUse, ...]


def simulate(
    program: Program, instruction_s: InstructionSeconds, collective_s: CollectiveSeconds
) -> Simulation:
    """Seconds and live bytes of a program.

    Args:
        program: What one rank runs.
        instruction_s: Prices compute.
        collective_s: Prices collectives.
    """
    clock = _Clock(program, instruction_s, collective_s)
    for instruction in program.instructions:
        clock.run(instruction)
    live = live_bytes(program)
    peak_at = max(range(len(live)), key=live.__getitem__, default=0)
    saved, gradients = _kinds_at(program, peak_at)
    entered: Counter[str] = Counter()
    for item in program.inputs:
        entered[item.kind] += item.local_type.num_bytes
    return Simulation(
        seconds=max([clock.now, *clock.free.values()]),
        compute_s=clock.compute_s,
        communication_s=clock.communication_s,
        exposed_s=clock.exposed_s,
        peak_bytes=live[peak_at] if live else 0,
        peak_at=peak_at,
        saved_bytes=saved,
        gradient_bytes=gradients,
        input_bytes=dict(entered),
        collectives=clock.uses(),
    )


class _Clock:
    """Runs instructions on the clocks."""

    def __init__(
        self,
        program: Program,
        instruction_s: InstructionSeconds,
        collective_s: CollectiveSeconds,
    ) -> None:
        self.types = {Ref(item.name): item.local_type for item in program.inputs}
        self.instruction_s = instruction_s
        self.collective_s = collective_s
        self.now = 0.0
        self.free: dict[int, float] = {}
        self.done: dict[Ref, float] = {}
        self.compute_s = self.communication_s = self.exposed_s = 0.0
        self._uses: dict[tuple[str, int, str], list[float]] = {}

    def run(self, instruction: Instruction) -> None:
        for index, kind in enumerate(instruction.outputs):
            self.types[Ref(instruction.name, index)] = kind
        if instruction.op in COLLECTIVES:
            self._start(instruction)
        elif instruction.op == WAIT:
            until = self.done[instruction.operands[0]]
            self.exposed_s += max(0.0, until - self.now)
            self.now = max(self.now, until)
        elif not instruction.view:
            moved = sum(self.types[ref].num_bytes for ref in instruction.operands)
            moved += sum(kind.num_bytes for kind in instruction.outputs)
            seconds = self.instruction_s(instruction, moved)
            self.compute_s += seconds
            self.now += seconds

    def _start(self, instruction: Instruction) -> None:
        axis = instruction.args[1]
        assert isinstance(axis, int)
        size = self.types[instruction.operands[0]].num_bytes
        full = max(size, instruction.outputs[0].num_bytes)
        kind = _KINDS[instruction.op]
        seconds = self.collective_s(kind, full, axis)
        end = max(self.now, self.free.get(axis, 0.0)) + seconds
        self.free[axis] = self.done[Ref(instruction.name)] = end
        self.communication_s += seconds
        use = self._uses.setdefault((kind, axis, instruction.purpose), [0, 0, 0.0])
        use[0] += 1
        use[1] += full
        use[2] += seconds

    def uses(self) -> tuple[CollectiveUse, ...]:
        return tuple(
            CollectiveUse(kind, axis, purpose, int(count), int(size), seconds)
            for (kind, axis, purpose), (count, size, seconds) in sorted(self._uses.items())
        )


def storages(program: Program) -> Mapping[Ref, Ref]:
    """The value whose storage each value of the program lies in."""
    owner = {Ref(item.name): Ref(item.name) for item in program.inputs}
    for instruction in program.instructions:
        for index in range(len(instruction.outputs)):
            ref = Ref(instruction.name, index)
            owner[ref] = owner[instruction.operands[0]] if instruction.view else ref
    return owner


def last_reads(program: Program, owner: Mapping[Ref, Ref]) -> Mapping[Ref, int]:
    """Index of the last instruction that reads each storage; results are read at the end.

    A collective reads its operand until it is waited for.
    """
    last: dict[Ref, int] = {}
    sends: dict[str, Ref] = {}
    for at, instruction in enumerate(program.instructions):
        for ref in instruction.operands:
            last[owner[ref]] = at
        if instruction.op in COLLECTIVES:
            sends[instruction.name] = instruction.operands[0]
        elif instruction.op == WAIT:
            last[owner[sends[instruction.operands[0].node]]] = at
        for index in range(len(instruction.outputs)):
            last.setdefault(owner[Ref(instruction.name, index)], at)
    for ref in program.results:
        last[owner[ref]] = len(program.instructions)
    return last


def live_bytes(program: Program) -> list[int]:
    """Bytes live while each instruction runs, without what enters the program."""
    owner = storages(program)
    last = last_reads(program, owner)
    entered = {Ref(item.name) for item in program.inputs}
    sizes: dict[Ref, int] = {}
    ends: dict[int, list[Ref]] = {}
    now = 0
    found = []
    for at, instruction in enumerate(program.instructions):
        for index, kind in enumerate(instruction.outputs):
            ref = Ref(instruction.name, index)
            if owner[ref] == ref:
                sizes[ref] = kind.num_bytes
                now += kind.num_bytes
                ends.setdefault(last[ref], []).append(ref)
        found.append(now)
        for ref in ends.pop(at, ()):
            if ref not in entered:
                now -= sizes[ref]
    return found


def _kinds_at(program: Program, at: int) -> tuple[int, int]:
    """Bytes at an instruction that were saved in the forward, and of finished gradients."""
    owner = storages(program)
    last = last_reads(program, owner)
    finished = {owner[ref] for ref in program.gradients.values()}
    saved = gradients = 0
    for made, instruction in enumerate(program.instructions[: at + 1]):
        for index, kind in enumerate(instruction.outputs):
            ref = Ref(instruction.name, index)
            if owner[ref] != ref or last[ref] < at:
                continue
            if ref in finished:
                gradients += kind.num_bytes
            elif instruction.phase is Phase.FORWARD and _read_late(program, last[ref], made):
                saved += kind.num_bytes
    return saved, gradients


def _read_late(program: Program, last: int, made: int) -> bool:
    if last >= len(program.instructions):
        return True
    return program.instructions[last].phase is Phase.BACKWARD and made < last
