"""What a step costs that recomputes, and the least that any choice of what is kept costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost.node import axis_seconds
from autopar.ir.graph import Phase
from autopar.ir.sharding import Mesh
from autopar.lower.overlap import overlap
from autopar.lower.program import Program
from autopar.lower.simulate import Prices, prices, seconds_of, simulate
from autopar.lower.spmd import lower
from autopar.plan.records import StagePlan
from autopar.planner.request import Candidate
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
