"""Copies to host memory and back, beside the compute that hides them.

A copy to the host starts where its operand is made and is waited for, which frees the operand,
where the compute behind it has taken as long as the copies in front; a copy back starts so long
before its first reader. Each direction does one copy at a time, in the order in which values are
made or read, and neither leaves its section. What is on its way is bounded, by `IN_FLIGHT` or by
the bytes that the plan leaves for it: where the link is slower than the compute, compute waits for
it rather than memory filling up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from autopar.lower.live import DEVICE, byte_changes, live_bytes, storages
from autopar.lower.program import TO_DEVICE, TO_HOST, WAIT, Instruction, Program, Section

IN_FLIGHT = 2
"""Bytes on their way in each direction, in sizes of the largest copy, where no plan says more."""


def spread_copies(program: Program, seconds: Mapping[str, float]) -> Program:
    """The program with every copy and the wait for it in their places.

    Args:
        program: Of one rank.
        seconds: Of kernels and copies by name. Without them, every copy is waited for where it
            starts.
    """
    return replace(program, instructions=tuple(_Mover(program, seconds).run()))


_Part = tuple[Section, int]
"""Section and chunk."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A copy to the host that is on its way, and the place at which it is done."""

    copy: Instruction
    done: int


class _Bound(Protocol):
    """What may be on its way at once."""

    def is_over(self, place: int, leaving: Iterable[_Leaving]) -> bool:
        """Whether these are too much behind a place."""

    def leaves(self, leaving: _Leaving, landed: int) -> None:
        """Note where a copy to the host is waited for."""

    def start(self, copy: Instruction, wanted: int, read: int) -> int:
        """Where a copy back may start, at the place that is wanted or later; it is noted."""


class _Window:
    """So many bytes in one direction."""

    def __init__(self, copies: Sequence[Instruction]) -> None:
        self.room = IN_FLIGHT * max(map(_num_bytes, copies))
        self.waiting: deque[tuple[int, int]] = deque()
        self.num_bytes, self.least = 0, 0

    def is_over(self, place: int, leaving: Iterable[_Leaving]) -> bool:
        return sum(_num_bytes(own.copy) for own in leaving) > self.room

    def leaves(self, leaving: _Leaving, landed: int) -> None:
        pass

    def start(self, copy: Instruction, wanted: int, read: int) -> int:
        size = _num_bytes(copy)
        while self.waiting and self.num_bytes + size > self.room:
            place, gone = self.waiting.popleft()
            self.num_bytes, self.least = self.num_bytes - gone, max(self.least, place)
        self.waiting.append((read, size))
        self.num_bytes += size
        return min(max(self.least, wanted), read)


class _Room:
    """So many bytes beyond the most that is held when nothing is on its way.

    A program that runs once may have more on its way wherever it holds less. What the sections of
    a loop hold depends on the microbatches beside them: there it is so many bytes at any place.

    Attributes:
        free: Bytes left beside every instruction of the program that copies nothing ahead.
        first: Of every place, and behind the last, the first of these instructions; ``own`` the
            one that is no copy and no wait for one.
        at: Where a copy stands among them.
        held: Of a copy to the host, what it holds; ``last`` where that is used for the last time,
            ``num_bytes`` what it takes.
    """

    def __init__(self, program: Program, more: int, once: bool) -> None:
        late = _Mover(replace(program, copy_room_bytes=None), {})
        instructions = late.run()
        program = replace(program, instructions=tuple(instructions))
        memory = storages(program)
        self.free = np.full(len(instructions), more, dtype=np.int64)
        if once:
            held = live_bytes(byte_changes(program, memory))[:, DEVICE]
            self.free += held.max(initial=0) - held
        self.at = {i.name: number for number, i in enumerate(instructions)}
        self.own = [*(self.at[i.name] for i in late.rest), len(instructions)]
        self.first = [0, *(at + 1 for at in self.own)]
        out = [i for i in instructions if i.op == TO_HOST]
        self.held = {i.name: memory.owner[i.operands[0]] for i in out}
        self.last = {ref: memory.last[ref] for ref in self.held.values()}
        self.num_bytes = {ref: memory.num_bytes.get(ref, 0) for ref in self.last}

    def is_over(self, place: int, leaving: Iterable[_Leaving]) -> bool:
        if place >= len(self.own) - 1:
            return False
        on_way = tuple(leaving)
        until, newest = self.own[place + 1], self.at[on_way[-1].copy.name]
        since = newest if newest >= self.first[place] else self.own[place]
        held = {self.held[own.copy.name] for own in on_way}
        more = sum(self.num_bytes[ref] for ref in held if self.last[ref] + 1 < until)
        return more > int(self.free[since:until].min())

    def leaves(self, leaving: _Leaving, landed: int) -> None:
        ref, until = self.held[leaving.copy.name], self.own[landed]
        self.free[self.last[ref] + 1 : until] -= self.num_bytes[ref]
        self.last[ref] = max(self.last[ref], until - 1)

    def start(self, copy: Instruction, wanted: int, read: int) -> int:
        size, end, place = _num_bytes(copy), self.at[copy.name], read
        while place > wanted and (self.free[self.first[place - 1] : end] >= size).all():
            place, end = place - 1, self.first[place - 1]
        self.free[self.first[place] : self.at[copy.name]] -= size
        return place


