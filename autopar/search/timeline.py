"""Step time of a pipeline, stage by stage from the last one: what a dynamic program needs.

A *timeline* keeps a few numbers of the stages placed so far (the *state*), all of them the smaller
the better, and says what they become with one more stage in front. So of two ways to place the same
blocks on the same devices, one whose numbers are all no larger is no worse whatever comes in front,
and of two options of one stage, one whose *measures* are all no larger.

The closed forms are those of `cost_models.pipeline`, with one message time a border and the seconds
``d`` of a stage's gradient reduction behind its last backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FORWARD, BACKWARD, WEIGHT, REDUCE, BEFORE = range(5)
COSTS = 5
"""Columns of the costs of a stage: seconds of a microbatch; in a step, of the reduction, and of
what comes ahead of the first forward.

The weight gradient's seconds are part of the backward's.
"""


class Timeline(Protocol):
    """A schedule whose step time can be built up from the last stage to the first."""

    @property
    def exact(self) -> bool:
        """Whether `seconds` is the closed form; else it is a lower bound of the schedule."""
        ...

    def live(self, behind: int, num_stages: int) -> int:
        """Most microbatches that a stage with `behind` stages behind it holds."""
        ...

    def measures(self, costs: Floats, behind: int) -> Floats:
        """[options, measures] of [options, COSTS]: no larger in all of them is no worse."""
        ...

    def start(self) -> Floats:
        """[1, numbers]: no stage yet."""
        ...

    def extend(self, states: Floats, costs: Floats, send_s: float, behind: int) -> Floats:
        """[states, options, numbers] with one more stage in front.

        `send_s` is what a message takes to the stages behind.
        """
        ...

    def seconds(self, states: Floats) -> Floats:
        """[states] seconds of the step if these are all stages."""
        ...

    def least_s(self, states: Floats, before_s: float) -> Floats:
        """[states] least seconds of the step, if the stages in front take `before_s` at least."""
        ...

    def most_s(self, cap_s: float, before_s: float, beyond_s: float, behind: int) -> float:
        """Seconds of one stage, for one microbatch, at which the step takes `cap_s` at least.

        Args:
            cap_s: Of the step.
            before_s: Seconds of the stages in front, at least.
            beyond_s: Of those behind.
            behind: How many are behind.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """1F1B: `cost_models.pipeline.one_f_one_b_chained_s`.

    With L the way from a stage to the last one and back, the state is

    * ``L``, the seconds of a microbatch on the foremost stage, and the longest way from a stage's
      first forward to its last backward;
    * for reductions: ``W``, the longest way from a stage to the end of a reduction behind it; and
      the longest of what they give: a stage's own end and d, or the way of its last microbatch
      from the end of its last forward on.
    """

    microbatches: int
    reduces: bool
    exact: bool = True

    def live(self, behind: int, num_stages: int) -> int:
        return min(behind + 1, self.microbatches)

    def measures(self, costs: Floats, behind: int) -> Floats:
        f, b, _, d = costs.T[:BEFORE]
        count, k = self.microbatches, behind
        if k == 0:
            return np.stack([f + b, f + b + d] if self.reduces else [f + b], axis=1)
        if count <= k + 1:
            return np.stack([f, b, d] if self.reduces else [f, b], axis=1)
        # What a stage adds to any number is a sum of these with no negative factor.
        if not self.reduces:
            return np.stack([count * (f + b) - k * f, count * (f + b) - k * b], axis=1)
        return np.stack([f, (count - k - 1) * f + (count - 1) * b, f + b + d], axis=1)

    def start(self) -> Floats:
        state = [0.0, 0.0, 0.0, -np.inf, 0.0]
        return np.array([state if self.reduces else state[:3]])

    def extend(self, states: Floats, costs: Floats, send_s: float, behind: int) -> Floats:
        f, b, _, d = costs.T[:BEFORE]
        both = f + b + 0 * states[:, :1]
        beyond = states[:, :1] + 2 * send_s
        paced, sent = self._paced(f, b, states[:, 1:2] + 2 * send_s, beyond, behind)
        pipe = np.maximum(paced, states[:, 2:3] + both + 2 * send_s)
        if not self.reduces:
            return np.stack([beyond + both, both, pipe], axis=2)
        way = states[:, 3:4] + send_s
        end = np.maximum(pipe + d, sent + way)
        end = np.maximum(end, states[:, 4:5] + f + send_s)
        on = np.maximum(beyond + both + d, way + f)
        return np.stack([beyond + both, both, pipe, on, end], axis=2)

    def _paced(
        self, f: Floats, b: Floats, following: Floats, beyond: Floats, behind: int
    ) -> tuple[Floats, Floats]:
        """[states, options] of a stage's own ways, as of `cost_models.pipeline`."""
        both = f + b
        left = self.microbatches - behind - 2
        if left < 0:
            more = self.microbatches - 1
            own = np.maximum(both + more * np.maximum(f, b) + beyond, self.microbatches * both)
            return own, self.microbatches * f + 0 * beyond
        pace = left * both
        if behind:
            for round_s, stages in ((following, 2), (beyond, behind + 1)):
                rounds, rest = divmod(left, stages)
                pace = np.maximum(pace, rounds * (both + round_s) + rest * both)
        come, leave = np.maximum(behind * f, beyond), np.maximum(behind * b, beyond)
        return 2 * both + come + pace + leave, both + come + pace + f

    def seconds(self, states: Floats) -> Floats:
        return np.asarray(np.maximum(states[:, 2], states[:, 4]) if self.reduces else states[:, 2])

    def least_s(self, states: Floats, before_s: float) -> Floats:
        return states[:, 2] + before_s

    def most_s(self, cap_s: float, before_s: float, beyond_s: float, behind: int) -> float:
        left_s, count = cap_s - before_s, self.microbatches
        if count <= behind + 1:
            return (left_s - beyond_s) / (1 + (count - 1) / 2)
        return min(left_s / count, (left_s - 2 * beyond_s) / (count - behind))


