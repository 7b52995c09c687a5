"""The program without tensors: its seconds and its live bytes.

One clock for compute, one for the collectives of each mesh axis, one for the host that issues ops.
A kernel starts when the one before it is done and the host has issued it; a collective starts when
what it reads is ready and its axis is free; compute stops at a wait until it is done. While compute
and a collective share the device, both are slowed. What a program takes is then exactly

    seconds = compute + slowed + exposed + host

with every second of the compute stream in one of the four.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.kernel import KernelSeconds, is_causal, kernel_seconds
from autopar.cost.reshard import CollectiveSeconds
from autopar.ir.graph import Phase, Ref, TensorType
from autopar.lower.live import Storages, kinds_at, live_bytes, storages
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
from cost_models.cluster import Device
from cost_models.overlap import Slowdown, compute_collective

_KINDS = {
    ALL_REDUCE: "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_TO_ALL: "all_to_all",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the parts of a program take.

    Attributes:
        kernel_s: Seconds of a local kernel.
        collective_s: Seconds of a collective.
        slowdown: Of compute and a collective that share the device.
        host_op_s: Seconds of the host to issue one op.
        host_view_s: Seconds of the host to make a view, where that is no less than an op.
    """

    kernel_s: KernelSeconds
    collective_s: CollectiveSeconds
    slowdown: Slowdown
    host_op_s: float
    host_view_s: float = 0.0