def _num_bytes(copy: Instruction) -> int:
    return copy.outputs[0].num_bytes


class _Mover:
    """Working state of `spread_copies`.

    Attributes:
        rest: What is no copy and no wait for one, in order.
        before: What goes in front of each of ``rest``, in order.
    """

    def __init__(self, program: Program, seconds: Mapping[str, float]) -> None:
        instructions = program.instructions
        # Without a loop and stages, what is behind the backward runs as soon as it can.
        once = program.microbatches == 1 and not (program.sends or program.receives)
        self.beside = {Section.EPILOGUE: (Section.BACKWARD, Section.EPILOGUE)} if once else {}
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
        more = program.copy_room_bytes if seconds else None
        self.room = None if more is None else _Room(program, more, once)

    def run(self) -> list[Instruction]:
        parts: dict[tuple[str, _Part], list[Instruction]] = defaultdict(list)
        for copy in self.copies:
            parts[copy.op, (copy.section, copy.chunk)].append(copy)
        for (op, part), copies in sorted(parts.items(), key=lambda own: own[0][0] == TO_DEVICE):
            place = self._leave if op == TO_HOST else self._return
            place(copies, self.room or _Window(copies), *self._clock(part))
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
        self,
        copies: Sequence[Instruction],
        bound: _Bound,
        first: int,
        last: int,
        at_s: list[float],
    ) -> None:
        """Start copies where their operands are made, and wait for them when they are done."""
        starting: dict[int, list[Instruction]] = defaultdict(list)
        for copy in copies:
            made = self.made.get(copy.operands[0].node, first - 1) + 1
            starting[max(first, made)].append(copy)
        leaving: deque[_Leaving] = deque()
        free_s = 0.0

        def land(place: int, *new: _Leaving) -> None:
            """Wait for what is done, and for what is too much beside a new one."""
            while leaving:
                if leaving[0].done > place and not bound.is_over(place, (*leaving, *new)):
                    break
                own = leaving.popleft()
                self.before[place].append(self.wait_of[own.copy.name])
                bound.leaves(own, place)

        for place in range(min(starting), max(last, *starting) + 1):
            for copy in starting.get(place, ()):
                free_s = max(free_s, at_s[place]) + self.seconds.get(copy.name, 0.0)
                new = _Leaving(copy, bisect_left(at_s, free_s, place, last))
                land(place, new)
                self.before[place].append(copy)
                leaving.append(new)
            land(place)

    def _return(
        self,
        copies: Sequence[Instruction],
        bound: _Bound,
        first: int,
        last: int,
        at_s: list[float],
    ) -> None:
        """Start copies as late as hides them, and wait for them where they are read."""
        read = [self._first_read(c, last) for c in copies]
        order = sorted(range(len(copies)), key=read.__getitem__)
        start_s = float("inf")
        wanted: dict[int, int] = {}
        for number in reversed(order):
            start_s = min(start_s, at_s[read[number]]) - self.seconds.get(copies[number].name, 0.0)
            wanted[number] = max(first, bisect_right(at_s, start_s, first, read[number] + 1) - 1)
        starts: dict[int, int] = {}
        least = first
        for number in order:
            earliest = min(max(least, wanted[number]), read[number])
            starts[number] = least = bound.start(copies[number], earliest, read[number])
        for number in order:
            self.before[starts[number]].append(copies[number])
        for number in order:
            self.before[read[number]].append(self.wait_of[copies[number].name])

    def _first_read(self, copy: Instruction, last: int) -> int:
        return min(self.read.get(self.wait_of[copy.name].name, last), last)
