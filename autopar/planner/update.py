"""What the optimizer's update holds and takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopar.cost.node import update_bytes_per_s
from autopar.lower.program import Program
from autopar.lower.stretch import ONCE, Repeats, weights
from autopar.options import OptimizerSpec
from autopar.plan.records import StagePlan
from cost_models.cluster import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update on one rank.

    Attributes:
        parameter_bytes: Of all parameters, frozen ones too.
        gradient_bytes: Of all gradients.
        state_bytes: Optimizer state on the device; ``host_state_bytes`` that in host memory.
        scratch_bytes: Of buckets of that on the device while it is updated.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    host_state_bytes: int
    scratch_bytes: int

    def seconds(self, device: Device) -> float:
        """Seconds on a device: bound by memory, and by the host link for what is in host memory.

        Buckets go out while others come in; one of them has nothing beside it.
        """
        rate = update_bytes_per_s(device)
        moved = 2 * (self.parameter_bytes + self.state_bytes) + self.gradient_bytes
        away = self.host_state_bytes + self.scratch_bytes / 2
        link_s = away / device.host_link_bytes_per_s
        return moved / rate + max(2 * self.host_state_bytes / rate, link_s)


def states_on_host(*stages: StagePlan) -> frozenset[str]:
    """Parameters whose state is in host memory."""
    return frozenset(p.name for stage in stages for p in stage.parameters if p.state_on_host)


def update_of(
    program: Program,
    optimizer: OptimizerSpec,
    repeats: Repeats = ONCE,
    away: Collection[str] = (),
) -> Update:
    """The update of the parameters of a program.

    Args:
        program: Of one rank.
        optimizer: What its state takes.
        repeats: Copies of blocks that the program lacks.
        away: Parameters whose state is in host memory.
    """
    parameters = gradients = 0
    here = there = largest = 0.0
    for item, often in weights(program, repeats):
        if item.kind != "parameter":
            continue
        size = often * item.local_type.num_bytes
        parameters += size
        if item.target not in program.gradients:
            continue
        gradients += size
        element = optimizer.element_bytes(item.local_type.dtype)
        state = often * item.local_type.num_elements * element
        if item.target in away:
            there += state
            largest = max(largest, element)
        else:
            here += state
    bucket = largest * (optimizer.host_bucket_elements or 0)
    return Update(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        state_bytes=int(here),
        host_state_bytes=int(there),
        scratch_bytes=int(min(2 * bucket, there)),
    )
