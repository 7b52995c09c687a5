"""Capture and search of Llama-3 8B on an 8 x 8 mesh, and what twice the layers change.

``python -m tests.benchmarks.search [--batch N]`` prints seconds of this process (wall and CPU) for
32 and 64 layers: capture, analysis, and planning (building and solving the integer programs,
lowering and simulating what they found). Imports are not counted.
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
from autopar.planner.driver import Request, make_plan
from autopar.search.analysis import analyse

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64, help="sequences of the global batch")
    batch_size = parser.parse_args().batch
    ids = torch.zeros(batch_size, SEQUENCE, dtype=torch.long, device="meta")
    table = Table("layers", "nodes", "classes", "capture", "analyse", "plan", "total", "solver")
    for num_layers in (32, 64):
        model = model_of(num_layers)
        timers = [Timer(), Timer(), Timer()]
        batch = {"input_ids": ids, "labels": ids}
        captured = timers[0].run(lambda m=model, b=batch: capture_step(m, b, grad=True))
        analysis = timers[1].run(lambda c=captured: analyse(c.graph))
        request = Request(model="Llama", fingerprint="", cluster=Cluster.preset("h100", nodes=8))
        plan = timers[2].run(lambda a=analysis, r=request: make_plan(a, r))
        total = Timer(sum(t.wall_s for t in timers), sum(t.cpu_s for t in timers))
        table.add_row(
            str(num_layers),
            str(plan.search.num_nodes),
            str(plan.search.num_classes),
            *(f"{t.wall_s:.1f} / {t.cpu_s:.1f}" for t in (*timers, total)),
            f"{plan.search.status}, gap {plan.search.gap:.2%}",
        )
    Console().print("seconds, wall / CPU of this process")
    Console().print(table)


if __name__ == "__main__":
    main()
