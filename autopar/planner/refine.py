"""Local moves on a plan that is lowered: what runs again, one value at a time.

The integer program counts memory at some moments and for an average copy of a block, and its shares
of a class become whole copies. So of what its plan runs again some need not: there may be room for
one value more, or for a small one in place of a large one, or everywhere but at the peak. And what
ran again may wait long for a reader that it could be made once more for. `Moves` finds changes in a
`Ledger` of every stage, within the memory of its ranks; what comes of all of them is lowered and
simulated. Where a stage holds more than it may then, its ledger's limit is lowered by as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost
from autopar.ir.graph import Ref
from autopar.ir.sharding import Sharding
from autopar.lower.program import Section
from autopar.lower.rows import turns_of
from autopar.lower.unroll import Turn
from autopar.plan.records import StagePlan
from autopar.planner.evaluate import evaluate_stage, measured
from autopar.planner.layout import Layout
from autopar.planner.ledger import Choice, Ledger, Lowered
from autopar.planner.moves import Moves
from autopar.planner.pipeline import Kind, Lane
from autopar.planner.pipelines import CHEAP
from autopar.planner.request import Candidate, Request
from autopar.planner.savings import savings
from autopar.planner.staged import lower_pipeline
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

    Plans that run nothing again and fit are left as they are, and so are steps of very many nodes
    in many classes, and pipelines that take long to lower.

    Args:
        analysis: The step.
        request: What was asked.
        candidate: The candidate.
        limit_of: Bytes that a device lets a rank use.
    """
    fits = candidate.memory.total_bytes <= candidate.limit_bytes
    groups, num_nodes = _groups(candidate.built), len(analysis.graph.nodes)
    if not groups or len(groups) * num_nodes > MANY:
        return candidate
    if candidate.num_stages > 1 and num_nodes > CHEAP:
        return candidate
    if fits and not _promises(analysis, candidate):
        return candidate
    subject = _Subject(analysis, request, candidate, limit_of)
    stages = [_Stage(analysis, candidate.built, groups, own) for own in subject.stages()]
    for number in range(ROUNDS + 1):
        # In the end stages that would hold too much stay as they are, for what others gain.
        moved = [stage.move() if number < ROUNDS else stage.leave() for stage in stages]
        if not any(moved):
            break
        chunks = {n: plan for stage in stages for n, plan in stage.chunks.items()}
        found, over = subject.evaluated([chunks[n] for n in sorted(chunks)])
        if max(over) <= 0:
            return candidate if fits and found.step_s >= candidate.step_s else found
        for stage, own in zip(stages, over, strict=True):
            stage.tighten(own)
    return candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A stage of a candidate, as it was lowered.

    Attributes:
        lowered: Its chunks, and what they hold when.
        cost: Prices its nodes.
        room_bytes: What its ranks may hold beyond what they do.
    """

    lowered: Lowered
    cost: NodeCost
    room_bytes: float


class _Subject:
    """A candidate, and what it takes with other chunks."""

    def __init__(
        self,
        analysis: Analysis,
        request: Request,
        candidate: Candidate,
        limit_of: Callable[[Device], int],
    ) -> None:
        self.analysis = analysis
        self.request = request
        self.candidate = candidate
        self.limit_of = limit_of
        plans, count = candidate.pipeline.stages, candidate.num_stages
        self.layout = Layout(
            schedule=candidate.schedule, num_stages=count, num_chunks=len(plans) // count
        )
        self.held = [
            [chunk for chunk, own in enumerate(self.layout.lanes) if own == stage]
            for stage in range(count)
        ]
        self.costs = [candidate.costs[chunks[0]] for chunks in self.held]

    def stages(self) -> list[_Found]:
        """Every stage of the candidate."""
        candidate, layout = self.candidate, self.layout
        plans, microbatches = candidate.pipeline.stages, candidate.mesh.microbatches
        if layout.num_stages == 1:
            row = [
                Turn(section, 0, number)
                for number in range(min(microbatches, 2))
                for section in (Section.FORWARD, Section.BACKWARD)
            ]
            lowered = Lowered(chunks={0: plans[0]}, row=row, profile=candidate.simulation.profile)
            room = candidate.limit_bytes - candidate.memory.total_bytes
            return [_Found(lowered=lowered, cost=self.costs[0], room_bytes=room)]
        pipeline, transfers = candidate.pipeline, candidate.pipeline.transfers
        lowered_all = lower_pipeline(
            self.analysis, self._lanes(), pipeline, layout, self.request.cluster
        )
        profiles = lowered_all.profiles(pipeline, layout)
        used = measured(self.request, pipeline, lowered_all.under(layout), self._limits()).used
        rows = turns_of(layout.schedule, layout.num_stages, layout.num_chunks, microbatches)
        return [
            _Found(
                lowered=Lowered(
                    chunks={n: plans[n] for n in chunks},
                    row=row,
                    profile=profile,
                    transfers=transfers,
                ),
                cost=cost,
                room_bytes=limit - own,
            )
            for chunks, row, profile, cost, limit, own in zip(
                self.held, rows, profiles, self.costs, self._limits(), used, strict=True
            )
        ]

    def evaluated(self, chunks: Sequence[StagePlan]) -> tuple[Candidate, list[float]]:
        """The candidate with other chunks, and bytes by which every stage holds too much."""
        candidate, analysis, request = self.candidate, self.analysis, self.request
        if self.layout.num_stages == 1:
            found = evaluate_stage(
                analysis,
                request,
                self.costs[0],
                candidate.built,
                candidate.solution,
                chunks[0],
                self.limit_of,
            )
            return found, [found.memory.total_bytes - found.limit_bytes]
        pipeline = replace(candidate.pipeline, stages=tuple(chunks))
        lowered = lower_pipeline(analysis, self._lanes(), pipeline, self.layout, request.cluster)
        limits = self._limits()
        taken = measured(request, pipeline, lowered.under(self.layout), limits)
        found = replace(
            candidate,
            pipeline=pipeline,
            simulation=taken.simulation,
            memory=taken.memory,
            limit_bytes=taken.limit_bytes,
            update_s=taken.update_s,
            host_bytes=taken.host_bytes,
        )
        return found, [own - limit for own, limit in zip(taken.used, limits, strict=True)]

    def _limits(self) -> list[int]:
        return [self.limit_of(cost.device) for cost in self.costs]

    def _lanes(self) -> list[Lane]:
        """The ranks of every stage; those that are priced alike are of one kind."""
        plans = self.candidate.pipeline.stages
        first = {id(cost): plans[own[0]] for cost, own in zip(self.costs, self.held, strict=True)}
        kinds = {id(cost): Kind(first[id(cost)], cost) for cost in self.costs}
        return [
            Lane(kinds[id(cost)], plans[own[0]].first_rank)
            for cost, own in zip(self.costs, self.held, strict=True)
        ]


class _Stage:
    """A stage whose choice is moved.

    Attributes:
        chunks: Its chunks, as far as it was moved.
    """

    def __init__(
        self, analysis: Analysis, built: Built, groups: Sequence[tuple[str, ...]], found: _Found
    ) -> None:
        self.analysis = analysis
        self.before = self.chunks = found.lowered.chunks
        self.kept = {number: _layouts(plan, built) for number, plan in found.lowered.chunks.items()}
        kept = {ref: own for layouts in self.kept.values() for ref, own in layouts.items()}
        self.ledger = Ledger(analysis, found.lowered, found.cost, kept)
        self.groups = [own for names in groups if (own := self._own(names))]
        self.start = self.ledger.choice(self.before)
        self.limit_bytes = self.ledger.held(self.start).peak_bytes + found.room_bytes
        self.settled = False

    def _own(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those that the stage runs."""
        return tuple(name for name in names if name in self.ledger.part_of)

    def move(self) -> bool:
        """Look for moves within the limit, unless they are known; whether there are any."""
        if not self.settled:
            choice = Moves(self.ledger, self.groups, self.limit_bytes).best(self.start)
            stays = choice is None or choice == self.start
            self.chunks = self.before if stays or choice is None else self._with(choice)
            self.settled = True
        return self.chunks is not self.before

    def leave(self) -> bool:
        """Leave it as it was, if what is known does not fit; whether it is moved."""
        self.chunks = self.chunks if self.settled else self.before
        return self.chunks is not self.before

    def tighten(self, over: float) -> None:
        """Allow so many bytes less, if they are too many."""
        if over > 0:
            self.limit_bytes -= over
            self.settled = False

    def _with(self, choice: Choice) -> Mapping[int, StagePlan]:
        return {
            number: _chunk(self.analysis, plan, self.ledger, choice, self.kept[number])
            for number, plan in self.before.items()
        }


