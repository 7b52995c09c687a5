"""What changes of sharding cost beside their collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from autopar.cost.node import NodeCost, axis_seconds
from autopar.cost.reshard import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SLICE,
    Step,
    copied_elements,
    step_kind,
)
from autopar.ir.graph import TensorType
from autopar.ir.sharding import (
    SUM,
    WHOLE,
    AxisSharding,
    Mesh,
    Split,
    is_legal,
    local_shape,
)
from autopar.lower.builder import Builder
from autopar.lower.reshard import emit_step
from cost_models.cluster import Cluster

MESH = Mesh(("a", "b"), (2, 2))
KIND = TensorType((4, 8, 12), "float32")
OPTIONS: tuple[AxisSharding, ...] = (
    WHOLE,
    SUM,
    Split(0, 1, 2),
    Split(1, 1, 4),
    Split(2, 1, 6),
    Split(2, 3, 2),
)


def steps() -> Iterator[Step]:
    """Every change of the first axis, whatever the second one does."""
    for old, new, other in itertools.product(OPTIONS, OPTIONS, OPTIONS):
        before, after = (old, other), (new, other)
        if all(is_legal(KIND.shape, sharding, MESH) for sharding in (before, after)):
            kind = step_kind(KIND.shape, before, after, 0)
            if kind is not None:
                yield Step(kind, 0, before, after)


def copied(step: Step) -> int:
    """Elements of what the lowered step copies."""
    build = Builder(MESH, (0, 0))
    local = TensorType(local_shape(KIND.shape, step.before, (0, 0)), KIND.dtype)
    emit_step(build, build.add_input("x", local), KIND, step)
    copies = [i for i in build.instructions if i.op == "aten.clone.default"]
    return sum(i.outputs[0].num_elements for i in copies)


@pytest.mark.parametrize("kind", [ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, SLICE])
def test_what_a_step_copies_is_what_its_program_copies(kind: str) -> None:
    found = [step for step in steps() if step.kind == kind]
    wanted = [copied(step) for step in found]
    assert [copied_elements(KIND, step) for step in found] == wanted
    assert any(wanted)


def test_a_gather_along_an_inner_dim_takes_longer_by_its_copy() -> None:
    cluster = Cluster.preset("h100", 1)
    mesh = Mesh(("a",), (8,))
    cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    kind = TensorType((4096, 4096), "bfloat16")
    outer_s, inner_s = (
        cost.step_s(kind, Step(ALL_GATHER, 0, (Split(dim, 1, 512),), (WHOLE,))) for dim in (0, 1)
    )
    copy_s = cost.kernel_s("aten.clone.default", (kind,), (kind,), False, 0)
    assert inner_s == pytest.approx(outer_s + copy_s)
