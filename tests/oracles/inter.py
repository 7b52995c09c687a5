"""The inter-op problem by exhaustion, and the plan spaces of others as parts of it.

Every function enumerates in full: for small problems only. A plan is a schedule, the places of its
stages, the first block of every piece, and the point of every block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.schedules.actions import Schedule
from autopar.schedules.makespan import ChunkTime, simulate
from autopar.schedules.table import Size, schedule_named
from autopar.search.interproblem import Choice, Family, InterProblem, Place, Point, Setting
from cost_models.pipeline import (
    StageTime,
    gpipe_s,
    interleaved_live,
    one_f_one_b_chained_s,
    one_f_one_b_live,
)
from tests.autopar.schedules.dapple import DapplePlan, latency_s


@dataclass(frozen=True, kw_only=True)
class InterPlan:
    """One plan.

    Attributes:
        setting: Microbatches and fronts.
        schedule: Its name.
        places: Of every stage.
        borders: First and end block of every piece.
        points: Index of the point of every block.
    """

    setting: Setting
    schedule: str
    places: tuple[Place, ...]
    borders: tuple[tuple[int, int], ...]
    points: tuple[int, ...]


def plans_of(choice: Choice, problem: InterProblem) -> InterPlan:
    """What a choice says, with its counts dealt out to blocks in order."""
    points: list[int] = []
    for piece in choice.pieces:
        left = {own: list(counts) for own, counts in piece.counts.items()}
        for block in range(piece.first, piece.end):
            counts = left[problem.blocks[block]]
            index = next(i for i, count in enumerate(counts) if count)
            counts[index] -= 1
            points.append(index)
        assert not any(any(counts) for counts in left.values()), "counts beyond the blocks"
    return InterPlan(
        setting=choice.setting,
        schedule=choice.schedule,
        places=choice.places,
        borders=tuple((piece.first, piece.end) for piece in choice.pieces),
        points=tuple(points),
    )


def step_s(problem: InterProblem, plan: InterPlan) -> float | None:
    """Seconds of the step by closed form, or by simulation where there is none; None: no room."""
    count, num_stages = plan.setting.microbatches, len(plan.places)
    spec = schedule_named(plan.schedule)
    lanes = [spec.lane_of_chunk(piece, num_stages) for piece in range(len(plan.borders))]
    own = [[_point(problem, plan, block, plan.places[lane]) for block in range(*border)]
           for border, lane in zip(plan.borders, lanes, strict=True)]  # fmt: skip
    held = _live(plan, lanes)
    for stage, place in enumerate(plan.places):
        here = [(p, held[n]) for n, lane in enumerate(lanes) if lane == stage for p in own[n]]
        size = sum(p.resident_bytes + live * p.saved_bytes for p, live in here)
        if size + max(p.transient_bytes for p, _ in here) > place.memory_bytes:
            return None
    sends = [
        problem.send_s(plan.setting, end - 1, plan.places[a], plan.places[b])
        for (_, end), (a, b) in zip(plan.borders, pairwise(lanes), strict=False)
    ]
    forward = [sum(p.forward_s for p in piece) for piece in own]
    backward = [sum(p.backward_s for p in piece) for piece in own]
    reduces = [sum(p.reduce_s for n, q in enumerate(lanes) if q == s for p in own[n])
               for s in range(num_stages)]  # fmt: skip
    stages = [StageTime(f, b) for f, b in zip(forward, backward, strict=True)]
    before = [sum(p.before_s for n, q in enumerate(lanes) if q == s for p in own[n])
              for s in range(num_stages)]  # fmt: skip
    if plan.schedule == "1f1b":
        return max(
            before[first]
            + one_f_one_b_chained_s(stages[first:], reduces[first:], count, sends[first:])
            for first in range(num_stages)
        )
    if plan.schedule == "gpipe" and not any(reduces + before):
        return gpipe_s(stages, count, sends)
    weights = [
        min(sum(p.weight_s for p in piece), b) for piece, b in zip(own, backward, strict=True)
    ]
    times = [ChunkTime(f, b, w) for f, b, w in zip(forward, backward, weights, strict=True)]
    if plan.schedule == "gpipe":
        # As the closed form: the longest of what it takes from any stage on.
        return max(
            before[first]
            + _simulated_s(
                spec.generate(num_stages - first, 1, count),
                times[first:],
                sends[first:],
                reduces[first:],
            )
            for first in range(num_stages)
        )
    rows = spec.generate(num_stages, len(own) // num_stages, count)
    return _simulated_s(rows, times, sends, reduces, before)


def _simulated_s(
    rows: Schedule,
    times: Sequence[ChunkTime],
    sends: Sequence[float],
    reduces: Sequence[float],
    before: Sequence[float] = (),
) -> float:
    """Seconds until the last stage has reduced."""
    timeline = simulate(rows, times, sends, before)
    return max(e[-1] + d for e, d in zip(timeline.ends_s, reduces, strict=True))


def _point(problem: InterProblem, plan: InterPlan, block: int, place: Place) -> Point:
    return plan.setting.fronts[problem.blocks[block]][place.kind][plan.points[block]]


def _live(plan: InterPlan, lanes: Sequence[int]) -> list[float]:
    """Most microbatches that a piece is held for, by the closed forms of the schedules."""
    count, num_stages = plan.setting.microbatches, len(plan.places)
    if plan.schedule == "gpipe":
        return [count] * len(lanes)
    if plan.schedule == "1f1b":
        return [one_f_one_b_live(n, stages=num_stages, num_microbatches=count) for n in lanes]
    if plan.schedule == "zb-h1":
        return [min(num_stages, count)] * len(lanes)
    chunks = len(lanes) // num_stages
    return [
        min(
            count,
            interleaved_live(n, stages=num_stages, chunks=chunks, num_microbatches=count),
        )
        for n in lanes
    ]


def cuts_of(num_blocks: int, pieces: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut blocks into pieces."""
    for inner in itertools.combinations(range(1, num_blocks), pieces - 1):
        yield tuple(pairwise((0, *inner, num_blocks)))


