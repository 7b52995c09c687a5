"""Solve, lower and solve again until the program that runs fits the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.planner.evaluate import FASTER, evaluate, evaluate_stages
from autopar.planner.lanes import LESS, WORTH, Lanes, MeshSearch, shared_s
from autopar.planner.pipelines import CHEAP
from autopar.planner.refine import QUICK, refined
from autopar.planner.request import Candidate, Failure, Request
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from autopar.search.consistent import contradiction
from autopar.search.intra import Least, least_bytes, moment_of
from autopar.search.problem import Solution

ROUNDS, PIPELINE_ROUNDS = 6, 4
"""Times a mesh is solved again with a tighter memory limit; stages are lowered in full each."""

MORE = 1.1
"""Room that is left for what the problem does not know of, which grows as other things shrink."""

SPARSE = (2, 3, 4, 6, 8, 12, 16)
"""Of how many copies of a block one keeps what it hands on, where no plan fits that keeps all."""

BRANCHED = 2
"""Times that what rounding left of a plan that fits is branched on."""

SHARPER = 3
"""Times a mesh is solved again between a limit that was too tight and one that was not enough."""

EDGE = 0.2
"""Least part of the way between two limits by which the next is away from either."""

ANY, SOME = 1e-4, 1e-2
"""Least part of a short step, and of a long one, that a wider limit must promise for that."""

LOOSE = 0.1
"""Of the memory, what is allowed by sums beyond it where only a part of a class would fit."""

FROM = (1.0, 1.01, 1.05, 1.2)
"""Parts of the least memory by its sums within which a plan is sought that local moves start from.
"""

FEW = 10_000
"""Nodes of a step up to which local moves are tried where nothing fits: they are many then; of a
pipeline, which is lowered whole, up to `CHEAP`.

