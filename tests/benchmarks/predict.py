"""A published row predicted: pinned plan, lowered program, simulated; a schedule around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from autopar.cost.kernel import is_causal
from autopar.cost.node import NodeCost, axis_seconds, update_bytes_per_s
from autopar.cost.reshard import CollectiveSeconds
from autopar.ir.graph import Phase, Ref
from autopar.ir.sharding import Mesh
from autopar.lower.live import byte_changes, live_bytes, storages
from autopar.lower.overlap import overlap
from autopar.lower.program import COLLECTIVES, WAIT, Program
from autopar.lower.simulate import Prices, Simulation, prices, simulate
from autopar.lower.spmd import lower
from autopar.schedules import SCHEDULES, ChunkTime, Costs, Schedule, Size
from autopar.schedules import simulate as run_schedule
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from cost_models.collectives import AxisLink, axis_link, collective_s, send_s
from cost_models.memory import dropout_mask_bytes
from cost_models.overlap import compute_collective, exposed_reduction_s
from cost_models.pipeline import StageTime, one_f_one_b_s
from tests.benchmarks.pinned import pin, stored_shardings
from tests.benchmarks.run import Run
from tests.benchmarks.templates import Sizes, Style, step_graph

EAGER_OP_S = 22e-6
"""Host seconds of an op of an eager framework: module calls, autograd, views as much as kernels.

Fitted 2026-11-30 to the launch-bound cells of vTrain's grid (hidden 1024, one sequence), which run
Megatron-DeepSpeed with PyTorch 2.0 on hosts of 2.25 GHz. Programs of autopar have neither modules
nor autograd; they take ``Device.host_op_s``.
"""

EAGER_JOIN_S = 30e-6
"""Seconds that a collective adds where computation waits for it, beside those of the collective.

Two streams wait for each other. Published all-reduces of 2, 4 and 8 A100 take 72, 83 and 100 us of
short tensors in a program (fitted to public tables, 2026-11), 23 to 34 more than alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One microbatch through one layer, and through all that is no layer.

    Attributes:
        forward_s: Of the layer; ``backward_s``; both with their collectives.
        unreduced_s: Of the backward where gradients are not reduced in it.
        rest_forward_s: Of embedding, head and loss; ``rest_backward_s``.
        again_s: Of the layer's forward in a backward that recomputes it, by kind of recomputation.
        weight_s: Of the products for the layer's weight gradients.
        saved_bytes: Kept by the layer for its backward; ``rest_bytes`` the peak without layers.
        working_bytes: Most that is live while a layer runs, what it saved included.
    """

    forward_s: float
    backward_s: float
    unreduced_s: float
    rest_forward_s: float
    rest_backward_s: float
    again_s: Mapping[str, float]
    weight_s: float
    saved_bytes: float
    rest_bytes: float
    working_bytes: float


def step_s(run: Run) -> float:
    """Seconds of a step."""
    unit = unit_of(run)
    busy_s, last_backward_s = _schedule_s(run, unit)
    return busy_s + _update_s(run) + _reduction_s(run, last_backward_s)


def unit_of(run: Run) -> Unit:
    """One microbatch of a run."""
    return _unit(
        run.style,
        run.sizes,
        run.dtype,
        run.cluster,
        run.tp,
        run.dp if run.zero == 3 else 1,
        run.sequence_parallel,
        run.states.reduced_bytes,
    )


def _update_s(run: Run) -> float:
    """Of norm, clipping and update: read twice and written once more, gradients; states, both."""
    states = run.states
    moved = 2 * (states.parameter_bytes + states.optimizer_bytes) + 4 * states.gradient_bytes
    rate = update_bytes_per_s(run.cluster.device(0))
    return run.stage_parameters(0) * moved / run.states_ranks / rate


def _schedule_s(run: Run, unit: Unit) -> tuple[float, float]:
    """Seconds of all microbatches on all stages, and of one backward of a stage."""
    chunks = _chunk_times(run, unit)
    num = run.num_microbatches
    if run.pp == 1:
        last_s = chunks[0].backward_s
        if not run.reduces_last:
            return run.microbatches * (chunks[0].forward_s + last_s), last_s
        unreduced_s = last_s - run.layers * (unit.backward_s - unit.unreduced_s)
        return run.microbatches * chunks[0].forward_s + last_s + (num - 1) * unreduced_s, last_s
    if run.schedule == "1f1b":
        stages = [StageTime(chunk.forward_s, chunk.backward_s) for chunk in chunks]
        return one_f_one_b_s(stages, num), chunks[0].backward_s
    timeline = run_schedule(table(run, unit), chunks)
    # Zero-bubble runs check gradients behind the update, so that no barrier ends a step.
    if SCHEDULES[run.schedule].splits_backward:
        return timeline.period_s, chunks[0].backward_s
    return timeline.makespan_s, chunks[0].backward_s


def _chunk_times(run: Run, unit: Unit) -> list[ChunkTime]:
    """Of every chunk, in the order of the model, with Megatron's messages in it.

    Those are not hidden: the stage that waits for one computes nothing.
    """
    blocked_s = 0.0
    if run.pp > 1:
        sent = 2 * run.sizes.batch * run.sizes.seq * run.hidden / run.tp
        blocked_s = send_s(sent, axis_link(run.cluster, (run.pp, run.dp, run.tp), 0))
    rate = update_bytes_per_s(run.cluster.device(0))
    found = []
    for place, layers in enumerate(run.layers_of_chunk):
        num = run.chunk_parameters(place)
        accumulate_s = num * run.states.accumulate_bytes / rate
        again_s = layers * unit.again_s[run.recompute]
        if run.stage_recomputed:
            again_s = run.stage_recomputed[place] * unit.again_s["full"]
        forward_s = layers * unit.forward_s + blocked_s
        backward_s = layers * unit.backward_s + again_s + accumulate_s + blocked_s
        if place == len(run.layers_of_chunk) - 1:
            logits = run.sizes.batch * run.sizes.seq * run.sizes.vocab / run.tp
            forward_s += unit.rest_forward_s + logits * run.metric_bytes / rate
            backward_s += unit.rest_backward_s
        found.append(ChunkTime(forward_s, backward_s, layers * unit.weight_s + accumulate_s))
    return found


def table(run: Run, unit: Unit) -> Schedule:
    """The actions of a run's schedule."""
    forward_s, weight_s = unit.forward_s, unit.weight_s
    input_s = unit.backward_s - weight_s
    costs = Costs(forward_s=1.0, input_s=input_s / forward_s, weight_s=weight_s / forward_s)
    return _table(run.schedule, run.pp, run.chunks, run.num_microbatches, pending_share(run), costs)


