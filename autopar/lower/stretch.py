"""Programs of few copies of a block, read as if they had all of them.

A program lowered from a shortened graph has the first and last copies of every block. Where two
copies follow each other instruction for instruction, the stretch between them repeats: `stretched`
finds it, and says in which order the instructions of the whole program would run. Nothing is
extrapolated: every instruction of every copy has its turn, and what does not repeat is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Program, ProgramInput

Place = tuple[int, int, int]
"""Block, place in it, number of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The copies that a shortened graph has and those that it lacks.

    Attributes:
        places: Of every captured node (and parameter name) of a block that was shortened.
        more: For every block, the copies that are missing.
        typical: For every block, the number of a copy in its middle.
    """

    places: Mapping[str, Place] = field(default_factory=dict)
    more: tuple[int, ...] = ()
    typical: int = 1


ONCE = Repeats()
"""Of a program that has all of its copies."""


class NotPeriodicError(Exception):
    """The copies of a program do not follow each other alike."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The order in which instructions run.

    Attributes:
        order: Index of the instruction of every turn.
        pair: A number of every turn; a wait has that of the turn whose end it waits for.
        loops: First turn, length and times of what repeats, in order; the first time not counted.
    """

    order: NDArray[np.int64]
    pair: NDArray[np.int64]
    loops: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Instructions ``[start, stop)`` that repeat, copy after copy by ``step``."""

    start: int
    stop: int
    block: int
    step: int


def weights(program: Program, repeats: Repeats) -> Iterator[tuple[ProgramInput, int]]:
    """What enters a program, and how often it does in the whole one."""
    for item in program.inputs:
        place = repeats.places.get(item.name)
        often = 1
        if place is not None and place[2] == repeats.typical:
            often += repeats.more[place[0]]
        yield item, often


def in_turn(starts: Sequence[int]) -> Turns:
    """One turn an instruction; ``starts`` as of `stretched`."""
    return Turns(np.arange(len(starts)), np.asarray(starts, dtype=np.int64))


def stretched(
    origins: Sequence[str], signs: Sequence[Hashable], starts: Sequence[int], repeats: Repeats
) -> Turns:
    """The turns of the whole program.

    Args:
        origins: Captured node of every instruction.
        signs: Of every instruction, what must agree for two to be alike.
        starts: For every wait, the index of what it waits for; for others, their own.
        repeats: The copies that are there and those that are not.

    Raises:
        NotPeriodicError: Two copies in the middle differ.
    """
    keys = _keys(origins, repeats)
    chunks = _chunks(keys, signs, starts, repeats)
    _check(keys, chunks, repeats)
    return _turns(keys, starts, chunks, repeats)


_Key = tuple[int, int, int, int] | None
"""Block, place, ordinal among the instructions of the place, copy; None outside of blocks."""


def _keys(origins: Sequence[str], repeats: Repeats) -> list[_Key]:
    seen: dict[str, int] = defaultdict(int)
    keys: list[_Key] = []
    for origin in origins:
        place = repeats.places.get(origin)
        if place is None:
            keys.append(None)
            continue
        keys.append((place[0], place[1], seen[origin], place[2]))
        seen[origin] += 1
    return keys


def _chunks(
    keys: Sequence[_Key], signs: Sequence[Hashable], starts: Sequence[int], repeats: Repeats
) -> list[_Chunk]:
    """Runs of instructions whose next copy lies one run behind, as often as they are long."""
    where = {key: at for at, key in enumerate(keys) if key is not None}

    def ahead(at: int) -> tuple[int, int, int] | None:
        """Block, step and distance of the same instruction of the next copy, if they are alike."""
        key = keys[at] if at < len(keys) else None
        if key is None:
            return None
        for step in (1, -1):
            other = where.get((*key[:3], key[3] + step), -1)
            same = other > at and signs[other] == signs[at]
            if same and _place(keys[starts[at]]) == _place(keys[starts[other]]):
                return key[0], step, other - at
        return None

    found: list[_Chunk] = []
    start, now = 0, ahead(0)
    for at in range(1, len(keys) + 1):
        here = ahead(at)
        if here == now:
            continue
        if now is not None and at - start >= now[2]:
            block, step, distance = now
            own = {_place(key) for key in keys[start : start + distance]}
            # The gap is behind this copy: what repeats must repeat there.
            before = repeats.typical if step > 0 else repeats.typical + 1
            there = {_place(key) for key in keys[start:at] if key is not None and key[3] == before}
            if own == there:
                found.append(_Chunk(start, start + distance, block, step))
        start, now = at, here
    return _apart(keys, found)


