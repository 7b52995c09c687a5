"""Programs of several microbatches as FX modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from autopar.capture import capture_step
from autopar.capture.batch import flatten_batch
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.sharding import Mesh
from autopar.lower.program import Program
from autopar.lower.spmd import lower
from autopar.options import OptimizerSpec
from autopar.runtime.loop import build
from autopar.runtime.measure import LiveBytes
from autopar.runtime.module import AxisGroup
from autopar.search.analysis import analyse
from autopar.search.build import build_problem
from autopar.search.decode import decode
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster
from tests.oracles.models import Built, llama, mlp
from tests.oracles.slow import slow_core


def programs_of(built: Built, microbatches: int) -> tuple[list[Program], dict[str, torch.Tensor]]:
    """One rank's program of every microbatch, and the captured constants."""
    model, batch, loss = built
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    mesh = Mesh(("a",), (1,)).with_time(microbatches)
    cluster = Cluster.local(1)
    cost = NodeCost(slow_core(), mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e9)
    problem = build_problem(analysis, mesh, cost, updates, Restrictions())
    stage = decode(problem, analysis, solve(problem.problem))
    times = [(m,) for m in range(microbatches)] if mesh.time_axis is not None else [()]
    programs = [
        lower(analysis.graph, analysis.rules, stage, (0, *time), cost.collective_s)
        for time in times
    ]
    return programs, dict(captured.constants)


@pytest.mark.parametrize(
    ("built", "microbatches"),
    [(mlp(8), 2), (mlp(7), 3), (mlp(3), 3), (llama(1), 2), (mlp(8), 1)],
    ids=["even", "uneven", "single", "llama", "one"],
)
def test_loops_equal_one_process(built: Built, microbatches: int) -> None:
    model, batch, loss_function = built
    programs, constants = programs_of(built, microbatches)
    made = build(programs, (AxisGroup("", 1),), torch.device("cpu"))
    paths, tensors, _ = flatten_batch(batch)
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    values |= dict(zip(paths, tensors, strict=True)) | constants
    inputs = [values[entry.target].detach().clone() for entry in programs[0].inputs]
    before = copy.deepcopy(inputs)
    with torch.no_grad():
        results = made.run(*inputs)
        again = made.run(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    model.zero_grad()
    loss = loss_function(model, batch)
    loss.backward()
    torch.testing.assert_close(results[0], loss.detach())
    gradients = dict(model.named_parameters())
    for name, found in zip(
        programs[0].gradients, results[1 + len(programs[0].aux) :], strict=False
    ):
        torch.testing.assert_close(found, gradients[name].grad, rtol=1e-5, atol=1e-6)
    if microbatches > 1:
        sizes = {replace(p, microbatch=0).instructions for p in programs}
        assert len(made.modules) == 2 + len(sizes)


def test_memory_of_a_loop_is_that_of_one_microbatch() -> None:
    peaks = []
    for microbatches in (1, 4):
        built = mlp(64)
        programs, constants = programs_of(built, microbatches)
        made = build(programs, (AxisGroup("", 1),), torch.device("cpu"))
        paths, tensors, _ = flatten_batch(built[1])
        values = dict(built[0].named_parameters()) | dict(zip(paths, tensors, strict=True))
        values |= constants
        inputs = [values[entry.target].detach() for entry in programs[0].inputs]
        with torch.no_grad(), LiveBytes() as measured:
            made.run(*inputs)
        peaks.append(measured.peak_bytes)
    assert peaks[1] < peaks[0]
