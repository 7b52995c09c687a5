"""Sharding first, memory second: what choosing both together must never lose against.

The baseline takes the best sharding there is without a memory limit, and then drops, copies to the
host or keeps what that sharding makes, so that it fits: by the same integer program, with the same
costs, in which every node has the one choice left that the first solution made. What is kept may
still be kept in another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar import hint
from autopar.ir.sharding import Mesh
from autopar.planner.hints import settle
from autopar.planner.lanes import MeshSearch, prepare
from autopar.planner.layout import Layout
from autopar.planner.prove import prove, squeezed
from autopar.planner.refine import refined
from autopar.planner.request import Candidate, Request
from autopar.search.analysis import Analysis
from autopar.search.build import Built, with_reruns
from autopar.search.intra import solve
from autopar.search.problem import Solution
from cost_models.cluster import Cluster

EXACT = 1e-6
"""Relative gap at which programs are compared."""


def sequential(plain: Built, limit_bytes: float) -> Solution:
    """The best sharding without a limit, made to fit it."""
    free = solve(plain.problem, gap=EXACT)
    return _within(with_reruns(plain, (free,)), limit_bytes)


def unbound_bytes(plain: Built) -> float:
    """Most that the best sharding without a limit holds, by the problem's memory sums."""
    return max(solve(plain.problem, gap=EXACT).memory_bytes)


def joint(plain: Built, limit_bytes: float) -> Solution:
    """Sharding and memory at once, over all strategies."""
    return _within(with_reruns(plain), limit_bytes)


def _within(built: Built, limit_bytes: float) -> Solution:
    return solve(replace(built.problem, memory_limit_bytes=limit_bytes), gap=EXACT)


class _ShardFirst(MeshSearch):
    """A mesh whose sharding is settled before memory is looked at."""

    def _near(
        self, unbound: Solution, total: float | None, time_limit_s: float
    ) -> tuple[Solution, ...]:
        return (unbound,)


Make = Callable[[MeshSearch], MeshSearch]


def as_it_is(search: MeshSearch) -> MeshSearch:
    return search


def sharded_first(search: MeshSearch) -> MeshSearch:
    """The same mesh, sharded before memory is looked at."""
    return _ShardFirst(
        search.unlimited,
        search.num_stages,
        search.cost,
        forced=False,
        limit_of=search.limit_of,
        pending=search.pending,
    )


ALONE = Layout(schedule="1f1b", num_stages=1, num_chunks=1)


def planned_on(
    analysis: Analysis,
    cluster: Cluster,
    mesh: Mesh,
    limit_bytes: float,
    make: Make = as_it_is,
    layout: Layout = ALONE,
) -> Candidate | None:
    """What is lowered and simulated on one mesh after local moves, or None if nothing fits.

    Args:
        analysis: The step.
        cluster: Where.
        mesh: Of every stage.
        limit_bytes: A rank may use.
        make: How the mesh is searched.
        layout: The stages.
    """
    hints = () if limit_bytes == float("inf") else (hint.memory_limit(int(limit_bytes)),)
    request = Request(model="m", fingerprint="f", cluster=cluster, hints=hints)
    settled = settle(analysis, cluster, hints, None)
    lanes = prepare(analysis, request, settled, (mesh,) * layout.num_stages, layout)
    searched = replace(lanes, searches=tuple(make(search) for search in lanes.searches))
    found = prove(analysis, request, searched, 60.0, float("inf"))
    if isinstance(found, Candidate):
        return refined(analysis, request, found, settled.usable_bytes)
    return squeezed(analysis, request, searched, 60.0)
