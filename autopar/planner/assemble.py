"""The plan of the candidate that was chosen, with what is to be known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.hint import Hint, Ranks, Schedule
from autopar.ir.graph import INPUT, Graph, Node
from autopar.ir.sharding import Split
from autopar.plan.records import (
    AllWays,
    CollectivePlan,
    CopyPlan,
    Plan,
    Prediction,
    Saving,
    SearchReport,
)
from autopar.plan.wording import fold_names, ranks_text
from autopar.planner.request import Candidate, Request
from autopar.planner.savings import savings
from autopar.search.analysis import Analysis
from autopar.search.sums import summed_early


def assemble(
    analysis: Analysis,
    request: Request,
    best: Candidate,
    found: Sequence[Candidate],
    *,
    tried: Sequence[tuple[str, float | None]],
    all_ways: AllWays,
    seconds: float,
    cut_short: bool,
) -> Plan:
    """The plan of a candidate.

    Args:
        analysis: The step.
        request: What was asked.
        best: The candidate.
        found: All that fit the memory.
        tried: Meshes with what the search modelled on them, None where nothing fits.
        all_ways: What is proven of those that were not tried too.
        seconds: Of the search.
        cut_short: Whether the clock ended it.
    """
    graph = analysis.graph
    bound = min(c.bound_s for c in found)
    objective = best.objective_s
    return Plan(
        model=request.model,
        fingerprint=request.fingerprint,
        cluster=request.cluster.name,
        cluster_ranks=request.cluster.num_devices,
        batch={n.target: n.outputs[0] for n in graph.sources(INPUT)},
        hints=tuple(str(h) for h in request.hints),
        stages=best.pipeline.stages,
        transfers=best.pipeline.transfers,
        microbatches=best.mesh.microbatches,
        per_microbatch=graph.alone,
        schedule=best.schedule,
        notes=(
            *_idle(request, best),
            *_notes(analysis, best),
            *_without_effect(request.hints, best),
        ),
        memory_limit_bytes=best.limit_bytes,
        prediction=_prediction(best, savings(analysis, best.costs, best.pipeline.stages)),
        search=SearchReport(
            status=_status({c.solution.status for c in found}, cut_short),
            objective_s=objective,
            bound_s=bound,
            gap=max(0.0, (objective - bound) / objective) if objective else 0.0,
            seconds=seconds,
            capture_s=request.capture_s,
            meshes=tuple(tried),
            num_nodes=len(graph.nodes),
            num_classes=len(analysis.folding.classes),
            num_strategies=best.built.num_strategies,
            num_variables=best.solution.num_variables,
            all_ways=all_ways,
        ),
        modules=_modules(graph),
    )


def _status(statuses: set[str], cut_short: bool) -> str:
    if cut_short or "time_limited" in statuses:
        return "time_limited"
    return "optimal" if statuses == {"optimal"} else "feasible"


def _prediction(best: Candidate, saved: tuple[Saving, ...]) -> Prediction:
    simulation = best.simulation
    return Prediction(
        step_s=best.step_s,
        compute_s=simulation.compute_s,
        communication_s=simulation.communication_s,
        exposed_s=simulation.exposed_s,
        optimizer_s=best.update_s,
        memory=best.memory,
        collectives=tuple(
            CollectivePlan(
                kind=use.kind,
                axis=best.mesh.names[use.axis],
                purpose=use.purpose,
                count=use.count,
                tensor_bytes=use.tensor_bytes,
                predicted_s=use.seconds,
            )
            for use in simulation.collectives
        ),
        copies=tuple(
            CopyPlan(
                kind=use.kind,
                purpose=use.purpose,
                count=use.count,
                num_bytes=use.tensor_bytes,
                predicted_s=use.seconds,
            )
            for use in simulation.copies
        ),
        copy_exposed_s=simulation.copy_exposed_s,
        savings=saved,
    )


def _modules(graph: Graph) -> Mapping[str, str]:
    return {node.name: node.source.module for node in graph.nodes if node.source.module}


def _idle(request: Request, best: Candidate) -> list[str]:
    """Which ranks are idle, and why."""
    used = {
        stage.first_rank + rank
        for stage in best.pipeline.stages
        for rank in range(stage.mesh.num_ranks)
    }
    idle = [rank for rank in range(request.cluster.num_devices) if rank not in used]
    if not idle:
        return []
    asked = any(isinstance(hint, Ranks) for hint in request.hints)
    why = "as hint.ranks asks" if asked else "no plan that uses them was found to be faster"
    verb = "are" if len(idle) > 1 else "is"
    if request.settled_plan is not None:
        why = "as in the plan that placed the parameters"
    return [f"{ranks_text(idle)} of {request.cluster.num_devices} {verb} idle: {why}"]


def _without_effect(hints: Sequence[Hint], best: Candidate) -> list[str]:
    """Hints about pipelines that the plan has no use for, and what to do."""
    if best.num_stages > 1:
        return []
    return [
        f"{given} has no effect: the plan has one stage; ask for more with hint.degrees(pp=...)"
        for given in hints
        if isinstance(given, Schedule)
    ]


ATTENTION_DROPOUT = "autopar.attention_dropout.default"


def _places(nodes: Sequence[Node]) -> str:
    """Where nodes are, repeated layers as one."""
    paths = dict.fromkeys(node.source.module for node in nodes)
    named = [folded.name for folded in fold_names((path, "") for path in paths if path)]
    return ", ".join([*named, *(["the model"] if "" in paths else [])])


def _notes(analysis: Analysis, best: Candidate) -> list[str]:
    """What a user should know of this plan."""
    notes = []
    whole = [
        node
        for node in analysis.graph.nodes
        if node.name in analysis.rules
        and not analysis.rules[node.name].factors()
        and max((t.num_elements for t in node.outputs), default=0) > 1
        and node.name not in analysis.steady
    ]
    if whole:
        ops = {node.op.rpartition(".")[0].removeprefix("aten.") for node in whole}
        notes.append(f"computed whole on every rank: {', '.join(sorted(ops))} in {_places(whole)}")
    unfused = [n for n in analysis.graph.nodes if n.op == ATTENTION_DROPOUT]
    if unfused:
        notes.append(
            f"attention drops weights in {_places(unfused)}, which no fused kernel does here: with "
            "a dropout of 0 there the step is shorter"
        )
    for mesh in dict.fromkeys(stage.mesh for stage in best.pipeline.stages):
        here = [stage for stage in best.pipeline.stages if stage.mesh == mesh]
        for axis, ranks in enumerate(mesh.sizes):
            if ranks > 1 and not any(
                isinstance(sharding[axis], Split)
                for stage in here
                for node in stage.nodes
                for sharding in (*node.operands, *node.outputs)
            ):
                notes.append(
                    f"mesh axis {mesh.names[axis]!r} of {ranks} ranks splits nothing: its ranks "
                    "repeat each other's work"
                )
    early = summed_early(analysis, (n for s in best.pipeline.stages for n in s.nodes))
    if early:
        where = ", ".join(repr(module) if module else "the model" for module in sorted(early))
        notes.append(
            f"gradients of {where} are summed in {next(iter(early.values()))}: they go on through "
            "an op that cannot take the terms of a sum"
        )
    return notes
