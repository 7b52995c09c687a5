"""What each family of published rows ran, framework by framework.

Facts come from the rows, their sources and the frameworks' code at the time; what a source leaves
open and the memory column decides is said where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from cost_models.cluster import Cluster, Devices
from cost_models.devices import HOPPER_FLASH, device_named
from cost_models.records import Efficiency
from tests.benchmarks.run import Run, States
from tests.benchmarks.templates import Sizes, Style

Row = dict[str, str]

GPT = Style(family="gpt", flash=False, fused=True, dropout=True, joined=True)
MPT = Style(family="gpt", flash=True, fused=False, causal=False, joined=True, loss="fused")
LLAMA = Style(family="llama", flash=True, fused=False)
LLAMA_FUSED = Style(family="llama", flash=True, fused=True)

MEGATRON = States(
    parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12, accumulate_bytes=6, reduced_bytes=2
)
"""Megatron's fp16: gradients are added and reduced as they are; only bf16 runs keep fp32 ones."""

MEGATRON_WIDE = replace(MEGATRON, gradient_bytes=4, reduced_bytes=4)
"""Since 2022: the product that makes a gradient adds it to one of fp32."""

FP32 = States(
    parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8, accumulate_bytes=12, reduced_bytes=4
)
SHARDED = replace(FP32, accumulate_bytes=0, reduced_bytes=2)
"""FSDP: everything of fp32 and split; gathered and reduced in bf16."""

BF16 = States(
    parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, accumulate_bytes=6, reduced_bytes=2
)
"""All in bf16, moments too."""

REASONS = {
    "misc_paper": "batch not published",
    "misc_small": "batch and model not published in full",
    "deepspeed": "peak over configurations that are not published",
    "fa2_e2e": "batch not published",
    "nemo2402": "degrees not published",
    "nemo2404": "fp8: casts and scaling are not modelled",
    "nemo2405": "fp8: casts and scaling are not modelled",
    "mcore_llama": "fp8: casts and scaling are not modelled",
    "kempner_moe": "experts are not modelled",
    "moe_folding": "experts are not modelled",
    "ibm_fsdp": "hybrid shards, or a fraction of recomputation that is not published",
}


NOT_MODELLED: Mapping[str, str] = {
    "internevo": (
        "HybridZero's optimizer on the host. Steps of 1, 2 and 4 microbatches on 512 and 1,024 "
        "GPUs leave 0.9 to 1.1 s that do not depend on their number, 0.4 s with one long "
        "microbatch, of which reduction, update and broadcasts explain 0.1 to 0.5; with states "
        "split over all ranks each rank's broadcast adds 2.6 ms (7.2 against 4.5 s on 1,024)"
    ),
    "dtfm_grid": (
        "whatever disturbs tensor parallelism on these nodes. TP 8 in fp16 takes 11.3, 17.4 and "
        "7.1 s at microbatches of 1, 2 and 8, TP 4 6.0, 7.6 and 5.3 s; its authors flag six more "
        "cells, up to five times slower, as unexplained. Kernels or links give no such order"
    ),
    "zerobubble": (
        "the head of the smaller model, which is predicted to hold up its pipeline: steps with "
        "hardly a bubble take 50 ms a microbatch, predicted 58"
    ),
    "vtrain_single": (
        "where NCCL changes protocol. All-reduces of two ranks at microbatches of 2 take longer "
        "than at 4, so that errors are -9 % at one and +12 % at the other"
    ),
    "kempner_dense": (
        "gradients of gathered pieces in pipelines: 14.8B on two stages takes 31 % longer than "
        "predicted, 28.7B on two 18 % less, with nothing in the rows to tell them apart"
    ),
    "mist_l4": (
        "fused attention of L4 at locked clocks, of which nothing is published: rows with it are "
        "predicted 13 % too quick, rows without 2 %"
    ),
}
"""Effects behind the errors that are left, with what the rows say of them."""


class Skipped(Exception):
    """A row that is not predicted, and why."""


