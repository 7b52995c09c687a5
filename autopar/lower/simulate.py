"""The program without tensors: its seconds and its live bytes.

One clock for compute, one for the collectives of each mesh axis, one for copies to host memory and
one for copies back, one for the host that issues ops. A kernel starts when the one before it is
done and the host has issued it; a collective or a copy starts when what it reads is ready and its
axis or direction is free; compute stops at a wait until it is done. What shares the device is
slowed. What a program takes is then exactly

    seconds = compute + slowed + exposed + host

with every second of the compute stream in one of the four.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.kernel import KernelSeconds, is_causal, kernel_seconds
from autopar.cost.reshard import CollectiveSeconds
from autopar.ir.graph import Phase, Ref, TensorType
from autopar.lower.live import (
    DEVICE,
    GRADIENTS,
    HOST,
    SAVED,
    Moment,
    Storages,
    byte_changes,
    live_bytes,
    moments,
    storages,
)
from autopar.lower.program import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    COPIES,
    REDUCE_SCATTER,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    Instruction,
    Program,
)
from autopar.lower.stretch import ONCE, Repeats, Turns, in_turn, stretched, weights
from cost_models.cluster import Device
from cost_models.overlap import (
    NO_SLOWDOWN,
    Slowdown,
    both_copies,
    compute_collective,
    compute_copy,
)

_KINDS = {
    TO_HOST: "to_host",
    TO_DEVICE: "to_device",
    ALL_REDUCE: "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_TO_ALL: "all_to_all",
}
ON_HOST = "in host memory"
"""Kind of what enters from host memory, in ``Simulation.input_bytes``."""

_LINKS = {TO_HOST: -1, TO_DEVICE: -2}
"""What copies have for an axis: the two directions of the host link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the parts of a program take.

    Attributes:
        kernel_s: Seconds of a local kernel.
        collective_s: Seconds of a collective.
        slowdown: Of compute and a collective that share the device.
        host_op_s: Seconds of the host to issue one op.
        host_view_s: Seconds of the host to make a view, where that is no less than an op.
        host_link_bytes_per_s: Of copies to host memory and of copies back, each.
        copy_slowdown: Of compute and a copy that share the device.
        both_copies: Of a copy from the host and one to it.
    """

    kernel_s: KernelSeconds
    collective_s: CollectiveSeconds
    slowdown: Slowdown
    host_op_s: float
    host_view_s: float = 0.0
    host_link_bytes_per_s: float = math.inf
    copy_slowdown: Slowdown = NO_SLOWDOWN
    both_copies: Slowdown = NO_SLOWDOWN


def prices(device: Device, collective_s: CollectiveSeconds) -> Prices:
    """Prices of programs that run eagerly on a device."""
    return Prices(
        kernel_s=kernel_seconds(device),
        collective_s=collective_s,
        slowdown=compute_collective(device.kind),
        host_op_s=device.host_op_s,
        host_link_bytes_per_s=device.host_link_bytes_per_s,
        copy_slowdown=compute_copy(device.kind),
        both_copies=both_copies(device.kind),
    )


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """Collectives of one kind, axis and purpose in a program, or copies of one direction."""

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
        forward_s: From its first instruction to the first of the backward.
        compute_s: Of its kernels, alone on the device.
        communication_s: Of its collectives, alone on the device.
        copy_s: Of its copies to host memory and back, alone on the device.
        exposed_s: Compute idle in waits and at the end.
        copy_exposed_s: The part of it that copies cause.
        slowed_s: Added to kernels by collectives and copies beside them.
        host_s: Compute idle because the host has not issued the next op yet.
        num_launched: Kernels and collectives issued.
        peak_bytes: Most bytes live at once, without what enters the program.
        peak_at: Turn of the instruction at the peak.
        peak_origins: Captured nodes and phases of that instruction and of the next `AHEAD`.
        saved_bytes: At the peak, bytes made in the forward that the backward reads.
        gradient_bytes: At the peak, bytes of finished gradients.
        profile: What is held when; empty where copies of blocks were not there.
        host_bytes: Most bytes in host memory at once.
        input_bytes: Bytes that enter, by kind.
        collectives: What is communicated.
        copies: What is copied to host memory and back.
    """

    seconds: float
    forward_s: float
    compute_s: float
    communication_s: float
    copy_s: float
    exposed_s: float
    copy_exposed_s: float
    slowed_s: float
    host_s: float
    num_launched: int
    peak_bytes: int
    peak_at: int
    peak_origins: tuple[tuple[str, Phase], ...] = field(compare=False)
    saved_bytes: int
    gradient_bytes: int
    profile: tuple[Moment, ...] = field(compare=False)
    host_bytes: int
    input_bytes: Mapping[str, int]
    collectives: tuple[CollectiveUse, ...]
    copies: tuple[CollectiveUse, ...]


