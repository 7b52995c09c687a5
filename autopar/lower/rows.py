"""The rows of a schedule in the words of programs: which section of which chunk runs when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.lower.program import Section
from autopar.lower.unroll import Row, Turn
from autopar.schedules.actions import Kind
from autopar.schedules.table import schedule_named

SECTIONS: Mapping[Kind, Section] = {
    Kind.FORWARD: Section.FORWARD,
    Kind.BACKWARD: Section.BACKWARD,
    Kind.INPUT_GRADIENT: Section.BACKWARD,
    Kind.WEIGHT_GRADIENT: Section.WEIGHT_GRADIENT,
}


def turns_of(
    schedule: str, num_stages: int, num_chunks: int, microbatches: int
) -> tuple[tuple[Turn, ...], ...]:
    """What the ranks of every stage do, in order.

    Args:
        schedule: A name of ``autopar.schedules``.
        num_stages: Groups of ranks.
        num_chunks: Chunks of the model that each holds.
        microbatches: Of a step.

    Raises:
        HintError: There is no such schedule.
        UnsupportedError: The schedule does not exist for these numbers.
    """
    rows = schedule_named(schedule).generate(num_stages, num_chunks, microbatches)
    return tuple(tuple(Turn(SECTIONS[a.kind], a.chunk, a.microbatch) for a in row) for row in rows)


def memory_turns(row: Row) -> tuple[Turn, ...]:
    """The turns of the first few microbatches: as many as show all that the row ever holds at once.

    What is held while a turn runs depends on it, on the next one, whose messages may have come, on
    how many microbatches of every chunk are in which part of their way, and on which sums have
    begun. As many microbatches are kept as leave, for every turn of the row, one that is alike and
    holds no less.
    """
    wanted = _most_held(row)
    microbatches = 1 + max((turn.microbatch for turn in row), default=0)
    count = 0
    while (count := count + 1 + count // 4) < microbatches:
        some = tuple(turn for turn in row if turn.microbatch < count)
        if _all_covered(wanted, _most_held(some)):
            return some
    return tuple(row)


def holds_no_more(row: Row, other: Row) -> bool:
    """Whether the same program holds no more in a row than in another one, as `memory_turns`."""
    return _all_covered(_most_held(row), _most_held(other))


def _all_covered(wanted: _Held, found: _Held) -> bool:
    """Whether every state of a kind of turn has one of the same kind that holds no less."""
    return all(
        any(_covers(one, state) for one in found.get(turns, ()))
        for turns, states in wanted.items()
        for state in states
    )


_State = Counter[tuple[int, Section]]
"""Microbatches by chunk and the last section they ran; for the epilogue how many parts of a
backward have begun their sums."""

_Held = Mapping[tuple[object, ...], Sequence[_State]]
"""For every kind of turn and next turn, states in front of it."""


def _most_held(row: Row) -> dict[tuple[object, ...], list[_State]]:
    """For every kind of turn and next turn, the states in front of it that no other covers."""
    splits = any(turn.section is Section.WEIGHT_GRADIENT for turn in row)
    state: _State = Counter()
    found: dict[tuple[object, ...], list[_State]] = {}
    for at, (section, chunk, _) in enumerate(row):
        own = found.setdefault((section, chunk, *(t[:2] for t in row[at + 1 : at + 2])), [])
        if not any(_covers(other, state) for other in own):
            own[:] = [other for other in own if not _covers(state, other)]
            own.append(state.copy())
        _advance(state, section, chunk, splits)
    return found


def _advance(state: _State, section: Section, chunk: int, splits: bool) -> None:
    """Count what is held behind a turn."""
    if section is Section.FORWARD:
        state[chunk, section] += 1
        return
    state[chunk, Section.FORWARD if section is Section.BACKWARD else Section.BACKWARD] -= 1
    state[chunk, Section.BACKWARD] += section is Section.BACKWARD and splits
    begun = 1 if section is Section.BACKWARD else 2
    state[chunk, Section.EPILOGUE] = max(state[chunk, Section.EPILOGUE], begun)


def _covers(one: _State, other: _State) -> bool:
    return all(one[key] >= count for key, count in other.items())
