"""The rows of a schedule in the words of programs: which section of which chunk runs when."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.lower.program import Section
from autopar.lower.unroll import Turn
from autopar.schedules.actions import Kind
from autopar.schedules.table import rows_of

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
    rows = rows_of(schedule, num_stages, num_chunks, microbatches)
    return tuple(tuple(Turn(SECTIONS[a.kind], a.chunk, a.microbatch) for a in row) for row in rows)