def simulate(program: Program, cost: Prices, repeats: Repeats = ONCE) -> Simulation:
    """Seconds and live bytes of a program.

    Args:
        program: What one rank runs.
        cost: What its parts take.
        repeats: Copies of blocks that the program lacks and that are simulated all the same.

    Raises:
        NotPeriodicError: The copies that are there are not alike.
    """
    memory = storages(program)
    changes = byte_changes(program, memory)
    steps = _steps(program, cost, memory)
    turns = in_turn([step.start for step in steps])
    if repeats.more:
        signs = [(step.sign, made) for step, made in zip(steps, _rows(changes), strict=True)]
        origins = [i.origin for i in program.instructions]
        turns = stretched(origins, signs, [step.start for step in steps], repeats)
    clock = _Clock(cost)
    forward_s = clock.run(steps, turns)
    live = live_bytes(changes[turns.order])
    peak_at = int(np.argmax(live[:, DEVICE])) if len(live) else 0
    at_peak = live[peak_at].tolist() if len(live) else (0, 0, 0, 0)
    return Simulation(
        seconds=clock.now,
        forward_s=forward_s,
        compute_s=clock.compute_s,
        communication_s=clock.communication_s,
        copy_s=clock.copy_s,
        exposed_s=clock.exposed_s,
        copy_exposed_s=clock.copy_exposed_s,
        slowed_s=clock.slowed_s,
        host_s=clock.host_s,
        num_launched=clock.num_launched,
        peak_bytes=at_peak[DEVICE],
        peak_at=peak_at,
        peak_origins=tuple(dict.fromkeys(_origins(program, turns, peak_at))),
        saved_bytes=at_peak[SAVED],
        gradient_bytes=at_peak[GRADIENTS],
        profile=() if repeats.more else moments(program.instructions, live[:, DEVICE]),
        host_bytes=int(live[:, HOST].max(initial=0)),
        input_bytes=entered_bytes(program, repeats),
        collectives=clock.uses(),
        copies=clock.uses(copies=True),
    )


def entered_bytes(program: Program, repeats: Repeats = ONCE) -> Mapping[str, int]:
    """Bytes that enter a program, by kind."""
    entered: Counter[str] = Counter()
    for item, often in weights(program, repeats):
        kind = ON_HOST if item.on_host else item.kind
        entered[kind] += often * item.local_type.num_bytes
    return dict(entered)


AHEAD = 512
"""Instructions behind the one at the peak whose captured nodes are told."""


def _origins(program: Program, turns: Turns, start: int) -> Iterator[tuple[str, Phase]]:
    for at in turns.order[start : start + AHEAD].tolist():
        yield program.instructions[at].origin, program.instructions[at].phase


def seconds_of(program: Program, cost: Prices) -> Mapping[str, float]:
    """Seconds of every kernel and every copy by name, each alone on its clock.

    A kernel takes no less than the host takes to issue it. A copy takes as long as beside one that
    goes the other way, if there are any in its phase.
    """
    steps = _steps(program, cost, storages(program))
    ways = {(i.phase, i.op) for i in program.copies}
    slow = {
        (phase, op): both
        for op, other, both in (
            (TO_DEVICE, TO_HOST, cost.both_copies.first),
            (TO_HOST, TO_DEVICE, cost.both_copies.second),
        )
        for phase in Phase
        if (phase, other) in ways
    }
    found = {}
    for instruction, step in zip(program.instructions, steps, strict=True):
        if step.do is _Do.KERNEL:
            found[instruction.name] = max(step.seconds, cost.host_op_s)
        elif step.do is _Do.START and step.axis < 0:
            shared = slow.get((instruction.phase, instruction.op), 1.0)
            found[instruction.name] = step.seconds * shared
    return found


