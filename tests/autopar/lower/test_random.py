"""What is drawn depends on no plan: programs of any ranks, microbatches and stages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.capture import capture_step
from autopar.capture.random import make_key
from autopar.cost.node import axis_seconds
from autopar.ir.graph import MICROBATCH_NUMBER
from autopar.ir.sharding import Mesh, Sharding, Split, Whole, local_elements, local_indices
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.autopar.lower.test_microbatches import exact
from tests.autopar.lower.test_stages import pipeline
from tests.oracles.lockstep import run_lockstep
from tests.oracles.models import DRAWING, drawing
from tests.oracles.pipeline import SEED, STEP, assert_exact, variants_of
from tests.oracles.random_plans import random_stage

FREE = Mesh(("a", "b"), (2, 2))
DATA = Mesh(("dp",), (2,), roles=("dp",))
TENSOR = Mesh(("tp",), (2,), roles=("tp",))


@given(st.data())
def test_elements_of_a_piece_are_those_of_its_indices(data: st.DataObject) -> None:
    """A dim of (outer, rows, blocks) split by two axes and time, beside another."""
    outer, a, b, chunk = (data.draw(st.integers(1, 3)) for _ in range(4))
    sizes = (2, 3, 2)
    shape = (outer * sizes[0] * a * sizes[1] * b, 4 * chunk)
    inner = sizes[1] * b
    sharding: Sharding = (
        Split(0, outer, a * inner),
        Split(0, outer * sizes[0] * a, b),
        data.draw(st.sampled_from([Split(1, 1, 2 * chunk), Split(1, 2, chunk), Whole()])),
    )
    for where in itertools.product(*map(range, sizes)):
        found = local_elements(shape, sharding, where, 2)
        numbers = [found.start + where[2] * found.per_microbatch]
        for count, stride in found.runs:
            numbers = [n + i * stride for n in numbers for i in range(count)]
        splits = [[(x, s) for x, s in enumerate(sharding) if _on(s, dim)] for dim in (0, 1)]
        rows, columns = (
            local_indices(size, own, where) for size, own in zip(shape, splits, strict=True)
        )
        assert numbers == [i * shape[1] + j for i in rows for j in columns]


def _on(axis: object, dim: int) -> bool:
    return isinstance(axis, Split) and axis.dim == dim


MESHES = {"dp": DATA, "tp": TENSOR, "free": FREE}
SMALL = {("drawing", "free"), ("gpt2 dropout", "tp"), ("bert dropout", "dp"), ("t5 dropout", "dp")}
"""What every run tries; the others are large."""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in SMALL else pytest.mark.large)
        for name in DRAWING
        for mesh in MESHES
    ],
)
def test_models_that_draw_are_exact(name: str, mesh: str) -> None:
    exact(DRAWING[name](), MESHES[mesh].with_time(2))


@pytest.mark.parametrize(("batch_size", "microbatches"), [(6, 3), (7, 2), (5, 3)])
def test_uneven_microbatches_that_draw_are_exact(batch_size: int, microbatches: int) -> None:
    exact(drawing(batch_size), Mesh(("a",), (1,)).with_time(microbatches))


@pytest.mark.parametrize(("name", "mesh"), [("drawing", TENSOR), ("gpt2 dropout", DATA)])
def test_stages_that_draw_are_exact(name: str, mesh: Mesh) -> None:
    pipeline(DRAWING[name](), mesh.with_time(2), 2)


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [
        ("drawing", FREE, 0),
        ("drawing", FREE, 1),
        ("drawing", FREE.with_time(2), 2),
        ("drawing", Mesh(("a",), (3,)), 3),
        pytest.param("bert dropout", FREE, 4, marks=pytest.mark.large),
        *(pytest.param("gpt2 dropout", FREE, s, marks=pytest.mark.large) for s in range(6)),
        *(pytest.param("t5 dropout", FREE, s, marks=pytest.mark.large) for s in range(6)),
    ],
)
def test_any_plan_that_draws_is_exact(name: str, mesh: Mesh, seed: int) -> None:
    model, batch, loss = DRAWING[name]()
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    stage = random_stage(analysis, mesh, seed)
    variants = variants_of(analysis, stage, axis_seconds(Cluster.local(mesh.num_ranks), mesh))
    programs = variants if mesh.time_axis is not None else variants[0]
    assert_exact(model, batch, loss, analysis, programs, captured)


class Masks(nn.Module):
    """Its dropout of ones is the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.scale * (x * 0.0 + 1.0))


def masks_loss(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mask = model(batch["x"])
    return mask.sum(), {"mask": mask, "noise": torch.randn_like(batch["x"])}


@pytest.mark.parametrize("batch_size", [8, 5])
def test_masks_and_noise_are_equal_to_the_bit_under_every_plan(batch_size: int) -> None:
    model, batch = Masks(), {"x": torch.randn(batch_size, 4, 6)}
    captured = capture_step(model, batch, masks_loss, grad=True)
    analysis = analyse(captured.graph)
    tensors = {"x": batch["x"], "scale": model.scale.detach(), "key": make_key(SEED, STEP)}
    tensors |= dict(captured.constants)
    seen: dict[str, set[bytes]] = {"mask": set(), "noise": set()}
    layouts = set()
    for mesh in (Mesh(("a",), (1,)), Mesh(("a",), (3,)), FREE):
        for seed in range(3):
            stage = random_stage(analysis, mesh, seed)
            layouts.update(str(plan.outputs) for plan in stage.nodes if "dropout" in plan.name)
            seconds = axis_seconds(Cluster.local(mesh.num_ranks), mesh)
            (programs,) = variants_of(analysis, stage, seconds)
            for program, env in zip(programs, run_lockstep(programs, tensors), strict=True):
                for name, ref in program.aux:
                    seen[name].add(env[ref].numpy().tobytes())
    assert {name: len(found) for name, found in seen.items()} == {"mask": 1, "noise": 1}
    assert len(layouts) > 3


def test_microbatches_run_one_program_and_are_told_which_they_are() -> None:
    model, batch, loss = drawing(8)
    captured = capture_step(model, batch, loss, grad=True)
    analysis = analyse(captured.graph)
    mesh = Mesh(("a",), (1,)).with_time(4)
    stage = random_stage(analysis, mesh, 0)
    variants = variants_of(analysis, stage, axis_seconds(Cluster.local(1), mesh))
    programs = {ranks[0].instructions for ranks in variants}
    assert len(programs) == 1
    told = [i for i in programs.pop() if MICROBATCH_NUMBER in i.args]
    assert "autopar.dropout.default" in {i.op for i in told}
