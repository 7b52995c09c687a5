"""Local moves on a plan that is lowered: what runs again, one value at a time.

The integer program counts memory at some moments and for an average copy of a block, and its shares
of a class become whole copies. So of what its plan runs again some need not: there may be room for
one value more, or for a small one in place of a large one, or everywhere but at the peak. And what
ran again may wait long for a reader that it could be made once more for. `Moves` finds changes in a
`Ledger` of the plan; what comes of it is lowered and simulated. If that holds more than it may, the
ledger's limit is lowered by as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.cost.node import NodeCost
from autopar.ir.graph import Ref
from autopar.ir.sharding import Sharding
from autopar.plan.records import StagePlan
from autopar.planner.evaluate import evaluate_stage
from autopar.planner.ledger import Choice, Ledger
from autopar.planner.moves import Moves
from autopar.planner.request import Candidate, Request
from autopar.planner.savings import savings
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from cost_models.cluster import Device

ROUNDS = 3
"""Times that a refined plan is lowered."""

QUICK = 4000
"""Nodes of a step that is lowered in no time, so that any gain is worth it."""

WORTH = 0.05
"""Part of a longer step that what runs again must take, at least, for a few per cent of it."""

MANY = 10**7
"""Classes that may run again, times nodes of the step, up to which moves are looked for.

Each class has moves of its own, and the ledger goes through the step for each.
"""


def refined(
    analysis: Analysis,
    request: Request,
    candidate: Candidate,
    limit_of: Callable[[Device], int],
) -> Candidate:
    """The candidate after local moves, if it then fits and, where it did before, is faster.

    Pipelines are left as they are, and so are plans that run nothing again and fit, and steps of
    very many nodes in many classes.

    Args:
        analysis: The step.
        request: What was asked.
        candidate: The candidate.
        limit_of: Bytes that a device lets a rank use.
    """
    room = candidate.limit_bytes - candidate.memory.total_bytes
    if candidate.num_stages > 1 or not candidate.built.reruns:
        return candidate
    groups = _groups(candidate.built)
    if len(groups) * len(analysis.graph.nodes) > MANY:
        return candidate
    (stage,), (cost,) = candidate.pipeline.stages, candidate.costs
    if room >= 0 and not _promises(analysis, cost, stage, candidate.step_s):
        return candidate
    kept = _layouts(stage, candidate.built)
    ledger = Ledger(analysis, stage, cost, kept, candidate.simulation)
    start = ledger.choice(stage)
    before = ledger.held(start)
    for _ in range(ROUNDS):
        moves = Moves(ledger, groups, before.peak_bytes + room)
        choice = moves.best(start)
        if choice is None or choice == start:
            break
        changed = _stage(analysis, stage, ledger, choice, kept)
        found = evaluate_stage(
            analysis, request, cost, candidate.built, candidate.solution, changed, limit_of
        )
        over = found.memory.total_bytes - found.limit_bytes
        if over <= 0:
            fits = candidate.memory.total_bytes <= candidate.limit_bytes
            return candidate if fits and found.step_s >= candidate.step_s else found
        room -= over
    return candidate


def _promises(analysis: Analysis, cost: NodeCost, stage: StagePlan, step_s: float) -> bool:
    """Whether what runs again takes so long that a few per cent of it are worth a lowering."""
    if len(analysis.graph.nodes) <= QUICK:
        return bool(stage.recomputed)
    again = frozenset(stage.recomputed)
    found = savings(analysis, (cost,), (stage,)) if again else ()
    return sum(saving.seconds for saving in found if saving.name in again) >= WORTH * step_s


def _groups(built: Built) -> list[tuple[str, ...]]:
    """Members of every class that may run again and need not."""
    found = []
    for rerun, names in zip(built.problem.reruns, built.reruns, strict=True):
        first, last = round(rerun.least * len(names)), round(rerun.most * len(names))
        found.append(names[first:last])
    return [names for names in found if names]


def _layouts(stage: StagePlan, built: Built) -> Mapping[Ref, tuple[Sharding, ...]]:
    """How each value that may be made again is kept if it is not: as others of its class are.

    Where none of them is, as it is made.
    """
    made = {plan.name: plan.outputs for plan in stage.nodes}
    found: dict[Ref, tuple[Sharding, ...]] = {}
    for rerun, names in zip(built.problem.reruns, built.reruns, strict=True):
        for index in range(len(made[names[0]])):
            own = {name: stage.kept.get(str(Ref(name, index))) for name in names}
            usual = next((kept for kept in own.values() if kept), None)
            for name in names[: round(rerun.most * len(names))]:
                found[Ref(name, index)] = own[name] or usual or (made[name][index],)
    return found


def _stage(
    analysis: Analysis,
    stage: StagePlan,
    ledger: Ledger,
    choice: Choice,
    layouts: Mapping[Ref, tuple[Sharding, ...]],
) -> StagePlan:
    """A stage with another choice."""
    ran = {life.node for life in ledger.lives(choice)}
    again = tuple(node.name for node in analysis.graph.nodes if node.name in ran)
    read = {ref for name in ran for ref in ledger.reads(name)}
    kept = {value: own for value, own in stage.kept.items() if _node(value) not in ran}
    for ref, own in layouts.items():
        crosses = ledger.read_late(ref.node) or ref in read
        if ref.node not in ran and crosses:
            kept.setdefault(str(ref), own)
    forgotten: dict[str, list[str]] = defaultdict(list)
    for reader, name in sorted(pair for own in choice for pair in own.dropped):
        if name in ran:
            forgotten[reader].append(name)
    return replace(
        stage,
        kept=kept,
        recomputed=again,
        forgotten={reader: tuple(names) for reader, names in forgotten.items()},
        offloaded=tuple(value for value in stage.offloaded if value in kept),
        copy_room_bytes=None,
    )


def _node(value: str) -> str:
    """The node of a value written as text."""
    return value.partition(":")[0]