@dataclass(frozen=True, slots=True)
class AllForwardAllBackward:
    """GPipe: two flow shops of equal jobs, `cost_models.pipeline.gpipe_s`, and reductions.

    The state is the sum and the largest of the forwards and of the backwards, and the longest way
    from the first backward to the end of a reduction.
    """

    microbatches: int
    exact: bool = True

    def live(self, behind: int, num_stages: int) -> int:
        return self.microbatches

    def measures(self, costs: Floats, behind: int) -> Floats:
        return costs[:, [FORWARD, BACKWARD, REDUCE]]

    def start(self) -> Floats:
        return np.zeros((1, 5))

    def extend(self, states: Floats, costs: Floats, send_s: float, behind: int) -> Floats:
        f, b, _, d = costs.T[:BEFORE]
        forward = states[:, 0:1] + f + send_s
        slowest_f = np.maximum(states[:, 1:2], f)
        backward = states[:, 2:3] + b + send_s
        slowest_b = np.maximum(states[:, 3:4], b)
        end = np.maximum(states[:, 4:5], backward + (self.microbatches - 1) * slowest_b + d)
        return np.stack([forward, slowest_f, backward, slowest_b, end], axis=2)

    def seconds(self, states: Floats) -> Floats:
        return states[:, 0] + (self.microbatches - 1) * states[:, 1] + states[:, 4]

    def least_s(self, states: Floats, before_s: float) -> Floats:
        more = self.microbatches - 1
        return states[:, 0] + states[:, 2] + before_s + more * (states[:, 1] + states[:, 3])

    def most_s(self, cap_s: float, before_s: float, beyond_s: float, behind: int) -> float:
        return (cap_s - before_s - beyond_s) / self.microbatches


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """ZB-H1: what a stage waits for, all its work, its reduction; the schedule says what else.

    A stage begins when the first microbatch has come through those in front of it, and its
    backwards when that has come back, by when it has no more forwards done than it may hold. The
    state is the longest of these, and the way of one microbatch there and back.
    """

    microbatches: int
    num_stages: int
    exact: bool = False

    def live(self, behind: int, num_stages: int) -> int:
        return min(num_stages, self.microbatches)

    def measures(self, costs: Floats, behind: int) -> Floats:
        f, b, w, d = costs.T[:BEFORE]
        later = self.microbatches - self.live(behind, self.num_stages)
        late = (1 + later) * f + self.microbatches * b + d
        return np.stack([self.microbatches * (f + b) + d, late, f, f + b - w], axis=1)

    def start(self) -> Floats:
        return np.zeros((1, 2))

    def extend(self, states: Floats, costs: Floats, send_s: float, behind: int) -> Floats:
        work, late, f, turn = self.measures(costs, behind).T
        pipe, way = states[:, 0:1], states[:, 1:2] + 2 * send_s
        longest = np.maximum(work, late + way)
        if behind:
            longest = np.maximum(longest, pipe + f + send_s)
        return np.stack([longest, way + turn], axis=2)

    def seconds(self, states: Floats) -> Floats:
        return states[:, 0]

    def least_s(self, states: Floats, before_s: float) -> Floats:
        return states[:, 0]

    def most_s(self, cap_s: float, before_s: float, beyond_s: float, behind: int) -> float:
        return cap_s / self.microbatches


