"""Pipelines within little memory: ``python -m tests.benchmarks.dawnpiper [model or stages ...]``.

GPT-2 medium, BERT large and T5 large on 4 and 8 stages of one device each, under 1F1B with two
microbatches a stage. For every way to cut the step (`tests.oracles.stagecuts`) and for the planner:
the largest microbatch that fits (eight sizes are tried between one and twice as many samples), as
a multiple of that of the even cut that keeps everything; then, at the largest of all ways but the
planner's, the step, the bytes of every stage, how many times what the emptiest stage holds the
fullest does, the same of those stages alone that run something again or send it away, and the
processor seconds it took. At last the planner's step as a multiple of that of the even cut made to
fit, within five parts of what the fullest stage holds where everything is kept.
Names of models as arguments run those alone, numbers as many stages. All *simulated*.
"""

from __future__ import annotations

import bisect
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
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

FINE = 8
"""Sizes of a microbatch that are tried between one and twice as many samples."""

SIZES = tuple(sorted({round(2 ** (n / FINE)) for n in range(8 * FINE + 1)}))
"""Samples of a microbatch."""

LIMITS = tuple(part / 10 for part in range(9, 4, -1))
"""Parts of what the fullest stage holds where all is kept, within which the last two are timed."""


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

    def staged(self, way: str, microbatch: int) -> tuple[Staged | None, float]:
        """The pipeline of a way, and the processor seconds that it took; it is made once."""
        if (way, microbatch) not in self.made:
            cuts = self.cuts(microbatch)
            start = time.process_time()
            staged = WAYS[way](cuts)
            self.made[way, microbatch] = staged, time.process_time() - start
        return self.made[way, microbatch]

    @functools.cached_property
    def made(self) -> dict[tuple[str, int], tuple[Staged | None, float]]:
        return {}

    def fits(self, way: str, microbatch: int) -> bool:
        """Whether a way finds a pipeline within memory."""
        cuts = self.cuts(microbatch)
        if way in LEAST:
            return LEAST[way](cuts)
        staged, _ = self.staged(way, microbatch)
        return staged is not None and max(staged.peaks) <= cuts.limit_bytes

    def largest(self, way: str, guess: float) -> int:
        """The largest of `SIZES` that fits, if one does then all smaller ones do; 0 if none.

        Args:
            way: To cut the step.
            guess: About how large it is: that is tried first.
        """
        found: dict[int, bool] = {-1: True, len(SIZES): False}

        def fit(at: int) -> bool:
            if at not in found:
                found[at] = self.fits(way, SIZES[at])
            return found[at]

        low = bisect.bisect_right(SIZES, max(guess, 1)) - 1
        stride = 1
        while not fit(low):
            low, stride = max(-1, low - stride), 2 * stride
        high, stride = low + 1, 1
        while fit(high):
            low, high, stride = high, min(len(SIZES), high + stride), 2 * stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fit(middle) else (low, middle)
        return SIZES[low] if low >= 0 else 0


WAYS: Mapping[str, Callable[[StageCuts], Staged | None]] = {
    "even, all kept": StageCuts.balanced,
    "even, then made to fit": StageCuts.cut_first,
    "whole blocks": StageCuts.whole_blocks,
    "planner": StageCuts.planned,
}
KEPT, FIRST, BLOCKS, PLANNER = WAYS

LEAST: Mapping[str, Callable[[StageCuts], bool]] = {
    FIRST: StageCuts.cut_first_fits,
    BLOCKS: StageCuts.whole_blocks_fit,
}
"""Whether a way fits at all, of those that can say so at once."""


def most(case: Case) -> Mapping[str, int]:
    """The largest microbatch of every way."""
    few, more = (max(case.cuts(size).balanced().peaks) for size in (1, 2))
    kept = case.largest(KEPT, 1 + (case.cuts(1).limit_bytes - few) / (more - few))
    first = case.largest(FIRST, AIM * kept)
    blocks = case.largest(BLOCKS, first)
    planner = case.largest(PLANNER, max(first, blocks, AIM * kept))
    return {KEPT: kept, FIRST: first, BLOCKS: blocks, PLANNER: planner}


AIM = 4
"""Times the microbatch of the even cut that keeps everything, which is to fit."""


def rows(case: Case) -> list[list[str]]:
    """A row for every way."""
    largest = most(case)
    shown = max(count for name, count in largest.items() if name != PLANNER)
    found = []
    for name in WAYS:
        size = min(shown, largest[name])
        cuts, (staged, seconds) = case.cuts(size), case.staged(name, size)
        assert staged is not None, name
        found.append(
            [
                f"{case.model}, {case.stages} stages of {cuts.limit_bytes / 2**30:.1f} GiB",
                name,
                f"{largest[name]} ({largest[name] / largest[KEPT]:.1f})",
                f"{size}",
                f"{staged.step_s / cuts.samples * 1e3:.1f} ms",
                " ".join(f"{peak / 2**30:.1f}" for peak in staged.peaks),
                f"{staged.spread:.2f} ({staged.bound_spread:.2f})",
                f"{seconds:.1f} s",
            ]
        )
    return found


def ratios(case: Case) -> list[str]:
    """The planner's step as a multiple of that of the cut first, within less and less memory."""
    cuts = case.cuts(OF)
    kept = max(cuts.balanced().peaks)
    found = [f"{case.model}, {case.stages} stages"]
    for part in LIMITS:
        own = cuts.within(int(part * kept))
        first, planned = own.cut_first(), own.planned()
        if first is None:
            found.append("only the planner fits" if planned else "neither fits")
        else:
            found.append(f"{planned.step_s / first.step_s:.4f}" if planned else "only it fits")
        print(*found, flush=True, file=sys.stderr)
    return found


OF = 8
"""Samples of a microbatch whose step is timed within less and less memory."""


def timed(job: tuple[Callable[[Case], Any], Case]) -> tuple[Any, float]:
    """What a job finds, and its processor seconds."""
    make, case = job
    start = time.process_time()
    found = make(case)
    return found, time.process_time() - start


def chosen(arguments: Sequence[str]) -> tuple[list[str], list[int]]:
    """The models and numbers of stages that arguments name, all where they name none."""
    models = [arg for arg in arguments if not arg.isdigit()]
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        known = ", ".join(map(repr, MODELS))
        raise SystemExit(f"cannot cut {unknown[0]!r} into stages: no such model; use {known}")
    numbers = [int(arg) for arg in arguments if arg.isdigit()]
    if any(number < 2 for number in numbers):
        raise SystemExit(f"cannot cut a model into {min(numbers)} stages; use 2 or more")
    return models or list(MODELS), numbers or list(STAGES)


def main() -> None:
    models, numbers = chosen(sys.argv[1:])
    jobs: list[tuple[Callable[[Case], Any], Case]] = [
        (rows, Case(model, stages)) for model in models for stages in numbers
    ]
    jobs += [(ratios, Case(model, numbers[0])) for model in models]
    console = Console(width=150)
    within = Table("planner / even, then made to fit", *(f"{part:.0%}" for part in LIMITS))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for (make, case), (found, seconds) in zip(jobs, pool.map(timed, jobs), strict=True):
            if make is ratios:
                within.add_row(*found)
            else:
                table = Table(
                    "step", "cut", "largest", "shown", "a sample", "GiB", "spread", "planning"
                )
                for row in found:
                    table.add_row(*row)
                console.print(table)
            console.print(f"{case.model}, {case.stages} stages: {seconds:.0f} processor seconds")
    console.print(within)


if __name__ == "__main__":
    main()
