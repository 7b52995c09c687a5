"""Parts of the cluster that a plan may run on, the other ranks being idle.

Where talking to a node or a site costs more than it computes, the plan is faster without it; slower
devices may hold the others up. A part is planned as a cluster of its own, its ranks numbered from
0, and what is found is then moved to where the part lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.cost.node import NodeCost, axis_seconds
from autopar.hint import Ranks
from autopar.ir.graph import SOURCE_OPS
from autopar.ir.sharding import WHOLE, Mesh
from autopar.planner.hints import Settled
from autopar.planner.request import Candidate, Request
from autopar.search.analysis import Analysis
from cost_models.cluster import Cluster, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Ranks that take part, as a cluster.

    Attributes:
        ranks: Their global numbers.
        cluster: Their devices, and the network as between ranks that follow each other.
        name: For the report, before the name of a mesh; empty for the whole cluster.
    """

    ranks: tuple[int, ...]
    cluster: Cluster
    name: str = ""

    def asked(self, request: Request, *, time_limit_s: float | None = None) -> Request:
        """The request for this part alone."""
        limit_s = request.time_limit_s if time_limit_s is None else time_limit_s
        taken = request.settled_plan
        if taken is not None:
            here = {rank: place for place, rank in enumerate(self.ranks)}
            stages = tuple(replace(s, first_rank=here[s.first_rank]) for s in taken.stages)
            taken = replace(taken, stages=stages, cluster_ranks=len(self.ranks))
        return replace(request, cluster=self.cluster, settled_plan=taken, time_limit_s=limit_s)

    def moved(self, candidate: Candidate) -> Candidate:
        """A candidate that was found for the part alone, on the ranks it has in the cluster."""
        pipeline = candidate.pipeline
        stages = tuple(replace(s, first_rank=self.ranks[s.first_rank]) for s in pipeline.stages)
        return replace(candidate, pipeline=replace(pipeline, stages=stages))


def parts(request: Request, settled: Settled) -> Iterator[Part]:
    """Where to look for a plan: where it must be; else on the whole cluster, then on parts of it.

    These are one unit of every level above the nodes' own (a site, a node), the one with the
    fastest devices, and every run of equal devices. Fewer of equal ranks of a node are not among
    them: there all can repeat what some of them do, which takes as long.
    """
    cluster, taken = request.cluster, request.settled_plan
    whole = Ranks(cluster.num_devices)
    if taken is not None:
        used = tuple(rank for ranks in taken.ranks_of_stages for rank in ranks)
        yield _part(cluster, Ranks(len(used), used[0]), used)
        return
    found = [whole, *_units(cluster), *_runs(cluster)]
    for own in dict.fromkeys(found if settled.ranks is None else [settled.ranks]):
        yield _part(cluster, own, tuple(range(own.first, own.first + own.count)))


def _part(cluster: Cluster, own: Ranks, ranks: tuple[int, ...]) -> Part:
    if own.count == cluster.num_devices:
        return Part(ranks=ranks, cluster=cluster)
    part = cluster.part(min(own.first, cluster.num_devices - own.count), own.count)
    name = part.name.removeprefix(f"{cluster.name}, ")
    return Part(ranks=ranks, cluster=part, name=f"{name}: ")


def _units(cluster: Cluster) -> Iterator[Ranks]:
    """The fastest unit of every level but the innermost, the largest first."""

    def speed(first_rank: int, count: int) -> float:
        runs = cluster.runs_between(first_rank, first_rank + count)
        return min(max(cluster.devices[run].device.peak_flops_per_s.values()) for run in runs)

    for at in range(len(cluster.levels) - 1, 0, -1):
        count = math.prod(level.size for level in cluster.levels[:at])
        units = [Ranks(count, first) for first in range(0, cluster.num_devices, count)]
        yield max(units, key=lambda unit: speed(unit.first, unit.count))


def _runs(cluster: Cluster) -> Iterator[Ranks]:
    """Every run of equal devices."""
    first = 0
    for run in cluster.devices:
        yield Ranks(run.count, first)
        first += run.count


def seconds_alone(analysis: Analysis, device: Device) -> Mapping[str, float]:
    """Seconds of every node on one device."""
    mesh = Mesh(("all",), (1,))
    cost = NodeCost(device, mesh, axis_seconds(Cluster.local(1), mesh))
    found: dict[str, float] = {}
    for members in analysis.folding.classes:
        node = analysis.graph.by_name[members[0]]
        if node.op in SOURCE_OPS:
            continue
        types = analysis.operand_types(node)
        reads, makes = ((WHOLE,),) * len(types), ((WHOLE,),) * len(node.outputs)
        each_s = cost.seconds(node, analysis.rules[node.name], types, reads, makes)
        found.update(dict.fromkeys(members, each_s))
    return found
