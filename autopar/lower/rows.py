"""The rows of a schedule in the words of programs: which section of which chunk runs when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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
    """Enough of a row for all that its ranks ever hold at once.

    What is held while a turn runs depends on it, on the next one, whose messages may have come, on
    how many microbatches of every chunk are in which part of their way, and on which sums have
    begun. The row is followed to the last turn at which that is new and not less than before; then
    what has begun is finished, so that every value lives as long as in the whole row.
    """
    splits = any(turn.section is Section.WEIGHT_GRADIENT for turn in row)
    state: _State = Counter()
    seen: dict[tuple[object, ...], list[_State]] = {}
    last = 0
    for at, (section, chunk, _) in enumerate(row):
        before = seen.setdefault((section, chunk, *(t[:2] for t in row[at + 1 : at + 2])), [])
        if not any(_covers(other, state) for other in before):
            before.append(state.copy())
            last = at
        _advance(state, section, chunk, splits)
    begun = {turn.microbatch for turn in row[: last + 1]}
    return tuple(turn for turn in row if turn.microbatch in begun)


_State = Counter[tuple[int, Section]]
"""Microbatches by chunk and the last section they ran; 1 in the epilogue's place if sums began."""


def _advance(state: _State, section: Section, chunk: int, splits: bool) -> None:
    """Count what is held behind a turn."""
    if section is Section.FORWARD:
        state[chunk, section] += 1
        return
    state[chunk, Section.FORWARD if section is Section.BACKWARD else Section.BACKWARD] -= 1
    state[chunk, Section.BACKWARD] += section is Section.BACKWARD and splits
    state[chunk, Section.EPILOGUE] = 1


def _covers(one: _State, other: _State) -> bool:
    return all(one[key] >= count for key, count in other.items())
