"""Train a small GPT on two processes and on one, and compare.

The model is transformers' GPT-2, unmodified; the text is the documentation that every Python
carries; a token is a byte.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text
from torch import Tensor, nn

from autopar.api import compile as compile_parallel
from autopar.api import plan as make_plan
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan.records import Plan
from autopar.plan.text import add_row, plan_view, section, table
from autopar.plan.wording import seconds_text
from autopar.runtime.clip import clip_grad_norm_
from autopar.spawn import Event, run_workers, work
from autopar.verify import difference

ALLOWED = 1e-4
"""Largest relative difference that floating-point order explains in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Sizes of the demonstration.

    Attributes:
        processes: Of the parallel run.
        steps: To train.
        batch: Samples a step, over all processes.
        seq: Bytes a sample.
        hidden: Width of the model.
        layers: Blocks of the model.
        seed: Of the first weights and of the order of the text.
    """

    processes: int = 2
    steps: int = 50
    batch: int = 16
    seq: int = 128
    hidden: int = 128
    layers: int = 4
    seed: int = 0

    @property
    def cluster(self) -> Cluster:
        return Cluster.local(self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training run left.

    Attributes:
        losses: Of every step.
        parameters: After the last step.
        step_s: Median seconds of a step, compilation left out.
    """

    losses: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Two runs of one training."""

    plan: Plan
    one: Run
    many: Run

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of a loss."""
        pairs = zip(self.many.losses, self.one.losses, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    @property
    def parameter_difference(self) -> tuple[float, str]:
        """Largest relative difference of a parameter, and its name."""
        other = self.many.parameters
        return max((difference(other.get(n), p), n) for n, p in self.one.parameters.items())

    @property
    def passed(self) -> bool:
        return max(self.loss_difference, self.parameter_difference[0]) <= ALLOWED


def build(demo: Demo) -> nn.Module:
    """The model: the same weights in every process.

    Raises:
        AutoparError: transformers is not installed.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise AutoparError(
            "cannot build the model of the demonstration: transformers is not installed; "
            "pip install 'autopar[demo]'"
        ) from None
    config = GPT2Config(
        vocab_size=256,
        n_positions=demo.seq,
        n_embd=demo.hidden,
        n_layer=demo.layers,
        n_head=max(1, demo.hidden // 32),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(demo.seed)
    model: Any = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers does not guess it from this class's name
    made: nn.Module = model.train()
    return made


def text() -> Tensor:
    """The interpreter's own documentation as bytes."""
    topics: Mapping[str, str] = pydoc_data.topics.topics
    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(joined.encode()), dtype=torch.int64)


