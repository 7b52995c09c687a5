"""The words of a schedule: actions on chunks and microbatches, in one row per lane.

A *lane* is the group of ranks that runs a row; a *chunk* is a stage of the model, numbered along
the model. A lane may hold several chunks: there are lanes x v of them, and chunk 0 takes the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate


class Kind(StrEnum):
    """What an action computes of one chunk for one microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradients of the input and of the parameters."""
    INPUT_GRADIENT = "input_gradient"
    """The part of the backward that the chunk before waits for."""
    WEIGHT_GRADIENT = "weight_gradient"
    """The rest: nothing waits for it but the optimizer."""

    __hash__ = str.__hash__  # the enum's own is a Python call, and actions are keys everywhere


GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""The kinds that send a gradient to the chunk before."""

LAST_USES = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
"""The kinds behind which what the forward saved is free."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One step of a lane.

    Attributes:
        kind: What is computed.
        chunk: Of which chunk.
        microbatch: For which microbatch.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value} of chunk {self.chunk} for microbatch {self.microbatch}"


Row = tuple[Action, ...]
"""What one lane does, in order."""

Schedule = tuple[Row, ...]
"""One row per lane."""


def chunk_lanes(schedule: Schedule) -> dict[int, int]:
    """The lane of every chunk."""
    return {action.chunk: lane for lane, row in enumerate(schedule) for action in row}


def gradient_kind(schedule: Schedule) -> Kind:
    """The kind that sends gradients: `INPUT_GRADIENT` where the backward is split."""
    kinds = {action.kind for row in schedule for action in row}
    return Kind.INPUT_GRADIENT if Kind.INPUT_GRADIENT in kinds else Kind.BACKWARD


def needs(action: Action, last_chunk: int, gradient: Kind) -> tuple[Action, ...]:
    """The actions whose results an action reads.

    Args:
        action: The one that reads.
        last_chunk: Number of the chunk that makes the loss.
        gradient: The kind that sends gradients in this schedule.
    """
    chunk, microbatch = action.chunk, action.microbatch
    if action.kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, chunk - 1, microbatch),) if chunk else ()
    if action.kind is Kind.WEIGHT_GRADIENT:
        return (Action(gradient, chunk, microbatch),)
    own = Action(Kind.FORWARD, chunk, microbatch)
    if chunk == last_chunk:
        return (own,)
    return (own, Action(gradient, chunk + 1, microbatch))


def live_counts(row: Iterable[Action], pending_share: float = 1.0) -> Iterator[float]:
    """Behind every action, how many microbatches of chunks hold what their forward saved.

    Those between their two gradients count `pending_share`.
    """
    change = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.INPUT_GRADIENT: pending_share - 1,
        Kind.WEIGHT_GRADIENT: -pending_share,
    }
    return accumulate(change[action.kind] for action in row)
