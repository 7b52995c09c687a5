"""What a step costs that recomputes, and the least that any choice of what is kept costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import axis_seconds
from autopar.ir.graph import Phase, Ref
from autopar.ir.sharding import Mesh
from autopar.lower.overlap import overlap
from autopar.lower.program import Program
from autopar.lower.rows import turns_of
from autopar.lower.simulate import Prices, prices, seconds_of, simulate
from autopar.lower.spmd import lower
from autopar.options import ADAMW
from autopar.plan.records import StagePlan
from autopar.planner.evaluate import predicted_memory
from autopar.planner.layout import Layout
from autopar.planner.pipeline import Kind, Lane
from autopar.planner.request import Candidate
from autopar.planner.staged import lower_pipeline, lower_some
from autopar.search.analysis import Analysis
from autopar.search.recompute import recompute_of
from cost_models.cluster import Cluster
from tests.oracles.sequential import planned_on

ONE = Mesh(("a",), (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of what runs again, and bytes at the peak beside what enters the program."""

    seconds: float
    peak_bytes: int


class OneRank:
    """A step on one rank of a cluster.

    Attributes:
        free: The plan that keeps everything; ``plain`` its stage.
        fixed_bytes: What a plan holds beside what its program makes.
        peak_bytes: What the program of ``plain`` makes and holds at its peak.
    """

    def __init__(self, analysis: Analysis, cluster: Cluster) -> None:
        self.analysis = analysis
        self.cluster = cluster
        self.collective_s = axis_seconds(cluster, ONE)
        self.prices: Prices = prices(cluster.device(0), self.collective_s)
        free = self.planned(float("inf"))
        assert free is not None
        self.free = free
        self.plain: StagePlan = free.pipeline.stages[0]
        program = self.program(self.plain)
        self.plain_s = sum(seconds_of(program, self.prices).values())
        self.peak_bytes = simulate(program, self.prices).peak_bytes
        self.fixed_bytes = free.memory.total_bytes - self.peak_bytes

    def planned(self, limit_bytes: float) -> Candidate | None:
        """The plan within so many bytes; None if nothing fits."""
        return planned_on(self.analysis, self.cluster, ONE, limit_bytes)

    def program(self, stage: StagePlan) -> Program:
        graph, rules = self.analysis.graph, self.analysis.rules
        return overlap(lower(graph, rules, stage, (0,), self.collective_s), self.prices)

    def cost(self, stage: StagePlan) -> Cost:
        program = self.program(stage)
        seconds = sum(seconds_of(program, self.prices).values()) - self.plain_s
        return Cost(seconds=seconds, peak_bytes=simulate(program, self.prices).peak_bytes)

    def every_cost(self) -> Iterator[tuple[Cost, bool]]:
        """Of every choice of the values that are not kept, all else that they need run again.

        Each is made again once or for each use; told is whether any is made for each.
        """
        may = recompute_of(self.analysis, in_loop=False, allowed=True).runs_again
        names = [node.name for node in self.analysis.graph.nodes if may(node.name)]
        crossing = {value.partition(":")[0] for value in self.plain.kept}
        kept = [name for name in names if name in crossing]
        late = [n.name for n in self.analysis.graph.nodes if n.phase is Phase.BACKWARD]
        for choice in itertools.product(("kept", "once", "each"), repeat=len(kept)):
            stay = {name for name, way in zip(kept, choice, strict=True) if way == "kept"}
            each = tuple(name for name, way in zip(kept, choice, strict=True) if way == "each")
            again = tuple(name for name in names if name not in stay)
            forgotten = dict.fromkeys(late, each) if each else {}
            stage = replace(self.plain, recomputed=again, forgotten=forgotten)
            yield self.cost(stage), bool(each)


class Stages:
    """A step on stages of one rank each, under 1F1B.

    Attributes:
        layout: The stages.
        mesh: Of each.
    """

    def __init__(self, analysis: Analysis, num_stages: int, microbatches: int) -> None:
        self.analysis = analysis
        self.layout = Layout(schedule="1f1b", num_stages=num_stages, num_chunks=1)
        self.cluster = Cluster.local(num_stages)
        self.mesh = ONE.with_time(microbatches)
        self.rows = turns_of("1f1b", num_stages, 1, microbatches)
        self.may = recompute_of(analysis, in_loop=True, allowed=True).runs_again

    def planned(self, limit_bytes: float) -> Candidate | None:
        """The plan within so many bytes a rank; None if nothing fits."""
        return planned_on(self.analysis, self.cluster, self.mesh, limit_bytes, layout=self.layout)

    def best_s(self, plan: Candidate, limit_bytes: float) -> float:
        """The step of the same stages, each with the choice that takes least and fits.

        Of every choice of the values that are not kept, all else that they need run again, once or
        for each use; infinite if none of these fits.
        """
        plans = list(plan.pipeline.stages)
        for number, stage in enumerate(plans):
            costs = ((self._cost(plan, number, own), own) for own in self._choices(stage))
            fitting = [(cost.seconds, own) for cost, own in costs if cost.peak_bytes <= limit_bytes]
            if not fitting:
                return math.inf
            plans[number] = min(fitting, key=lambda own: own[0])[1]
        return self.step_s(plan, plans)

    def step_s(self, plan: Candidate, plans: Sequence[StagePlan]) -> float:
        """The step of a plan with other stages, without the update."""
        kind = Kind(plans[0], plan.costs[0])
        lanes = [Lane(kind, stage) for stage in range(len(plans))]
        pipeline = replace(plan.pipeline, stages=tuple(plans))
        lowered = lower_pipeline(self.analysis, lanes, pipeline, self.layout, self.cluster)
        return lowered.step_s(self.layout)

    def _cost(self, plan: Candidate, number: int, stage: StagePlan) -> Cost:
        """Seconds of the backward of a microbatch, and all bytes, of one stage."""
        plans = list(plan.pipeline.stages)
        plans[number] = stage
        pipeline = replace(plan.pipeline, stages=tuple(plans))
        kind = Kind(stage, plan.costs[number])
        own = lower_some(self.analysis, kind, pipeline, (number,), splits_backward=False)[number]
        memory = predicted_memory(own.together, own.peak(self.rows[number]), ADAMW)
        (chunk,) = own.chunks
        return Cost(seconds=chunk.time.backward_s, peak_bytes=memory.total_bytes)

    def _choices(self, stage: StagePlan) -> Iterator[StagePlan]:
        graph = self.analysis.graph
        names = [plan.name for plan in stage.nodes if self.may(plan.name)]
        late = [p.name for p in stage.nodes if graph.by_name[p.name].phase is Phase.BACKWARD]
        roots = {
            self.analysis.root(ref).root.node
            for name in late
            for ref in graph.by_name[name].operands
        }
        crossing = [name for name in names if name in roots]
        made = {plan.name: plan.outputs for plan in stage.nodes}
        for choice in itertools.product(("kept", "once", "each"), repeat=len(crossing)):
            stay = {name for name, way in zip(crossing, choice, strict=True) if way == "kept"}
            each = tuple(n for n, way in zip(crossing, choice, strict=True) if way == "each")
            again = tuple(name for name in names if name not in stay)
            kept = {
                str(Ref(name, index)): (sharding,)
                for name in stay
                for index, sharding in enumerate(made[name])
            }
            others = {v: own for v, own in stage.kept.items() if v.partition(":")[0] not in names}
            yield replace(
                stage,
                recomputed=again,
                forgotten=dict.fromkeys(late, each) if each else {},
                kept=others | kept,
            )
