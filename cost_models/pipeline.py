"""Step time, bubbles and live microbatches of pipeline schedules, in closed form.

Stage i of S takes f_i forward and b_i backward for each of G microbatches, t_i = f_i + b_i, and a
message to a neighbour takes c. Exposed collectives and recomputation are part of f and b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.records import require_amount, require_count


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage and one microbatch.

    Attributes:
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward.
    """

    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        require_amount("stage time", "forward_s", self.forward_s, least=0)
        require_amount("stage time", "backward_s", self.backward_s, least=0)

    @property
    def both_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


Sends = float | Sequence[float]
"""Seconds of a message between neighbours, one way: of all, or of each border."""


def _borders(send_s: Sends, num_stages: int) -> Sequence[float]:
    """Seconds of a message at every border."""
    if isinstance(send_s, int | float):
        return [send_s] * (num_stages - 1)
    assert len(send_s) == num_stages - 1, "one message a border"
    return send_s


def gpipe_s(stages: Sequence[StageTime], num_microbatches: int, send_s: Sends = 0.0) -> float:
    """Seconds of all forwards, then all backwards: two flow shops.

    Source:
        Huang et al., GPipe, NeurIPS 2019; the makespan of a flow shop of equal jobs.
    """
    require_count("schedule", "num_microbatches", num_microbatches)
    hops_s = 2 * sum(_borders(send_s, len(stages)))
    slowest_s = max(s.forward_s for s in stages) + max(s.backward_s for s in stages)
    return sum(s.both_s for s in stages) + hops_s + (num_microbatches - 1) * slowest_s


def one_f_one_b_s(stages: Sequence[StageTime], num_microbatches: int, send_s: Sends = 0.0) -> float:
    """Seconds of one forward, one backward with unequal stages and costly messages.

    The last backward of the first stage ends the step, see `one_f_one_b_ends_s`.
    """
    return one_f_one_b_ends_s(stages, num_microbatches, send_s)[0]


def one_f_one_b_reduced_s(
    stages: Sequence[StageTime],
    reduces_s: Sequence[float],
    num_microbatches: int,
    send_s: Sends = 0.0,
) -> float:
    """Seconds of one forward, one backward where each stage reduces gradients at its end."""
    ends_s = one_f_one_b_ends_s(stages, num_microbatches, send_s)
    return max(end + reduce for end, reduce in zip(ends_s, reduces_s, strict=True))


def one_f_one_b_ends_s(
    stages: Sequence[StageTime], num_microbatches: int, send_s: Sends = 0.0
) -> tuple[float, ...]:
    """Seconds until the last backward of every stage in one forward, one backward.

    The longest of these ways through the schedule, so never more than it takes; it is less by at
    most a few thousandths. With k = S - 1 - i stages behind stage i and n = min(k, G - 1):

    * in: the first microbatch is back from stage i after ``E_i = b_i + max(sum f_(j <= i) + sends
      + n max f_(j <= i), E_(i+1) + c)``: stage i has sent off n more, and stages in front of it may
      be slower at that, or it has waited for the stages behind;
    * out: the same backwards, from the last forward of stage i to the end of stage l:
      ``D_i = f_i + max(sum b_(l <= j <= i) + sends + n max b_(l <= j <= i), D_(i+1) + c)``; to a
      stage l behind i, the last microbatch goes forwards first;
    * between them, where G > k + 1, stage i works through G - k - 2 microbatches at the pace of
      round trips of stages i to j: j - i + 1 of them in ``sum t_(i <= m <= j) + 2 sum c``;
    * where G <= k + 1, stage i does all forwards before its first backward, so that E_i or D_i has
      the other way's (G - 1) slowest forwards or backwards in front of it or behind it.
    """
    require_count("schedule", "num_microbatches", num_microbatches)
    paths = _Paths(stages, num_microbatches, _borders(send_s, len(stages)))
    return tuple(paths.end_s(last) for last in range(len(stages)))