@cache
def _table(
    name: str, lanes: int, chunks: int, microbatches: int, pending: float, costs: Costs
) -> Schedule:
    rounded = Costs(
        forward_s=1.0,
        input_s=round(costs.input_s, 2),
        weight_s=round(costs.weight_s, 2),
        pending_share=pending,
    )
    size = Size(lanes=lanes, chunks=chunks, microbatches=microbatches, costs=rounded)
    return SCHEDULES[name].generate_for(size)


def pending_share(run: Run) -> float:
    """Share of a layer's saved bytes that its weight gradients need: operands of the products.

    Inputs of the four products and gradients of their outputs, 32 s b h in 16 bits; the rest is
    freed behind the input gradient.
    """
    products = 32 * run.sizes.seq * run.sizes.batch * run.hidden / run.tp
    return round(min(1.0, products / saved_bytes(run)), 2)


def saved_bytes(run: Run) -> float:
    """Of a layer that recomputes nothing, with the masks that dropout keeps."""
    saved = unit_of(run).saved_bytes
    if not run.style.dropout:
        return saved
    sizes = run.sizes
    return saved + dropout_mask_bytes(
        batch=sizes.batch,
        seq=sizes.seq,
        hidden=run.hidden,
        heads=0 if run.style.flash else sizes.heads,
        tensor_ranks=run.tp,
        sequence_parallel=run.sequence_parallel,
    )


def _reduction_s(run: Run, last_backward_s: float) -> float:
    """Seconds that the reduction of gradients, and ZeRO's gather, add to a step.

    Where states are split among neighbours only, gradients are scattered among those and what is
    left of them summed with the other groups.
    """
    if run.dp == 1 or run.zero == 3:
        return 0.0
    num = run.stage_parameters(0)
    reduced = num * run.states.reduced_bytes
    link = _data_link(run, run.dp)
    if not run.zero:
        reduce_s, gather_s = collective_s("all_reduce", reduced, link), 0.0
    else:
        is_split = run.states_ranks == run.dp
        inner = link if is_split else _data_link(run, run.states_ranks)
        reduce_s = collective_s("reduce_scatter" if is_split else "all_reduce", reduced, link)
        gather_s = _gather_s(run, num * run.states.parameter_bytes, inner)
    if run.overlap_reduction:
        slowdown = compute_collective(run.cluster.device(0).kind)
        reduce_s = exposed_reduction_s(reduce_s, last_backward_s, 0.0, 8, slowdown)
    return reduce_s + gather_s


