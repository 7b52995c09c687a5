"""Pipelines within little memory: ``python -m tests.benchmarks.dawnpiper [model or stages ...]``.

GPT-2 medium, BERT large and T5 large on 4 and 8 stages of one device each, under 1F1B with two
microbatches a stage. For every way to cut the step (`tests.oracles.stagecuts`) and for the planner:
the largest microbatch that fits, as a multiple of that of the even cut that keeps everything; then,
at the largest of all ways but the planner's, the step, the bytes of the fullest stage, how many
times that is what the emptiest stage holds, and the processor seconds it took. Names of models as
arguments run those alone, numbers as many stages. All *simulated*.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autopar.capture import capture_step
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.models import output_loss
from tests.oracles.stagecuts import StageCuts, Staged

A_STAGE = 2
"""Microbatches a stage."""

MOST = 256
"""Samples of a microbatch, at most."""


def gpt2_medium() -> tuple[Any, int]:
    config = GPT2Config(
        n_embd=1024,
        n_layer=24,
        n_head=16,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    return GPT2LMHeadModel(config), 1024


def bert_large() -> tuple[Any, int]:
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), 512


def t5_large() -> tuple[Any, int]:
    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), 512


MODELS: Mapping[str, Callable[[], tuple[Any, int]]] = {
    "GPT-2 medium": gpt2_medium,
    "BERT large": bert_large,
    "T5 large": t5_large,
}
DEVICES = {"GPT-2 medium": "v100", "BERT large": "v100-10gbe", "T5 large": "a100-40gb"}
STAGES = (4, 8)


@functools.lru_cache(maxsize=8)
def step(model: str, samples: int) -> Analysis:
    with torch.device("meta"):
        module, length = MODELS[model]()
        ids = torch.zeros(samples, length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return analyse(capture_step(module.train(), batch, output_loss, grad=True).graph)


@dataclass(frozen=True)
class Case:
    """A model on a number of stages."""

    model: str
    stages: int

    @functools.cached_property
    def cluster(self) -> Cluster:
        machine = Cluster.preset(DEVICES[self.model], nodes=self.stages)
        return machine.part(0, self.stages)

    def cuts(self, microbatch: int) -> StageCuts:
        """The ways to cut it, with so many samples a microbatch."""
        if microbatch not in self.known:
            count = A_STAGE * self.stages
            self.known[microbatch] = StageCuts(
                step(self.model, count * microbatch), self.cluster, count
            )
        return self.known[microbatch]

    @functools.cached_property
    def known(self) -> dict[int, StageCuts]:
        return {}

    def largest(self, fits: Callable[[StageCuts], bool]) -> int:
        """The largest microbatch that fits, if one does then all smaller ones do; 0 if none."""
        low, high = 0, 1
        while high <= MOST and fits(self.cuts(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(self.cuts(middle)) else (low, middle)
        return low


def _fits(cuts: StageCuts, staged: Staged | None) -> bool:
    return staged is not None and max(staged.peaks) <= cuts.limit_bytes


WAYS: Mapping[str, Callable[[StageCuts], Staged | None]] = {
    "even, all kept": StageCuts.balanced,
    "even, then made to fit": StageCuts.cut_first,
    "whole blocks": StageCuts.whole_blocks,
    "planner": StageCuts.planned,
}


def rows(case: Case) -> list[list[str]]:
    """A row for every way."""
    fits: dict[str, Callable[[StageCuts], bool]] = {
        name: (lambda cuts, make=make: _fits(cuts, make(cuts))) for name, make in WAYS.items()
    }
    fits["even, then made to fit"] = StageCuts.cut_first_fits
    fits["whole blocks"] = StageCuts.whole_blocks_fit
    most = {name: case.largest(fits[name]) for name in WAYS}
    shown = max(count for name, count in most.items() if name != "planner")
    found = []
    for name, make in WAYS.items():
        cuts = case.cuts(min(shown, most[name]))
        start = time.process_time()
        staged = make(cuts)
        seconds = time.process_time() - start
        assert staged is not None, name
        found.append(
            [
                f"{case.model}, {case.stages} stages of {cuts.limit_bytes / 2**30:.1f} GiB",
                name,
                f"{most[name]} ({most[name] / most['even, all kept']:.1f})",
                f"{cuts.samples // cuts.microbatches}",
                f"{staged.step_s / cuts.samples * 1e3:.1f} ms",
                " ".join(f"{peak / 2**30:.1f}" for peak in staged.peaks),
                f"{staged.spread:.2f}",
                f"{seconds:.1f} s",
            ]
        )
    return found


def main() -> None:
    table = Table(
        "step", "cut", "largest microbatch", "shown", "a sample", "GiB", "spread", "planning"
    )
    asked = [arg for arg in sys.argv[1:] if not arg.isdigit()] or list(MODELS)
    numbers = [int(arg) for arg in sys.argv[1:] if arg.isdigit()] or list(STAGES)
    for model in asked:
        for stages in numbers:
            for row in rows(Case(model, stages)):
                table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
