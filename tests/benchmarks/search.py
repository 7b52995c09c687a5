"""Capture and search of Llama-3 8B on an 8 x 8 mesh, and what twice the layers change.

``python -m tests.benchmarks.search [--batch N]`` prints seconds of this process (wall and CPU) for
32 and 64 layers: capture, analysis, search (building and solving the integer program of the 8 x 8
mesh), and planning (all of that, lowering and simulating too). Imports are not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.capture import capture_step
from autopar.cluster import Cluster
from autopar.cost.node import NodeCost, axis_seconds, update_bytes_per_s
from autopar.options import OptimizerSpec
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from autopar.search.build import build_problem
from autopar.search.intra import solve
from autopar.search.outer import meshes
from autopar.search.problem import Solution
from autopar.search.restrict import Restrictions
from autopar.search.space import Updates

SEQUENCE = 8192


@dataclass
class Timer:
    """Wall and CPU seconds of a call."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def run(self, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.wall_s = time.perf_counter() - wall
        self.cpu_s = time.process_time() - cpu
        return result


def model_of(num_layers: int) -> LlamaForCausalLM:
    """Llama-3 8B with this number of layers, on meta."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def searched(analysis: Analysis) -> Solution:
    """The integer program of the 8 x 8 mesh, built and solved."""
    cluster = Cluster.preset("h100", nodes=8)
    (mesh,) = meshes(cluster, None)
    device = cluster.device(0)
    cost = NodeCost(device, mesh, axis_seconds(cluster, mesh))
    updates = Updates(OptimizerSpec(state_bytes=8.0), update_bytes_per_s(device))
    return solve(build_problem(analysis, mesh, cost, updates, Restrictions()).problem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64, help="sequences of the global batch")
    batch_size = parser.parse_args().batch
    ids = torch.zeros(batch_size, SEQUENCE, dtype=torch.long, device="meta")
    table = Table("layers", "nodes", "classes", "capture", "analyse", "search", "plan", "result")
    for num_layers in (32, 64):
        model = model_of(num_layers)
        timers = [Timer(), Timer(), Timer(), Timer()]
        batch = {"input_ids": ids, "labels": ids}
        captured = timers[0].run(lambda m=model, b=batch: capture_step(m, b, grad=True))
        analysis = timers[1].run(lambda c=captured: analyse(c.graph))
        request = Request(model="Llama", fingerprint="", cluster=Cluster.preset("h100", nodes=8))
        timers[2].run(lambda a=analysis: searched(a))
        plan = timers[3].run(lambda a=analysis, r=request: make_plan(a, r))
        table.add_row(
            str(num_layers),
            str(plan.search.num_nodes),
            str(plan.search.num_classes),
            *(f"{t.wall_s:.1f} / {t.cpu_s:.1f}" for t in timers),
            f"{plan.search.status}, gap {plan.search.gap:.2%}",
        )
    Console().print("seconds, wall / CPU of this process")
    Console().print(table)


if __name__ == "__main__":
    main()
