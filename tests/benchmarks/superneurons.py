"""SuperNeurons' networks within little memory: ``python -m tests.benchmarks.superneurons``.

* AlexNet as Caffe has it (96 channels of 55 x 55 behind the first convolution, response
  normalisation as one op), batch 200, fp32: the least memory of a plan beside parameters, their
  gradients and optimizer state, against 886 MiB, the four tensors of the first normalisation's
  backward, which no schedule holds less than.
* Residual networks of bottlenecks, batch 16 of 224 x 224, on 12 GiB: the greatest depth of which
  everything is kept, and whether 3.3 times that depth fits with the input of every fourth block
  kept.

On one device that computes like an H100, without host memory. All *simulated*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.capture import capture_step
from autopar.planner.lanes import MeshSearch
from autopar.planner.request import Candidate
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster, Devices
from tests.oracles.recomputes import ONE, OneRank
from tests.oracles.sequential import planned_on

MIB = 1 << 20
LAYER_BYTES = 4 * 96 * 55 * 55 * 200 * 4
"""What the backward of the first normalisation reads and makes: SuperNeurons' largest layer."""

CARD_BYTES = 12 << 30
DEEPER = 3.3


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
    """A block of a residual network that changes neither width nor size."""

    def __init__(self, width: int = 256, inner: int = 64) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, inner, 1, bias=False)
        self.across = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.up = nn.Conv2d(inner, width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norms[0](self.down(x)))
        hidden = torch.relu(self.norms[1](self.across(hidden)))
        return torch.relu(x + self.norms[2](self.up(hidden)))


class Residual(nn.Module):
    """Blocks of the first stage, whose images are largest: 56 x 56."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 256, 4, 4)
        self.blocks = nn.Sequential(*(Bottleneck() for _ in range(depth)))
        self.head = nn.Linear(256, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


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
class Depths:
    """Blocks that fit where everything is kept, and the bytes of the plan of more of them."""

    kept: int
    deeper: int
    plan: Candidate | None


def depths() -> Depths:
    few, more = (OneRank(analysed(Residual(n), 16, 224), card()) for n in (8, 12))
    totals = [rank.free.memory.total_bytes for rank in (few, more)]
    each = (totals[1] - totals[0]) / 4
    kept = int(8 + (CARD_BYTES - totals[0]) / each)
    deeper = int(DEEPER * kept)
    deep = OneRank(analysed(Residual(deeper), 16, 224), card())
    plan = planned_on(deep.analysis, deep.cluster, ONE, CARD_BYTES, every_fourth)
    return Depths(kept, deeper, plan)


def every_fourth(search: MeshSearch) -> MeshSearch:
    """The same, with the input of every fourth block kept alone."""
    assert search.keeps_every(4)
    return search


def main() -> None:
    rank = OneRank(analysed(alexnet(), 200, 227), card())
    print(f"AlexNet, everything kept: {activation_bytes(rank.free) / MIB:.1f} MiB")
    for part in (1.3, 1.2, 1.1, 1.01, 1.001, 0.999, 0.99):
        plan = planned_within(rank, part * LAYER_BYTES)
        held = "nothing fits"
        if plan is not None:
            slower = plan.step_s / rank.free.step_s
            held = f"holds {activation_bytes(plan) / MIB:.1f} MiB, {slower:.3f} of the step"
        print(f"within {part * LAYER_BYTES / MIB:.1f} MiB: {held}")
    found = depths()
    print(f"residual network on 12 GiB: {found.kept} blocks, everything kept")
    if found.plan is None:
        print(f"{found.deeper} blocks do not fit")
    else:
        size = found.plan.memory.total_bytes / 2**30
        print(f"{found.deeper} blocks take {size:.2f} GiB")


if __name__ == "__main__":
    main()
