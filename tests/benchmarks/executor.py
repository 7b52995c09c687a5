"""Step time of the compiled program on one rank against the eager step, paired.

``python -m tests.benchmarks.executor`` trains a small Llama and a small GPT-2 both ways in turn and
prints the median of the ratios compiled / eager: below 1 the program is faster. One thread each.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import autopar

PAIRS = 20


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Four layers of width 256, 8 sequences of 128 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    ids = torch.randint(0, 2048, (8, 128))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Four layers of width 256, 8 sequences of 128 tokens, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=2048,
        n_positions=128,
        n_embd=256,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    ids = torch.randint(0, 2048, (8, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def paired(eager: Callable[[], Any], compiled: Callable[[], Any]) -> list[float]:
    """Ratios compiled / eager of alternating runs, the order changing every time."""
    ratios = []
    for number in range(PAIRS + 3):
        seconds = {}
        order = (("eager", eager), ("compiled", compiled))
        for name, run in order if number % 2 else reversed(order):
            start = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - start
        if number >= 3:
            ratios.append(seconds["compiled"] / seconds["eager"])
    return ratios


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = Table("model", "pairs", "median compiled / eager", "least", "most")
    for name, build in (("llama", llama), ("gpt2", gpt2)):
        torch.manual_seed(0)
        model, batch = build()
        parallel = autopar.compile(copy.deepcopy(model), autopar.Cluster.local(1), batch)

        def eager(model: Any = model, batch: Any = batch) -> None:
            model(**batch).loss.backward()
            model.zero_grad()

        def compiled(parallel: Any = parallel, batch: Any = batch) -> None:
            parallel(batch).backward()
            parallel.zero_grad()

        ratios = paired(eager, compiled)
        middle = statistics.median(ratios)
        table.add_row(name, str(PAIRS), f"{middle:.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}")
    Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
