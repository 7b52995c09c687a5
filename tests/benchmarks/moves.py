"""Local moves on the stages of pipelines: ``python -m tests.benchmarks.moves [layers ...]``.

GPT-2 of the width of its medium model and any number of layers, on four A100 that are a stage each,
8 microbatches of 4 samples, without host memory, under 1F1B and interleaved with two chunks. Within
parts of what the fullest stage holds where nothing runs again: the planner's step without local
moves and with them, as multiples of that, the most that a stage then holds as a part of the limit,
and processor seconds of the moves and of all planning. All *simulated*.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import InfeasibleError
from autopar.plan.records import Plan, Prediction
from autopar.planner import driver
from autopar.planner.request import Candidate, Request, Unlimited
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster, Device
from tests.oracles.models import output_loss

LAYERS = (8, 16, 24)
STAGES, MICROBATCHES, SAMPLES, TOKENS = 4, 8, 4, 1024
PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
SCHEDULES: tuple[hint.Hint, ...] = (hint.schedule("1f1b"), hint.schedule("interleaved", chunks=2))


def step(layers: int) -> Analysis:
    """The captured step of a GPT-2 of so many layers."""
    config = GPT2Config(
        n_embd=1024,
        n_layer=layers,
        n_head=16,
        n_positions=TOKENS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        ids = torch.zeros(MICROBATCHES * SAMPLES, TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return analyse(capture_step(model, batch, output_loss, grad=True).graph)


def machine() -> Cluster:
    """Four devices whose host has no memory for them."""
    cluster = Cluster.preset("a100", nodes=1).part(0, STAGES)
    runs = tuple(
        replace(run, device=replace(run.device, unified_memory=True)) for run in cluster.devices
    )
    return replace(cluster, devices=runs)


@dataclass(slots=True)
class Watched:
    """Local moves as the planner makes them, watched.

    Attributes:
        before: The candidate without them; ``after`` with them.
        seconds: Processor seconds that they took.
    """

    before: list[Candidate] = field(default_factory=list)
    after: list[Candidate] = field(default_factory=list)
    seconds: float = 0.0

    def refined(self, *given: Any) -> Candidate:
        start = time.process_time()
        found: Candidate = REFINED(*given)
        self.seconds = time.process_time() - start
        self.before, self.after = [given[2]], [found]
        return found


REFINED: Callable[[Analysis, Request, Candidate, Callable[[Device], int]], Candidate] = (
    driver.refined
)


@dataclass(frozen=True, slots=True)
class Case:
    """A step on the stages under a schedule, within any memory."""

    analysis: Analysis
    schedule: hint.Hint
    known: dict[Hashable, Unlimited] = field(default_factory=dict)

    def planned(self, *limit: hint.Hint) -> Plan:
        asked = (hint.degrees(pp=STAGES, dp=1, tp=1), hint.microbatches(MICROBATCHES))
        request = Request(
            model="gpt2",
            fingerprint="",
            cluster=machine(),
            hints=(*asked, self.schedule, *limit),
            time_limit_s=3600.0,
            known=self.known,
        )
        return driver.make_plan(self.analysis, request)

    def row(self, free: Prediction, part: float) -> list[str]:
        """What moves gain within a part of the memory."""
        limit, start = int(part * free.memory.total_bytes), time.process_time()
        watched = Watched()
        driver.refined = watched.refined
        try:
            self.planned(hint.memory_limit(limit))
        except InfeasibleError:
            return ["nothing found"]
        finally:
            driver.refined = REFINED
        (before,), (after,) = watched.before, watched.after
        return [
            f"{before.step_s / free.step_s:.4f}",
            f"{after.step_s / free.step_s:.4f}",
            f"{1 - after.step_s / before.step_s:.2%}",
            f"{after.memory.total_bytes / limit:.1%}",
            f"{watched.seconds:.1f} s",
            f"{time.process_time() - start:.1f} s",
        ]


COLUMNS = ("layers", "schedule", "memory", "without", "with", "gain", "holds", "moves", "planning")


def main() -> None:
    table = Table(*COLUMNS)
    for layers in map(int, sys.argv[1:]) if sys.argv[1:] else LAYERS:
        analysis = step(layers)
        for schedule in SCHEDULES:
            case = Case(analysis, schedule)
            free = case.planned().prediction
            for part in PARTS:
                row = [str(layers), str(schedule), f"{part:.0%}", *case.row(free, part)]
                print(*row, file=sys.stderr, flush=True)
                table.add_row(*row)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