And up to which all spacings of checkpoints are lowered, not that alone which is modelled fastest.
"""

REACH = 2.0
"""Parts of the memory that a plan may need, at most, for local moves to be tried."""


def prove(
    analysis: Analysis, request: Request, search: Lanes, time_limit_s: float, beat_s: float
) -> Candidate | Failure:
    """Solve the meshes of all stages until what is lowered fits.

    A step without a pipeline is not lowered if the search models more than ``beat_s`` for it. Where
    copies to the host wait for room, what is fastest with room for them is tried too; where they
    hide behind less than was reckoned with, what is fastest then, and in the end what is fastest
    without them. Where nothing fits that treats copies of a block
    unlike each other, all are treated alike.
    """
    best: Candidate | None = None
    is_short = len(search.searches) == 1 and len(analysis.graph.nodes) <= QUICK
    least = FASTER if is_short else LESS
    while True:
        outcome = _tightened(analysis, request, search, time_limit_s, beat_s, best)
        if isinstance(outcome, Candidate):
            best = outcome if best is None or outcome.step_s < best.step_s else best
            again = [
                k for k in search.kinds if k.leaves_room(outcome) or k.hides_less(outcome, least)
            ]
            if not again:
                return best
        elif best is not None or outcome.proven or outcome.too_slow:
            return best or outcome
        elif not [kind for kind in search.kinds if kind.treats_alike()]:
            return outcome


def _can_gain(
    best: Candidate, search: Lanes, solved: Mapping[MeshSearch, tuple[Built, Solution]]
) -> bool:
    """Whether hiding copies better may gain enough, beyond what is modelled to take longer."""
    longer_s = shared_s([solved[kind][1].objective_s for kind in search.searches])
    longer_s -= best.objective_s
    least_s = WORTH * best.step_s if len(search.searches) > 1 else 0.0
    return best.simulation.copy_exposed_s - longer_s > least_s


def prove_harder(
    analysis: Analysis, request: Request, search: Lanes, time_limit_s: float
) -> Candidate | Failure:
    """What local moves make fit; the same with sparser checkpoints, as long as it is no slower.

    Of a long step the first that fits, those that are modelled fastest in front.
    """
    kind, is_long = search.kinds[0], len(analysis.graph.nodes) > FEW
    found: Candidate | Failure | None = squeezed(analysis, request, search, time_limit_s)
    for copies in _promising(search, time_limit_s) if is_long else SPARSE:
        if is_long and isinstance(found, Candidate):
            break
        if not all(tuple(kind.keeps_every(copies) for kind in search.kinds)):
            break
        outcome: Candidate | Failure | None = prove(
            analysis, request, search, time_limit_s, math.inf
        )
        if isinstance(outcome, Failure):
            outcome = squeezed(analysis, request, search, time_limit_s) or outcome
        best_s = found.step_s if isinstance(found, Candidate) else math.inf
        if best_s < math.inf and not (isinstance(outcome, Candidate) and outcome.step_s < best_s):
            break
        found = outcome
    return found or Failure(kind.plain.mesh, False, math.inf)


def _promising(search: Lanes, time_limit_s: float) -> list[int]:
    """Spacings of checkpoints, those with which stages are modelled fastest in front."""
    modelled: dict[int, float] = {}
    for copies in SPARSE:
        if not all(tuple(kind.keeps_every(copies) for kind in search.kinds)):
            break
        modelled[copies] = sum(kind.modelled_s(time_limit_s) for kind in search.kinds)
    return sorted(modelled, key=modelled.__getitem__)


def squeezed(
    analysis: Analysis, request: Request, search: Lanes, time_limit_s: float
) -> Candidate | None:
    """A plan that fits after local moves, from one that needs little by its sums."""
    num_stages, num_nodes = len(search.searches), len(analysis.graph.nodes)
    if num_nodes > (FEW if num_stages == 1 else CHEAP):
        return None
    least: dict[MeshSearch, float] = {}
    for kind in search.kinds:
        problem = kind.within(kind.allowed, time_limit_s)[0].problem
        of_all = least_bytes(problem, time_limit_s=time_limit_s).num_bytes
        least[kind] = of_all / num_stages
        if least[kind] > REACH * kind.allowed:
            return None
    for part in FROM:
        solved = {
            kind: kind.within(max(kind.allowed, part * own), time_limit_s)
            for kind, own in least.items()
        }
        if all(solution.choice for _, solution in solved.values()):
            kind = search.kinds[0]
            if num_stages > 1:
                start, _ = evaluate_stages(analysis, request, search, solved)
            else:
                start = evaluate(analysis, request, kind.cost, *solved[kind], kind.limit_of)
            found = refined(analysis, request, start, kind.limit_of)
            fits = found.memory.total_bytes <= found.limit_bytes
            fits = fits and all(own.fits_host(found.host_bytes) for own in search.kinds)
            return replace(found, limited=True) if fits else None
    return None


def _tightened(
    analysis: Analysis,
    request: Request,
    search: Lanes,
    time_limit_s: float,
    beat_s: float,
    best: Candidate | None,
) -> Candidate | Failure:
    """The first that fits, with a tighter limit whenever what is lowered does not.

    Of one stage, the limit is widened again where it was tightened by more than was needed, and
    what rounding leaves is branched on only of what fits. Or what is best so far, where hiding
    copies better cannot gain enough for another lowering.
    """
    tried: _Tried | None = None
    before: _Tried | None = None
    kinds, num_stages = search.kinds, len(search.searches)
    limits: dict[MeshSearch, float | None] = dict.fromkeys(kinds)
    took, less = dict.fromkeys(kinds, math.inf), dict.fromkeys(kinds, LESS)
    least = Least(float("inf"))
    for _ in range(ROUNDS if num_stages == 1 else PIPELINE_ROUNDS):
        solved = {k: k.within(limits[k], time_limit_s, rough=num_stages == 1) for k in kinds}
        cramped = [k for k, (_, s) in solved.items() if not s.choice and limits[k] == k.first_limit]
        if num_stages > 1 and cramped:
            limits.update({kind: kind.allowed for kind in cramped})
            continue
        for kind, (found, solution) in solved.items():
            if not solution.choice:
                if kind.is_impossible:
                    stuck = contradiction(kind.plain.problem) or ""
                    return Failure(kind.plain.mesh, True, math.inf, contradicts=stuck)
                if least.num_bytes == float("inf"):
                    least = least_bytes(found.problem, time_limit_s=time_limit_s)
                    least = replace(least, num_bytes=least.num_bytes / num_stages)
                if least.num_bytes <= kind.allowed == limits[kind] and num_stages == 1:
                    # By its sums nothing whole fits, but a part does: its program may hold less.
                    limits[kind] = (1 + LOOSE) * kind.allowed
                    break
                return Failure(
                    kind.plain.mesh,
                    solution.status == "infeasible" and limits[kind] in (None, kind.allowed),
                    least.num_bytes,
                    least.moment,
                    kind.host_asked(time_limit_s),
                )
        if not all(solution.choice for _, solution in solved.values()):
            continue
        held = {kind: max(s.memory_bytes) / num_stages for kind, (_, s) in solved.items()}
        tight = [kind for kind in kinds if limits[kind] is None and held[kind] > kind.allowed]
        if tight:
            limits.update({kind: kind.first_limit for kind in tight})
            continue
        if num_stages == 1 and solved[kinds[0]][1].objective_s > beat_s:
            return Failure(kinds[0].plain.mesh, False, held[kinds[0]], too_slow=True)
        if best is not None and not _can_gain(best, search, solved):
            return best
        if num_stages > 1:
            candidate, used = evaluate_stages(analysis, request, search, solved)
        else:
            (only,) = kinds
            tried = _tried(analysis, request, only, limits[only], solved[only])
            assert tried is not None
            candidate, used = tried.candidate, {only: tried.used_bytes}
        over = [kind for kind in kinds if used[kind] > kind.allowed]
        fitting = [kind for kind in kinds if kind.fits_host(candidate.host_bytes)]
        if not over and len(fitting) == len(kinds):
            if tried is not None:
                return _sharpened(analysis, request, kinds[0], time_limit_s, tried, before)
            limited = any(limit is not None for limit in limits.values())
            return replace(candidate, limited=limited)
        for kind in over:
            if used[kind] < least.num_bytes:
                found, solution = solved[kind]
                least = Least(used[kind], moment_of(found.problem, solution.memory_bytes))
            if kind.looks_at(candidate.fullest_node):
                continue
            # The program needs more than the problem knows of: leave that much room.
            limit = limits[kind]
            last = kind.allowed if limit is None else limit
            before = tried
            room = MORE * max(0.0, used[kind] - held[kind])
            # A little less may be the same whole copies: then twice as much less.
            less[kind] *= 2 if used[kind] >= took[kind] else 1
            took[kind] = used[kind]
            limits[kind] = min(kind.allowed - room, last - less[kind] * kind.allowed)
    return Failure(kinds[0].plain.mesh, False, least.num_bytes, least.moment)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A limit of the problem, and what was lowered of its solution: how many bytes that holds."""

    limit_bytes: float
    candidate: Candidate
    used_bytes: int


