"""What the ranks of a pipeline hold in a row, without writing the whole row out.

What a turn makes, reads and frees is the same in every microbatch but the first, whose results the
others are added to. So two microbatches are written out; where the turns of the others stand in the
row says when their storages are made, and the last turn that uses one when it is freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Phase, Ref
from autopar.lower.live import (
    DEVICE,
    GRADIENTS,
    HOST,
    SAVED,
    Moment,
    live_bytes,
    moments,
    storages,
)
from autopar.lower.program import Program
from autopar.lower.unroll import Row, Turn, Written, unrolled, written

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Most bytes at once, without what enters the program.

    Attributes:
        peak_bytes: On the device.
        saved_bytes: Of them, made in the forward for the backward.
        gradient_bytes: Of them, of finished gradients.
        host_bytes: Most in host memory.
    """

    peak_bytes: int
    saved_bytes: int
    gradient_bytes: int
    host_bytes: int


def held_in(program: Program, row: Row) -> Held:
    """What is held at most in a row of turns.

    Args:
        program: Of a rank, with all its chunks.
        row: Its turns.
    """
    return Loop(program, row).held(row)


class _Uses(dict[Ref, int]):
    """Last instruction that uses a storage; ``all`` the last one in every part."""

    def __init__(self, part_of: Sequence[int]) -> None:
        super().__init__()
        self.part_of = part_of
        self.all: dict[Ref, dict[int, int]] = {}

    def __setitem__(self, ref: Ref, at: int) -> None:
        super().__setitem__(ref, at)
        self.all.setdefault(ref, {})[self.part_of[at]] = at


class Loop:
    """A loop of which two microbatches are written out, to be held against any of its rows."""

    def __init__(self, program: Program, row: Row) -> None:
        """A program and one of its rows."""
        some = [turn for number in (0, 1) for turn in row if turn.microbatch == number]
        self.parts = written(program, some)
        sizes = [len(part.instructions) for part in self.parts]
        self.starts = [0, *itertools.accumulate(sizes)]
        self.part_of = [n for n, size in enumerate(sizes) for _ in range(size)]
        self.part_of.append(len(sizes) - 1)
        whole = unrolled(program, self.parts)
        uses = _Uses(self.part_of)
        self.memory = storages(whole, uses)
        self.uses = uses.all
        self.origin = {i.name: i.origin for i in whole.instructions}
        self.finished = {self.memory.owner[ref] for ref in whole.gradients.values()}
        self.late = [i.phase is Phase.BACKWARD for i in whole.instructions]
        self.late.append(True)

    def held(self, row: Row) -> Held:
        """What is held at most in a row."""
        live = live_bytes(_Replay(self, row).changes())
        at = int(np.argmax(live[:, DEVICE])) if len(live) else 0
        peak = live[at].tolist() if len(live) else [0] * 4
        return Held(
            peak_bytes=peak[DEVICE],
            saved_bytes=peak[SAVED],
            gradient_bytes=peak[GRADIENTS],
            host_bytes=int(live[:, HOST].max(initial=0)),
        )

    def profile(self, row: Row) -> tuple[Moment, ...]:
        """What is held when in a row: of the microbatches of a section, most."""
        replay = _Replay(self, row)
        live = live_bytes(replay.changes())[:, DEVICE]
        found: list[Moment] = []
        for part in self._alike(row):
            most = np.zeros(len(part.instructions), dtype=np.int64)
            for start, size in replay.spans(part):
                # The first microbatch adds nothing to a total at its end.
                most[:size] = np.maximum(most[:size], live[start : start + size])
            found += moments(part.instructions, most)
        return tuple(found)

    def _alike(self, row: Row) -> list[Written]:
        """The parts that tell what a microbatch holds, and what runs before and behind the loop."""
        last = max((turn.microbatch for turn in row), default=0)
        number = min(1, last)
        return [
            part
            for part in self.parts
            if part.turn is None or (part.turn.microbatch == number and not part.posted)
        ]

    def behind(self, row: Row, at: int, without: Container[str] = ()) -> tuple[int, int]:
        """Bytes on the device right behind a turn of a row: made before the loop, and in it.

        Beside what enters the program.

        Args:
            row: The row.
            at: Number of the turn.
            without: Captured nodes whose results are not counted.
        """
        replay, found = _Replay(self, row), []
        counted = [r for r in self.memory.num_bytes if self.origin[r.node] not in without]
        for within in (False, True):
            own = [r for r in counted if (self.number(self.memory.made[r]) is not None) == within]
            made, freed = replay.changes(own)[: replay.ends[at]].sum(axis=0)[:, DEVICE].tolist()
            found.append(int(made - freed))
        return found[0], found[1]

    def number(self, at: int) -> int | None:
        """Microbatch of an instruction; None before and behind the loop."""
        turn = self.parts[self.part_of[at]].turn
        return None if turn is None else turn.microbatch