def number(row: Row, name: str, default: int = 1) -> int:
    """A column as a whole number; `default` where it is empty."""
    return int(float(row[name])) if row[name] not in ("", "per-stage") else default


@cache
def cluster(preset: str, gpus: int, per_node: int, kind: str = "") -> Cluster:
    """`gpus` devices of a preset, `per_node` a node."""
    made = Cluster.preset(preset, nodes=max(2, -(-gpus // per_node)))
    inner, outer = made.levels[:2]
    nodes = max(1, gpus // per_node)
    levels = [replace(inner, size=min(per_node, gpus))]
    if nodes > 1:
        levels.append(replace(outer, size=nodes))
    device = device_named(kind) if kind else made.device(0)
    return Cluster(
        name=preset,
        devices=(Devices(device=device, count=min(per_node, gpus) * nodes),),
        levels=tuple(levels),
    )


def slower_fabric(made: Cluster, bytes_per_s: float) -> Cluster:
    """The cluster with another bandwidth of each device between nodes."""
    if len(made.levels) == 1:
        return made
    inner, outer = made.levels
    return replace(made, levels=(inner, replace(outer, bandwidth_bytes_per_s=bytes_per_s)))


def with_kernels(made: Cluster, efficiency: Efficiency) -> Cluster:
    """The cluster with kernels of another time."""
    device = replace(made.device(0), efficiency=efficiency)
    return replace(made, devices=(replace(made.devices[0], device=device),))


def run_of(row: Row) -> Run:
    """The run of a row.

    Raises:
        Skipped: It is not predicted.
    """
    family = row["family"]
    if family in REASONS:
        raise Skipped(REASONS[family])
    if "fp8" in row["precision"]:
        raise Skipped("fp8: casts and scaling are not modelled")
    if number(row, "cp") > 1:
        raise Skipped("context parallel")
    make = FAMILIES.get(family)
    if make is None:
        raise Skipped("framework not described")
    return make(row)


def base(row: Row, style: Style, where: Cluster) -> Run:
    """What all frameworks share; states as Megatron has them."""
    hidden, heads = number(row, "hidden"), number(row, "heads")
    tp, pp = number(row, "tp"), number(row, "pp")
    dp = number(row, "n_gpus") // (tp * pp)
    micro = number(row, "micro_batch")
    chunks = number(row, "vp")
    ffn = number(row, "ffn", (8 * hidden // 3) if style.family == "llama" else 4 * hidden)
    return Run(
        style=style,
        sizes=Sizes(
            batch=micro,
            seq=number(row, "seq"),
            heads=heads,
            kv_heads=number(row, "kv_heads", heads) if style.family == "llama" else heads,
            head_dim=hidden // heads,
            ffn=ffn,
            vocab=number(row, "vocab", 51200),
        ),
        layers=number(row, "layers"),
        dtype="bfloat16",
        cluster=where,
        tp=tp,
        dp=dp,
        pp=pp,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        microbatches=number(row, "global_batch", dp * micro) / (dp * micro),
        zero=0,
        sequence_parallel=False,
        recompute="full" if row["recompute"].startswith("full") else "none",
        overlap_reduction=False,
        states=MEGATRON,
        is_tied=style.family == "gpt",
    )


def selene(row: Row) -> Cluster:
    """A100-80GB, eight a node."""
    return cluster("a100", number(row, "n_gpus"), 8)


def megatron(row: Row) -> Run:
    """Megatron-LM of 2021: fp16, gradients all-reduced behind the last backward."""
    return replace(base(row, GPT, selene(row)), keeps_outputs=True)


def megatron_2020(row: Row) -> Run:
    """Megatron-LM of 2020, on DGX-2H (V100) and DGX A100."""
    if row["gpu"].startswith("V100"):
        where = cluster("v100", number(row, "n_gpus"), number(row, "gpus_per_node"))
        return replace(base(row, GPT, where), dtype="float16")
    return base(row, GPT, cluster("a100-40gb", number(row, "n_gpus"), 8))


def korthikanti(row: Row) -> Run:
    """Full recomputation, or the paper's: the core of attention again, sequences split."""
    made = replace(megatron(row), states=MEGATRON_WIDE, keeps_outputs=False)
    if row["recompute"] == "full":
        return made
    return replace(made, sequence_parallel=True, recompute="attention")


def nemo2022(row: Row) -> Run:
    """NeMo on Megatron; the tables do not mention recomputation."""
    return replace(base(row, GPT, selene(row)), recompute="none", states=MEGATRON_WIDE)


def vtrain(row: Row) -> Run:
    """Megatron-DeepSpeed: full recomputation, no overlap, plain 1F1B."""
    return replace(base(row, GPT, selene(row)), recompute="full", keeps_outputs=True)


def dtfm(row: Row) -> Run:
    """Megatron-LM on p3.16xlarge: eight V100-16GB and 25 Gb/s a node.

    Its fused softmax, which scales scores as well, is for 16 bits only.
    """
    where = cluster("v100", number(row, "n_gpus"), 8, "V100-16GB")
    where = slower_fabric(where, 0.8 * 25e9 / 8 / 8)
    if "unexplained" in row["notes"]:
        raise Skipped("its authors flag the measurement as unexplained")
    made = replace(base(row, GPT, where), keeps_outputs=True)
    if row["precision"] == "fp32":
        style = replace(GPT, scaled=True)
        return replace(made, dtype="float32", states=FP32, style=style)
    return replace(made, dtype="float16")


def fsdp(row: Row, style: Style, where: Cluster) -> Run:
    """Parameters gathered in every microbatch, forward and backward; reduced in each."""
    return replace(base(row, style, where), zero=3, states=SHARDED)


def llmfoundry(row: Row) -> Run:
    """FSDP with all traffic in bf16, and a loss that turns logits into their gradients in place.

    Composer then works out two metrics of every microbatch, cross-entropy and perplexity: each
    reads the logits, writes them in fp32 and takes the log-softmax of that.
    """
    preset = {"A100-80GB": "a100", "A100-40GB": "a100-40gb", "H100-80GB": "h100"}[row["gpu"]]
    where = cluster(preset, number(row, "n_gpus"), 8)
    if preset == "h100":
        where = with_kernels(where, HOPPER_FLASH)
    return replace(fsdp(row, MPT, where), metric_bytes=2 * (2 + 4 + 4 + 4))


def torchtitan(row: Row) -> Run:
    """FSDP2; gradients are reduced in fp32."""
    if row["gpu"].startswith("H100"):
        where = cluster("h100", number(row, "n_gpus"), 8, "H100-96GB")
    else:
        where = cluster("a100", number(row, "n_gpus"), 8)
    style = LLAMA_FUSED if "compile" in row["notes"] else LLAMA
    kinds = {"selective-op": "op", "selective-layer": "half", "full": "full", "none": "none"}
    made = fsdp(row, style, where)
    states = replace(made.states, reduced_bytes=4)
    return replace(made, recompute=kinds[row["recompute"]], states=states)


def kempner(row: Row) -> Run:
    """Everything stored in bf16; gradients of FSDP are whole and fp32 until the last microbatch.

    From the code of 2026-04: under ``no_sync``, FSDP2 keeps unreduced gradients in the dtype they
    are reduced in. Tensor parallelism splits sequences, but neither the embedding nor the loss, and
    not in pipelines, whose gathered parameters stay. Logits live four times in 16 bits: those of
    the microbatch before, still held by their name, these, their log-softmax and their gradients.
    """
    made = base(row, LLAMA_FUSED, cluster("h200", number(row, "n_gpus"), 4))
    is_sharded = made.dp > 1
    states = replace(
        BF16, reduced_bytes=4 if is_sharded else 2, all_new=not is_sharded and made.pp == 1
    )
    if is_sharded:
        states = replace(states, accumulate_bytes=18)
    return replace(
        made,
        style=LLAMA_FUSED if "compile" in row["notes"] else LLAMA,
        zero=3 if is_sharded else 0,
        states=states,
        sequence_parallel=made.tp > 1 and made.pp == 1,
        whole_ends=made.tp > 1,
        logit_bytes=8,
        reduces_last=is_sharded,
        keeps_gathered=is_sharded and made.pp > 1,
    )


def internevo(row: Row) -> Run:
    """ZeRO-1 within the group that the row names, reduced beside the backward, in bf16."""
    where = slower_fabric(selene(row), 0.88 * 4 * 100e9 / 8 / 8)
    made = base(row, LLAMA_FUSED, where)
    group = row["notes"].partition("zero group ")[2].split(";")[0]
    states = replace(BF16, optimizer_bytes=12)
    ranks = int(group) if group.isdigit() else 0
    return replace(
        made,
        zero=1,
        zero_ranks=ranks,
        states=states,
        overlap_reduction=True,
        broadcasts=True,
    )


def zerobubble(row: Row) -> Run:
    """The ends hold a layer less; interleaved, their first and last chunk."""
    made = base(row, GPT, selene(row))
    schedules = {"ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "1F1B": "1f1b", "1F1B-I": "interleaved"}
    each = (made.layers + 2) // (made.pp * made.chunks)
    middle = (each,) * (made.pp * made.chunks - 2)
    return replace(
        made,
        schedule=schedules[row["schedule"]],
        states=MEGATRON_WIDE,
        stage_layers=(each - 1, *middle, each - 1),
    )


def litgpt(row: Row) -> Run:
    """One microbatch of pretraining, everything in bf16.

    Data parallelism without sharding has buckets for gradients beside them.
    """
    if not row["notes"].startswith("eager;"):
        raise Skipped("kernels of a compiler that is not modelled")
    where = cluster("a100-40gb", number(row, "n_gpus"), 8)
    made = base(row, LLAMA, where)
    zero = number(row, "zero_stage", 0)
    replica_bytes = 2 if made.dp > 1 and not zero else 0
    return replace(made, zero=zero, states=BF16, replica_bytes=replica_bytes)


def mist(row: Row) -> Run:
    """Mist's own runtime and Megatron's, clocks at 1050 MHz; stages as the notes have them.

    Megatron, whose steps are derived, has no fused kernels for Llama's layers.
    """
    if "offload" in row["notes"]:
        raise Skipped("optimizer states offloaded in part")
    is_llama = "llama" in row["model"]
    style = Style(
        family="llama" if is_llama else "gpt",
        flash="flash_attn=1" in row["notes"],
        fused=not (is_llama and "derived" in row["notes"]),
        dropout=False,
        loss="fused",
    )
    made = base(row, style, cluster("l4", number(row, "n_gpus"), 8))
    stages = [stage.split(":") for stage in _note(row, "layers:recomputed ").split()]
    return replace(
        made,
        dtype="float16",
        zero=1,
        is_tied=False,
        stage_layers=tuple(int(layers) for layers, _ in stages),
        stage_recomputed=tuple(int(again) for _, again in stages),
    )


def _note(row: Row, label: str) -> str:
    """What a row's notes say behind a label."""
    return row["notes"].partition(label)[2].split(";")[0]


FAMILIES: Mapping[str, Callable[[Row], Run]] = {
    "megatron_sc21": megatron,
    "megatron_2020": megatron_2020,
    "korthikanti": korthikanti,
    "nemo2022": nemo2022,
    "vtrain_single": vtrain,
    "dtfm_grid": dtfm,
    "llmfoundry_h100": llmfoundry,
    "llmfoundry_a100": llmfoundry,
    "llmfoundry_a100_40": llmfoundry,
    "torchtitan": torchtitan,
    "torchtitan_a100": torchtitan,
    "kempner_dense": kempner,
    "internevo": internevo,
    "zerobubble": zerobubble,
    "litgpt": litgpt,
    "mist_l4": mist,
}