def _gather_s(run: Run, gathered_bytes: float, link: AxisLink) -> float:
    """Of the parameters that ZeRO-1 has updated."""
    if not run.broadcasts:
        return collective_s("all_gather", gathered_bytes, link)
    return link.ranks * collective_s("broadcast", gathered_bytes / link.ranks, link)


def _data_link(run: Run, ranks: int) -> AxisLink:
    """Of so many neighbouring data-parallel ranks."""
    return axis_link(run.cluster, (run.pp * (run.dp // ranks), ranks, run.tp), 1)


@cache
def _unit(
    style: Style,
    sizes: Sizes,
    dtype: str,
    cluster: Cluster,
    tp: int,
    dp: int,
    sequence_parallel: bool,
    reduced_bytes: float,
) -> Unit:
    """Differences of one and two layers (two and three under FSDP, whose gathers run ahead).

    Host and device are simulated apart and the slower of the two counts, of a layer and of the
    rest: in so short a program a host would get ahead in the rest, which it does not in a long one.
    """
    fewer, programs, inside = _programs(style, sizes, dtype, cluster, tp, dp, sequence_parallel)
    seconds = axis_seconds(cluster, programs[0].mesh)
    priced = replace(prices(cluster.device(0), _joined(seconds)), host_op_s=0.0)
    wider = reduced_bytes / (4 if dtype == "float32" else 2)
    if dp > 1 and wider != 1:
        priced = replace(priced, collective_s=_reduced_in(priced.collective_s, wider))
    small, large = (simulate(p, priced) for p in programs)
    layer, rest = _parts(fewer, _passes_s(small), _passes_s(large))
    host, rest_host = _parts(fewer, *map(_host_s, programs))
    small_kinds, large_kinds = (_forward_kinds(p, priced) for p in programs)
    kinds = {kind: large_kinds[kind] - small_kinds[kind] for kind in large_kinds}
    compute_s = kinds["product"] + kinds["attention"] + kinds["memory"]
    forward_s = max(layer[0], host[0])
    again = {
        "none": 0.0,
        "full": max(compute_s, host[0]) if dp > 1 else forward_s,
        "half": compute_s / 2,
        "op": kinds["memory"] + kinds["product"] / 2,
        "attention": kinds["attention"] + kinds["core"],
    }
    unreduced_s = layer[1]
    if dp > 1:
        free = replace(priced, collective_s=_reduced_in(priced.collective_s, 0.0))
        passes = [_passes_s(simulate(p, free)) for p in programs]
        unreduced_s = _parts(fewer, *passes)[0][1]
    saved = large.saved_bytes - small.saved_bytes
    return Unit(
        forward_s=forward_s,
        backward_s=max(layer[1], host[1]),
        unreduced_s=max(unreduced_s, host[1]),
        rest_forward_s=max(rest[0], rest_host[0]),
        rest_backward_s=max(rest[1], rest_host[1]),
        again_s=again,
        weight_s=kinds["product"],
        saved_bytes=saved,
        rest_bytes=small.peak_bytes - small.gradient_bytes - fewer * saved,
        working_bytes=_working_bytes(programs[0], inside) - (fewer - 1) * saved,
    )


Passes = tuple[float, float]
"""Seconds of a forward and of a backward."""


def _passes_s(simulated: Simulation) -> Passes:
    return simulated.forward_s, simulated.seconds - simulated.forward_s


def _host_s(program: Program) -> Passes:
    """Of the host to issue a program's ops, views among them."""
    issued = [i for i in program.instructions if i.op != WAIT]
    backward = sum(i.phase is Phase.BACKWARD for i in issued)
    return EAGER_OP_S * (len(issued) - backward), EAGER_OP_S * backward


def _parts(fewer: int, small: Passes, large: Passes) -> tuple[Passes, Passes]:
    """Of one layer, and of all that is none, from programs of `fewer` layers and of one more."""
    layer = large[0] - small[0], large[1] - small[1]
    return layer, (small[0] - fewer * layer[0], small[1] - fewer * layer[1])


def _joined(seconds: CollectiveSeconds) -> CollectiveSeconds:
    """Prices of collectives with what an eager framework adds."""
    return lambda kind, size, axis: seconds(kind, size, axis) + EAGER_JOIN_S


def _reduced_in(seconds: CollectiveSeconds, wider: float) -> CollectiveSeconds:
    """Prices of a mesh whose first axis reduces gradients in a dtype so many times as wide."""

    def found(kind: str, tensor_bytes: int, axis: int) -> float:
        reduces = axis == 0 and kind in ("reduce_scatter", "all_reduce")
        return seconds(kind, round(tensor_bytes * wider) if reduces else tensor_bytes, axis)

    return found


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
    live, _, gradients, *_ = live_bytes(byte_changes(program, storages(program))).T.tolist()
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
