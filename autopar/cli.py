"""The command line: one function a command, each also to be called from Python.

Each command imports what it needs, so that reading a plan does not wait for transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from autopar.errors import AutoparError

app = typer.Typer(
    name="autopar",
    help="Automatic parallelization of PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="pkg.module:build or file.py:build, returning (model, batch) or "
        "(model, batch, loss); or a transformers config.json.",
    ),
]
HintOption = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it at run time
    typer.Option(
        "--hint",
        metavar="NAME=VALUE",
        help="dp=2, tp=4, zero=3, memory_limit=60GiB, replicate=PATTERN, shard=PATTERN:DIM:AXIS.",
    ),
]
BatchOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--batch", help="Samples of the global batch."),
]
SeqOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--seq", help="Tokens of a sample."),
]
PrecisionOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--precision",
        help="fp32, bf16 (fp32 stored, bf16 computed) or zero_paper; else the model's own dtypes.",
    ),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A saved plan.")]


def console(*, stderr: bool = False) -> Console:
    """Where to print; at least as wide as the tables where the output is no terminal."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=100)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=2, help="Steps to train.")] = 50,
    processes: Annotated[int, typer.Option(min=1, help="CPU processes of the parallel run.")] = 2,
) -> None:
    """Plan a small GPT, train it on 2 CPU processes and on one, and compare."""
    from autopar.demo import Demo, run_demo

    outcome = run_demo(Demo(steps=steps, processes=processes), console())
    if not outcome.passed:
        raise typer.Exit(1)


@app.command()
def plan(
    model: ModelArgument,
    cluster: Annotated[
        str,
        typer.Option(help="local:4 (CPU processes), h100:8 (preset, nodes) or a YAML file."),
    ],
    nodes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Nodes of a preset, where --cluster does not say."),
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="fp32, bf16 or fp16: weights of a config; else what the config says."),
    ] = None,
    precision: PrecisionOption = None,
    hint: HintOption = None,
    optimizer: Annotated[
        str,
        typer.Option(help="torch: its AdamW; autopar: ours, whose state may be in host memory."),
    ] = "torch",
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "-o", "--output", help="Save the plan as JSON; of --pareto also a .svg or .html plot."
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds the search may take.")] = 120.0,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also plan within less memory; time against memory.")
    ] = False,
) -> None:
    """Search the fastest plan that fits in memory; needs no GPU and no process group."""
    from autopar.api import planner
    from autopar.hint import Hint, MemoryLimit
    from autopar.inputs import load_cluster, load_subject, optimizer_named, parse_hints
    from autopar.options import Options
    from autopar.plan.records import Plan
    from autopar.plan.text import plan_view
    from autopar.report.pareto import pareto as front_of
    from autopar.report.pareto import pareto_view
    from autopar.report.plot import FORMATS, write_plot

    out = console()
    plots = output is not None and output.suffix in FORMATS
    if plots and not pareto:
        raise AutoparError(
            f"cannot save a plan as '{output}': it is written as JSON; add --pareto for a plot of "
            "time against memory, or give a name that ends in .json"
        )
    hints = parse_hints(hint or ())
    where = load_cluster(cluster, nodes)
    with busy(out, f"building {model}"):
        subject = load_subject(model, batch=batch, seq=seq, dtype=dtype)
    for note in subject.notes:
        out.print(f"note: {note}", markup=False)
    name = type(subject.model).__name__
    doing = f"planning {name} for {where.num_devices} ranks of {where.name}"
    with busy(out, doing) as now:
        search = planner(
            subject.model,
            where,
            subject.batch,
            loss=subject.loss,
            optimizer=optimizer_named(optimizer),
            precision=precision,
            options=Options(time_limit_s=time_limit),
            recipe=subject.recipe,
        )

        def within(more: Sequence[Hint]) -> Plan:
            limits = [h for h in more if isinstance(h, MemoryLimit)]
            now(", ".join([doing, *map(str, limits)]))
            own = [h for h in hints if not (limits and isinstance(h, MemoryLimit))]
            return search((*own, *more))

        def told(line: str) -> None:
            out.print(line, markup=False)

        front = front_of(within, told=told) if pareto else (within(()),)
    found = front[0]
    out.print(plan_view(found), markup=False)
    if pareto:
        out.print(pareto_view(front), markup=False)
    if output is not None:
        if plots:
            write_plot(front, output)
        else:
            found.save(output)
        out.print(f"\nsaved to {output}", markup=False)


