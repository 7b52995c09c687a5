"""Large Model Support as an oracle: the first tensors that cross leave, and come back ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost.node import axis_seconds
from autopar.lower.overlap import overlap
from autopar.lower.simulate import prices, simulate
from autopar.lower.spmd import lower
from autopar.options import ADAMW
from autopar.plan.records import Plan
from autopar.planner.evaluate import predicted_memory
from autopar.planner.update import update_of
from autopar.search.analysis import Analysis
from autopar.search.recompute import recompute_of
from cost_models.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Swapped:
    """One setting of its two knobs, simulated.

    Attributes:
        count: Tensors that leave.
        lead: How far ahead they come back, as a part of what their copy takes; 0 when read.
        memory_bytes: At the peak.
        step_s: With the update.
    """

    count: int
    lead: float
    memory_bytes: int
    step_s: float


def swapped(
    analysis: Analysis,
    cluster: Cluster,
    free: Plan,
    parts: Sequence[float],
    leads: Sequence[float],
) -> Iterator[Swapped]:
    """The grid of the knobs.

    Args:
        analysis: The step.
        cluster: One device.
        free: Its fastest plan, in which nothing leaves.
        parts: Of the tensors that cross, those that leave: the first ones.
        leads: How far ahead.
    """
    device, seconds = cluster.device(0), axis_seconds(cluster, free.mesh)
    may = recompute_of(analysis, in_loop=False, allowed=True).may_leave
    order = [value for value in free.stage.kept if may(value.partition(":")[0])]
    cost = prices(device, seconds)
    for part in parts:
        count = int(part * len(order))
        stage = replace(free.stage, offloaded=tuple(order[:count]))
        lowered = lower(analysis.graph, analysis.rules, stage, (0,), seconds)
        for lead in leads:
            # A link that seems slower has copies start earlier.
            link = device.host_link_bytes_per_s / lead if lead else 0.0
            early = prices(replace(device, host_link_bytes_per_s=link), seconds) if lead else None
            program = overlap(lowered, early)
            found = simulate(program, cost)
            memory = predicted_memory(program, found, ADAMW).total_bytes
            taken_s = found.seconds + update_of(program, ADAMW).seconds(device)
            yield Swapped(count, lead, memory, taken_s)
