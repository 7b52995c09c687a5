"""A published row predicted: pinned plan, lowered program, simulated; closed forms around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from autopar.cost.kernel import is_causal
from autopar.cost.node import NodeCost, axis_seconds, update_bytes_per_s
from autopar.ir.graph import Phase, Ref
from autopar.ir.sharding import Mesh
from autopar.lower.live import byte_changes, live_bytes, storages
from autopar.lower.overlap import overlap
from autopar.lower.program import COLLECTIVES, WAIT, Program
from autopar.lower.simulate import Prices, prices, simulate
from autopar.lower.spmd import lower
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from cost_models.collectives import axis_link, collective_s, send_s
from cost_models.overlap import compute_collective, exposed_reduction_s
from cost_models.pipeline import (
    StageTime,
    interleaved_live,
    interleaved_s,
    one_f_one_b_live,
    one_f_one_b_s,
)
from tests.benchmarks.pinned import pin, stored_shardings
from tests.benchmarks.templates import Sizes, Style, step_graph

EAGER_OP_S = 22e-6
"""Host seconds of an op of an eager framework: module calls, autograd, views as much as kernels.

Fitted 2026-11-30 to the launch-bound cells of vTrain's grid (hidden 1024, one sequence), which run
Megatron-DeepSpeed with PyTorch 2.0 on hosts of 2.25 GHz. Programs of autopar have neither modules
nor autograd; they take ``Device.host_op_s``.
"""


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
        schedule: ``1f1b``, ``interleaved``, ``zb-1p`` or ``zb-2p``.
        microbatches: Of a step.
        zero: ZeRO stage over ``dp``; 3 is FSDP, gathered in every microbatch.
        sequence_parallel: Over ``tp``.
        recompute: ``none``, ``full``, ``attention``, ``half`` (every other layer) or ``op``.
        overlap_reduction: Whether gradients are reduced beside the backward.
        state_bytes: Of optimizer and master copies, bytes a parameter.
        parameter_bytes: Of the copy that computes; ``gradient_bytes`` of its gradient.
        uneven_ends: First and last stage hold a layer less.
        holds_logits: The caller keeps the logits, also in fp32, through the backward.
        keeps_gathered: Gathered parameters stay from the forward to the end of the backward.
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
    state_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    uneven_ends: bool = False
    holds_logits: bool = False
    keeps_gathered: bool = False


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step and bytes of the fullest rank."""

    step_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One microbatch through one layer, and through all that is no layer.

    Attributes:
        forward_s: Of the layer; ``backward_s``; both with their collectives.
        rest_forward_s: Of embedding, head and loss; ``rest_backward_s``.
        again_s: Of the layer's forward in a backward that recomputes it, by kind of recomputation.
        weight_s: Of the products for the layer's weight gradients.
        saved_bytes: Kept by the layer for its backward; ``rest_bytes`` the peak without layers.
        working_bytes: Most that is live while a layer runs, what it saved included.
    """

    forward_s: float
    backward_s: float
    rest_forward_s: float
    rest_backward_s: float
    again_s: Mapping[str, float]
    weight_s: float
    saved_bytes: float
    rest_bytes: float
    working_bytes: float


def predict(run: Run) -> Predicted:
    """Step time and peak memory of a run."""
    unit = _unit(
        run.style,
        run.sizes,
        run.dtype,
        run.cluster,
        run.tp,
        run.dp if run.zero == 3 else 1,
        run.sequence_parallel,
    )
    update_s = _parameters(run) * _update_bytes(run) / update_bytes_per_s(run.cluster.device(0))
    if run.zero:
        update_s /= run.dp
    busy_s, last_backward_s = _schedule_s(run, unit)
    return Predicted(busy_s + update_s + _reduction_s(run, last_backward_s), _peak_bytes(run, unit))


def _schedule_s(run: Run, unit: Unit) -> tuple[float, float]:
    """Seconds of all microbatches on all stages, and of one backward of a stage."""
    again_s = unit.again_s[run.recompute]
    backward_s = unit.backward_s + again_s
    if run.pp == 1:
        forward_s = run.layers * unit.forward_s + unit.rest_forward_s
        whole_s = run.layers * backward_s + unit.rest_backward_s
        return run.microbatches * (forward_s + whole_s), whole_s
    counts = [run.layers / run.pp] * run.pp
    if run.uneven_ends:
        each = (run.layers + 2) / run.pp
        counts = [each - 1, *[each] * (run.pp - 2), each - 1]
    link = axis_link(run.cluster, (run.pp, run.dp, run.tp), 0)
    sent = 2 * run.sizes.batch * run.sizes.seq * run.sizes.heads * run.sizes.head_dim / run.tp
    message_s = send_s(sent, link)
    num = max(1, round(run.microbatches))
    # Megatron's messages are not hidden: the stage that waits for one computes nothing.
    blocked_s = message_s * run.chunks
    stages = [StageTime(n * unit.forward_s + blocked_s, n * backward_s + blocked_s) for n in counts]
    stages[-1] = StageTime(
        stages[-1].forward_s + unit.rest_forward_s, stages[-1].backward_s + unit.rest_backward_s
    )
    if run.schedule == "1f1b":
        return one_f_one_b_s(stages, num), stages[0].backward_s
    slowest = max(stages, key=lambda stage: stage.both_s)
    mean_s = sum(stage.both_s for stage in stages) / run.pp
    if run.schedule == "interleaved":
        spread_s = (run.pp - 1) / run.chunks * (slowest.both_s - mean_s)
        steady_s = interleaved_s(slowest, stages=run.pp, chunks=run.chunks, num_microbatches=num)
        return steady_s - spread_s, slowest.backward_s / run.chunks
    weight_s = max(counts) * unit.weight_s
    delayed = 1 if run.schedule == "zb-1p" else 2
    bubble_s = (run.pp - 1) * max(0.0, mean_s - delayed * weight_s - weight_s)
    return num * slowest.both_s + bubble_s, slowest.backward_s


def _parameters(run: Run) -> float:
    """Parameters of the fullest pipeline stage on one rank of ``tp``."""
    return (_layer_parameters(run) * run.layers / run.pp + _rest_parameters(run)) / run.tp


def _layer_parameters(run: Run) -> float:
    sizes = run.sizes
    hidden = sizes.heads * sizes.head_dim
    attention = hidden * (2 * hidden + 2 * sizes.kv_heads * sizes.head_dim)
    return attention + (3 if run.style.family == "llama" else 2) * hidden * sizes.ffn


def _rest_parameters(run: Run) -> float:
    return run.sizes.vocab * run.sizes.heads * run.sizes.head_dim


def _update_bytes(run: Run) -> float:
    return 2 * (run.parameter_bytes + run.state_bytes) + run.gradient_bytes


def _reduction_s(run: Run, last_backward_s: float) -> float:
    """Seconds that the reduction of gradients, and ZeRO's gather, add to a step."""
    if run.dp == 1 or run.zero == 3:
        return 0.0
    link = axis_link(run.cluster, (run.pp, run.dp, run.tp), 1)
    num_parameters = _parameters(run)
    if run.zero:
        reduce_s = collective_s("reduce_scatter", num_parameters * run.gradient_bytes, link)
        gather_s = collective_s("all_gather", num_parameters * run.parameter_bytes, link)
    else:
        reduce_s = collective_s("all_reduce", num_parameters * run.gradient_bytes, link)
        gather_s = 0.0
    if run.overlap_reduction:
        slowdown = compute_collective(run.cluster.device(0).kind)
        reduce_s = exposed_reduction_s(reduce_s, last_backward_s, 0.0, 8, slowdown)
    return reduce_s + gather_s


