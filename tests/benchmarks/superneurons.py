"""SuperNeurons' networks within little memory: ``python -m tests.benchmarks.superneurons``.

``alexnet`` or ``residual`` behind it runs that part alone.

* AlexNet as Caffe has it (96 channels of 55 x 55 behind the first convolution, response
  normalisation as one op), batch 200, fp32: the least memory of a plan beside parameters, their
  gradients and optimizer state, against 886 MiB, the four tensors of the first normalisation's
  backward, which no schedule holds less than.
* Residual networks of a stem and four stages of bottlenecks, the third of any length, batch 16 of
  224 x 224, trained with momentum: the greatest depth of which everything is kept in 12 GB (10**9
  bytes), and the planner's own plans for 3.2432 times as many layers and for 2,500; with the
  seconds of the processor that capture and planning take.

On one device that computes like an H100, without host memory. All *simulated*.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import hint
from autopar.capture import capture_step
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Candidate, Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster, Devices
from tests.oracles.recomputes import OneRank

MIB = 1 << 20
LAYER_BYTES = 4 * 96 * 55 * 55 * 200 * 4
"""What the backward of the first normalisation reads and makes: SuperNeurons' largest layer."""

CARD_BYTES = 12 * 10**9
DEEPER = 3.2432
"""How many times as deep SuperNeurons trains as others do: 1920 layers to 592."""

DEEPEST = 2500
"""Layers of the deepest residual network that SuperNeurons names."""


@torch.library.custom_op("caffe::lrn", mutates_args=())
def lrn(x: torch.Tensor) -> torch.Tensor:
    """Response normalisation over five channels, as one op."""
    return functional.local_response_norm(x, 5)