@dataclass(frozen=True, slots=True)
class Begun:
    """A timeline of which stages have something to do ahead of their first forward.

    The step is the longest of what it takes from any stage on, begun when that stage can; what the
    stages in front of it do behind that is not added. The last number of the state is that.
    """

    inner: Timeline

    @property
    def exact(self) -> bool:
        return self.inner.exact

    def live(self, behind: int, num_stages: int) -> int:
        return self.inner.live(behind, num_stages)

    def measures(self, costs: Floats, behind: int) -> Floats:
        return np.column_stack((self.inner.measures(costs, behind), costs[:, BEFORE]))

    def start(self) -> Floats:
        return np.column_stack((self.inner.start(), [0.0]))

    def extend(self, states: Floats, costs: Floats, send_s: float, behind: int) -> Floats:
        grown = self.inner.extend(states[:, :-1], costs, send_s, behind)
        flat = grown.reshape(-1, grown.shape[2])
        ends = self.inner.seconds(flat).reshape(grown.shape[:2]) + costs[:, BEFORE]
        return np.concatenate((grown, np.maximum(ends, states[:, -1:])[:, :, None]), axis=2)

    def seconds(self, states: Floats) -> Floats:
        return states[:, -1]

    def least_s(self, states: Floats, before_s: float) -> Floats:
        return np.maximum(self.inner.least_s(states[:, :-1], before_s), states[:, -1])

    def most_s(self, cap_s: float, before_s: float, beyond_s: float, behind: int) -> float:
        return self.inner.most_s(cap_s, before_s, beyond_s, behind)


def timeline_of(
    schedule: str, *, microbatches: int, num_stages: int, reduces: bool, begins: bool
) -> Timeline | None:
    """The timeline of a schedule of one chunk a stage; None where there is none.

    Args:
        schedule: Its name.
        microbatches: Of the step.
        num_stages: Of the pipeline.
        reduces: Whether any stage has a reduction.
        begins: Whether any has something to do ahead of its first forward.
    """
    known: Mapping[str, Timeline] = {
        "gpipe": AllForwardAllBackward(microbatches),
        "1f1b": OneForwardOneBackward(microbatches, reduces),
        "zb-h1": SplitBackward(microbatches, num_stages),
    }
    found = known.get(schedule)
    return Begun(found) if begins and found is not None else found
