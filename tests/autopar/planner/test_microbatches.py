"""More microbatches where memory asks for them, and none where the model needs its whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import hint
from autopar.ir.graph import Phase, TensorType
from autopar.ir.sharding import Mesh
from autopar.lower.program import Instruction, Program, Section
from autopar.lower.simulate import Prices
from autopar.planner.evaluate import simulate_loop
from cost_models.overlap import NO_SLOWDOWN

SECONDS = st.sampled_from((0.5, 2.0, 20.0))


def test_a_model_that_needs_its_whole_batch_is_planned_within_memory() -> None:
    model = nn.Sequential(
        nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64), nn.BatchNorm1d(64)
    )
    cluster = autopar.Cluster.local(2)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    batch = torch.zeros(512, 64)
    free = autopar.plan(model, cluster, batch, loss=loss)
    limit = int(0.85 * free.prediction.memory.total_bytes)
    tight = autopar.plan(model, cluster, batch, loss=loss, hints=[hint.memory_limit(limit)])
    assert tight.microbatches == 1
    assert tight.prediction.memory.total_bytes <= limit


@given(
    before=st.lists(SECONDS, min_size=1, max_size=3),
    loop=st.lists(SECONDS, min_size=1, max_size=4),
    behind=st.lists(SECONDS, min_size=1, max_size=8),
    host_op_s=st.sampled_from((0.0, 1.0, 3.0)),
)
def test_more_microbatches_take_no_less_than_they_compute(
    before: list[float], loop: list[float], behind: list[float], host_op_s: float
) -> None:
    parts = ((Section.PROLOGUE, before), (Section.FORWARD, loop), (Section.EPILOGUE, behind))
    seconds = {f"{part}_{n}": s for part, own in parts for n, s in enumerate(own)}
    program = Program(
        mesh=Mesh(("a",), (1,)),
        coordinates=(0,),
        inputs=(),
        instructions=tuple(
            Instruction(
                name=f"{part}_{n}",
                op=f"{part}_{n}",
                args=(),
                kwargs=(),
                outputs=(TensorType((1,), "float32"),),
                origin="",
                phase=Phase.FORWARD,
                section=part,
            )
            for part, own in parts
            for n in range(len(own))
        ),
        loss=None,
        aux=(),
        gradients={},
        mutations={},
        microbatches=50,
    )
    priced = Prices(
        kernel_s=lambda op, *_: seconds[op],
        collective_s=lambda *_: 0.0,
        slowdown=NO_SLOWDOWN,
        host_op_s=host_op_s,
    )
    found = simulate_loop(program, priced)
    assert found.compute_s == pytest.approx(sum(before) + 50 * sum(loop) + sum(behind))
    assert found.seconds >= (1 - 1e-9) * max(found.compute_s, found.num_launched * host_op_s)
    assert found.seconds == pytest.approx(found.compute_s + found.host_s)
