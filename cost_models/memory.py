"""Bytes of training state, activations and what surrounds them, each apart.

The peak of a plan is the liveness of its program, counted elsewhere. What is here prices what no
program shows, and holds the closed forms of published systems, to check the rest against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from cost_models.records import Device, require_amount, require_count
from cost_models.units import GIB

CONTEXT_BYTES = int(1.25 * GIB)
"""A CUDA context, its kernels and NCCL's first communicator: 1 to 1.5 GiB on public runs."""

FRAGMENTATION_MEAN = 1.105
FRAGMENTATION_MOST = 1.223
"""Bytes that PyTorch's allocator reserves over those it hands out: mean and largest.

Of 248 stages whose reserved and allocated peaks are published with the Mist artifact (2025).
"""

COMMUNICATOR_BYTES = 64 * 2**20
"""Device memory of one more NCCL communicator with the buffers of its channels; recalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter's states.

    Attributes:
        parameter: Of the copy that computes.
        gradient: Of its gradient.
        optimizer: Of the optimizer's own, a master copy included.
    """

    parameter: float
    gradient: float
    optimizer: float

    def __post_init__(self) -> None:
        for field in fields(self):
            require_amount("state bytes", field.name, getattr(self, field.name), least=0)

    @property
    def total(self) -> float:
        """Bytes of all states of one parameter."""
        return self.parameter + self.gradient + self.optimizer


FP32_ADAM = StateBytes(parameter=4, gradient=4, optimizer=8)
"""Everything in fp32: two moments beside parameter and gradient.

Also that of autocast and of FSDP2 mixed precision, whose 16-bit copies are transient.
"""
ZERO_ADAM = StateBytes(parameter=2, gradient=2, optimizer=12)
"""fp16 parameter and gradient; fp32 master copy and two moments (ZeRO, arXiv 1910.02054, 2019)."""
MEGATRON_ADAM = StateBytes(parameter=2, gradient=4, optimizer=12)
"""As `ZERO_ADAM`, with gradients summed in fp32 (Megatron-LM, 2021)."""
FP8_LM_ADAM = StateBytes(parameter=1, gradient=1, optimizer=5)
"""fp8 parameter, gradient and first moment, fp16 master copy and second moment.

Gradient, master copy and moments together take 6 bytes where `MEGATRON_ADAM` takes 16 (FP8-LM, Peng
et al., arXiv 2310.18313, 2023).
"""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of training state on one rank.

    Attributes:
        parameter_bytes: Of parameters.
        gradient_bytes: Of gradients.
        optimizer_bytes: Of optimizer states and master copies.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Bytes of all three."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: ModelStates) -> ModelStates:
        """States of two sets of parameters, such as experts and the rest."""
        return ModelStates(
            self.parameter_bytes + other.parameter_bytes,
            self.gradient_bytes + other.gradient_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
        )


def model_states(
    num_parameters: float, state: StateBytes, *, ranks: int = 1, zero_stage: int = 0
) -> ModelStates:
    """Bytes of training state on one of `ranks` data-parallel ranks.

    Stage 1 splits the optimizer's states over them, 2 the gradients too, 3 the parameters too.

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, 2019, section 5.
    """
    require_count("model states", "ranks", ranks)
    return ModelStates(
        num_parameters * state.parameter / (ranks if zero_stage >= 3 else 1),
        num_parameters * state.gradient / (ranks if zero_stage >= 2 else 1),
        num_parameters * state.optimizer / (ranks if zero_stage >= 1 else 1),
    )


def zero_volume(num_parameters: int, *, zero_stage: int) -> int:
    """Elements that a rank sends in a step, in units where a ring's (n - 1)/n counts as 1.

    An all-reduce of gradients, or a reduce-scatter of them and an all-gather of parameters, is
    twice the parameters; stage 3 gathers parameters once more for the backward.

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054, 2019, section 7.
    """
    return num_parameters * (3 if zero_stage >= 3 else 2)


def bucketed_optimizer_bytes(num_parameters: float, bucket_parameters: float) -> float:
    """Device bytes when optimizer states stay on the host and visit it in buckets.

    fp16 parameters and gradients stay; `bucket_parameters` of them have 16 bytes of states:
    ``4 P + 16 bucket`` where all on the device are ``20 P``.

    Source:
        Singh and Bhatele, AxoNN, IPDPS 2022.
    """
    return 4 * num_parameters + 16 * bucket_parameters


PIECES = 3
"""Pieces of a bucketed update that are on the device at a time: one comes, one is updated, one
leaves."""