class _Replay:
    """Where the turns of all microbatches stand in a row."""

    def __init__(self, loop: Loop, row: Row) -> None:
        self.loop = loop
        self.more = np.arange(1, 1 + max((turn.microbatch for turn in row), default=0))
        self.sizes = {
            (part.turn, part.posted): len(part.instructions)
            for part in loop.parts
            if part.turn is not None
        }
        self.offsets: dict[tuple[Turn, bool], int] = {}
        self.ends: list[int] = []
        now = len(loop.parts[0].instructions)
        for at, turn in enumerate(row):
            near = [(other, True) for other in row[at + 1 if at else 0 : at + 2]]
            for part in (*near, (turn, False)):
                self.offsets[part] = now
                now += self._size(*part)
            self.ends.append(now)
        self.behind = now
        self.length = now + len(loop.parts[-1].instructions)

    def _size(self, turn: Turn, posted: bool) -> int:
        """Instructions of a turn, or of what it receives."""
        return self.sizes[turn._replace(microbatch=min(turn.microbatch, 1)), posted]

    def spans(self, part: Written) -> Iterator[tuple[int, int]]:
        """Where the instructions of a part stand in the row, and how many, for all microbatches."""
        if part.turn is None:
            yield 0 if part is self.loop.parts[0] else self.behind, len(part.instructions)
            return
        for (turn, posted), start in self.offsets.items():
            if (turn.section, turn.chunk, posted) == (*part.turn[:2], part.posted):
                yield start, self._size(turn, posted)

    def changes(self, some: Iterable[Ref] | None = None) -> Ints:
        """As of `live.byte_changes`, of the whole row and all storages, or some."""
        found = np.zeros((self.length + 1, 2, 4), dtype=np.int64)
        sizes = self.loop.memory.num_bytes
        for ref in sizes if some is None else some:
            size = sizes[ref]
            made = self.loop.memory.made[ref]
            numbers = self.more if self.loop.number(made) == 1 else np.zeros(1, dtype=np.int64)
            self._add(found, (ref, size), made, numbers)
        return found[: self.length]

    def _add(self, found: Ints, storage: tuple[Ref, int], made: int, numbers: Ints) -> None:
        """Add what some microbatches make of a storage, and free."""
        ref, size = storage
        loop = self.loop
        uses = list(loop.uses[ref].values())
        ends = np.stack([self._last(at, made, numbers) for at in uses])
        late = np.array([loop.late[at] for at in uses])[ends.argmax(axis=0)]
        for column, places in ((0, self._at(made, numbers)), (1, ends.max(axis=0))):
            if ref in loop.memory.on_host:
                np.add.at(found[:, column, HOST], places, size)
                continue
            np.add.at(found[:, column, DEVICE], places, size)
            if ref in loop.finished:
                np.add.at(found[:, column, GRADIENTS], places, size)
            elif not loop.late[made]:
                np.add.at(found[:, column, SAVED], places[late], size)

    def _at(self, at: int, numbers: Ints) -> Ints:
        """Where an instruction stands in the row, for some microbatches."""
        number = self.loop.part_of[at]
        within, part = at - self.loop.starts[number], self.loop.parts[number]
        if part.turn is None:
            return np.full(len(numbers), within + (self.behind if number else 0))
        section, chunk, _ = part.turn
        places = [self.offsets[Turn(section, chunk, n), part.posted] for n in numbers.tolist()]
        return np.array(places, dtype=np.int64) + within

    def _last(self, at: int, made: int, numbers: Ints) -> Ints:
        """Where a use stands, of what some microbatches make: the last, if later ones use it."""
        if at == len(self.loop.late) - 1:
            return np.full(len(numbers), self.length)
        using, making = self.loop.number(at), self.loop.number(made)
        if using == 1 and making != 1:
            return np.full(len(numbers), self._at(at, self.more).max())
        return self._at(at, numbers)