def prices(device: Device, collective_s: CollectiveSeconds) -> Prices:
    """Prices of programs that run eagerly on a device."""
    return Prices(
        kernel_s=kernel_seconds(device),
        collective_s=collective_s,
        slowdown=compute_collective(device.kind),
        host_op_s=device.host_op_s,
    )


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
        forward_s: From its first instruction to the first of the backward.
        compute_s: Of its kernels, alone on the device.
        communication_s: Of its collectives, alone on the device.
        exposed_s: Compute idle in waits and at the end.
        slowed_s: Added to kernels by collectives beside them.
        host_s: Compute idle because the host has not issued the next op yet.
        num_launched: Kernels and collectives issued.
        peak_bytes: Most bytes live at once, without what enters the program.
        peak_at: Index of the instruction at the peak.
        saved_bytes: At the peak, bytes made in the forward that the backward reads.
        gradient_bytes: At the peak, bytes of finished gradients.
        input_bytes: Bytes that enter, by kind.
        collectives: What is communicated.
    """

    seconds: float
    forward_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    slowed_s: float
    host_s: float
    num_launched: int
    peak_bytes: int
    peak_at: int
    saved_bytes: int
    gradient_bytes: int
    input_bytes: Mapping[str, int]
    collectives: tuple[CollectiveUse, ...]


def simulate(program: Program, cost: Prices) -> Simulation:
    """Seconds and live bytes of a program.

    Args:
        program: What one rank runs.
        cost: What its parts take.
    """
    memory = storages(program)
    clock = _Clock(program, cost, memory)
    forward_s: float | None = None
    for instruction in program.instructions:
        if forward_s is None and instruction.phase is Phase.BACKWARD:
            forward_s = clock.now
        clock.run(instruction)
    clock.drain()
    live = live_bytes(program, memory)
    peak_at = max(range(len(live)), key=live.__getitem__, default=0)
    saved, gradients = kinds_at(program, memory, peak_at)
    entered: Counter[str] = Counter()
    for item in program.inputs:
        entered[item.kind] += item.local_type.num_bytes
    return Simulation(
        seconds=clock.now,
        forward_s=clock.now if forward_s is None else forward_s,
        compute_s=clock.compute_s,
        communication_s=clock.communication_s,
        exposed_s=clock.exposed_s,
        slowed_s=clock.slowed_s,
        host_s=clock.host_s,
        num_launched=clock.num_launched,
        peak_bytes=live[peak_at] if live else 0,
        peak_at=peak_at,
        saved_bytes=saved,
        gradient_bytes=gradients,
        input_bytes=dict(entered),
        collectives=clock.uses(),
    )


@dataclass(slots=True)
class _Running:
    """A collective that was issued: its result and the seconds of it that are left."""

    ref: Ref
    left_s: float


class _Clock:
    """Runs instructions on the clocks."""

    def __init__(self, program: Program, cost: Prices, memory: Storages) -> None:
        self.types: dict[Ref, TensorType] = {Ref(i.name): i.local_type for i in program.inputs}
        self.cost = cost
        self.copies = memory.copies
        self.now = self.issued_s = 0.0
        self.compute_s = self.communication_s = 0.0
        self.exposed_s = self.slowed_s = self.host_s = 0.0
        self.num_launched = 0
        self._queues: dict[int, deque[_Running]] = {}
        self._pending: dict[Ref, int] = {}
        self._uses: dict[tuple[str, int, str], list[float]] = {}

    def run(self, instruction: Instruction) -> None:
        for index, kind in enumerate(instruction.outputs):
            self.types[Ref(instruction.name, index)] = kind
        if instruction.op == WAIT:
            self._wait(instruction.operands[0])
        elif instruction.op in COLLECTIVES:
            self._issue()
            self._start(instruction)
        elif not instruction.view or instruction.name in self.copies:
            self._issue()
            self._compute(instruction)
        else:
            self.issued_s += self.cost.host_view_s

    def drain(self) -> None:
        """Let every collective end."""
        for ref in list(self._pending):
            self._wait(ref)

    def _issue(self) -> None:
        """The host issues an op; the device idles until it has, collectives go on."""
        self.num_launched += 1
        self.issued_s += self.cost.host_op_s
        late = self.issued_s - self.now
        if late > 0:
            self.host_s += late
            self._pass(late)

    def _compute(self, instruction: Instruction) -> None:
        seconds = self.cost.kernel_s(
            instruction.op,
            tuple(self.types[ref] for ref in instruction.operands),
            instruction.outputs,
            is_causal(instruction.op, instruction.args),
            instruction.flops,
        )
        self.compute_s += seconds
        slow = self.cost.slowdown
        left = seconds
        while left > 0 and self._pending:
            shortest = min(queue[0].left_s for queue in self._queues.values() if queue)
            step = min(left * slow.first, shortest * slow.second)
            self.now += step
            self.slowed_s += step - step / slow.first
            self._advance(step / slow.second)
            left -= step / slow.first
            if left <= seconds * 1e-12:
                left = 0.0
        self.now += left

    def _start(self, instruction: Instruction) -> None:
        axis = instruction.args[1]
        assert isinstance(axis, int)
        size = self.types[instruction.operands[0]].num_bytes
        full = max(size, instruction.outputs[0].num_bytes)
        kind = _KINDS[instruction.op]
        seconds = self.cost.collective_s(kind, full, axis)
        self.communication_s += seconds
        use = self._uses.setdefault((kind, axis, instruction.purpose), [0, 0, 0.0])
        use[0] += 1
        use[1] += full
        use[2] += seconds
        if seconds > 0:
            ref = Ref(instruction.name)
            self._queues.setdefault(axis, deque()).append(_Running(ref, seconds))
            self._pending[ref] = axis

    def _wait(self, ref: Ref) -> None:
        while ref in self._pending:
            queue = self._queues[self._pending[ref]]
            step = queue[0].left_s
            self.exposed_s += step
            self._pass(step)

    def _pass(self, seconds: float) -> None:
        """Time without compute."""
        self.now += seconds
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        """Every axis works on its collectives for so many seconds of theirs."""
        for queue in self._queues.values():
            left = seconds
            while queue and left >= queue[0].left_s - 1e-15:
                left -= queue[0].left_s
                del self._pending[queue.popleft().ref]
            if queue and left > 0:
                queue[0].left_s -= left

    def uses(self) -> tuple[CollectiveUse, ...]:
        return tuple(
            CollectiveUse(kind, axis, purpose, int(count), int(size), seconds)
            for (kind, axis, purpose), (count, size, seconds) in sorted(self._uses.items())
        )