def piece_elements(bucket_elements: int) -> int:
    """Elements of a piece of a bucketed update: all that are there take what two buckets do."""
    return max(1, 2 * bucket_elements // PIECES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A GPT layer and how it is split.

    Attributes:
        batch: Sequences of a microbatch.
        seq: Their length.
        hidden: Hidden size.
        heads: Attention heads.
        tensor_ranks: Ranks of tensor parallelism.
    """

    batch: int
    seq: int
    hidden: int
    heads: int
    tensor_ranks: int = 1

    @property
    def input_bytes(self) -> int:
        """Bytes of the layer's input in 16 bits."""
        return 2 * self.seq * self.batch * self.hidden

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores that an unfused attention keeps: softmax, dropout and its mask."""
        return 5 * self.heads * self.seq**2 * self.batch


class Saved(StrEnum):
    """What a layer keeps for its backward and how tensor parallelism splits it."""

    ALL = "all"
    TENSOR = "tensor"
    TENSOR_SEQUENCE = "tensor+sequence"
    TENSOR_SELECTIVE = "tensor+selective"
    TENSOR_SEQUENCE_SELECTIVE = "tensor+sequence+selective"
    INPUT = "input"
    INPUT_SEQUENCE = "input+sequence"


def gpt_layer_saved_bytes(layer: LayerShape, saved: Saved) -> float:
    """Bytes that one GPT layer keeps of one microbatch, in 16 bits, attention unfused.

    Selective recomputation drops the scores, which a fused attention never keeps; with sequence
    parallelism, what lies between the tensor-parallel parts is split too; `INPUT` is full
    recomputation.

    Source:
        Korthikanti et al., arXiv 2205.05198, 2022, table 2; `INPUT_SEQUENCE` is the same reasoning.
    """
    unit = layer.seq * layer.batch * layer.hidden
    ranks = layer.tensor_ranks
    match saved:
        case Saved.ALL:
            return 34 * unit + layer.score_bytes
        case Saved.TENSOR:
            return 10 * unit + (24 * unit + layer.score_bytes) / ranks
        case Saved.TENSOR_SEQUENCE:
            return (34 * unit + layer.score_bytes) / ranks
        case Saved.TENSOR_SELECTIVE:
            return 10 * unit + 24 * unit / ranks
        case Saved.TENSOR_SEQUENCE_SELECTIVE:
            return 34 * unit / ranks
        case Saved.INPUT:
            return float(layer.input_bytes)
        case Saved.INPUT_SEQUENCE:
            return layer.input_bytes / ranks


def dropout_mask_bytes(
    *,
    batch: int,
    seq: int,
    hidden: int,
    heads: int,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes of the masks that a layer's dropouts keep, one byte an element.

    Two behind attention and feed-forward part, ``s b h`` each, and that of the weights of an
    unfused attention, ``a s^2 b``; fused attention (`heads` 0) draws its mask again.

    Args:
        batch: Sequences of a microbatch.
        seq: Their length.
        hidden: Hidden size.
        heads: Attention heads whose weights are dropped in memory.
        tensor_ranks: Ranks of tensor parallelism, which split the weights.
        sequence_parallel: Whether they split the other two as well.

    Source:
        Korthikanti et al., arXiv 2205.05198, 2022, section 4.1.
    """
    behind = 2 * seq * batch * hidden / (tensor_ranks if sequence_parallel else 1)
    return behind + heads * seq**2 * batch / tensor_ranks


def routed_input_bytes(layer: LayerShape, *, experts_per_token: int, layers: int = 1) -> int:
    """Bytes that layers of experts keep under full recomputation: inputs and routing.

    Which experts a token goes to is kept, in 2 bytes each, so that it goes there again.

    Source:
        Analysis of DeepSeek-V3's memory, arXiv 2502.07846, 2025.
    """
    routing = 2 * layer.batch * layer.seq * experts_per_token
    return layers * (layer.input_bytes + routing)


def stage_output_bytes(layer: LayerShape, *, stages: int) -> int:
    """Bytes that the first stage of a 1F1B pipeline saves by freeing outputs it has sent.

    One output of each of the microbatches in flight.

    Source:
        Korthikanti et al., arXiv 2205.05198, 2022, appendix B.
    """
    return layer.input_bytes * stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes on one device at its fullest moment, each kind apart.

    Attributes:
        parameters: Stored parameters and buffers.
        gradients: Gradients, or what accumulates them.
        optimizer: Optimizer states and master copies.
        saved: Values kept for the backward, of every microbatch in flight.
        transient: Live values of the op that runs, and workspaces.
        gathered: Gathered copies of sharded parameters.
        collective_buffers: Buckets, staging and communicators.
        context: The device's context and libraries.
        fragmentation: What the allocator reserves beyond what it hands out.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    saved: float = 0.0
    transient: float = 0.0
    gathered: float = 0.0
    collective_buffers: float = 0.0
    context: float = 0.0
    fragmentation: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Sum of all kinds."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def allocated_bytes(self) -> float:
        """What the allocator has handed out: all but context and fragmentation."""
        return self.total_bytes - self.context - self.fragmentation


def with_overheads(peak: Peak, device: Device, *, num_communicators: int = 0) -> Peak:
    """The peak with context, communicators and mean fragmentation of a device.

    A device whose memory is the host's has neither a context nor a caching allocator.
    """
    if device.unified_memory:
        return peak
    buffers = peak.collective_buffers + num_communicators * COMMUNICATOR_BYTES
    allocated = peak.allocated_bytes + buffers - peak.collective_buffers
    values = {field.name: getattr(peak, field.name) for field in fields(peak)}
    values |= {
        "collective_buffers": buffers,
        "context": float(CONTEXT_BYTES),
        "fragmentation": (FRAGMENTATION_MEAN - 1) * allocated,
    }
    return Peak(**values)


def hierarchical_all_reduce_bytes(
    tensor_bytes: float, group_sizes: Sequence[int]
) -> tuple[float, ...]:
    """Bytes that a rank sends on each dimension of a network in a hierarchical all-reduce.

    ``2 m (n - 1)/n`` on a dimension of n ranks, the message m shrinking n times for the next.

    Source:
        Won et al., LIBRA, ISPASS 2024.
    """
    sent = []
    for size in group_sizes:
        sent.append(2 * tensor_bytes * (size - 1) / size)
        tensor_bytes /= size
    return tuple(sent)
