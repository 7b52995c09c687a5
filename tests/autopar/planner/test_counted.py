"""Bytes of drawn plans: those predicted are those counted while their programs run."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from autopar import hint
from autopar.capture import capture_step
from autopar.capture.ops import torch_dtype
from autopar.capture.precision import precision_of
from autopar.errors import InfeasibleError
from autopar.hint import Hint
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles import models
from tests.oracles.counted import counted_bytes
from tests.oracles.hosts import hosted
from tests.oracles.pipeline import values_of

STEPS: dict[str, Any] = {
    "mlp": models.mlp,
    "gpt2": lambda: models.gpt2(layers=4, batch=8),
    "llama": models.llama,
    "t5": models.t5,
    "resnet": models.resnet,
    "unet": models.unet,
}
OTHERS: dict[str, Any] = {"small gpt2": lambda: models.gpt2(layers=2)}
PRECISIONS = (None, "bf16", "zero_paper")
SCHEDULES = ("1f1b", "zb-h1", "gpipe", "interleaved", "zb-v")
LINKS = (0.0, 1e8, 1e9, 1e10)
"""Bytes a second to host memory; 0 for devices that have none."""

PARTS = (None, 0.9, 0.7, 0.5, 0.35)
"""Of the memory that the fastest plan takes."""


@functools.cache
def step(name: str, precision: str | None) -> tuple[Analysis, dict[str, Tensor]]:
    """A captured step, and what enters it."""
    built = (STEPS | OTHERS)[name]()
    captured = capture_step(*built, grad=True, precision=precision_of(precision))
    analysis = analyse(captured.graph)
    values = values_of(built[0], built[1], analysis, captured)
    for node in analysis.graph.sources("parameter"):
        stored = torch_dtype(node.outputs[0].dtype)
        values[node.name] = values[node.name].detach().to(stored)
    return analysis, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is planned, and within which part of the memory it takes without a limit."""

    name: str
    precision: str | None
    cluster: Cluster
    optimizer: OptimizerSpec
    hints: tuple[Hint, ...]
    part: float | None

    def planned(self) -> Plan:
        analysis, _ = step(self.name, self.precision)

        def within(*limit: Hint) -> Plan:
            request = Request(
                model="m",
                fingerprint="f",
                cluster=self.cluster,
                hints=(*self.hints, *limit),
                optimizer=self.optimizer,
            )
            return make_plan(analysis, request)

        free = within()
        if self.part is None:
            return free
        return within(hint.memory_limit(int(self.part * free.prediction.memory.total_bytes)))


def drawn(seed: int) -> Case:
    """Any model in any precision, with microbatches, stages, a link, less memory and hints."""
    draw = random.Random(seed)
    name, precision = draw.choice(list(STEPS)), draw.choice(PRECISIONS)
    ranks, link = draw.choice((1, 1, 2, 2, 4)), draw.choice(LINKS)
    stages = draw.choice((1, 1, ranks))
    hints: list[Hint] = [hint.microbatches(draw.choice((1, 2, 4) if stages == 1 else (2, 4)))]
    hints.append(hint.degrees(pp=1) if stages == 1 else hint.degrees(pp=stages, dp=1, tp=1))
    if stages > 1:
        hints.append(hint.schedule(draw.choice(SCHEDULES)))
    part = draw.choice(PARTS)
    if link and draw.random() < 0.4:
        hints.append(hint.offload(draw.choice(("parameters", "optimizer", "*"))))
    elif draw.random() < 0.3:
        hints.append(hint.recompute("*"))
    return Case(
        name=name,
        precision=precision,
        cluster=hosted(ranks, link) if link else Cluster.local(ranks),
        optimizer=OptimizerSpec(moments=2, host_bucket_elements=512 if link else None),
        hints=tuple(hints),
        part=part,
    )


def assert_counted(case: Case) -> Plan:
    """The predicted bytes of a case are counted, on the device and in host memory."""
    analysis, values = step(case.name, case.precision)
    plan = case.planned()
    counted = counted_bytes(analysis, plan, case.cluster, values, case.optimizer)
    memory = plan.prediction.memory
    assert counted == (memory.total_bytes, memory.host_bytes)
    return plan


@pytest.mark.parametrize("link", [1e8, 1e10])
def test_casts_of_streamed_parameters_leave_the_device(link: float) -> None:
    """They wait in host memory as microbatches read them, or are made in each."""
    case = Case(
        name="mlp",
        precision="bf16",
        cluster=hosted(1, link),
        optimizer=OptimizerSpec(moments=2, host_bucket_elements=512),
        hints=(hint.microbatches(4), hint.offload("parameters")),
        part=None,
    )
    plan = assert_counted(case)
    analysis, _ = step(case.name, case.precision)
    assert len(analysis.casts) == len(plan.stage.parameters)
    assert not any(plan.stage.kept.get(cast) for cast in analysis.casts)
    assert plan.prediction.memory.parameters_bytes == 0


@pytest.mark.large
def test_copies_before_the_loop_of_a_stage_may_be_awaited_behind_a_message() -> None:
    """Of a tied weight that another stage needs, before what else is cast there has left."""
    case = Case(
        name="small gpt2",
        precision="bf16",
        cluster=hosted(2, 1e8),
        optimizer=OptimizerSpec(moments=2, host_bucket_elements=512),
        hints=(
            hint.microbatches(2),
            hint.degrees(pp=2, dp=1, tp=1),
            hint.schedule("1f1b"),
            hint.offload("parameters"),
        ),
        part=None,
    )
    plan = assert_counted(case)
    analysis, _ = step(case.name, case.precision)
    assert all(analysis.casts.keys() & set(stage.offloaded) for stage in plan.stages)


QUICK = (6, 26, 31, 35, 56)
SEEDS = [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.large) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_predicted_bytes_of_drawn_plans_are_counted(seed: int) -> None:
    try:
        assert_counted(drawn(seed))
    except InfeasibleError:
        pytest.skip("nothing fits so little memory")
