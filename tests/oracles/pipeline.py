"""From a model to the programs of all ranks and their results, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.capture import capture_step
from autopar.capture.interpret import source_values
from autopar.hint import Hint
from autopar.ir.graph import Ref
from autopar.ir.sharding import Mesh
from autopar.lower.overlap import overlap
from autopar.lower.program import Program
from autopar.lower.spmd import lower
from autopar.plan.records import StagePlan
from autopar.search.analysis import Analysis
from tests.oracles.lockstep import join, run_lockstep
from tests.oracles.microbatches import run_microbatches


def variants_of(
    analysis: Analysis, stage: StagePlan, collective_s: Callable[[str, int, int], float]
) -> list[list[Program]]:
    """For every microbatch, the program of every rank."""
    mesh = stage.mesh
    return [
        [
            lower(analysis.graph, analysis.rules, stage, (*mesh.coordinates(r), m), collective_s)
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
        overlap(
            lower(analysis.graph, analysis.rules, stage, mesh.coordinates(rank), collective_s)
        )
        for rank in range(mesh.num_ranks)
    ]


def eager(
    model: torch.nn.Module, batch: Any, loss: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Loss, gradients and buffers of one process."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
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
    """Loss and every gradient of the programs equal one process."""
    from autopar.capture.batch import flatten_batch

    expected, gradients, _ = eager(model, batch, loss)
    paths, tensors, _ = flatten_batch(batch)
    graph = analysis.graph
    values = source_values(
        graph,
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
        dict(zip(paths, tensors, strict=True)),
    )
    for node in graph.sources("constant"):
        values[node.name] = captured.constants[node.target]
    if isinstance(programs[0], Program):
        envs = run_lockstep(programs, values)
    else:
        envs = run_microbatches(programs, values)
        programs = programs[0]
    assert graph.loss is not None
    for program, env in zip(programs, envs, strict=True):
        assert program.loss is not None
        error = abs(float(env[program.loss]) - float(expected)) / max(1.0, abs(float(expected)))
        assert error <= tolerance, ("loss", float(env[program.loss]), float(expected))
    for name, ref in graph.gradients.items():
        kind = graph.type_of(ref)
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


__all__ = ["Hint", "Mesh", "Ref", "assert_exact", "capture_step", "eager", "programs_of", "variants_of"]