def _peak_bytes(run: Run, unit: Unit) -> float:
    """Peak of the first stage: states, saved values of the microbatches in flight, one in work."""
    num = max(1, round(run.microbatches))
    if run.chunks > 1:
        live = (
            interleaved_live(0, stages=run.pp, chunks=run.chunks, num_microbatches=num) / run.chunks
        )
    else:
        live = one_f_one_b_live(0, stages=run.pp, num_microbatches=num)
    if run.schedule == "zb-2p":
        live = min(2 * run.pp - 1, num)
    layers = run.layers / run.pp
    hidden = run.sizes.heads * run.sizes.head_dim
    kept = {
        "none": 0.0,
        "full": unit.saved_bytes - 2 * run.sizes.batch * run.sizes.seq * hidden,
        "half": unit.saved_bytes / 2,
        "op": unit.saved_bytes / 2,
        "attention": 0.0,
    }
    saved = (unit.saved_bytes - kept[run.recompute]) * layers * live
    transient = max(0.0, unit.working_bytes - unit.saved_bytes)
    split = run.dp if run.zero == 3 else 1
    states = _parameters(run) * (run.parameter_bytes + run.gradient_bytes) / split
    states += _parameters(run) * run.state_bytes / (run.dp if run.zero else 1)
    if run.keeps_gathered:
        states += _parameters(run) * run.parameter_bytes
    layer = kept[run.recompute] + transient
    rest = unit.rest_bytes if run.pp == 1 else 0.0
    if run.holds_logits and run.pp == 1:
        logits = run.sizes.batch * run.sizes.seq * run.sizes.vocab / run.tp
        rest += 6 * logits
        layer += 6 * logits
    return states + saved + max(layer, rest)


