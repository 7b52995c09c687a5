"""From a model to the programs of all ranks and their results, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.capture.batch import flatten_batch
from autopar.capture.interpret import source_values
from autopar.capture.keyed import keyed
from autopar.capture.random import make_key
from autopar.cost.node import axis_seconds
from autopar.ir.graph import Ref
from autopar.lower.chunks import lower_chunks, on_one_rank
from autopar.lower.overlap import overlap
from autopar.lower.program import Program
from autopar.lower.rows import turns_of
from autopar.lower.spmd import Crossing, lower
from autopar.lower.unroll import Row
from autopar.plan.records import StagePlan
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from autopar.search.stages import Pipeline, balanced_cuts, forward_order, split_stages
from cost_models.cluster import Cluster
from tests.oracles.lockstep import join, run_lockstep
from tests.oracles.microbatches import Lane, run_microbatches, run_pipeline

SEED, STEP = 7, 3
"""Key of what a model draws."""


def variants_of(
    analysis: Analysis,
    stage: StagePlan,
    collective_s: Callable[[str, int, int], float],
) -> list[list[Program]]:
    """For every microbatch, the program of every rank."""
    mesh = stage.mesh
    return [
        [
            lower(
                analysis.graph,
                analysis.rules,
                stage,
                mesh.coordinates(r) + ((m,) if mesh.time_axis is not None else ()),
                collective_s,
            )
            for r in range(mesh.num_ranks)
        ]
        for m in range(mesh.microbatches)
    ]


def programs_of(
    analysis: Analysis, stage: StagePlan, collective_s: Callable[[str, int, int], float]
) -> list[Program]:
    """The program of every rank of a stage."""
    mesh = stage.mesh
    return [
        overlap(lower(analysis.graph, analysis.rules, stage, mesh.coordinates(rank), collective_s))
        for rank in range(mesh.num_ranks)
    ]


def eager(
    model: torch.nn.Module, batch: Any, loss: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Loss, gradients and buffers of one process."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    with keyed(model, SEED, STEP):
        value = loss(model, copy.deepcopy(batch))
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return value.detach(), gradients, dict(model.named_buffers())


def assert_exact(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable[..., Any],
    analysis: Analysis,
    programs: Sequence[Program] | Sequence[Sequence[Program]],
    captured: Any,
    tolerance: float = 1e-5,
) -> None:
    """Loss and every gradient of the programs of one stage equal one process."""
    values = values_of(model, batch, analysis, captured)
    if isinstance(programs[0], Program):
        envs = run_lockstep(programs, values)
    else:
        envs = run_microbatches(programs, values)
        programs = programs[0]
    _compare((model, batch, loss), analysis, [(programs, envs)], tolerance)


def two_stages(
    built: tuple[torch.nn.Module, Any, Callable[..., Any]],
    analysis: Analysis,
    captured: Any,
    whole: StagePlan,
    schedule: str,
) -> tuple[list[Program], list[list[torch.Tensor]]]:
    """A plan of one rank cut into two stages, which are exact: their programs and results."""
    cuts = balanced_cuts([1.0] * len(forward_order(analysis)), 2)
    pipeline = split_stages(analysis, whole, cuts)
    lanes = assert_pipeline_exact(*built, analysis, pipeline, captured, schedule)
    programs = [lane.variants[0][0] for lane in lanes]
    found = [[lane.envs[0][r] for r in p.results] for lane, p in zip(lanes, programs, strict=True)]
    return programs, found


def assert_pipeline_exact(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable[..., Any],
    analysis: Analysis,
    pipeline: Pipeline,
    captured: Any,
    schedule: str = "1f1b",
    tolerance: float = 1e-5,
) -> list[Lane]:
    """Loss and every gradient of a pipeline equal one process; its lanes, at their end."""
    lanes = lanes_of(analysis, pipeline, schedule)
    found = run_pipeline(lanes, values_of(model, batch, analysis, captured))
    ended = [(lane.variants[0], lane.envs) for lane in found]
    _compare((model, batch, loss), analysis, ended, tolerance)
    return found


def lanes_of(
    analysis: Analysis, pipeline: Pipeline, schedule: str
) -> list[tuple[list[list[Program]], Row]]:
    """For every lane: for every microbatch, the program of every rank; and its row."""
    microbatches = pipeline.stages[0].mesh.microbatches
    firsts = sorted({stage.first_rank for stage in pipeline.stages})
    lanes = [firsts.index(stage.first_rank) for stage in pipeline.stages]
    rows = turns_of(schedule, len(firsts), len(lanes) // len(firsts), microbatches)
    crossing = Crossing(
        transfers=pipeline.transfers,
        meshes=tuple(stage.mesh for stage in pipeline.stages),
        splits_backward=schedule_named(schedule).splits_backward,
    )
    meshes = [pipeline.stages[lanes.index(lane)].mesh for lane in range(len(firsts))]
    seconds = [axis_seconds(Cluster.local(mesh.num_ranks), mesh) for mesh in meshes]

    def program(lane: int, rank: int, number: int) -> Program:
        held = {n: s for n, s in enumerate(pipeline.stages) if lanes[n] == lane}
        place = meshes[lane].coordinates(rank) + ((number,) if microbatches > 1 else ())
        programs = lower_chunks(
            analysis.graph, analysis.rules, held, place, seconds[lane], crossing
        )
        return on_one_rank(analysis.graph, programs, held)

    return [
        (
            [
                [program(lane, r, m) for r in range(meshes[lane].num_ranks)]
                for m in range(microbatches)
            ],
            rows[lane],
        )
        for lane in range(len(firsts))
    ]


def values_of(
    model: torch.nn.Module, batch: Any, analysis: Analysis, captured: Any
) -> dict[str, torch.Tensor]:
    """Whole tensor of everything that enters the graph."""
    paths, tensors, _ = flatten_batch(batch)
    values = source_values(
        analysis.graph,
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
        dict(zip(paths, tensors, strict=True)),
    )
    for node in analysis.graph.sources("constant"):
        values[node.name] = captured.constants[node.target]
    for node in analysis.graph.sources("key"):
        values[node.name] = make_key(SEED, STEP)
    return values


def _compare(
    built: tuple[torch.nn.Module, Any, Callable[..., Any]],
    analysis: Analysis,
    stages: Sequence[tuple[Sequence[Program], list[dict[Ref, torch.Tensor]]]],
    tolerance: float,
) -> None:
    expected, gradients, _ = eager(*built)
    with_loss = []
    for programs, envs in stages:
        for program, env in zip(programs, envs, strict=True):
            if program.loss is not None:
                with_loss.append(programs)
                error = abs(float(env[program.loss]) - float(expected))
                assert error <= tolerance * max(1.0, abs(float(expected))), "loss"
    assert with_loss and with_loss == [with_loss[0]] * len(with_loss[0]), "one stage makes it"
    left = {name for name, gradient in gradients.items() if gradient is not None}
    for programs, envs in stages:
        for name in programs[0].gradients:
            kind = analysis.graph.type_of(analysis.graph.gradients[name])
            item = next(i for i in programs[0].inputs if i.kind == "parameter" and i.target == name)
            pieces = {
                p.coordinates: env[p.gradients[name]] for p, env in zip(programs, envs, strict=True)
            }
            whole = join(pieces, kind.shape, item.sharding)
            wanted = gradients[name]
            assert wanted is not None, name
            error = float((whole - wanted.double()).abs().max()) if whole.numel() else 0.0
            scale = max(float(wanted.abs().max()), 0.1)
            assert error <= tolerance * scale, (name, error, scale)
            left.remove(name)
    assert not left, left
