"""Plans from random objectives: any legal plan must be exact."""

from __future__ import annotations

import random
from dataclasses import replace

from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.graph import PARAMETER, SOURCE_OPS, Phase
from autopar.ir.sharding import Mesh
from autopar.options import OptimizerSpec
from autopar.plan.records import StagePlan
from autopar.search.analysis import Analysis
from autopar.search.build import build_problem
from autopar.search.decode import decode
from autopar.search.intra import solve
from autopar.search.problem import Problem
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster


def random_stage(analysis: Analysis, mesh: Mesh, seed: int) -> StagePlan:
    """A stage that is optimal under random prices of strategies and of resharding."""
    cluster = Cluster.local(mesh.num_ranks)
    cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    built = build_problem(analysis, mesh, cost, updates, Restrictions())
    problem = with_random_prices(built.problem, random.Random(seed))
    solution = solve(problem, gap=0.05)
    assert solution.choice, solution.status
    return decode(built, analysis, solution)


def with_random_prices(problem: Problem, draw: random.Random) -> Problem:
    """The problem with every choice and arc priced at random; slices stay free."""
    nodes = tuple(
        replace(node, seconds=tuple(draw.random() for _ in node.seconds)) for node in problem.nodes
    )
    values = tuple(
        replace(
            value,
            arcs=tuple(
                replace(arc, seconds=0.2 * draw.random() if arc.seconds else 0.0)
                for arc in value.arcs
            ),
        )
        for value in problem.values
    )
    return replace(problem, nodes=nodes, values=values)


def recomputing(analysis: Analysis, stage: StagePlan, draw: random.Random) -> StagePlan:
    """The stage with a random part of its forward nodes recomputed: none, some, or all."""
    share = draw.choice((0.2, 0.5, 0.8, 1.0))
    names = [
        plan.name
        for plan in stage.nodes
        if analysis.graph.by_name[plan.name].phase is Phase.FORWARD and draw.random() < share
    ]
    return replace(stage, recomputed=tuple(names))


def streaming(analysis: Analysis, stage: StagePlan, draw: random.Random) -> StagePlan:
    """The stage with a random part of its parameters at home in host memory: some, or all.

    Each is brought back for every phase, or now and then kept for the backward. What microbatches
    cast of it is cast in each again, waits in host memory, or stays.
    """
    share = draw.choice((0.3, 0.7, 1.0))
    home = {p.name for p in stage.parameters if draw.random() < share}
    nodes = {node.target: node.name for node in analysis.graph.sources(PARAMETER)}
    dropped = {nodes[name] for name in home if draw.random() < 0.8}
    owners = analysis.casts if stage.mesh.time_axis is not None else {}
    casts = [cast for cast, owner in owners.items() if analysis.graph.by_name[owner].target in home]
    dropped |= {name for name in casts if draw.random() < 0.8}
    waiting = [
        name for name in casts if name in dropped & stage.kept.keys() and draw.random() < 0.5
    ]
    return replace(
        stage,
        offloaded=tuple(dict.fromkeys((*stage.offloaded, *waiting))),
        parameters=tuple(
            replace(p, on_host=p.name in home, state_on_host=p.name in home)
            for p in stage.parameters
        ),
        kept={value: () if value in dropped else own for value, own in stage.kept.items()},
    )


def offloading(analysis: Analysis, stage: StagePlan, draw: random.Random) -> StagePlan:
    """The stage with a random part of what it keeps offloaded: some, or all."""
    share = draw.choice((0.3, 0.7, 1.0))
    by_name = analysis.graph.by_name
    again = set(stage.recomputed)
    names = [
        value
        for value in stage.kept
        if by_name[value.partition(":")[0]].op not in SOURCE_OPS
        and value.partition(":")[0] not in again
        and draw.random() < share
    ]
    return replace(stage, offloaded=tuple(names))


def forgetting(analysis: Analysis, stage: StagePlan, draw: random.Random) -> StagePlan:
    """The stage with what it recomputes dropped before random nodes of the backward."""
    late = [
        plan.name
        for plan in stage.nodes
        if analysis.graph.by_name[plan.name].phase is Phase.BACKWARD and draw.random() < 0.05
    ]
    forgotten = {
        name: tuple(own for own in stage.recomputed if draw.random() < 0.5) for name in late
    }
    return replace(stage, forgotten={name: own for name, own in forgotten.items() if own})
