"""What the optimizer's update holds and takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopar.cost.node import update_bytes_per_s
from autopar.ir.graph import DTYPE_BYTES
from autopar.lower.program import Program
from autopar.lower.stretch import ONCE, Repeats, weights
from autopar.options import OptimizerSpec
from autopar.plan.records import StagePlan
from cost_models.cluster import Device
from cost_models.memory import PIECES, piece_elements
from cost_models.overlap import both_copies, together_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update on one rank.

    Attributes:
        parameter_bytes: Of all parameters on the device, frozen ones too.
        gradient_bytes: Of all gradients there.
        state_bytes: Optimizer state there; ``host_state_bytes`` that in host memory.
        piece_bytes: That come to the device at a time while what is in host memory is updated, in
            pieces.
        scratch_bytes: Held for a moment: of the pieces that are there together, and what the
            kernel makes.
        host_parameter_bytes: Of trained parameters whose home is host memory;
            ``host_gradient_bytes`` of their gradients.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    host_state_bytes: int
    scratch_bytes: int
    piece_bytes: int
    host_parameter_bytes: int = 0
    host_gradient_bytes: int = 0

    def seconds(self, device: Device) -> float:
        """Seconds on a device: bound by memory, and by the host link for what is in host memory.

        Pieces go out while others come in and one is updated; the first to come and the last to go
        have nothing beside them. Gradients come in and do not go out again.
        """
        rate = update_bytes_per_s(device)
        moved = 2 * (self.parameter_bytes + self.state_bytes) + self.gradient_bytes
        out = self.host_state_bytes + self.host_parameter_bytes
        here_s = (2 * out + self.host_gradient_bytes) / rate
        came = out + self.host_gradient_bytes
        if not came:
            return moved / rate
        link = device.host_link_bytes_per_s
        comes_s = self.piece_bytes / link
        goes_s = comes_s * out / came
        both_s = together_s(came / link - comes_s, out / link - goes_s, both_copies(device.kind))
        return moved / rate + comes_s + max(here_s, both_s) + goes_s


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
    parameters = gradients = at_home = delivered = 0
    here = there = largest = every = each = left = made = 0.0
    for item, often in weights(program, repeats):
        if item.kind != "parameter":
            continue
        size = often * item.local_type.num_bytes
        trained = item.target in program.gradients
        if not item.on_host:
            parameters += size
            gradients += size * trained
        elif trained:
            at_home += size
            delivered += size
        if not trained:
            continue
        dtype = item.local_type.dtype
        element = optimizer.element_bytes(dtype)
        state = often * item.local_type.num_elements * element
        if item.target in away or item.on_host:
            there += state
            brought = 2 * DTYPE_BYTES[dtype] if item.on_host else 0
            largest = max(largest, element + brought)
            made = max(made, optimizer.every_bytes(dtype) + sum(optimizer.each_bytes(dtype)))
        else:
            here += state
            every += often * item.local_type.num_elements * optimizer.every_bytes(dtype)
            own, still = (item.local_type.num_elements * b for b in optimizer.each_bytes(dtype))
            each, left = max(each, own + left), still
    come = there + at_home + delivered
    bucket = optimizer.host_bucket_elements
    elements = 0 if bucket is None else piece_elements(bucket)
    piece = min(largest * elements, come)
    in_piece = made * piece / largest if piece else 0.0
    # What is here is updated first, then pieces are.
    scratch = max(every + each, min(PIECES * piece, come) + in_piece)
    return Update(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        state_bytes=int(here),
        host_state_bytes=int(there),
        scratch_bytes=int(scratch),
        piece_bytes=int(piece),
        host_parameter_bytes=at_home,
        host_gradient_bytes=delivered,
    )
