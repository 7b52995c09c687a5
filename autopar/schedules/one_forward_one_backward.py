"""Schedules whose backward is whole: GPipe, 1F1B and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.actions import Action, Kind, Row, Schedule


def gpipe(lanes: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Source:
        Huang et al., GPipe, NeurIPS 2019.
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return tuple(
        tuple(Action(kind, lane, m) for kind in kinds for m in range(microbatches))
        for lane in range(lanes)
    )


def early_backward(warm_up: Sequence[int], microbatches: int) -> Schedule:
    """Lane i starts with ``warm_up[i]`` forwards, then one backward, one forward in turn.

    Source:
        Fan et al., DAPPLE, PPoPP 2021, section 3.2; with ``S - i`` forwards it is 1F1B, Narayanan
        et al., PipeDream, SOSP 2019.
    """
    return tuple(
        _in_turn(
            [Action(Kind.FORWARD, lane, m) for m in range(microbatches)],
            [Action(Kind.BACKWARD, lane, m) for m in range(microbatches)],
            first,
        )
        for lane, first in enumerate(warm_up)
    )


def interleaved(lanes: int, chunks: int, microbatches: int) -> Schedule:
    """Lane i holds the chunks i, i + S, ...; runs of S microbatches pass each chunk in turn.

    Lane i does ``2 (S - i - 1) + (v - 1) S`` forwards, then one forward, one backward in turn. The
    microbatches are a multiple of the lanes, or fewer: then they are one run.

    Source:
        Narayanan et al., SC 2021, section 2.2, and the order of Megatron-LM.
    """
    order = [
        (chunk, start + m)
        for start in range(0, microbatches, lanes)
        for chunk in range(chunks)
        for m in range(min(lanes, microbatches))
    ]
    rows = []
    for lane in range(lanes):
        forwards = [Action(Kind.FORWARD, c * lanes + lane, m) for c, m in order]
        backwards = [Action(Kind.BACKWARD, (chunks - 1 - c) * lanes + lane, m) for c, m in order]
        warm_up = 2 * (lanes - lane - 1) + (chunks - 1) * lanes + 1
        rows.append(_in_turn(forwards, backwards, warm_up))
    return tuple(rows)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Row:
    """`warm_up` forwards, then one backward, one forward in turn, then the other backwards."""
    row = list(forwards[:warm_up])
    later = forwards[warm_up:]
    for backward, forward in zip(backwards, later, strict=False):
        row += [backward, forward]
    return (*row, *backwards[len(later) :])