def _promises(analysis: Analysis, candidate: Candidate) -> bool:
    """Whether what runs again takes so long that a few per cent of it are worth a lowering."""
    plans = candidate.pipeline.stages
    if len(analysis.graph.nodes) <= QUICK:
        return any(plan.recomputed for plan in plans)
    taken: dict[int, float] = defaultdict(float)
    for cost, plan in zip(candidate.costs, plans, strict=True):
        again = frozenset(plan.recomputed)
        found = savings(analysis, (cost,), (plan,)) if again else ()
        taken[plan.first_rank] += sum(own.seconds for own in found if own.name in again)
    return max(taken.values()) >= WORTH * candidate.step_s


def _groups(built: Built) -> list[tuple[str, ...]]:
    """Members of every class that may run again and need not."""
    found = []
    for rerun, names in zip(built.problem.reruns, built.reruns, strict=True):
        first, last = round(rerun.least * len(names)), round(rerun.most * len(names))
        found.append(names[first:last])
    return [names for names in found if names]


def _layouts(chunk: StagePlan, built: Built) -> Mapping[Ref, tuple[Sharding, ...]]:
    """How each value that may be made again is kept if it is not: as others of its class are.

    Where none of them is, as it is made.
    """
    made = {plan.name: plan.outputs for plan in chunk.nodes}
    found: dict[Ref, tuple[Sharding, ...]] = {}
    for rerun, names in zip(built.problem.reruns, built.reruns, strict=True):
        here = [name for name in names[: round(rerun.most * len(names))] if name in made]
        for index in range(len(made[here[0]]) if here else 0):
            own = {name: chunk.kept.get(str(Ref(name, index))) for name in names}
            usual = next((kept for kept in own.values() if kept), None)
            for name in here:
                found[Ref(name, index)] = own[name] or usual or (made[name][index],)
    return found


