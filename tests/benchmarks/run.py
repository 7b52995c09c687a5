"""What a published row ran: the model, the framework's choices and the machine."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.cluster import Cluster
from tests.benchmarks.templates import Sizes, Style


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What a framework keeps of a parameter, and moves of it in a step.

    Attributes:
        parameter_bytes: Of the copy that computes.
        gradient_bytes: Of what accumulates its gradient.
        optimizer_bytes: Of moments and master copies.
        accumulate_bytes: Moved in device memory to add one microbatch's gradient.
        reduced_bytes: Of a gradient as it is sent between ranks.
        all_new: A compiled backward hands over all gradients at its end: they are live beside those
            that they are added to.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    accumulate_bytes: float
    reduced_bytes: float
    all_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a row ran.

    Attributes:
        style: How the framework writes a layer.
        sizes: Of a microbatch of one data-parallel rank.
        layers: Of the whole model.
        dtype: Of products.
        cluster: Where; ``tp``, ``dp``, ``pp`` degrees on it, innermost first.
        chunks: Virtual stages of a rank.
        schedule: ``1f1b``, ``interleaved``, ``zb-h1`` or ``zb-h2``.
        microbatches: Of a step.
        zero: ZeRO stage over ``dp``; 3 is FSDP, gathered in every microbatch.
        zero_ranks: Neighbouring ranks among which ZeRO-1 splits states; 0 means all of ``dp``.
        sequence_parallel: Over ``tp``.
        recompute: ``none``, ``full``, ``attention``, ``half`` (every other layer) or ``op``.
        overlap_reduction: Whether gradients are reduced beside the backward.
        states: Bytes of a parameter.
        is_tied: Embedding and head are one parameter, of which both ends of a pipeline have a copy.
        stage_layers: Of each stage, or of each chunk in the order of the model; none means even.
        stage_recomputed: Layers of each stage that are recomputed in full, instead of `recompute`.
        whole_ends: Over ``tp``, ranks have the whole embedding and compute the loss of all logits.
        logit_bytes: Most live of a logit at once; none means what the program of the loss has.
        reduces_last: Gradients are reduced in the last microbatch only, and whole until then.
        keeps_gathered: Gathered parameters stay from the forward to the end of the step.
        replica_bytes: Of a parameter's copy in the buckets of a replicated data parallelism.
        keeps_outputs: A stage keeps what it sends until the backward of the microbatch.
        metric_bytes: Moved of a logit in every microbatch for what the framework logs.
        broadcasts: ZeRO-1 sends updated parameters from one rank after the other.
    """

    style: Style
    sizes: Sizes
    layers: int
    dtype: str
    cluster: Cluster
    tp: int
    dp: int
    pp: int
    chunks: int
    schedule: str
    microbatches: float
    zero: int
    sequence_parallel: bool
    recompute: str
    overlap_reduction: bool
    states: States
    is_tied: bool
    zero_ranks: int = 0
    stage_layers: tuple[int, ...] = ()
    stage_recomputed: tuple[int, ...] = ()
    whole_ends: bool = False
    logit_bytes: float | None = None
    reduces_last: bool = False
    keeps_gathered: bool = False
    replica_bytes: float = 0.0
    keeps_outputs: bool = False
    metric_bytes: float = 0.0
    broadcasts: bool = False

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.sizes.heads * self.sizes.head_dim

    @property
    def num_microbatches(self) -> int:
        """Whole microbatches; at least one."""
        return max(1, round(self.microbatches))

    @property
    def layers_of_chunk(self) -> tuple[float, ...]:
        """Layers of every chunk, in the order of the model."""
        if self.stage_layers:
            return self.stage_layers
        num_chunks = self.pp * self.chunks
        return (self.layers / num_chunks,) * num_chunks

    @property
    def layers_of_stage(self) -> tuple[float, ...]:
        """Layers of every rank of the pipeline."""
        chunks = self.layers_of_chunk
        return tuple(sum(chunks[stage :: self.pp]) for stage in range(self.pp))

    @property
    def states_ranks(self) -> int:
        """Ranks among which the states of a parameter are split."""
        return (self.zero_ranks or self.dp) if self.zero else 1

    def layer_parameters(self) -> float:
        """Of one layer, on one rank of ``tp``."""
        sizes = self.sizes
        attention = self.hidden * (2 * self.hidden + 2 * sizes.kv_heads * sizes.head_dim)
        products = 3 if self.style.family == "llama" else 2
        return (attention + products * self.hidden * sizes.ffn) / self.tp

    def chunk_parameters(self, chunk: int) -> float:
        """Of one chunk, numbered along the model, on one rank of ``tp``."""
        whole = self.sizes.vocab * self.hidden
        split = whole / self.tp
        found = self.layers_of_chunk[chunk] * self.layer_parameters()
        if chunk == 0:
            found += whole if self.whole_ends else split
            if self.style.family == "gpt":
                found += self.sizes.seq * self.hidden
        is_last = chunk == len(self.layers_of_chunk) - 1
        if is_last and not (self.is_tied and chunk == 0):
            found += whole if self.whole_ends and self.pp > 1 else split
        return found

    def stage_parameters(self, stage: int) -> float:
        """Of one stage, on one rank of ``tp``."""
        chunks = range(stage, self.pp * self.chunks, self.pp)
        return sum(map(self.chunk_parameters, chunks))
