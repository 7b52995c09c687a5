"""Bytes that the ranks of a plan hold while its programs run, as counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from autopar.cost.node import axis_seconds
from autopar.lower.chunks import lower_chunks, on_one_rank
from autopar.lower.program import Program
from autopar.lower.rows import turns_of
from autopar.lower.simulate import prices
from autopar.lower.spmd import Crossing
from autopar.lower.unroll import looped
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.planner.update import states_on_host, update_of
from autopar.runtime.loop import build
from autopar.runtime.measure import LiveBytes
from autopar.runtime.module import AxisGroup
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from cost_models.cluster import Cluster
from tests.oracles.live import counted_peaks
from tests.oracles.wire import run_stages


def counted_bytes(
    analysis: Analysis,
    plan: Plan,
    cluster: Cluster,
    tensors: Mapping[str, Tensor],
    optimizer: OptimizerSpec,
) -> tuple[int, int]:
    """Most bytes that any rank holds on the device and in host memory, at the peak of a step.

    Stages of one rank run as the runtime runs them; several ranks with their loop written out.

    Args:
        analysis: The step.
        plan: Of one stage, or of stages of one rank each.
        cluster: What it was planned for.
        tensors: Whole tensor of everything that enters the graph.
        optimizer: What the update holds beside.
    """
    lanes = [_programs(analysis, plan, cluster, stage) for stage in range(plan.num_stages)]
    programs = [variants[0] for ranks in lanes for variants in ranks]
    if plan.num_stages > 1:
        chunks = len(plan.stages) // plan.num_stages
        rows = turns_of(plan.schedule, plan.num_stages, chunks, plan.microbatches)
        running = [(variants, row) for (variants,), row in zip(lanes, rows, strict=True)]
        counts, _ = run_stages(running, plan.stage_of_chunks, tensors)
    elif len(programs) == 1:
        counts = [_run(lanes[0][0], tensors)]
    else:
        count = plan.microbatches
        running = [p if count == 1 else looped(p, count) for p in programs]
        counts, _ = counted_peaks(running, tensors)
    away = states_on_host(*plan.stages)
    held = [_held(p, c, optimizer, away) for p, c in zip(programs, counts, strict=True)]
    return max(here for here, _ in held), max(there for _, there in held)


def _programs(analysis: Analysis, plan: Plan, cluster: Cluster, stage: int) -> list[list[Program]]:
    """For every rank of a stage, its program of every microbatch."""
    mesh, first = plan.meshes[stage], plan.ranks_of_stages[stage].start
    seconds = axis_seconds(cluster, mesh, first)
    cost = prices(cluster.device(first), seconds)
    crossing = Crossing(
        transfers=plan.transfers,
        meshes=tuple(chunk.mesh for chunk in plan.stages),
        splits_backward=schedule_named(plan.schedule).splits_backward,
    )
    chunks, count = plan.chunks_of(stage), plan.microbatches

    def program(place: tuple[int, ...]) -> Program:
        own = lower_chunks(analysis.graph, analysis.rules, chunks, place, seconds, crossing)
        return on_one_rank(analysis.graph, own, chunks, cost)

    times = [(m,) for m in range(count)] if count > 1 else [()]
    return [
        [program((*mesh.coordinates(rank), *time)) for time in times]
        for rank in range(mesh.num_ranks)
    ]


def _run(programs: Sequence[Program], tensors: Mapping[str, Tensor]) -> LiveBytes:
    """Live bytes of a step on one rank."""
    groups = tuple(AxisGroup("", 1) for _ in programs[0].mesh.sizes)
    built = build(programs, groups, torch.device("cpu"))
    values = [tensors[item.name] for item in programs[0].inputs]
    with torch.no_grad(), LiveBytes() as count:
        built.run(*values)
    return count


def _held(
    program: Program, count: LiveBytes, optimizer: OptimizerSpec, away: Collection[str]
) -> tuple[int, int]:
    """What a rank holds with what enters its program and the state of its optimizer."""
    update = update_of(program, optimizer, away=away)
    size = {False: 0, True: 0}
    for item in program.inputs:
        size[item.on_host] += item.local_type.num_bytes
    peak = max(count.peak_bytes, update.gradient_bytes + update.scratch_bytes)
    here = size[False] + update.state_bytes + peak
    return here, size[True] + update.host_state_bytes + count.host_peak_bytes