def _apart(keys: Sequence[_Key], chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """The longest chunks that have no place in common."""
    taken: set[tuple[int, ...] | None] = set()
    found = []
    for chunk in sorted(chunks, key=lambda c: c.start - c.stop):
        own = {_place(key) for key in keys[chunk.start : chunk.stop]}
        if not own & taken:
            found.append(chunk)
            taken |= own
    return found


def _place(key: _Key) -> tuple[int, ...] | None:
    return None if key is None else key[:3]


def _check(keys: Sequence[_Key], chunks: Sequence[_Chunk], repeats: Repeats) -> None:
    """Every instruction of a copy in the middle is in one chunk, once."""
    covered = [_place(key) for chunk in chunks for key in keys[chunk.start : chunk.stop]]
    middle = [
        {_place(key) for key in keys if key is not None and key[3] == repeats.typical + more}
        for more in (0, 1)
    ]
    if len(covered) != len(set(covered)) or not set(covered) == middle[0] == middle[1]:
        raise NotPeriodicError


def _turns(
    keys: Sequence[_Key], starts: Sequence[int], chunks: Sequence[_Chunk], repeats: Repeats
) -> Turns:
    number = _numbers(keys)
    ends: dict[int, tuple[int, int]] = {}
    usual: dict[int, int] = {}
    for chunk in chunks:
        for at in range(chunk.start, chunk.stop):
            ends[number[at]] = (chunk.stop, chunk.step)
            usual[number[at]] = number[starts[at]]
    own = np.zeros(len(keys), dtype=np.int64)
    for at, key in enumerate(keys):
        if key is not None:
            stop, step = ends.get(number[at], (len(keys), 1))
            late = (at >= stop) == (step > 0)
            own[at] = key[3] + (repeats.more[key[0]] if late else 0)
    # A wait in step with its copies belongs to its turn, any other to what it waits for.
    paired = np.asarray(
        [
            own[at] if usual.get(number[at]) == number[start] else own[start]
            for at, start in enumerate(starts)
        ],
        dtype=np.int64,
    )
    first = np.asarray([number[start] for start in starts], dtype=np.int64)
    span = int(own.max(initial=0)) + max(repeats.more) + 1
    order, copy, loops = [], [], []
    done = turns = 0
    for chunk in sorted(chunks, key=lambda c: c.stop):
        more = repeats.more[chunk.block]
        again = np.arange(chunk.start, chunk.stop)
        shifts = np.repeat(np.arange(1, more + 1), len(again)) * chunk.step
        order += [np.arange(done, chunk.stop), np.tile(again, more)]
        copy += [paired[done : chunk.stop], np.tile(paired[again], more) + shifts]
        turns += chunk.stop - done
        loops.append((turns, len(again), more))
        turns += len(again) * more
        done = chunk.stop
    order.append(np.arange(done, len(keys)))
    copy.append(paired[done:])
    turn = np.concatenate(order)
    return Turns(turn, first[turn] * span + np.concatenate(copy), tuple(loops))


def _numbers(keys: Sequence[_Key]) -> list[int]:
    """A number for every place of a block and every instruction outside of blocks."""
    known: dict[Hashable, int] = {}
    return [
        known.setdefault(at if key is None else key[:3], len(known)) for at, key in enumerate(keys)
    ]