def rows_of_places(family: Family) -> Iterator[tuple[Place, ...]]:
    """All sequences of places that cover the devices of a family."""

    def more(device: int) -> Iterator[tuple[Place, ...]]:
        if device == family.end:
            yield ()
        for place in family.places:
            if place.first == device:
                for rest in more(place.end):
                    yield (place, *rest)

    yield from more(family.first)


def every_plan(problem: InterProblem, schedules: Sequence[str]) -> Iterator[InterPlan]:
    """All plans with one piece a stage."""
    for setting, family, schedule in itertools.product(
        problem.settings, problem.families, schedules
    ):
        for places in rows_of_places(family):
            if len(places) > min(problem.most_stages, len(problem.blocks)):
                continue
            for borders in cuts_of(len(problem.blocks), len(places)):
                yield from _with_points(problem, setting, schedule, (places, borders))


def _with_points(
    problem: InterProblem,
    setting: Setting,
    schedule: str,
    layout: tuple[tuple[Place, ...], tuple[tuple[int, int], ...]],
) -> Iterator[InterPlan]:
    places, borders = layout
    fronts = [
        range(len(setting.fronts[problem.blocks[block]][place.kind]))
        for border, place in zip(borders, places, strict=True)
        for block in range(*border)
    ]
    for points in itertools.product(*fronts):
        yield InterPlan(
            setting=setting, schedule=schedule, places=places, borders=borders, points=points
        )


def best_s(problem: InterProblem, plans: Iterator[InterPlan]) -> float | None:
    """Least seconds of some plans; None if none fits."""
    return min((s for plan in plans if (s := step_s(problem, plan)) is not None), default=None)


def brute_force_s(problem: InterProblem, schedules: Sequence[str]) -> float | None:
    """Least seconds of all plans with one piece a stage."""
    return best_s(problem, every_plan(problem, schedules))


def megatron_s(problem: InterProblem) -> float | None:
    """Least seconds of a uniform grid.

    Stages of one size, as many blocks in every piece, one point for all, any number of pieces a
    stage and of microbatches.
    """
    return best_s(problem, _uniform(problem))


