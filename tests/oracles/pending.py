"""What a pipeline of a forced plan holds: by the sums of the problem, and once it is lowered."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.hint import Hint
from autopar.planner.evaluate import evaluate_stages
from autopar.planner.hints import settle
from autopar.planner.lanes import prepare
from autopar.planner.layout import Layout
from autopar.planner.request import Request
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from autopar.search.outer import stage_meshes
from cost_models.cluster import Cluster


def held_bytes(
    analysis: Analysis,
    cluster: Cluster,
    schedule: str,
    hints: Sequence[Hint],
    size: tuple[int, int],
) -> tuple[float, int]:
    """Bytes of a rank by the problem, and of the fullest rank of what runs.

    Args:
        analysis: The step.
        cluster: Where.
        schedule: Name of the schedule.
        hints: What must be forgotten, at least.
        size: Stages and microbatches.
    """
    num_stages, microbatches = size
    layout = Layout(
        schedule=schedule,
        num_stages=num_stages,
        num_chunks=schedule_named(schedule).least_chunks,
    )
    request = Request(model="m", fingerprint="f", cluster=cluster, hints=tuple(hints))
    settled = settle(analysis, cluster, hints, None)
    (spaces, *_) = stage_meshes(cluster, settled.degrees, num_stages)
    meshes = tuple(space.with_time(microbatches) for space in spaces)
    search = prepare(analysis, request, settled, meshes, layout)
    solved = {kind: kind.within(None, 60.0) for kind in search.kinds}
    _, used = evaluate_stages(analysis, request, search, solved)
    modelled = max(max(s.memory_bytes) / num_stages for _, s in solved.values())
    return modelled, max(used.values())