def _sharpened(
    analysis: Analysis,
    request: Request,
    kind: MeshSearch,
    time_limit_s: float,
    fits: _Tried,
    exceeds: _Tried | None,
) -> Candidate:
    """The fastest that fits, of one that was found by rounding and perhaps within too little.

    The limit is widened again, towards the last that was not tight enough, as long as the problem
    takes less within that; then what rounding left is branched on.

    Args:
        analysis: The step.
        request: What was asked.
        kind: The mesh.
        time_limit_s: For the solver.
        fits: What fits.
        exceeds: What held too much, if anything did.
    """
    least = ANY if len(analysis.graph.nodes) <= QUICK else SOME
    best = fits.candidate
    for _ in range(SHARPER if exceeds is not None else 0):
        assert exceeds is not None
        gain_s = fits.candidate.objective_s - exceeds.candidate.objective_s
        if gain_s <= least * best.step_s:
            break
        room, more = kind.allowed - fits.used_bytes, exceeds.used_bytes - fits.used_bytes
        share = min(max(room / more, EDGE), 1 - EDGE) if more > 0 else EDGE
        limit = fits.limit_bytes + share * (exceeds.limit_bytes - fits.limit_bytes)
        now = _tried(analysis, request, kind, limit, kind.within(limit, time_limit_s, rough=True))
        if now is None:
            break
        if _fits(kind, now):
            fits, best = now, min(best, now.candidate, key=lambda c: c.step_s)
        else:
            exceeds = now
    limit = fits.limit_bytes
    for _ in range(BRANCHED if best.solution.is_rough else 0):
        solved = kind.within(limit, time_limit_s)
        if solved[1].objective_s >= best.objective_s - least * best.step_s:
            break
        now = _tried(analysis, request, kind, limit, solved)
        if now is None:
            break
        if _fits(kind, now):
            return min(best, now.candidate, key=lambda c: c.step_s)
        limit -= MORE * max(0.0, now.used_bytes - kind.allowed)
    return best


def _fits(kind: MeshSearch, tried: _Tried) -> bool:
    """Whether device and host have the memory that was used."""
    return tried.used_bytes <= kind.allowed and tried.candidate.host_bytes <= kind.host_allowed


def _tried(
    analysis: Analysis,
    request: Request,
    kind: MeshSearch,
    limit: float | None,
    solved: tuple[Built, Solution],
) -> _Tried | None:
    """A solution of a step of one stage, lowered; None if there is none.

    Bytes are those of the fullest rank in proportion to its limit, which may be another.
    """
    if not solved[1].choice:
        return None
    found = evaluate(analysis, request, kind.cost, *solved, kind.limit_of)
    used = math.ceil(found.memory.total_bytes * kind.allowed / found.limit_bytes)
    found = replace(found, limited=limit is not None)
    return _Tried(kind.allowed if limit is None else limit, found, used)