def _rows(changes: NDArray[np.int64]) -> list[tuple[int, ...]]:
    return list(map(tuple, changes.reshape(len(changes), -1).tolist()))


class _Do(Enum):
    """What an instruction means to the clocks."""

    VIEW = auto()
    KERNEL = auto()
    START = auto()
    WAIT = auto()


class _Step(NamedTuple):
    """An instruction as the clocks see it.

    Attributes:
        do: What it means.
        phase: Forward or backward.
        seconds: Of the kernel or the collective, alone on the device.
        axis: Of the collective, or the direction of the copy.
        use: Kind, axis and purpose of the collective or copy.
        num_bytes: Of the full tensor of the collective, or of the copy.
        start: Index of the instruction; of a wait, that of what it waits for.
    """

    do: _Do
    phase: Phase
    seconds: float
    axis: int
    use: tuple[str, int, str]
    num_bytes: int
    start: int

    @property
    def sign(self) -> Hashable:
        """What is the same in every copy of a block."""
        return self.do, self.phase, self.seconds, self.use, self.num_bytes


_NO_USE = ("", 0, "")


def _steps(program: Program, cost: Prices, memory: Storages) -> list[_Step]:
    types: dict[Ref, TensorType] = {Ref(i.name): i.local_type for i in program.inputs}
    types |= {message.ref: message.local_type for message in program.receives}
    place: dict[str, int] = {}
    found = []
    for at, instruction in enumerate(program.instructions):
        place[instruction.name] = at
        for index, kind in enumerate(instruction.outputs):
            types[Ref(instruction.name, index)] = kind
        do, seconds, axis, use, num_bytes, start = _Do.VIEW, 0.0, 0, _NO_USE, 0, at
        if instruction.op == WAIT:
            do, start = _Do.WAIT, place[instruction.operands[0].node]
        elif instruction.op in COPIES:
            do, axis = _Do.START, _LINKS[instruction.op]
            num_bytes = instruction.outputs[0].num_bytes
            use = (_KINDS[instruction.op], axis, instruction.purpose)
            seconds = num_bytes / cost.host_link_bytes_per_s
        elif instruction.op in COLLECTIVES:
            do, axis = _Do.START, _axis(instruction)
            size = types[instruction.operands[0]].num_bytes
            num_bytes = max(size, instruction.outputs[0].num_bytes)
            use = (_KINDS[instruction.op], axis, instruction.purpose)
            seconds = cost.collective_s(use[0], num_bytes, axis)
        elif not instruction.view or instruction.name in memory.copies:
            do = _Do.KERNEL
            seconds = cost.kernel_s(
                instruction.op,
                tuple(types[ref] for ref in instruction.operands),
                instruction.outputs,
                is_causal(instruction.op, instruction.args),
                instruction.flops,
            )
        found.append(_Step(do, instruction.phase, seconds, axis, use, num_bytes, start))
    return found


def _axis(instruction: Instruction) -> int:
    axis = instruction.args[1]
    assert isinstance(axis, int)
    return axis


@dataclass(slots=True)
class _Running:
    """What was issued: the number of its turn and the seconds of it that are left."""

    pair: int
    left_s: float


