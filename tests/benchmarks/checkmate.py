"""What a GPT recomputes, against the optimum: ``python -m tests.benchmarks.checkmate``.

A GPT-2 of 32 layers of width 1024 on one H100 without host memory, in parts of the activations it
holds where nothing runs again. Ours is what the planner chooses with all layers in one class, after
local moves, lowered and within the limit to the byte: seconds of what runs again, and processor
seconds of solving, lowering and simulating. The optimum is Checkmate's, with each value kept or
made again once: the same memory sums with a binary of its own for every op of every layer, as long
as the solver is given. Where what it finds holds more than it may once it is lowered, memory is
counted there too, and it is solved again: places that no sum looks at would make it seem better
than any program is. Said are its best solution, and the bound that the solver proves; the ratios
are those of the whole step and of what runs again alone, to the bound. All *simulated*. Parts as
arguments are the budgets; ``--seconds`` what the solver is given each time.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autopar.capture import capture_step
from autopar.cost.node import NodeCost
from autopar.options import OptimizerSpec
from autopar.planner.evaluate import evaluate
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import Built, build_problem, with_moment, with_reruns
from autopar.search.intra import solve
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import output_loss
from tests.oracles.recomputes import ONE, OneRank

PARTS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
GAP = 1e-5
"""Of the step: less than a hundredth of what runs again, where least does."""

PLACES = 8
"""Places at which memory is counted more, at most, one after the other."""


def gpt(layers: int = 32) -> Any:
    """The captured step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=4096,
        n_embd=1024,
        n_head=16,
        n_layer=layers,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    with torch.device("meta"):
        model, ids = GPT2LMHeadModel(config), torch.zeros(8, 1024, dtype=torch.long)
    return capture_step(model, {"input_ids": ids, "labels": ids}, output_loss, grad=True).graph


def h100() -> Cluster:
    """One device of any memory, whose host's is its own."""
    cluster = Cluster.preset("h100", nodes=1)
    device = replace(cluster.device(0), memory_bytes=10**13, unified_memory=True)
    return replace(cluster, devices=(Devices(device=device, count=cluster.num_devices),))


def single(graph: Any, rank: OneRank) -> Built:
    """The problem with every op of every layer by itself."""
    cost = NodeCost(rank.cluster.device(0), ONE, rank.collective_s)
    updates = Updates(OptimizerSpec(state_bytes=8.0), 1e15)
    analysis: Analysis = analyse(graph, folded=False)
    return with_reruns(build_problem(analysis, ONE, cost, updates, Restrictions()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """What the solver found for every op of every layer, and what it took.

    Attributes:
        best_s: Seconds of the best solution; ``bound_s`` what it proves that none goes below.
        fits: Whether its program holds no more than it may.
        seconds: By the clock.
    """

    best_s: float
    bound_s: float
    fits: bool
    seconds: float


def optimum(rank: OneRank, built: Built, limit_bytes: float, time_limit_s: float) -> Optimum:
    """The best choice for every op by itself, memory counted wherever its programs hold most."""
    request = Request(model="m", fingerprint="f", cluster=rank.cluster)
    start, cost = time.perf_counter(), built.cost
    for _ in range(PLACES):
        problem = replace(built.problem, memory_limit_bytes=limit_bytes)
        best = solve(problem, time_limit_s=time_limit_s, gap=GAP)
        fits = False
        if not best.choice:
            break
        lowered = evaluate(rank.analysis, request, cost, built, best)
        fits = lowered.memory.total_bytes <= limit_bytes
        if fits or not lowered.fullest_node:
            break
        before, built = built, with_moment(built, lowered.fullest_node)
        if built is before:
            break
    return Optimum(
        best_s=best.objective_s,
        bound_s=best.bound_s,
        fits=fits,
        seconds=time.perf_counter() - start,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", type=float, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    graph = gpt()
    rank = OneRank(analyse(graph), h100())
    unfolded = single(graph, rank)
    plain_s = solve(unfolded.problem).objective_s
    columns = ("memory", "ours", "peak", "takes", "optimum", "bound", "fits", "takes")
    title = f"recompute of a step of {1e3 * rank.plain_s:.1f} ms"
    table = Table(*columns, "step / bound", "again / bound", title=title)
    for part in asked.parts:
        limit = rank.fixed_bytes + part * rank.peak_bytes
        start = time.process_time()
        plan = rank.planned(limit)
        taken_s = time.process_time() - start
        best = optimum(rank, unfolded, limit, asked.seconds)
        found = None if plan is None else rank.cost(plan.pipeline.stages[0])
        ours, solver = ["-"] * 2, ["-"] * 3
        if found is not None:
            ours = [f"{1e3 * found.seconds:.2f} ms", f"{found.peak_bytes / rank.peak_bytes:.1%}"]
        if best.best_s < math.inf:
            seconds = best.best_s - plain_s, best.bound_s - plain_s
            solver = [*(f"{1e3 * own:.2f} ms" for own in seconds), "yes" if best.fits else "no"]
        ratios = ["-"] * 2
        if found is not None and best.bound_s > plain_s:
            step, again = (found.seconds + plain_s) / best.bound_s, best.bound_s - plain_s
            ratios = [f"{step:.4f}", f"{found.seconds / again:.3f}"]
        table.add_row(
            f"{part:.0%}", *ours, f"{taken_s:.1f} s", *solver, f"{best.seconds:.0f} s", *ratios
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
