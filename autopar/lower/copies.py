"""Copies to host memory and back, beside the compute that hides them.

A copy to the host starts where its operand is made and is waited for, which frees the operand,
where the compute behind it has taken as long as the copies in front; a copy back starts so long
before its first reader. Each direction does one copy at a time, in the order in which values are
made or read, and neither leaves its section. `IN_FLIGHT` bounds what waits: where the link is
slower than the compute, compute waits for it rather than memory filling up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.lower.program import TO_DEVICE, TO_HOST, WAIT, Instruction, Program, Section

IN_FLIGHT = 2
"""Bytes on their way in each direction, in sizes of the largest copy."""


def spread_copies(program: Program, seconds: Mapping[str, float]) -> Program:
    """The program with every copy and the wait for it in their places.

    Args:
        program: Of one rank.
        seconds: Of kernels and copies by name. Without them, every copy is waited for where it
            starts.
    """
    mover = _Mover(program, seconds)
    return replace(program, instructions=tuple(mover.run()))


_Part = tuple[Section, int]
"""Section and chunk."""


class _Mover:
    """Working state of `spread_copies`.

    Attributes:
        rest: What is no copy and no wait for one, in order.
        before: What goes in front of each of ``rest``, in order.
    """

    def __init__(self, program: Program, seconds: Mapping[str, float]) -> None:
        instructions = program.instructions
        # Without a loop and stages, what is behind the backward runs as soon as it can.
        alone = program.microbatches == 1 and not (program.sends or program.receives)
        self.beside = {Section.EPILOGUE: (Section.BACKWARD, Section.EPILOGUE)} if alone else {}
        self.seconds = seconds
        copies = {i.name: i for i in instructions if i.op in (TO_HOST, TO_DEVICE)}
        waits = [i for i in instructions if i.op == WAIT and i.operands[0].node in copies]
        self.wait_of = {i.operands[0].node: i for i in waits}
        moved = copies.keys() | {i.name for i in waits}
        self.rest = [i for i in instructions if i.name not in moved]
        self.copies = list(copies.values())
        self.before: dict[int, list[Instruction]] = defaultdict(list)
        self.made = {i.name: at for at, i in enumerate(self.rest)}
        self.read: dict[str, int] = {}
        for at, instruction in enumerate(self.rest):
            for ref in instruction.operands:
                self.read.setdefault(ref.node, at)
        self.span: dict[_Part, tuple[int, int]] = {}
        for at, instruction in enumerate(self.rest):
            part = (instruction.section, instruction.chunk)
            first, last = self.span.get(part, (at, at))
            # What nobody reads is waited for at the very end, when its section has long been over.
            late = instruction.op == WAIT or instruction.view
            self.span[part] = (first, last if late else at + 1)

    def run(self) -> list[Instruction]:
        parts: dict[tuple[str, _Part], list[Instruction]] = defaultdict(list)
        for copy in self.copies:
            parts[copy.op, (copy.section, copy.chunk)].append(copy)
        for (op, part), copies in parts.items():
            place = self._leave if op == TO_HOST else self._return
            place(copies, *self._clock(part))
        found: list[Instruction] = []
        for at, instruction in enumerate(self.rest):
            found += self.before.get(at, ())
            found.append(instruction)
        return [*found, *self.before.get(len(self.rest), ())]

    def _clock(self, part: _Part) -> tuple[int, int, list[float]]:
        """First and last place of a section, and when each instruction starts in it."""
        sections = self.beside.get(part[0], (part[0],))
        spans = [self.span[s, part[1]] for s in sections if (s, part[1]) in self.span]
        first = min((first for first, _ in spans), default=len(self.rest))
        last = max((last for _, last in spans), default=len(self.rest))
        own = (
            self.seconds.get(i.name, 0.0) if i.section in sections and i.chunk == part[1] else 0.0
            for i in self.rest
        )
        return first, last, list(accumulate(own, initial=0.0))

    def _leave(
        self, copies: Sequence[Instruction], first: int, last: int, at_s: list[float]
    ) -> None:
        """Start copies where their operands are made, and wait for them when they are done."""
        made = [max(first, self.made.get(c.operands[0].node, first - 1) + 1) for c in copies]
        order = sorted(range(len(copies)), key=made.__getitem__)
        room = IN_FLIGHT * max(c.outputs[0].num_bytes for c in copies)
        flying: deque[tuple[Instruction, int]] = deque()
        bytes_, free_s = 0, 0.0
        for number in order:
            copy, place = copies[number], made[number]
            while flying and flying[0][1] <= place:
                bytes_ -= self._land(*flying.popleft())
            while flying and bytes_ + copy.outputs[0].num_bytes > room:
                bytes_ -= self._land(flying.popleft()[0], place)
            self.before[place].append(copy)
            free_s = max(free_s, at_s[place]) + self.seconds.get(copy.name, 0.0)
            flying.append((copy, bisect_left(at_s, free_s, place, last)))
            bytes_ += copy.outputs[0].num_bytes
        for copy, done in flying:
            self._land(copy, done)

    def _land(self, copy: Instruction, place: int) -> int:
        self.before[place].append(self.wait_of[copy.name])
        return copy.outputs[0].num_bytes

    def _return(
        self, copies: Sequence[Instruction], first: int, last: int, at_s: list[float]
    ) -> None:
        """Start copies as late as hides them, and wait for them where they are read."""
        read = [self._first_read(c, last) for c in copies]
        order = sorted(range(len(copies)), key=read.__getitem__)
        room = IN_FLIGHT * max(c.outputs[0].num_bytes for c in copies)
        start_s = float("inf")
        starts: dict[int, int] = {}
        for number in reversed(order):
            start_s = min(start_s, at_s[read[number]]) - self.seconds.get(copies[number].name, 0.0)
            starts[number] = max(first, bisect_right(at_s, start_s, first, read[number] + 1) - 1)
        waiting: deque[tuple[int, int]] = deque()
        bytes_, least = 0, first
        for number in order:
            size = copies[number].outputs[0].num_bytes
            while waiting and bytes_ + size > room:
                place, gone = waiting.popleft()
                bytes_, least = bytes_ - gone, max(least, place)
            starts[number] = least = min(max(least, starts[number]), read[number])
            waiting.append((read[number], size))
            bytes_ += size
        for number in order:
            self.before[starts[number]].append(copies[number])
        for number in order:
            self.before[read[number]].append(self.wait_of[copies[number].name])

    def _first_read(self, copy: Instruction, last: int) -> int:
        return min(self.read.get(self.wait_of[copy.name].name, last), last)
