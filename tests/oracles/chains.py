"""Chains of ops on two adjacent stages: what every cut costs, by trying all that may run again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op of a chain, its backward included.

    Attributes:
        seconds: Of one microbatch.
        again_s: What it takes longer if it runs again in the backward.
        resident_bytes: Held whatever runs again.
        saved_bytes: Held for every microbatch in flight, unless it runs again.
    """

    seconds: float
    again_s: float
    resident_bytes: int
    saved_bytes: int


Price = Callable[[Sequence[Op], int], float]
"""Seconds that ops on a stage take longer to fit, from those in flight; infinite if they cannot."""


def held_bytes(ops: Sequence[Op], in_flight: int) -> int:
    """What a stage holds if nothing runs again."""
    return sum(op.resident_bytes + in_flight * op.saved_bytes for op in ops)


def least_again_s(limit_bytes: int) -> Price:
    """The price of what may run again: the cheapest of all sets of ops whose stage then fits."""

    def price(ops: Sequence[Op], in_flight: int) -> float:
        best = math.inf
        for again in itertools.product((False, True), repeat=len(ops)):
            kept = sum(op.saved_bytes for op, runs in zip(ops, again, strict=True) if not runs)
            if sum(op.resident_bytes for op in ops) + in_flight * kept <= limit_bytes:
                best = min(best, sum(o.again_s for o, runs in zip(ops, again, strict=True) if runs))
        return best

    return price


def by_excess(curve: Callable[[int], float], limit_bytes: int) -> Price:
    """One price for both stages: a curve of the bytes beyond a limit."""
    return lambda ops, in_flight: curve(max(0, held_bytes(ops, in_flight) - limit_bytes))


@dataclass(frozen=True, slots=True)
class TwoStages:
    """A chain on two stages; ``in_flight`` microbatches are held by each."""

    ops: Sequence[Op]
    in_flight: tuple[int, int]
    price: Price

    def sides(self, at: int) -> tuple[tuple[Sequence[Op], int], tuple[Sequence[Op], int]]:
        """Ops of each stage, with what is in flight there, if the second begins at a position."""
        first, second = self.in_flight
        return (self.ops[:at], first), (self.ops[at:], second)

    def longer_s(self, at: int) -> float:
        """Seconds of the stage that takes longest, with what it pays to fit."""
        return max(sum(o.seconds for o in ops) + self.price(ops, k) for ops, k in self.sides(at))

    def balanced(self, measure: Price) -> int:
        """Of the two cuts between which the first stage overtakes the second, the lesser one.

        Args:
            measure: Of a stage, which no op more makes less.
        """
        count = len(self.ops)
        sizes = [[measure(ops, k) for ops, k in self.sides(at)] for at in range(count + 1)]
        over = next((at for at, (one, two) in enumerate(sizes) if one >= two), count)
        return min((max(0, over - 1), over), key=lambda at: max(sizes[at]))