@torch.library.custom_op("caffe::lrn_backward", mutates_args=())
def lrn_backward(gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its gradient, from what it read and made."""
    with torch.enable_grad():
        own = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(functional.local_response_norm(own, 5), own, gradient)
    return found


lrn.register_fake(torch.empty_like)
lrn_backward.register_fake(lambda gradient, x, y: torch.empty_like(x))
lrn.register_autograd(
    lambda context, gradient: lrn_backward(gradient, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)
RULES = tuple(autopar.rule(f"caffe::{name}", "whole") for name in ("lrn", "lrn_backward"))


class Normalisation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lrn(x)


def alexnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 11, 4), nn.ReLU(), Normalisation(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(), Normalisation()),
        *(nn.MaxPool2d(3, 2), nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 1000)),
    )


class Bottleneck(nn.Module):
    """A block of a residual network; the first of a stage changes width and maybe size."""

    def __init__(self, before: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        width = WIDER * inner
        self.down = nn.Conv2d(before, inner, 1, bias=False)
        self.across = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.up = nn.Conv2d(inner, width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, width))
        self.past = nn.Sequential()
        if before != width:
            past = nn.Conv2d(before, width, 1, stride, bias=False)
            self.past = nn.Sequential(past, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norms[0](self.down(x)))
        hidden = torch.relu(self.norms[1](self.across(hidden)))
        return torch.relu(self.past(x) + self.norms[2](self.up(hidden)))


WIDER = 4
"""Channels that a bottleneck hands on for each of its inner ones."""


class ResNet(nn.Module):
    """A stem and four stages of bottlenecks.

    Args:
        blocks: Of every stage.
        inner: Inner channels of the first stage's; those of each next stage are twice as many.
    """

    def __init__(self, blocks: tuple[int, ...], inner: int = 64) -> None:
        super().__init__()
        stem = nn.Conv2d(3, inner, 7, 2, padding=3, bias=False)
        parts: list[nn.Module] = [stem, nn.BatchNorm2d(inner), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        before = inner
        for stage, count in enumerate(blocks):
            own = inner << stage
            for block in range(count):
                parts.append(Bottleneck(before, own, 2 if stage and not block else 1))
                before = WIDER * own
        self.parts = nn.Sequential(*parts)
        self.head = nn.Linear(before, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts(x).mean((2, 3)))


def classified(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def analysed(model: nn.Module, batch: int, size: int) -> Analysis:
    with torch.device("meta"):
        images, labels = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
    captured = capture_step(model.to("meta"), (images, labels), classified, grad=True)
    return analyse(captured.graph, {rule.op: rule.make for rule in RULES})


def card() -> Cluster:
    """One device without host memory of its own."""
    cluster = Cluster.preset("h100", nodes=1)
    device = replace(cluster.device(0), memory_bytes=10**13, unified_memory=True)
    return replace(cluster, devices=(Devices(device=device, count=cluster.num_devices),))


def activation_bytes(plan: Candidate) -> int:
    """What a plan's program makes and holds at its peak beside finished gradients."""
    return plan.simulation.peak_bytes - plan.simulation.gradient_bytes


def planned_within(rank: OneRank, num_bytes: float) -> Candidate | None:
    """The plan that holds so much beside parameters, their gradients and optimizer state."""
    parameters = rank.free.memory.parameters_bytes
    return rank.planned(rank.fixed_bytes + parameters + num_bytes)


@dataclass(frozen=True, slots=True)
class Family:
    """Residual networks that differ in the blocks of their third stage.

    Attributes:
        others: Blocks of the first, second and fourth stage.
        inner: Inner channels of the first stage.
        batch: Images; ``size`` pixels a side.
    """

    others: tuple[int, int, int]
    inner: int
    batch: int
    size: int

    def analysed(self, third: int) -> Analysis:
        first, second, fourth = self.others
        model = ResNet((first, second, third, fourth), self.inner)
        return analysed(model, self.batch, self.size)

    def layers(self, third: int) -> int:
        """Depth as the name of the network says it: three a block, the stem and the head."""
        return 3 * (sum(self.others) + third) + 2

    def planned(self, third: int, limit_bytes: int | None = None) -> Plan:
        """The planner's own plan.

        Raises:
            InfeasibleError: Nothing fits.
        """
        return planned(self.analysed(third), limit_bytes)


def planned(analysis: Analysis, limit_bytes: int | None = None) -> Plan:
    """The planner's own plan on one rank of the card.

    Raises:
        InfeasibleError: Nothing fits.
    """
    limits = () if limit_bytes is None else (hint.memory_limit(limit_bytes),)
    hints = (hint.ranks(1), *limits)
    request = Request(
        model="resnet",
        fingerprint="",
        cluster=card(),
        hints=hints,
        optimizer=MOMENTUM,
        time_limit_s=3600.0,
    )
    return make_plan(analysis, request)


MOMENTUM = OptimizerSpec(state_bytes=4.0)
"""Stochastic gradient descent with momentum, fp32."""

PAPER = Family(others=(6, 32, 6), inner=64, batch=16, size=224)
"""SuperNeurons' networks: 1920 layers on 12 GB, where the best of the others trains 592.

Source:
    Wang et al., PPoPP 2018, section 4: the third stage alone is repeated.
"""


def kept_blocks(family: Family, limit_bytes: int, few: int) -> int:
    """Blocks of the third stage, at most, of which everything is kept within a limit.

    Each takes as much as the one before: so two plans of few tell.
    """
    less, more = (family.planned(n).prediction.memory.total_bytes for n in (few, few + 4))
    return few + int((limit_bytes - less) * 4 / (more - less))


def deeper_blocks(family: Family, kept: int) -> int:
    """Blocks of the third stage of a network of `DEEPER` times the layers."""
    return math.ceil((DEEPER * family.layers(kept) - family.layers(0)) / 3)


def run_alexnet() -> None:
    rank = OneRank(analysed(alexnet(), 200, 227), card())
    print(f"AlexNet, everything kept: {activation_bytes(rank.free) / MIB:.1f} MiB")
    for part in (1.3, 1.2, 1.1, 1.01, 1.001, 0.999, 0.99):
        plan = planned_within(rank, part * LAYER_BYTES)
        held = "nothing fits"
        if plan is not None:
            slower = plan.step_s / rank.free.step_s
            held = f"holds {activation_bytes(plan) / MIB:.1f} MiB, {slower:.3f} of the step"
        print(f"within {part * LAYER_BYTES / MIB:.1f} MiB: {held}")


def run_residual() -> None:
    kept = kept_blocks(PAPER, CARD_BYTES, 8)
    most = f"{PAPER.layers(kept):,} layers"
    print(f"residual networks in {CARD_BYTES / 1e9:.0f} GB: everything is kept up to {most}")
    heads = "resident", "kept", "planned", "step", "capture", "planning"
    print(f"{'layers':>8}" + "".join(f"{head:>12}" for head in heads), flush=True)
    for third in (kept, deeper_blocks(PAPER, kept), (DEEPEST - PAPER.layers(0)) // 3):
        row = residual_row(third)
        print(f"{PAPER.layers(third):>8,}" + "".join(f"{cell:>12}" for cell in row), flush=True)


def residual_row(third: int) -> tuple[str, ...]:
    """What one depth takes: resident, all kept, planned; times the step; seconds of processor."""
    start = time.process_time()
    analysis = PAPER.analysed(third)
    captured = time.process_time()
    plan = planned(analysis, CARD_BYTES)
    done = time.process_time()
    free = planned(analysis).prediction
    memory = free.memory
    resident = 2 * memory.parameters_bytes + memory.optimizer_bytes
    sizes = (resident, memory.total_bytes, plan.prediction.memory.total_bytes)
    return (
        *(f"{size / 1e9:.2f} GB" for size in sizes),
        f"{plan.prediction.step_s / free.step_s:.3f}",
        f"{captured - start:.0f} s",
        f"{done - captured:.0f} s",
    )


PARTS = {"alexnet": run_alexnet, "residual": run_residual}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("parts", nargs="*", default=list(PARTS), help="of " + ", ".join(PARTS))
    for part in arguments.parse_args().parts:
        PARTS[part]()


if __name__ == "__main__":
    main()