@app.command()
def verify(
    model: ModelArgument,
    cluster: Annotated[str, typer.Option(help="local:N, N CPU processes.")] = "local:2",
    plan: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plan", help="Run this plan instead of searching one."),
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    precision: PrecisionOption = None,
    hint: HintOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 5,
) -> None:
    """Train some steps on N processes and on one; compare loss, gradients and parameters."""
    from autopar.spawn import Event
    from autopar.verify import report_view
    from autopar.verify import verify as run

    out = console()
    with out.status("starting") as status:

        def on_event(event: Event) -> None:
            who = "one process" if event["phase"] == "reference" else cluster
            status.update(f"{who}: step {event['step']} of {event['steps']}")

        report = run(
            model,
            cluster,
            plan=None if plan is None else str(plan),
            hints=hint or (),
            batch=batch,
            seq=seq,
            precision=precision,
            steps=steps,
            on_event=on_event,
        )
    out.print(report_view(report), markup=False)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def explain(
    plan: PlanArgument,
    module: Annotated[str, typer.Option(help="Path of a module, or the end of one.")] = "",
    formula: Annotated[
        bool, typer.Option("--formula", help="Also the closed forms behind the predictions.")
    ] = False,
) -> None:
    """Show what a plan splits over what in a module, and what it communicates there."""
    from autopar.plan.explain import explain_view
    from autopar.plan.serialize import load

    found = load(plan)
    console().print(explain_view(found, module), markup=False)
    if formula:
        from autopar.plan.formulas import formulas_text

        console().print(formulas_text(found), markup=False, highlight=False)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A saved plan.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """Show what differs between two plans; exit code 1 if anything does."""
    from autopar.plan.serialize import load
    from autopar.report.diff import diff_view

    view = diff_view(load(a), load(b), (str(a), str(b)))
    console().print("the plans are the same" if view is None else view, markup=False)
    if view is not None:
        raise typer.Exit(1)


@app.command()
def profile(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="The cluster file to write."),
    ] = Path("cluster.yaml"),
    processes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Processes to start: of the CPU 2 if left out, else one a CUDA device."),
    ] = None,
) -> None:
    """Measure this machine, alone or under torchrun, and write a cluster file."""
    from autopar.profile import profile_machine, profile_view
    from autopar.spawn import Event

    out = console()
    with out.status("starting") as status:

        def on_event(event: Event) -> None:
            status.update(f"measuring {event['doing']}")

        found = profile_machine(processes, on_event=on_event)
    if found is None:
        return
    try:
        output.write_text(found.yaml(), encoding="utf-8")
    except OSError as error:
        raise AutoparError(f"cannot write cluster file '{output}': {error.strerror}") from None
    out.print(profile_view(found), markup=False)
    out.print(f"\nsaved to {output}; autopar plan MODEL --cluster {output}", markup=False)


@contextmanager
def busy(out: Console, doing: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the seconds so far, where the output is a terminal; what changes its text."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda doing: bar.update(task, description=doing)


def main() -> None:
    """Run the command line; an `AutoparError` is one line and exit code 2."""
    try:
        app()
    except AutoparError as error:
        if os.environ.get("AUTOPAR_TRACEBACK") == "1":
            raise
        console(stderr=True).print(
            f"error: {error}", style="bold red", markup=False, soft_wrap=True
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