class _Paths:
    """The ways through one forward, one backward of which the longest is the step."""

    def __init__(
        self, stages: Sequence[StageTime], num_microbatches: int, sends_s: Sequence[float]
    ) -> None:
        self.forward_s = [s.forward_s for s in stages]
        self.backward_s = [s.backward_s for s in stages]
        self.sends_s = [*sends_s, 0.0]
        self.count = num_microbatches
        self.back_s = self._returns_s(self.backward_s, self.forward_s, 0)
        self.between_s = [self._between_s(i) for i in range(len(stages))]

    def end_s(self, last: int) -> float:
        """Seconds until the last backward of one stage."""
        out_s = self._returns_s(self.forward_s, self.backward_s, last)
        found_s = 0.0
        for i in range(len(self.forward_s)):
            ahead_s = self._way_s(self.forward_s, i, last) if i < last else 0.0
            leave_s = ahead_s + out_s[max(i, last)]
            found_s = max(found_s, self._through_s(i, last, leave_s))
        return found_s

    def _through_s(self, i: int, last: int, leave_s: float) -> float:
        """The longest way that stage i sets the pace of, which it takes `leave_s` to leave."""
        more = self.count - 1
        if self.count > len(self.forward_s) - i:
            return self.back_s[i] + self.between_s[i] + leave_s
        found_s = self._way_s(self.forward_s, 0, i) + more * max(self.forward_s[: i + 1]) + leave_s
        if i >= last:
            slowest_s = max(self.backward_s[last : i + 1])
            down_s = self._way_s(self.backward_s, last, i)
            found_s = max(found_s, self.back_s[i] + down_s + more * slowest_s)
        return found_s

    def _way_s(self, seconds: Sequence[float], first: int, end: int) -> float:
        """Seconds of a microbatch through stages `first` to `end`, and the messages behind them."""
        return sum(seconds[first:end]) + sum(self.sends_s[first:end])

    def _returns_s(
        self, own: Sequence[float], other: Sequence[float], first: int
    ) -> dict[int, float]:
        """`E_i`, or with forwards and backwards swapped `D_i`, of stages from `first` on."""
        found_s: dict[int, float] = {}
        num_stages = len(own)
        for i in reversed(range(first, num_stages)):
            before = min(num_stages - 1 - i, self.count - 1)
            slowest_s = max(other[first : i + 1])
            waits_s = self._way_s(other, first, i) + other[i] + before * slowest_s
            if i + 1 < num_stages:
                waits_s = max(waits_s, found_s[i + 1] + self.sends_s[i])
            found_s[i] = own[i] + waits_s
        return found_s

    def _between_s(self, i: int) -> float:
        """Seconds of the microbatches between those that come in first and leave last."""
        left = self.count - 1 - len(self.forward_s) + i
        if left <= 0:
            return 0.0
        rounds_s = [0.0]
        for j in range(i, len(self.forward_s)):
            sent_s = 2 * self.sends_s[j - 1] if j > i else 0.0
            rounds_s.append(rounds_s[-1] + self.forward_s[j] + self.backward_s[j] + sent_s)
        best_s = [0.0]
        for number in range(1, len(rounds_s)):
            best_s.append(max(rounds_s[n] + best_s[number - n] for n in range(1, number + 1)))
        return max(left // n * rounds_s[n] + best_s[left % n] for n in range(1, len(rounds_s)))


def one_f_one_b_chained_s(
    stages: Sequence[StageTime],
    reduces_s: Sequence[float],
    num_microbatches: int,
    send_s: Sends = 0.0,
) -> float:
    """As `one_f_one_b_reduced_s`, of the ways that can be added up from the last stage on.

    A stage knows of those in front of it only what they take: n is multiplied by its own f and b,
    and a round trip is of stages i and i + 1, or of all from i on. For stages within 30 % of each
    other and messages of up to 2 % of one it is less than the schedule takes by up to 1 %.
    """
    require_count("schedule", "num_microbatches", num_microbatches)
    sends_s = [*_borders(send_s, len(stages)), 0.0]
    beyond_s = next_s = longest_s = ends_s = 0.0
    way_s = float("-inf")
    for i in reversed(range(len(stages))):
        f, b, c = stages[i].forward_s, stages[i].backward_s, sends_s[i]
        behind = len(stages) - 1 - i
        beyond_s += 2 * c
        paced_s, sent_s = _paced_s(stages[i], next_s + 2 * c, beyond_s, num_microbatches, behind)
        longest_s = max(paced_s, longest_s + f + b + 2 * c)
        ends_s = max(
            longest_s + reduces_s[i],
            sent_s + way_s + c,
            ends_s + f + c if behind else 0.0,
        )
        way_s = max(beyond_s + f + b + reduces_s[i], way_s + c + f)
        beyond_s, next_s = beyond_s + f + b, f + b
    return ends_s


def _paced_s(
    stage: StageTime, next_s: float, beyond_s: float, num_microbatches: int, behind: int
) -> tuple[float, float]:
    """Seconds from a stage's first forward to its last backward, and to its last forward's end.

    Args:
        stage: The stage.
        next_s: Of the stage behind it for one microbatch, and the messages to it and back.
        beyond_s: The same of all stages behind it.
        num_microbatches: Of the step.
        behind: Stages behind it.
    """
    f, b, both_s = stage.forward_s, stage.backward_s, stage.both_s
    left = num_microbatches - behind - 2
    if left < 0:
        busy_s = both_s + (num_microbatches - 1) * max(f, b) + beyond_s
        return max(busy_s, num_microbatches * both_s), num_microbatches * f
    pace_s = left * both_s
    if behind:
        for round_s, stages in ((next_s, 2), (beyond_s, behind + 1)):
            rounds, rest = divmod(left, stages)
            pace_s = max(pace_s, rounds * (both_s + round_s) + rest * both_s)
    in_s, out_s = max(behind * f, beyond_s), max(behind * b, beyond_s)
    return 2 * both_s + in_s + pace_s + out_s, both_s + in_s + pace_s + f


def interleaved_s(stage: StageTime, *, stages: int, chunks: int, num_microbatches: int) -> float:
    """Seconds of the interleaved schedule: equal stages of `chunks` chunks each, free messages.

    `stage` is all chunks of one rank together: ``G t + (S - 1) t / v``.

    Source:
        Narayanan et al., SC 2021, section 2.2; G is a multiple of S.
    """
    return stage.both_s * (num_microbatches + (stages - 1) / chunks)


def one_f_one_b_live(stage: int, *, stages: int, num_microbatches: int) -> int:
    """Most microbatches whose activations stage number `stage` holds at once: ``min(S - i, G)``."""
    return min(stages - stage, num_microbatches)


def interleaved_live(stage: int, *, stages: int, chunks: int, num_microbatches: int) -> int:
    """Most chunk activations that rank number `stage` holds at once in the interleaved schedule.

    ``min(G v, 2 (S - i - 1) + (v - 1) S + 1)``; each is 1/v of the rank's layers.
    """
    if chunks == 1:
        return one_f_one_b_live(stage, stages=stages, num_microbatches=num_microbatches)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(num_microbatches * chunks, warm_up + 1)


def interleaving_memory_factor(stages: int, chunks: int) -> float:
    """Activations of the first rank, interleaved over 1F1B: ``1 + (p - 1) / (p m)``.

    Source:
        Korthikanti et al., arXiv 2205.05198, 2022, section 4.2.
    """
    return 1 + (stages - 1) / (stages * chunks)


@dataclass(frozen=True, slots=True)
class SplitTime:
    """One stage and one microbatch, with the backward in two parts.

    Attributes:
        forward_s: Seconds of its forward.
        input_s: Seconds of the gradient of its input.
        weight_s: Seconds of the gradient of its parameters.
    """

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def all_s(self) -> float:
        """Seconds of all three."""
        return self.forward_s + self.input_s + self.weight_s


def one_f_one_b_bubble_s(stage: SplitTime, stages: int) -> float:
    """Idle seconds of every rank in 1F1B: ``(S - 1) (f + b + w)``."""
    return (stages - 1) * stage.all_s


def zb_h1_bubble_s(stage: SplitTime, stages: int) -> float:
    """Idle seconds of ZB-H1, with about the memory of 1F1B: ``(S - 1) (f + b - w)``.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, 2023. For unequal
        f, b, w the schedule itself says more.
    """
    return (stages - 1) * max(0.0, stage.forward_s + stage.input_s - stage.weight_s)


def zb_h2_bubble_s(stage: SplitTime, stages: int) -> float:
    """Idle seconds of ZB-H2, with about twice the memory of 1F1B: ``(S - 1) (f + b - 2 w)``.

    Source:
        As of `zb_h1_bubble_s`.
    """
    return (stages - 1) * max(0.0, stage.forward_s + stage.input_s - 2 * stage.weight_s)
