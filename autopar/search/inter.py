"""The inter-op program: microbatches, places, schedule, cuts and points of least step time.

Outer combinations are taken in the order of a guess, and left out where their bound is no better
than the best so far. One piece a stage is solved exactly (`chain`): 1F1B and GPipe to the optimum
of their closed form, ZB-H1 to the least longest stage, whose schedule is then simulated. Several
pieces a stage (interleaved, ZB-V) are cut evenly and simulated (`chunked`); proven is then what
holds for those cuts. The bound of the whole is the least of what is proven.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from autopar.errors import UnsupportedError
from autopar.schedules.table import Size, schedule_named
from autopar.search.chain import Chain, Combination, Memo
from autopar.search.chunked import Chunked, simulated_s
from autopar.search.interproblem import (
    Choice,
    Family,
    InterProblem,
    InterSolution,
    Setting,
    Tried,
)
from autopar.search.timeline import timeline_of


def solve_inter(
    problem: InterProblem, *, gap: float = 0.0, below_s: float = float("inf")
) -> InterSolution:
    """The best choice over all combinations, and the proven bound.

    Args:
        problem: What to choose from.
        gap: Part of the step time by which the best may be worse than the optimum.
        below_s: Seconds of a step that is known: nothing slower is looked for.
    """
    start = time.process_time()
    memo = Memo(problem, gap)
    candidates = sorted(
        (c for c in _candidates(memo) if c.bound_s < float("inf")), key=lambda c: c.guess_s
    )
    best: Choice | None = None
    tried = []
    for candidate in candidates:
        cap_s = below_s if best is None else best.step_s
        found, bound_s = None, candidate.bound_s
        if bound_s < cap_s:
            found, bound_s = candidate.solve(cap_s)
        if found is not None and found.step_s < cap_s:
            best = found
        step_s = float("inf") if found is None else found.step_s
        tried.append(Tried(name=candidate.name, bound_s=bound_s, step_s=step_s))
    least_s = min((t.bound_s for t in tried), default=float("inf"))
    return InterSolution(
        best=best,
        bound_s=least_s if best is None else min(least_s, best.step_s),
        asked_gap=gap,
        tried=tuple(tried),
        seconds=time.process_time() - start,
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One combination, with what is known of it before it is solved."""

    memo: Memo
    combination: Combination
    chunks: int
    bound_s: float

    @property
    def name(self) -> str:
        several = f" x {self.chunks}" if self.chunks > 1 else ""
        return f"{self.combination.name}{several}"

    @property
    def guess_s(self) -> float:
        """The bound, with about the bubble that the schedule has where stages are equal."""
        share = {"zb-h1": 1 / 3, "zb-v": 0.0}.get(self.combination.schedule, 1 / self.chunks)
        idle = share * (self.combination.num_stages - 1) / self.combination.setting.microbatches
        return self.bound_s * (1 + idle)

    def solve(self, cap_s: float) -> tuple[Choice | None, float]:
        """The best choice below the cap, if there is one, and what is proven."""
        if self.chunks > 1 or self.combination.schedule == "zb-v":
            return Chunked(self.memo, self.combination, self.chunks).solve(cap_s)
        chain = _chain(self.memo, self.combination)
        found, bound_s = chain.solve(cap_s)
        if found is None or chain.timeline.exact:
            return found, bound_s
        step_s = simulated_s(found, self.memo.problem.sends_s(found))
        return replace(found, step_s=step_s), bound_s


def _chain(memo: Memo, combination: Combination) -> Chain:
    fronts = combination.setting.fronts
    points = [p for front in fronts for own in front for p in own]
    timeline = timeline_of(
        combination.schedule,
        microbatches=combination.setting.microbatches,
        num_stages=combination.num_stages,
        reduces=any(p.reduce_s for p in points),
        begins=any(p.before_s for p in points),
    )
    assert timeline is not None, f"no timeline of {combination.schedule}"
    return Chain(memo, combination, timeline)


def _candidates(memo: Memo) -> list[_Candidate]:
    """All combinations of microbatches, places, number of stages and schedule."""
    problem = memo.problem
    found = []
    for setting in problem.settings:
        for family in problem.families:
            for num_stages in _stage_numbers(problem, family):
                for schedule, chunks in problem.schedules:
                    if _possible(problem, family, setting, (schedule, chunks, num_stages)):
                        combination = Combination(
                            setting=setting,
                            family=family,
                            schedule=schedule,
                            num_stages=num_stages,
                        )
                        bound_s = least_s(memo, combination)
                        found.append(_Candidate(memo, combination, chunks, bound_s))
    return found


def least_s(memo: Memo, combination: Combination) -> float:
    """Least seconds of the step, by the work that there is.

    A single stage has all of it, of points that fit its memory if they are mixed.
    """
    setting, family = combination.setting, combination.family
    if combination.num_stages == 1:
        chain = _chain(memo, combination)
        return setting.microbatches * min(chain.alone_s(place) for place in family.places)
    return memo.work(setting, family).step_s(setting.microbatches, combination.num_stages)


def _stage_numbers(problem: InterProblem, family: Family) -> range:
    """How many stages places of a family can make."""
    most = min(problem.most_stages, len(problem.blocks))
    if family.is_tiling:
        count = len(family.places)
        return range(count, count + 1) if problem.least_stages <= count <= most else range(0)
    least = min(place.size for place in family.places)
    return range(problem.least_stages, min(most, (family.end - family.first) // least) + 1)


def _possible(
    problem: InterProblem, family: Family, setting: Setting, way: tuple[str, int, int]
) -> bool:
    """Whether a schedule exists for these numbers; several pieces need a fixed row of places."""
    schedule, chunks, num_stages = way
    if num_stages == 1 and (schedule, chunks) != problem.schedules[0]:
        return False
    if chunks > 1 and not family.is_tiling:
        return False
    if problem.starts and len(problem.starts) != num_stages * chunks:
        return False
    size = Size(lanes=num_stages, chunks=chunks, microbatches=setting.microbatches)
    try:
        schedule_named(schedule).check(size, len(problem.blocks))
    except UnsupportedError:
        return False
    return True