def batches(demo: Demo) -> Iterator[dict[str, Tensor]]:
    """Batches of random pieces of the text, the same in every process."""
    data = text()
    draw = torch.Generator().manual_seed(demo.seed)
    while True:
        starts = torch.randint(len(data) - demo.seq, (demo.batch,), generator=draw)
        ids = torch.stack([data[start : start + demo.seq] for start in starts.tolist()])
        yield {"input_ids": ids, "labels": ids}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW. Its eps lies above the rounding of gradients that are 0 in exact arithmetic.

    The bias of attention's keys has such a gradient; with the usual 1e-8 its sign, which is
    noise, would move the bias by whole steps on one process already.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def warmup(update: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate grows over ten steps; at full rate from the start, training itself is unstable.

    Measured on one process, with the samples of every batch in another order: after 50 steps the
    parameters are 4e-7 apart with the warm-up and 6e-5 without.
    """
    return torch.optim.lr_scheduler.LinearLR(update, start_factor=0.1, total_iters=10)


def run_demo(demo: Demo, console: Console) -> Outcome:
    """Plan, train on several processes, train on one, and compare; prints as it goes.

    Raises:
        AutoparError: A process failed.
    """
    model = build(demo)
    size = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]training GPT-2[/bold] with {size:,} parameters on {len(text()):,} bytes of "
        f"Python's documentation, {demo.processes} processes beside one"
    )
    with console.status("capturing the step and searching a plan"):
        plan = make_plan(model, demo.cluster, next(batches(demo)))
    console.print()
    console.print(plan_view(plan), highlight=False, markup=False)
    console.print()
    with tempfile.TemporaryDirectory(prefix="autopar-demo-") as name, _progress(console) as bars:
        folder = Path(name)
        plan.save(folder / "plan.json")
        many = _train(demo, folder, demo.processes, bars)
        one = _train(demo, folder, 1, bars)
    outcome = Outcome(plan=plan, one=one, many=many)
    console.print(outcome_view(outcome), highlight=False)
    return outcome


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


def _train(demo: Demo, folder: Path, processes: int, bars: Progress) -> Run:
    who = "one process" if processes == 1 else f"{processes} processes"
    task = bars.add_task(f"{who:12}", total=demo.steps, loss="starting")

    def on_event(event: Event) -> None:
        bars.update(task, completed=event["step"], loss=f"loss {event['loss']:.4f}")

    own = folder / f"run{processes}"
    own.mkdir()
    sizes = {name: getattr(demo, name) for name in Demo.__slots__}
    plan = None if processes == 1 else str(folder / "plan.json")
    (own / "job.json").write_text(json.dumps({"demo": sizes, "plan": plan}))
    run_workers("autopar.demo", own, processes, on_event=on_event)
    found = [Run(**torch.load(path, weights_only=True)) for path in sorted(own.glob("run-*.pt"))]
    # Of a pipeline, every stage tells its own parameters.
    return replace(found[0], parameters={n: p for run in found for n, p in run.parameters.items()})


# The result as a table.

_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: tuple[float, ...], width: int = 50) -> str:
    """A curve in one line of text; the lowest value is the lowest block."""
    low, high = min(values), max(values)
    picked = [values[i * len(values) // width] for i in range(width)]
    picked = list(values) if len(values) <= width else picked
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in picked)


def outcome_view(outcome: Outcome) -> RenderableType:
    """Both curves, and how far they are apart."""
    one, many = outcome.one, outcome.many
    count = f"{outcome.plan.cluster_ranks} processes"
    right = ("step", "one process", count, "difference")
    losses = table(*right, right=right)
    last = len(one.losses)
    for step in sorted({1, *range(10, last + 1, 10), last}):
        a, b = many.losses[step - 1], one.losses[step - 1]
        add_row(losses, str(step), f"{b:.6f}", f"{a:.6f}", f"{abs(a - b) / abs(b):.1e}")
    curves = table("", "loss of every step", "from", "to", "a step", right=("from", "to", "a step"))
    for who, run in ((count, many), ("one process", one)):
        ends = (f"{run.losses[0]:.3f}", f"{run.losses[-1]:.3f}")
        add_row(curves, who, sparkline(run.losses), *ends, seconds_text(run.step_s))
    apart, name = outcome.parameter_difference
    good, bad = ("bold green", "equal"), ("bold red", "NOT EQUAL")
    style, word = good if outcome.passed else bad
    speed = one.step_s / many.step_s
    verdict = Text.assemble(
        (word, style),
        f" up to floating-point order: loss within {outcome.loss_difference:.1e}, parameters "
        f"within {apart:.1e} (worst {name}); {ALLOWED:.0e} is allowed",
    )
    pace = Text(
        f"{count} are {speed:.2f} x as fast as one; a step takes {seconds_text(many.step_s)}, "
        f"predicted were {seconds_text(outcome.plan.prediction.step_s)}"
    )
    return Group(section("loss", [losses]), section("curves", [curves]), Text(""), verdict, pace)


# The workers' side.


def train(
    demo: Demo,
    step: Callable[[Mapping[str, Tensor]], Tensor],
    module: nn.Module,
    clip: Callable[[], Any],
    tell: Callable[..., None],
) -> Run:
    """A plain training loop: the same one for one process and for several."""
    update = optimizer(module.parameters())
    rate = warmup(update)
    losses, seconds = [], []
    for number, batch in zip(range(demo.steps), batches(demo), strict=False):
        start = time.perf_counter()
        loss = step(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        clip()
        update.step()
        rate.step()
        update.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        tell(step=number + 1, loss=losses[-1])
    steady = sorted(seconds[1:] or seconds)
    return Run(
        losses=tuple(losses),
        parameters={name: _full(p).detach() for name, p in module.named_parameters()},
        step_s=steady[len(steady) // 2],
    )


def _full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def main(folder: str) -> None:
    """One worker: all of the training, or a rank of it."""
    torch.set_num_threads(1)
    with work(folder) as job:
        demo = Demo(**job.spec["demo"])
        model = build(demo)
        if job.spec["plan"] is None:
            parameters = list(model.parameters())
            run = train(
                demo,
                lambda batch: model(**batch).loss,
                model,
                lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
                job.tell,
            )
        else:
            example = next(batches(demo))
            parallel = compile_parallel(model, demo.cluster, example, plan=job.spec["plan"])
            run = train(demo, parallel, parallel, lambda: clip_grad_norm_(parallel, 1.0), job.tell)
            if not parallel.plan.speaks(job.rank):
                run = replace(run, parameters={})
        if job.rank == 0 or run.parameters:
            found = {name: getattr(run, name) for name in Run.__slots__}
            torch.save(found, job.folder / f"run-{job.rank:05}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
