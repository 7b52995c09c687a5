"""Plans of steps whose result depends on the number of microbatches.

Modules that ``hint.per_microbatch`` names are computed from each microbatch alone, so every number
of microbatches is a step of its own: each is captured and planned, the fewest first, until more do
not make it faster.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError, SearchTimeoutError, UnsupportedError
from autopar.hint import Degrees, Hint, Microbatches, PerMicrobatch
from autopar.ir.sharding import Mesh
from autopar.plan.records import AllWays, Plan
from autopar.planner.batches import microbatch_counts, samples_of
from autopar.planner.driver import make_plan
from autopar.planner.hints import settle
from autopar.planner.layout import Layout
from autopar.planner.request import Request
from autopar.search.analysis import Analysis
from autopar.search.restrict import below, needing_whole

StepOf = Callable[[int], tuple[Analysis, Request]]
"""The step in a number of microbatches, and what to plan of it."""


def best_plan(step_of: StepOf) -> Plan:
    """The fastest plan, over numbers of microbatches where the step depends on it.

    Raises:
        HintError: A hint matches nothing or contradicts another.
        InfeasibleError: No plan was found that fits the memory.
        SearchTimeoutError: The time ran out before a plan was found.
        UnsupportedError: The hints ask for microbatches that the step cannot run in.
    """
    analysis, request = step_of(1)
    patterns = [h.pattern for h in request.hints if isinstance(h, PerMicrobatch)]
    if not patterns:
        return make_plan(analysis, request)
    counts = _counts(analysis, request)
    best: Plan | None = None
    failed: InfeasibleError | SearchTimeoutError | None = None
    for count in counts:
        try:
            plan = make_plan(*((analysis, request) if count == 1 else step_of(count)))
        except UnsupportedError:
            if best is None:
                raise
            break
        except (InfeasibleError, SearchTimeoutError) as error:
            failed = error
            continue
        if best is not None and plan.prediction.step_s >= best.prediction.step_s:
            break
        best = plan
    if best is None:
        assert failed is not None
        raise failed
    search = best.search
    if len(counts) > 1:
        # What is proven of one number of microbatches says nothing of the others.
        search = replace(search, all_ways=AllWays())
    return replace(best, notes=(*best.notes, *_idle(analysis, patterns)), search=search)


def _counts(analysis: Analysis, request: Request) -> Sequence[int]:
    """Numbers of microbatches to plan, fewest first."""
    settled = settle(analysis, request.cluster, request.hints, request.memory_fraction)
    forced = _forced(request.hints)
    layout = Layout(
        schedule=settled.schedule,
        num_stages=next((h.pp or 1 for h in request.hints if isinstance(h, Degrees)), 1),
        num_chunks=settled.chunks,
        hints=settled.cuts,
    )
    return microbatch_counts(analysis.graph, forced, layout)


def _forced(hints: Iterable[Hint]) -> int | None:
    return next((h.count for h in hints if isinstance(h, Microbatches)), None)


def _idle(analysis: Analysis, patterns: Sequence[str]) -> list[str]:
    """Hints that name nothing that needs the whole batch, and what does."""
    samples = samples_of(analysis.graph)
    parts = next((n for n in range(2, samples + 1) if samples % n == 0), 1)
    if parts == 1:
        return []
    modules = needing_whole(analysis, Mesh(("all0",), (1,)).with_time(parts))
    idle = [p for p in patterns if not any(below(p, module) for module in modules)]
    found = []
    for pattern in idle:
        near = difflib.get_close_matches(pattern.strip("*."), sorted(modules), n=3, cutoff=0.0)
        others = ", ".join(map(repr, near))
        what = f"modules that do: {others}" if others else "no module of this step does"
        found.append(
            f"hint.per_microbatch({pattern!r}) has no effect: what it names needs no other samples "
            f"in the middle of the step; {what}"
        )
    return found