@cache
def _unit(
    style: Style,
    sizes: Sizes,
    dtype: str,
    cluster: Cluster,
    tp: int,
    dp: int,
    sequence_parallel: bool,
) -> Unit:
    """Differences of one and two layers (two and three under FSDP, whose gathers run ahead)."""
    fewer, programs, inside = _programs(style, sizes, dtype, cluster, tp, dp, sequence_parallel)
    seconds = axis_seconds(cluster, programs[0].mesh)
    priced = prices(cluster.device(0), seconds)
    priced = replace(priced, host_op_s=EAGER_OP_S, host_view_s=EAGER_OP_S)
    found = [(simulate(p, priced), _forward_kinds(p, priced)) for p in programs]
    (small, small_kinds), (large, large_kinds) = found
    forward_s = large.forward_s - small.forward_s
    backward_s = large.seconds - large.forward_s - small.seconds + small.forward_s
    kinds = {kind: large_kinds[kind] - small_kinds[kind] for kind in large_kinds}
    compute_s = kinds["product"] + kinds["attention"] + kinds["memory"]
    core_s = kinds["attention"] + kinds["core"]
    again = {
        "none": 0.0,
        "full": compute_s if dp > 1 else forward_s,
        "half": compute_s / 2,
        "op": kinds["memory"] + kinds["product"] / 2,
        "attention": core_s,
    }
    saved = large.saved_bytes - small.saved_bytes
    return Unit(
        forward_s=forward_s,
        backward_s=backward_s,
        rest_forward_s=small.forward_s - fewer * forward_s,
        rest_backward_s=small.seconds - small.forward_s - fewer * backward_s,
        again_s=again,
        weight_s=kinds["product"],
        saved_bytes=saved,
        rest_bytes=small.peak_bytes - small.gradient_bytes - fewer * saved,
        working_bytes=_working_bytes(programs[0], inside) - (fewer - 1) * saved,
    )


@cache
def _programs(
    style: Style,
    sizes: Sizes,
    dtype: str,
    cluster: Cluster,
    tp: int,
    dp: int,
    sequence_parallel: bool,
) -> tuple[int, tuple[Program, Program], frozenset[str]]:
    """How many layers, programs of a rank for so many and one more, and nodes of layers."""
    roles = ("dp", "tp") if dp > 1 else ("tp",)
    mesh = Mesh(roles, (dp, tp) if dp > 1 else (tp,), roles=roles)
    global_sizes = replace(sizes, batch=sizes.batch * dp)
    fewer = 2 if dp > 1 else 1
    found = []
    for layers in (fewer, fewer + 1):
        graph = step_graph(style, layers, global_sizes, dtype)
        analysis = analyse(graph, folded=False)
        seconds = axis_seconds(cluster, mesh)
        cost = NodeCost(cluster.device(0), mesh, seconds)
        stage = pin(
            analysis,
            mesh,
            cost,
            stored_shardings(analysis, mesh),
            sequence_parallel=sequence_parallel,
        )
        zero = (0,) * len(mesh.sizes)
        found.append(overlap(lower(graph, analysis.rules, stage, zero, seconds)))
    inside = frozenset(n.name for n in graph.nodes if n.source.module.startswith("layers."))
    return fewer, (found[0], found[1]), inside


def _working_bytes(program: Program, inside: frozenset[str]) -> float:
    """Most live bytes while a layer runs, apart from finished gradients."""
    live, _, gradients = live_bytes(byte_changes(program, storages(program))).T.tolist()
    places = [i for i, made in enumerate(program.instructions) if made.origin in inside]
    at = max(places, key=live.__getitem__)
    return float(live[at] - gradients[at])


def _forward_kinds(program: Program, priced: Prices) -> dict[str, float]:
    """Seconds of the forward's kernels by kind; ``core``: the unfused attention among them."""
    types = {Ref(item.name): item.local_type for item in program.inputs}
    found = {"product": 0.0, "attention": 0.0, "memory": 0.0, "core": 0.0}
    for instruction in program.instructions:
        for index, kind in enumerate(instruction.outputs):
            types[Ref(instruction.name, index)] = kind
        if instruction.phase is Phase.BACKWARD or instruction.view:
            continue
        if instruction.op in COLLECTIVES or instruction.op == WAIT:
            continue
        seconds = priced.kernel_s(
            instruction.op,
            tuple(types[ref] for ref in instruction.operands),
            instruction.outputs,
            is_causal(instruction.op, instruction.args),
            instruction.flops,
        )
        fused = instruction.op.startswith("autopar.attention")
        product = instruction.flops > 0 and not fused
        found["attention" if fused else "product" if product else "memory"] += seconds
        if instruction.op in ("aten.bmm.default", "aten._softmax.default"):
            found["core"] += seconds
    return found
