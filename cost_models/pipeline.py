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

    The largest of `one_f_one_b_bounds`; against exact simulation of random stages it errs by 0.1 %
    on average.
    """
    bounds = one_f_one_b_bounds(stages, num_microbatches, send_s)
    return max(max(bound) for bound in bounds)


def one_f_one_b_bounds(
    stages: Sequence[StageTime], num_microbatches: int, send_s: Sends = 0.0
) -> tuple[tuple[float, float], ...]:
    """Two lower bounds a stage, in seconds, of which the largest is the step.

    With k = S - 1 - i stages after stage i, pre_i the first microbatch's way to stage i and back
    from it, and L_i its way from there to the last stage and back:

    * busy: ``pre_i + G t_i + max(0, L_i - k f_i) + max(0, L_i - k b_i)``: stage i works through its
      microbatches, and waits for the last stages where warm-up and drain do not cover the way;
    * round trip: ``pre_i + t_i + L_i + (G - 1) (t_i + L_i) / (k + 1)``: at most k + 1 microbatches
      are on their way beyond stage i at a time.

    With G <= k the stage does all forwards before its first backward, and only one of the two can
    hold up the others: ``pre_i + t_i + (G - 1) max(f_i, b_i) + L_i``. Each maximum is a pair of
    linear inequalities, so that an integer program can state them.
    """
    require_count("schedule", "num_microbatches", num_microbatches)
    bounds = []
    sends_s = _borders(send_s, len(stages))
    for i, stage in enumerate(stages):
        after = len(stages) - 1 - i
        beyond_s = sum(s.both_s for s in stages[i + 1 :]) + 2 * sum(sends_s[i:])
        reach_s = sum(s.both_s for s in stages[:i]) + 2 * sum(sends_s[:i])
        work_s = num_microbatches * stage.both_s
        if num_microbatches <= after + 1:
            slower_s = max(stage.forward_s, stage.backward_s)
            busy_s = reach_s + stage.both_s + (num_microbatches - 1) * slower_s + beyond_s
            trip_s = busy_s
        else:
            warm_s = max(0.0, beyond_s - after * stage.forward_s)
            drain_s = max(0.0, beyond_s - after * stage.backward_s)
            busy_s = reach_s + work_s + warm_s + drain_s
            round_s = stage.both_s + beyond_s
            trip_s = reach_s + round_s + (num_microbatches - 1) * round_s / (after + 1)
        bounds.append((busy_s, trip_s))
    return tuple(bounds)


def one_f_one_b_reduced_s(
    stages: Sequence[StageTime],
    reduces_s: Sequence[float],
    num_microbatches: int,
    send_s: Sends = 0.0,
) -> float:
    """Seconds of one forward, one backward where each stage reduces gradients at its end.

    The step ends with the last backward or the last reduction. Stage l ends

    * no sooner than its own bounds of `one_f_one_b_bounds` and those of the stages behind it say,
      less the backwards in front of it, which still come then;
    * no sooner than the last microbatch has come to it: the last forward of a stage i < l in front,
      ``G f_i + (G - k - 1) b_i + max(0, L_i - k f_i)`` (or ``(G - 1) (t_i + L_i) / (k + 1) + f_i``)
      behind that stage's start, then the forwards behind it and the backwards down to l.
    """
    sends_s = _borders(send_s, len(stages))
    bounds = one_f_one_b_bounds(stages, num_microbatches, sends_s)
    ends_s = [max(map(max, bounds))]
    for i, stage in enumerate(stages):
        after = len(stages) - 1 - i
        start_s = sum(s.forward_s for s in stages[:i]) + sum(sends_s[:i])
        back_s = sum(s.backward_s for s in stages[:i]) + sum(sends_s[:i])
        ends_s.append(max(map(max, bounds[i:])) - back_s + reduces_s[i])
        beyond_s = sum(s.both_s for s in stages[i + 1 :]) + 2 * sum(sends_s[i:])
        sent_s = num_microbatches * stage.forward_s
        if num_microbatches > after + 1:
            sent_s += (num_microbatches - after - 1) * stage.backward_s
            sent_s += max(0.0, beyond_s - after * stage.forward_s)
            rounds = (num_microbatches - 1) / (after + 1)
            sent_s = max(sent_s, stage.forward_s + rounds * (stage.both_s + beyond_s))
        for end in range(i + 1, len(stages)):
            between_s = sum(s.backward_s for s in stages[i + 1 : end]) + sum(sends_s[i:end])
            ends_s.append(start_s + sent_s + beyond_s - between_s + reduces_s[end])
    return max(ends_s)


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