def _uniform(problem: InterProblem) -> Iterator[InterPlan]:
    num_blocks = len(problem.blocks)
    for setting, family, (schedule, chunks) in itertools.product(
        problem.settings, problem.families, problem.schedules
    ):
        for places in rows_of_places(family):
            pieces = len(places) * chunks
            size = Size(lanes=len(places), chunks=chunks, microbatches=setting.microbatches)
            spec = schedule_named(schedule)
            equal = len({place.size for place in places}) == 1
            whole = not spec.whole_rounds or setting.microbatches % size.lanes == 0
            if num_blocks % pieces or not equal or not whole or not family.is_tiling:
                continue
            each = num_blocks // pieces
            borders = tuple((i * each, (i + 1) * each) for i in range(pieces))
            most = min(len(setting.fronts[own][places[0].kind]) for own in problem.blocks)
            for point in range(most):
                yield InterPlan(
                    setting=setting,
                    schedule=schedule,
                    places=places,
                    borders=borders,
                    points=(point,) * num_blocks,
                )


def alpa_s(problem: InterProblem) -> float | None:
    """Seconds of the plan of two levels: stages first, by what each takes at best.

    The intra-op level gives every stage the points of least seconds within its memory; the inter-op
    level takes the cuts and places of least ``sum t + (G - 1) max t``.

    Source:
        Zheng et al., Alpa, OSDI 2022, equation 2.
    """
    best: tuple[float, float] | None = None
    for setting, family in itertools.product(problem.settings, problem.families):
        for places in rows_of_places(family):
            if len(places) > min(problem.most_stages, len(problem.blocks)):
                continue
            for borders in cuts_of(len(problem.blocks), len(places)):
                found = _two_levels(problem, setting, (places, borders))
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
    return None if best is None else best[1]


def _two_levels(
    problem: InterProblem,
    setting: Setting,
    layout: tuple[tuple[Place, ...], tuple[tuple[int, int], ...]],
) -> tuple[float, float] | None:
    """Its objective, and the seconds of the step."""
    places, borders = layout
    points: list[int] = []
    seconds = []
    for stage, (border, place) in enumerate(zip(borders, places, strict=True)):
        fronts = [setting.fronts[problem.blocks[block]][place.kind] for block in range(*border)]
        live = min(len(places) - stage, setting.microbatches)
        fitting = []
        for own in itertools.product(*(range(len(front)) for front in fronts)):
            chosen = [front[i] for front, i in zip(fronts, own, strict=True)]
            size = sum(p.resident_bytes + live * p.saved_bytes for p in chosen)
            if size + max(p.transient_bytes for p in chosen) <= place.memory_bytes:
                fitting.append((sum(p.forward_s + p.backward_s for p in chosen), own))
        if not fitting:
            return None
        least_s, own = min(fitting)
        seconds.append(least_s)
        points += own
    plan = InterPlan(
        setting=setting, schedule="1f1b", places=places, borders=borders, points=tuple(points)
    )
    found = step_s(problem, plan)
    assert found is not None
    return sum(seconds) + (setting.microbatches - 1) * max(seconds), found


def dapple_s(problem: InterProblem) -> float | None:
    """Seconds of the plan that DAPPLE's latency puts first, of all its placements.

    A block is on any stage of any size; the latency counts all-reduces and the pivot's bubbles.
    """
    best: tuple[float, float] | None = None
    for plan in every_plan(problem, ["1f1b"]):
        found = step_s(problem, plan)
        if found is None:
            continue
        own = [
            [_point(problem, plan, block, place) for block in range(*border)]
            for border, place in zip(plan.borders, plan.places, strict=True)
        ]
        latency = latency_s(
            DapplePlan(
                [
                    ChunkTime(sum(p.forward_s for p in stage), sum(p.backward_s for p in stage))
                    for stage in own
                ],
                [
                    problem.send_s(plan.setting, end - 1, a, b)
                    for (_, end), (a, b) in zip(plan.borders, pairwise(plan.places), strict=False)
                ],
                [sum(p.reduce_s for p in stage) for stage in own],
                plan.setting.microbatches,
            )
        )
        if best is None or latency < best[0]:
            best = latency, found
    return None if best is None else best[1]
