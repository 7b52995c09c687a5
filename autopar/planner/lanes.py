"""The problems of the meshes of all stages, solved under tighter and tighter memory limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost, axis_seconds, update_bytes_per_s
from autopar.ir.sharding import WHOLE, Mesh, Sharding
from autopar.plan.records import StagePlan
from autopar.planner.hints import Settled
from autopar.planner.layout import Layout, most_pending
from autopar.planner.request import Candidate, Request, Unlimited
from autopar.search.analysis import Analysis
from autopar.search.build import Built, build_problem, with_moment, with_reruns
from autopar.search.intra import away_bytes, fits, solve
from autopar.search.offers import describe_mesh
from autopar.search.problem import Solution, alike
from autopar.search.recompute import recompute_of
from autopar.search.space import Pending, Updates
from cost_models.cluster import Device

UNEVEN = 0.1
"""Part of the memory that is left at first for stages that hold more than others."""

LESS = 0.01
"""Least part of the memory by which the limit is tightened from round to round."""

WORTH = 0.1
"""Least part of the step that a pipeline must be able to gain to be tried."""


def prepare(
    analysis: Analysis,
    request: Request,
    settled: Settled,
    meshes: Sequence[Mesh],
    layout: Layout,
) -> Lanes:
    """The problems of the meshes of all stages, not solved yet; one for stages that are alike."""
    first_ranks = [0, *itertools.accumulate(mesh.num_ranks for mesh in meshes)][:-1]
    cluster, taken = request.cluster, request.settled_plan
    kinds: dict[tuple[Mesh, tuple[int, ...]], list[int]] = {}
    for stage, (mesh, first) in enumerate(zip(meshes, first_ranks, strict=True)):
        runs = cluster.runs_between(first, first + mesh.num_ranks)
        kinds.setdefault((mesh, runs), []).append(stage)
    searches: dict[int, MeshSearch] = {}
    for (mesh, runs), stages in kinds.items():
        restrictions = settled.restrictions
        if taken is not None:
            chunks = [c for s in stages for c in taken.chunks_of(s).values()]
            parameters = [p for chunk in chunks for p in chunk.parameters]
            homes = {p.name: p for p in parameters if p.on_host or p.state_on_host}
            restrictions = replace(restrictions, stored=_stored(chunks, mesh), homes=homes)
        device = slowest([cluster.devices[run].device for run in runs])
        if mesh.shares:
            fullest = first_ranks[stages[0]] + mesh.space.rank(mesh.space.fullest)
            # The others are simulated on their own devices, but for those of a pipeline.
            least = device.memory_bytes if len(meshes) > 1 else cluster.device(fullest).memory_bytes
            device = replace(cluster.device(fullest), memory_bytes=least)
        cost = NodeCost(device, mesh, axis_seconds(cluster, mesh, first_ranks[stages[0]]))
        updates = Updates(request.optimizer, update_bytes_per_s(device))
        key = cluster, first_ranks[stages[0]], cost.device, mesh, updates, str(restrictions)
        unlimited = request.known.get((*key, layout.num_stages))
        if unlimited is None:
            built = build_problem(
                analysis, mesh, cost, updates, restrictions, num_stages=layout.num_stages
            )
            unlimited = request.known[*key, layout.num_stages] = Unlimited(built)
        asked = (
            restrictions.recompute
            or restrictions.offload
            or restrictions.offload_states
            or restrictions.offload_parameters
        )
        forced = bool(asked)
        search = MeshSearch(
            unlimited,
            layout.num_stages,
            cost,
            forced=forced,
            limit_of=settled.usable_bytes,
            pending=most_pending(layout, mesh.microbatches),
        )
        searches.update(dict.fromkeys(stages, search))
    return Lanes(
        searches=tuple(searches[s] for s in range(len(meshes))),
        first_ranks=tuple(first_ranks),
        layout=layout,
    )


def slowest(devices: Sequence[Device]) -> Device:
    """The device that equal parts of the work wait for, with the memory of the smallest."""
    found = min(devices, key=lambda device: max(device.peak_flops_per_s.values()))
    return replace(found, memory_bytes=min(device.memory_bytes for device in devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The search of every stage, the same one for stages that are alike.

    Attributes:
        searches: Of every stage.
        first_ranks: Global number of the first rank of every stage.
        layout: Chunks of the stages, and their schedule.
        others: Schedules of the same chunks, of which the fastest that fits may be taken.
    """

    searches: tuple[MeshSearch, ...]
    first_ranks: tuple[int, ...]
    layout: Layout
    others: tuple[Layout, ...] = ()

    @property
    def kinds(self) -> tuple[MeshSearch, ...]:
        """Every search once."""
        return tuple(dict.fromkeys(self.searches))

    @property
    def name(self) -> str:
        """Stages and meshes, in words; without the schedule."""
        meshes = [describe_mesh(kind.plain.mesh) for kind in self.searches]
        if len(self.kinds) > 1:
            alike = [(mesh, len(list(group))) for mesh, group in itertools.groupby(meshes)]
            return "stages of " + ", ".join(
                mesh if count == 1 else f"{count} times {mesh}" for mesh, count in alike
            )
        return f"{len(meshes)} stages of {meshes[0]}" if len(meshes) > 1 else meshes[0]

    @property
    def is_bound(self) -> bool:
        """Whether the solutions without a memory limit need more than there is."""
        return any(
            kind.unlimited.solution is not None
            and max(kind.unlimited.solution.memory_bytes) > kind.num_stages * kind.allowed
            for kind in self.kinds
        )

    def under(self, schedule: str) -> str:
        """Stages, meshes and schedule, in words."""
        if len(self.searches) == 1:
            return self.name
        chunks = self.layout.num_chunks
        return f"{self.name}, {schedule}" + (f" x {chunks}" if chunks > 1 else "")

    def work_s(self, time_limit_s: float) -> float:
        """Seconds of a stage's work if memory did not bind and stages shared it as it is fast."""
        return shared_s([kind.unbound_s(time_limit_s) for kind in self.searches])