def _chunk(
    analysis: Analysis,
    chunk: StagePlan,
    ledger: Ledger,
    choice: Choice,
    layouts: Mapping[Ref, tuple[Sharding, ...]],
) -> StagePlan:
    """A chunk of a stage with another choice."""
    ran = {life.node for life in ledger.lives(choice)}
    here = {plan.name for plan in chunk.nodes}
    again = tuple(node.name for node in analysis.graph.nodes if node.name in ran & here)
    read = {ref for name in ran for ref in ledger.reads(name)}
    kept = {value: own for value, own in chunk.kept.items() if _node(value) not in ran}
    for ref, own in layouts.items():
        crosses = ledger.read_late(ref.node) or ref in read
        if ref.node not in ran and crosses:
            kept.setdefault(str(ref), own)
    forgotten: dict[str, list[str]] = defaultdict(list)
    for reader, name in sorted(pair for own in choice for pair in own.dropped):
        if name in ran & here:
            forgotten[reader].append(name)
    return replace(
        chunk,
        kept=kept,
        recomputed=again,
        forgotten={reader: tuple(names) for reader, names in forgotten.items()},
        offloaded=tuple(value for value in chunk.offloaded if value in kept),
        copy_room_bytes=None,
    )


def _node(value: str) -> str:
    """The node of a value written as text."""
    return value.partition(":")[0]
