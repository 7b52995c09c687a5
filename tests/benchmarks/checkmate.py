"""What a GPT recomputes, against the optimum: ``python -m tests.benchmarks.checkmate``.

A GPT-2 of 32 layers of width 1024 on one H100 without host memory, in parts of the activations it
holds where nothing runs again. Ours is what the planner chooses with all layers in one class,
lowered and within the limit to the byte: seconds of what runs again, and processor seconds of
solving, lowering and simulating. The optimum is Checkmate's, with each value kept or made again
once: the same memory sums with a binary of its own for every op of every layer, as long as the
solver is given. Where the time is up, its best solution and its proven bound. All *simulated*.
Parts as arguments are the budgets; ``--seconds`` what the solver is given each.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autopar.capture import capture_step
from autopar.cost.node import NodeCost
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import Built, StateBytes, build_problem, with_reruns
from autopar.search.intra import solve
from autopar.search.problem import Solution
from autopar.search.restrict import Restrictions
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import output_loss
from tests.oracles.recomputes import ONE, OneRank

PARTS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
GAP = 1e-4


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
    states = StateBytes(per_element=8.0, update_bytes_per_s=1e15)
    analysis: Analysis = analyse(graph, folded=False)
    return with_reruns(build_problem(analysis, ONE, cost, states, Restrictions()))


def optimum(built: Built, limit_bytes: float, time_limit_s: float) -> Solution:
    problem = replace(built.problem, memory_limit_bytes=limit_bytes)
    return solve(problem, time_limit_s=time_limit_s, gap=GAP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", type=float, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    graph = gpt()
    rank = OneRank(analyse(graph), h100())
    unfolded = single(graph, rank)
    plain_s = solve(unfolded.problem).objective_s
    columns = ("memory", "ours", "peak", "takes", "optimum", "bound", "takes", "ours / optimum")
    table = Table(*columns, title=f"recompute of a step of {1e3 * rank.plain_s:.1f} ms")
    for part in asked.parts:
        limit = rank.fixed_bytes + part * rank.peak_bytes
        start = time.process_time()
        plan = rank.planned(limit)
        taken_s = time.process_time() - start
        best = optimum(unfolded, limit, asked.seconds)
        best_s, bound_s = best.objective_s - plain_s, best.bound_s - plain_s
        found = None if plan is None else rank.cost(plan.pipeline.stages[0])
        table.add_row(
            f"{part:.0%}",
            "-" if found is None else f"{1e3 * found.seconds:.2f} ms",
            "-" if found is None else f"{found.peak_bytes / rank.peak_bytes:.1%}",
            f"{taken_s:.1f} s",
            f"{1e3 * best_s:.2f} ms",
            f"{1e3 * bound_s:.2f} ms",
            f"{best.seconds:.0f} s",
            "-" if found is None else f"{found.seconds / best_s:.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