class _Clock:
    """Runs instructions on the clocks."""

    def __init__(self, cost: Prices) -> None:
        self.cost = cost
        self.now = self.issued_s = 0.0
        self.compute_s = self.communication_s = 0.0
        self.exposed_s = self.slowed_s = self.host_s = 0.0
        self.copy_s = self.copy_exposed_s = 0.0
        self.num_launched = 0
        self._queues: dict[int, deque[_Running]] = {}
        self._pending: dict[int, int] = {}
        self._uses: dict[tuple[str, int, str], list[float]] = {}

    def run(self, steps: Sequence[_Step], turns: Turns) -> float:
        """Run every turn and let every collective end; seconds until the backward starts."""
        forward_s: float | None = None
        for at, pair in zip(turns.order.tolist(), turns.pair.tolist(), strict=True):
            step = steps[at]
            if forward_s is None and step.phase is Phase.BACKWARD:
                forward_s = self.now
            if step.do is _Do.KERNEL:
                self._issue()
                self._compute(step.seconds)
            elif step.do is _Do.START:
                self._issue()
                self._start(step, pair)
            elif step.do is _Do.WAIT:
                self._wait(pair)
            else:
                self.issued_s += self.cost.host_view_s
        for pair in list(self._pending):
            self._wait(pair)
        return self.now if forward_s is None else forward_s

    def _issue(self) -> None:
        """The host issues an op; the device idles until it has, collectives go on."""
        self.num_launched += 1
        self.issued_s += self.cost.host_op_s
        late = self.issued_s - self.now
        if late > 0:
            self.host_s += late
            self._pass(late)

    def _compute(self, seconds: float) -> None:
        self.compute_s += seconds
        left = seconds
        while left > 0 and self._pending:
            slow = {axis: self._slowdown(axis) for axis, queue in self._queues.items() if queue}
            pace = {axis: s.second * self._shared(axis) for axis, s in slow.items()}
            factor = max(beside.first for beside in slow.values())
            ends = (self._queues[axis][0].left_s * often for axis, often in pace.items())
            step = min(left * factor, *ends)
            self.now += step
            self.slowed_s += step - step / factor
            for axis, often in pace.items():
                self._advance(self._queues[axis], step / often)
            left -= step / factor
            if left <= seconds * 1e-12:
                left = 0.0
        self.now += left

    def _slowdown(self, axis: int) -> Slowdown:
        """Of compute and what runs on an axis or a direction of the host link."""
        return self.cost.slowdown if axis >= 0 else self.cost.copy_slowdown

    def _shared(self, axis: int) -> float:
        """How many times as long a copy takes while another comes the other way."""
        if axis >= 0 or not all(self._queues.get(link) for link in _LINKS.values()):
            return 1.0
        both = self.cost.both_copies
        return both.first if axis == _LINKS[TO_DEVICE] else both.second

    def _start(self, step: _Step, pair: int) -> None:
        if step.axis >= 0:
            self.communication_s += step.seconds
        else:
            self.copy_s += step.seconds
        use = self._uses.setdefault(step.use, [0, 0, 0.0])
        use[0] += 1
        use[1] += step.num_bytes
        use[2] += step.seconds
        if step.seconds > 0:
            self._queues.setdefault(step.axis, deque()).append(_Running(pair, step.seconds))
            self._pending[pair] = step.axis

    def _wait(self, pair: int) -> None:
        while pair in self._pending:
            axis = self._pending[pair]
            step = self._queues[axis][0].left_s * self._shared(axis)
            if axis < 0:
                # What comes the other way may end before; then the rest is faster.
                step = min(step, *self._ends())
                self.copy_exposed_s += step
            self.exposed_s += step
            self._pass(step)

    def _ends(self) -> list[float]:
        """Seconds until each direction of the host link is through with its first copy."""
        links = ((axis, self._queues.get(axis)) for axis in _LINKS.values())
        return [queue[0].left_s * self._shared(axis) for axis, queue in links if queue]

    def _pass(self, seconds: float) -> None:
        """Time without compute."""
        left = seconds
        while left > 0:
            step = min(left, *self._ends()) if self._ends() else left
            self.now += step
            pace = {axis: self._shared(axis) for axis in self._queues}
            for axis, queue in self._queues.items():
                self._advance(queue, step / pace[axis])
            left -= step
            if left <= seconds * 1e-12:
                left = 0.0

    def _advance(self, queue: deque[_Running], seconds: float) -> None:
        """An axis works on its collectives for so many seconds of theirs."""
        left = seconds
        while queue and left >= queue[0].left_s - 1e-15:
            left -= queue[0].left_s
            del self._pending[queue.popleft().pair]
        if queue and left > 0:
            queue[0].left_s -= left

    def uses(self, *, copies: bool = False) -> tuple[CollectiveUse, ...]:
        """Collectives, or copies, by kind."""
        return tuple(
            CollectiveUse(kind, axis, purpose, int(count), int(size), seconds)
            for (kind, axis, purpose), (count, size, seconds) in sorted(self._uses.items())
            if (axis < 0) == copies
        )