def shared_s(seconds: Sequence[float]) -> float:
    """Seconds of work that stages share, so that they take equally long, from those of each alone.

    No way to share it takes less: the stage that takes longest takes that at least.
    """
    if not all(seconds):
        return 0.0
    return seconds[0] / len(seconds) if len(set(seconds)) == 1 else 1 / sum(1 / s for s in seconds)


JOINT = 600
"""Strategies up to which recompute and sharding are solved over all of them at once."""

FEWER = 0.6
"""Part of what was reckoned to hide that is next, once, where as much did and more was copied."""

LEFT = 0.15
"""Part of what is kept that is reckoned to stay where the rest is recomputed."""


class MeshSearch:
    """Solves one mesh under tighter and tighter memory limits.

    Without a limit nothing runs again, so the smaller problem is solved. Within one, sharding and
    recompute are chosen together: over all strategies where they are few, else over those of three
    solutions without recompute: that without a limit, that within it, and that within it if most
    activations were gone.
    """

    def __init__(
        self,
        unlimited: Unlimited,
        num_stages: int,
        cost: NodeCost,
        *,
        forced: bool,
        limit_of: Callable[[Device], int],
        pending: Pending,
    ) -> None:
        self.unlimited = unlimited
        self.plain = unlimited.built
        self.num_stages = num_stages
        self.cost = cost
        self.forced = forced
        self.limit_of = limit_of
        self.pending = pending
        self.allowed = float(limit_of(cost.device))
        self.host_limit = self.host_allowed = float(cost.device.host_memory_bytes)
        self.hides = 1.0
        self.fewer = FEWER
        self.reserved = 0.0
        self.left_more = False
        self.joint: Built | None = None
        self.last: tuple[tuple[object, ...], tuple[Built, Solution]] | None = None
        self.alike = False
        self.every = 1

    @property
    def first_limit(self) -> float:
        """Bytes a rank may use by the problem at first, which knows stages on average alone."""
        return self.allowed * (1 - UNEVEN) if self.num_stages > 1 else self.allowed

    @property
    def is_impossible(self) -> bool:
        """Whether no choices fit together, whatever memory there is."""
        solution = self.unlimited.solution
        return solution is not None and solution.status == "infeasible"

    def hides_less(self, candidate: Candidate, least: float) -> bool:
        """Whether copies hide behind less compute than was reckoned with, which is noted.

        Where that was so once, what is fastest without any copy has a try in the end.

        Args:
            candidate: What was lowered.
            least: Part of the step from which on what nothing hides counts.
        """
        found = candidate.simulation
        hidden_s = found.copy_s - found.copy_exposed_s
        hides = hidden_s / found.compute_s if found.compute_s else 0.0
        exposed = found.copy_exposed_s >= least * candidate.step_s
        if self.hides == 0 or (self.hides == 1 and not exposed):
            return False
        if not exposed:
            self.hides = 0.0
        elif hides < (1 - WORTH) * self.hides:
            self.hides = hides
        else:
            self.hides, self.fewer = self.fewer * self.hides, 0.0
        self.reserved, self.left_more = 0.0, False
        return True

    def leaves_room(self, candidate: Candidate) -> bool:
        """Whether copies wait for room that was not left for them; from here on it is.

        What was left by the problem's sums may be too little for the program: then, once, so much
        more.
        """
        room = candidate.pipeline.stages[0].copy_room_bytes or 0
        missing = candidate.crowded_bytes - room
        if missing <= 0 or self.left_more:
            return False
        self.left_more = self.reserved > 0
        self.reserved = max(self.reserved + missing, float(candidate.crowded_bytes))
        return True

    def host_asked(self, time_limit_s: float) -> float:
        """Bytes of host memory a rank that hints ask for, if they are more than there are."""
        if not self.forced or self.joint is None or self.joint.problem.link is None:
            return 0.0
        link = replace(self.joint.problem.link, host_limit_bytes=math.inf)
        problem = replace(self.joint.problem, memory_limit_bytes=None, link=link)
        solution = solve(problem, time_limit_s=time_limit_s)
        used = away_bytes(problem, solution) / self.num_stages
        return used if used > self.host_allowed else 0.0

    def fits_host(self, used: float) -> bool:
        """Whether host memory holds so much a rank; if not, less is allowed from here on."""
        over = used - self.host_allowed
        if over > 0:
            self.host_limit -= max(over, LESS * self.host_allowed)
        return over <= 0

    def looks_at(self, node: str) -> bool:
        """Whether memory is counted at one more node: where a program held most.

        That is exact where copies are treated alike only, else bytes are those of an average copy.
        """
        if self.joint is None or not node or not self.alike:
            return False
        before, self.joint = self.joint, with_moment(self.joint, node)
        return self.joint is not before

    def keeps_every(self, copies: int) -> bool:
        """Keep what only every so many copies of a block hand on; whether there are such blocks."""
        self.every, self.joint, self.alike = copies, None, False
        space = self.plain.space
        in_loop = space.mesh.time_axis is not None
        found = recompute_of(space.analysis, in_loop=in_loop, allowed=True, every=copies)
        hints = space.restrictions
        return any(found.handed_on.values()) and not (hints.keep or hints.offload)

    def treats_alike(self) -> bool:
        """Whether copies of a block could still run different ops again; from here on they do not.

        Bytes are then those of every copy, where they were those of an average one.
        """
        before, self.alike = self.alike, self.joint is not None and bool(self.joint.problem.reruns)
        return self.alike and not before

    def within(
        self, limit: float | None, time_limit_s: float, *, rough: bool = False
    ) -> tuple[Built, Solution]:
        """The best solution, and the problem it is one of.

        Args:
            limit: Bytes a rank may use; None for any.
            time_limit_s: For the solver.
            rough: Whether what rounding finds is enough, however far from the bound.
        """
        unbound = self._unbound(time_limit_s)
        if (limit is None and not self.forced) or not unbound.choice:
            return self.plain, unbound
        asked = (limit, self.host_limit, self.hides, self.reserved, self.alike, rough)
        if self.last is None or self.last[0] != asked or self.last[1][0] is not self.joint:
            self.last = asked, self._solved(unbound, limit, time_limit_s, rough)
        return self.last[1]

    def _solved(
        self, unbound: Solution, limit: float | None, time_limit_s: float, rough: bool
    ) -> tuple[Built, Solution]:
        """As `within`, where memory or a hint may ask for more than the plain problem has."""
        total = None if limit is None else (limit - self.reserved) * self.num_stages
        if self.joint is None:
            near = self._near(unbound, total, time_limit_s)
            self.joint = with_reruns(self.plain, near, every=self.every, pending=self.pending)
        link = self.joint.problem.link
        if link is not None:
            # What hints ask for leaves all the same.
            leaves = self.forced or self.hides > 0
            host = max(0.0, self.host_limit) * self.num_stages * leaves
            link = replace(link, host_limit_bytes=host, hides=self.hides)
        problem = replace(self.joint.problem, memory_limit_bytes=total, link=link)
        problem = alike(problem) if self.alike else problem
        solution = solve(problem, time_limit_s=time_limit_s, rough=rough)
        if self.joint.num_strategies < self.plain.num_strategies:
            # Proven is only what holds without a limit.
            bound_s = min(unbound.bound_s, solution.objective_s)
            status = "feasible" if solution.status == "optimal" else solution.status
            solution = replace(solution, status=status, bound_s=bound_s)
        return self.joint, solution

    def modelled_s(self, time_limit_s: float) -> float:
        """Seconds of the step on this mesh within memory; infinite where nothing is found."""
        _, solution = self.within(None, time_limit_s)
        if solution.choice and max(solution.memory_bytes) / self.num_stages > self.allowed:
            _, solution = self.within(self.first_limit, time_limit_s)
        return solution.objective_s if solution.choice else math.inf

    def unbound_s(self, time_limit_s: float) -> float:
        """Seconds of the whole step on this mesh alone, if memory did not bind."""
        return self._unbound(time_limit_s).objective_s

    def _unbound(self, time_limit_s: float) -> Solution:
        """The best solution if memory did not bind."""
        if self.unlimited.solution is None:
            self.unlimited.solution = solve(self.plain.problem, time_limit_s=time_limit_s)
        return self.unlimited.solution

    def _near(
        self, unbound: Solution, total: float | None, time_limit_s: float
    ) -> tuple[Solution, ...]:
        """Solutions between which the joint problem chooses; none for all strategies."""
        if self.plain.num_strategies <= JOINT:
            return ()
        if total is None or max(unbound.memory_bytes[:2]) <= total:
            return (unbound,)
        problem = replace(self.plain.problem, memory_limit_bytes=total, moments=())
        fewer = tuple(
            v if v.persistent else replace(v, kept_bytes=tuple(LEFT * b for b in v.kept_bytes))
            for v in problem.values
        )
        found = [
            solve(own, time_limit_s=time_limit_s, gap=NEAR)
            for own in (problem, replace(problem, values=fewer))
            if not fits(own, unbound)
        ]
        return (unbound, *(solution for solution in found if solution.choice))


NEAR = 1e-2
"""Relative gap of the solutions that only offer their strategies."""


def _stored(chunks: Sequence[StagePlan], mesh: Mesh) -> Mapping[str, Sharding]:
    """Stored shardings of chunks, for their mesh with or without the time axis."""
    num_axes = len(mesh.space.sizes)
    in_time = (WHOLE,) * (len(mesh.sizes) - num_axes)
    return {
        parameter.name: (*parameter.stored[:num_axes], *in_time)
        for chunk in chunks
        for parameter in chunk.parameters
    }
