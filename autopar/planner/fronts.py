"""What every unit of the forward can be on a stage: points of seconds and bytes.

The step is solved on the mesh of a stage at several prices of a byte, so that what comes out is the
fastest for its memory. Of every kind of unit one is lowered alone, with its backward, under each of
these solutions: what it takes and holds are those of the program that runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from autopar.lower.program import Section
from autopar.lower.unroll import Row, Turn
from autopar.plan.records import StagePlan
from autopar.planner.evaluate import predicted_memory
from autopar.planner.lanes import JOINT, MeshSearch
from autopar.planner.pipeline import Kind
from autopar.planner.request import Request, Way
from autopar.planner.staged import LoweredStage, lower_some
from autopar.planner.units import Units
from autopar.planner.update import states_on_host, update_of
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from autopar.search.decode import decode
from autopar.search.interproblem import Point
from autopar.search.intra import solve
from autopar.search.problem import BytePrice, Problem, Solution, alike
from autopar.search.stages import equal_lanes, split_lanes

POINTS = 6
"""Most solutions of a mesh, between the fastest and the one that holds least."""

FEWER = 4
"""The same where values may wait in host memory: with such, and as many without."""

INSIDE = 4
"""Solutions inside the hull, where all are looked for."""

NEAR = 0.005
"""Part of the seconds and bytes between two solutions that one between them must gain."""

LIGHT = 1e-4
"""What all memory costs, in steps, where of the fastest solutions the one that holds least is to be
found: what is made of the batch alone is made as it is read."""

DEAR = 1e3
"""What all memory costs, in steps, where a solution is to hold as little as it can."""


def ways_of(
    analysis: Analysis,
    request: Request,
    search: MeshSearch,
    units: Units,
    *,
    bound: bool,
    thorough: bool,
    splits_backward: bool,
    time_limit_s: float,
) -> tuple[Way, ...]:
    """The ways to run the step on a mesh, the fastest first, and what units then take.

    They are kept for plans within another memory limit, unless that chose their strategies.

    Args:
        analysis: The step.
        request: What was asked.
        search: Of the mesh.
        units: Of the forward.
        bound: Whether memory binds; those that are fastest are the only ones if not.
        thorough: Whether to look inside the hull, too.
        splits_backward: Whether weight gradients are a section of their own.
        time_limit_s: For each run of the solver.
    """
    limit = search.first_limit if search.plain.num_strategies > JOINT else None
    asked = (bound, thorough, splits_backward, search.pending, search.every, limit)
    key = units.starts, units.kinds, asked
    known = search.unlimited.ways
    if key in known:
        return known[key]
    solved = (
        _solutions(search, time_limit_s, thorough=thorough)
        if bound
        else _free(search, time_limit_s, thorough=thorough)
    )
    found = []
    for built, solution in solved:
        plan = decode(built, analysis, solution)
        points = _points(
            analysis, request, Kind(plan, search.cost), units, splits_backward=splits_backward
        )
        found.append(Way(built, solution, plan, points))
    known[key] = tuple(found)
    return known[key]


def within(
    analysis: Analysis, solved: tuple[Built, Problem], limit_bytes: float, time_limit_s: float
) -> Way | None:
    """The fastest way that holds no more by its sums, of which no unit is lowered; None if none is.

    Args:
        analysis: The step.
        solved: A problem without a limit, and what its numbers stand for.
        limit_bytes: Of the whole step.
        time_limit_s: For the solver.
    """
    built, problem = solved
    solution = solve(replace(problem, memory_limit_bytes=limit_bytes), time_limit_s=time_limit_s)
    if not solution.choice:
        return None
    return Way(built, solution, decode(built, analysis, solution), ())


def _free(
    search: MeshSearch, time_limit_s: float, *, thorough: bool
) -> list[tuple[Built, Solution]]:
    """The fastest solution, and the one of those as fast that holds least."""
    built, fastest = search.within(None, time_limit_s)
    if not thorough or not fastest.choice:
        return [(built, fastest)]
    lighter = _priced(built.problem, LIGHT * _each_s(fastest), time_limit_s)
    is_other = lighter.choice and lighter.choice != fastest.choice
    return [(built, fastest), *([(built, lighter)] if is_other else [])]


def _solutions(
    search: MeshSearch, time_limit_s: float, *, thorough: bool
) -> list[tuple[Built, Solution]]:
    """Solutions that are the fastest for what they hold, those that hold most first.

    Those without copies to the host are among them: where copies are many, less of them hides than
    is reckoned with.
    """
    built, problems = problems_of(search, time_limit_s)
    most = POINTS if len(problems) == 1 else FEWER
    each_s = _each_s(search.within(None, time_limit_s)[1])
    found = [own for problem in problems for own in _hull(problem, each_s, most, time_limit_s)]
    if thorough:
        found += _inside(problems[0], found, time_limit_s)
    # The fastest may be without copies anyway.
    apart = {(held_bytes(own), own.objective_s): own for own in found}
    return [(built, apart[key]) for key in sorted(apart, key=lambda key: (-key[0], key[1]))]


def problems_of(search: MeshSearch, time_limit_s: float) -> tuple[Built, tuple[Problem, ...]]:
    """The problem of a mesh without a limit, and with the same without copies to the host.

    There is no other one where hints ask for copies, or none can be.
    """
    built, _ = search.within(search.first_limit, time_limit_s)
    problem = replace(alike(built.problem), memory_limit_bytes=None)
    if problem.link is None or search.forced:
        return built, (problem,)
    stays = replace(problem, link=replace(problem.link, host_limit_bytes=0.0))
    return built, (problem, stays)


def _priced(problem: Problem, price_s: float, time_limit_s: float) -> Solution:
    """The best solution at a price of a byte."""
    return solve(replace(problem, price=BytePrice(price_s, price_s)), time_limit_s=time_limit_s)


def _each_s(solution: Solution) -> float:
    """The step a byte that a solution holds."""
    return solution.objective_s / max(solution.memory_bytes[0], 1.0)


def _hull(problem: Problem, each_s: float, most: int, time_limit_s: float) -> list[Solution]:
    """At most so many solutions on the lower hull of seconds against bytes, the fastest first.

    Args:
        problem: Without a limit.
        each_s: The step a byte, about.
        most: Of solutions.
        time_limit_s: For each run of the solver.
    """
    priced = partial(_priced, problem, time_limit_s=time_limit_s)
    found = [own for part in (LIGHT, DEAR) if (own := priced(part * each_s)).choice]
    while 1 < len(found) < most:
        gaps = list(pairwise(found))
        spans = [_gain(*pair, whole=(found[0], found[-1])) for pair in gaps]
        widest = max(range(len(gaps)), key=spans.__getitem__)
        if spans[widest] < NEAR:
            break
        left, right = gaps[widest]
        between = priced(_slope(left, right))
        if not between.choice or _is_on(between, left, right):
            break
        found.insert(widest + 1, between)
    return found


def _inside(problem: Problem, hull: Sequence[Solution], time_limit_s: float) -> list[Solution]:
    """Solutions inside a hull: of few copies, mixtures of two of its corners may be too coarse.

    Each is the fastest within a limit between the sums of two neighbours.
    """
    sums = sorted({max(own.memory_bytes) for own in hull})
    found = []
    for low, high in pairwise(sums):
        parts = round(INSIDE * (high - low) / (sums[-1] - sums[0]))
        for part in range(1, parts + 1):
            limit = low + (high - low) * part / (parts + 1)
            own = solve(replace(problem, memory_limit_bytes=limit), time_limit_s=time_limit_s)
            found += [own] if own.choice else []
    return found


def held_bytes(solution: Solution) -> float:
    """Bytes of the whole step that a solution holds at the end of the forward, by its sums."""
    return solution.memory_bytes[0]


def _slope(left: Solution, right: Solution) -> float:
    """Seconds a byte between two solutions."""
    return (right.objective_s - left.objective_s) / max(held_bytes(left) - held_bytes(right), 1.0)


def _gain(left: Solution, right: Solution, *, whole: tuple[Solution, Solution]) -> float:
    """How much may lie between two solutions, as a part of what lies between the outermost.

    Bytes count for more: the first that are saved cost least, and most stages need no more.
    """
    seconds = whole[1].objective_s - whole[0].objective_s
    held = held_bytes(whole[0]) - held_bytes(whole[1])
    if seconds <= 0 or held <= 0:
        return 0.0
    longer = (right.objective_s - left.objective_s) / seconds
    fewer = (held_bytes(left) - held_bytes(right)) / held
    return math.sqrt(min(longer, 1.0)) * min(fewer, 1.0)


def _is_on(between: Solution, left: Solution, right: Solution) -> bool:
    """Whether a solution is no better than a mixture of two others."""
    slope = _slope(left, right)
    own, mixed = (s.objective_s + slope * held_bytes(s) for s in (between, left))
    return own >= (1 - 1e-6) * mixed


def _points(
    analysis: Analysis, request: Request, kind: Kind, units: Units, *, splits_backward: bool
) -> tuple[Point, ...]:
    """What a unit of every kind takes and holds under a plan."""
    shown = sorted(units.shown.values())
    cuts = sorted({at for unit in shown for at in units.starts[unit : unit + 2]} - {0})
    cuts = [at for at in cuts if at < units.starts[-1]]
    chunk_of = {start: number for number, start in enumerate([0, *cuts])}
    pipeline = split_lanes(
        analysis, equal_lanes(kind.whole, len(cuts) + 1), cuts, range(len(cuts) + 1)
    )
    numbers = {kind: chunk_of[units.starts[unit]] for kind, unit in units.shown.items()}
    lowered = lower_some(
        analysis, kind, pipeline, sorted(numbers.values()), splits_backward=splits_backward
    )

    def point(number: int) -> Point:
        stage = lowered[number], pipeline.stages[number]
        return _point(analysis, request, *stage, splits_backward=splits_backward)

    return tuple(point(number) for _, number in sorted(numbers.items()))


def _point(
    analysis: Analysis,
    request: Request,
    stage: LoweredStage,
    plan: StagePlan,
    *,
    splits_backward: bool,
) -> Point:
    """Seconds and bytes of one unit."""
    (chunk,) = stage.chunks
    # What the update makes, lowered stages are checked for.
    away, optimizer = states_on_host(plan), request.optimizer.at_rest
    several = plan.mesh.microbatches > 1
    fewer, more = (
        predicted_memory(
            stage.together,
            stage.peak(_row(chunk.number, *size, splits_backward=splits_backward)),
            optimizer,
            away=away,
        )
        for size in (ROWS if several else ((1, 1), (1, 1)))
    )
    update = update_of(stage.together, optimizer, away=away)
    held = fewer.parameters_bytes + fewer.optimizer_bytes + fewer.buffers_bytes
    saved, live, late = fewer.saved_bytes, 1, 0
    if several:
        saved, live = max(0, more.total_bytes - fewer.total_bytes), ROWS[0][0]
        row = _row(chunk.number, 1, 2, splits_backward=splits_backward)
        # What is made of the batch alone is there once, however many units read it.
        before, late = stage.between(row, len(row) // 2 - 1, analysis.data)
        held += before
    else:
        held += update.gradient_bytes
    return Point(
        forward_s=chunk.time.forward_s,
        backward_s=chunk.time.backward_s,
        weight_s=chunk.time.weight_s,
        reduce_s=chunk.sections[Section.EPILOGUE].seconds + update.seconds(stage.cost.device),
        before_s=chunk.sections[Section.PROLOGUE].seconds,
        resident_bytes=held,
        late_bytes=max(0, late),
        saved_bytes=saved,
        transient_bytes=max(0, fewer.total_bytes - held - late - live * saved),
    )


ROWS = ((2, 4), (3, 5))
"""(microbatches that are held at once, and all) of two rows of a unit: what is received for the
next is there in both."""


def _row(number: int, held: int, count: int, *, splits_backward: bool) -> Row:
    """A row of one chunk as in 1F1B: so many forwards ahead, then one of each in turn."""
    late = [Section.BACKWARD] + [Section.WEIGHT_GRADIENT] * splits_backward
    order = [(Section.FORWARD, n) for n in range(held)]
    for done in range(count):
        order += [(section, done) for section in late]
        if done + held < count:
            order.append((Section.FORWARD, done + held))
    return [Turn(section, number, n) for section, n in order]
