"""GPT-2 on two sites of two A100, through `autopar.plan`: ``python -m tests.benchmarks.sites``.

For every round trip and bandwidth between the sites: the plan that is chosen, and what the
simulator says of it and of the ways that hints force: data parallel or anything else over all
four, a pipeline that is cut between the sites, one site alone. ``large`` plans the large model,
``--batch N`` another number of sequences of 1,024 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar import hint
from autopar.errors import AutoparError
from autopar.plan.records import Plan
from autopar.plan.text import mesh_text
from cost_models.cluster import Cluster
from tests.oracles.sites import LARGE, MEDIUM, TOKENS, Gpt2, two_sites

ROUND_TRIPS_MS = (0.1, 1, 5, 10, 20, 50)
BANDWIDTHS = (1.25e9, 12.5e9)
"""Between the sites, in bytes a second: 10 and 100 Gbit/s."""

FORCED: dict[str, tuple[hint.Hint, ...]] = {
    "one stage": (hint.degrees(dp=4, tp=1, cp=1, pp=1),),
    "cut at the WAN": (hint.degrees(pp=2),),
    "one site": (hint.ranks(2), hint.degrees(pp=1)),
}
"""Ways that the choice is compared with."""


def gpt2(size: Gpt2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model of transformers in bfloat16, on meta, without dropout; and its batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.width // 64,
        vocab_size=size.vocabulary,
        use_cache=False,
        **options,
    )
    with torch.device("meta"):
        tokens = torch.zeros(size.batch, TOKENS, dtype=torch.long)
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
    return model, {"input_ids": tokens, "labels": tokens}


def cluster(round_trip_ms: float, bytes_per_s: float) -> Cluster:
    """Two sites with this much between them."""
    made = two_sites(round_trip_ms)
    node, wan = made.levels
    return replace(made, levels=(node, replace(wan, bandwidth_bytes_per_s=bytes_per_s)))


def choice(plan: Plan) -> str:
    """Which of the ways a plan is."""
    if plan.idle_ranks:
        return "one site"
    return "one stage" if plan.num_stages == 1 else "cut at the WAN"


def forced_s(
    model: nn.Module, where: Cluster, batch: Any, hints: Sequence[hint.Hint]
) -> float | None:
    """Simulated seconds of the best plan of one way; None if there is none."""
    try:
        return autopar.plan(model, where, batch, hints=hints).prediction.step_s
    except AutoparError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", nargs="?", choices=("medium", "large"), default="medium")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    size = replace({"medium": MEDIUM, "large": LARGE}[given.size], batch=given.batch)
    model, batch = gpt2(size)
    made = Table("Gbit/s", "round trip ms", "choice", "mesh of a stage", "microbatches", "step ms")
    for name in FORCED:
        made.add_column(f"{name} ms", justify="right")
    for bytes_per_s in BANDWIDTHS:
        for round_trip_ms in ROUND_TRIPS_MS:
            where = cluster(round_trip_ms, bytes_per_s)
            plan = autopar.plan(model, where, batch)
            others = [forced_s(model, where, batch, hints) for hints in FORCED.values()]
            made.add_row(
                f"{bytes_per_s / 1.25e8:g}",
                f"{round_trip_ms:g}",
                choice(plan),
                mesh_text(plan.stages[0]),
                f"{plan.microbatches}, {plan.schedule}" if plan.num_stages > 1 else "1",
                f"{1e3 * plan.prediction.step_s:.1f}",
                *(f"{1e3 * seconds:.1f}" if seconds else "none" for seconds in others),
            )
    title = f"GPT-2 {size.name}, batch {size.batch} x {TOKENS}, two sites of two A100; simulated"
    made.title = title
    Console().print(made)


if __name__ == "__main__":
    main()
