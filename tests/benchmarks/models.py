"""Plans of models people train, at full size: ``python -m tests.benchmarks.models``.

Each model of `tests.benchmarks.modelfiles` is built on the meta device from its configuration,
captured and planned, in a fresh process without the capture cache. Printed are its parameters,
seconds of the processor (imports are not counted), the step that is simulated, its MFU, the memory
of the fullest rank, and the plan in short; or the error that a user gets. MFU counts the products
of forward and backward as captured, attention over all keys. Names of models as arguments run those
alone; ``--most`` bounds the processor seconds of one; ``--save FOLDER`` keeps plans and tables.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.modelfiles import MODEL_FILES, ModelFile

ROOT = Path(__file__).parents[2]
HEADS = ("model", "parameters", "cluster", "batch", "capture", "plan", "step", "MFU", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, as text."""

    parameters: str = ""
    capture: str = ""
    plan: str = ""
    step: str = ""
    mfu: str = ""
    memory: str = ""
    short: str


def run_case(name: str, case: ModelFile, save: Path | None) -> Row:
    """Plan one model in this process."""
    import autopar.cli  # noqa: F401  (its imports are not counted)
    from autopar import api
    from autopar.configs import DTYPES
    from autopar.errors import AutoparError
    from autopar.inputs import load_cluster, load_subject
    from autopar.options import Options
    from autopar.plan.wording import bytes_text, seconds_text

    kept: dict[str, Any] = {}
    analyse = api.analyse

    def watched(*args: Any, **kwargs: Any) -> Any:
        kept["captured_s"] = time.process_time()
        kept["analysis"] = analyse(*args, **kwargs)
        return kept["analysis"]

    api.analyse = watched  # type: ignore[assignment]
    cluster = load_cluster(case.cluster)
    start = time.process_time()
    row = Row(short="")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(case.config))
            subject = load_subject(str(path), batch=case.batch, seq=case.seq)
        total = sum(parameter.numel() for parameter in subject.model.parameters())
        row = Row(parameters=f"{total / 1e9:.2f}", short="")
        options = Options(time_limit_s=3600)
        found = api.plan(subject.model, cluster, subject.batch, options=options)
    except AutoparError as error:
        return Row(parameters=row.parameters, short=f"{type(error).__name__}: {error}")
    if save is not None:
        found.save(save / f"{name}.json")
        (save / f"{name}.txt").write_text(str(found) + "\n")
    analysis, step_s = kept["analysis"], found.prediction.step_s
    flops = sum(rule.flops for rule in analysis.rules.values())
    dtype = next(subject.model.parameters()).dtype
    (rate,) = (name for name, known in DTYPES.items() if known == dtype)
    peak = sum(d.count * d.device.peak_flops_per_s[rate] for d in cluster.devices)
    return Row(
        parameters=row.parameters,
        capture=f"{kept['captured_s'] - start:.1f} s",
        plan=f"{time.process_time() - kept['captured_s']:.1f} s",
        step=seconds_text(step_s),
        mfu=f"{flops / (peak * step_s):.0%}",
        memory=bytes_text(found.prediction.memory.total_bytes),
        short=in_short(found),
    )


def in_short(plan: Any) -> str:
    """Meshes, schedule, and what runs again or is away."""
    from autopar.plan.text import mesh_text, pipeline_text
    from autopar.plan.wording import bytes_text

    parts = list(dict.fromkeys(mesh_text(stage) for stage in plan.stages))
    if len(plan.stages) > 1:
        parts.append(f"stages: {pipeline_text(plan)}")
    if plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches")
    again = sum(len(stage.recomputed) for stage in plan.stages)
    if again:
        parts.append(f"{again} ops run again")
    host = plan.prediction.memory.host_bytes
    if host:
        parts.append(f"{bytes_text(host)} a rank in host memory")
    if plan.idle_ranks:
        parts.append(f"{len(plan.idle_ranks)} ranks idle")
    return "; ".join(parts)


def line(name: str, case: ModelFile, row: Row) -> str:
    """A row of the table in Markdown."""
    batch = str(case.batch) + ("" if case.seq is None else f" x {case.seq:,}")
    cells = (name, row.parameters, case.cluster, batch, row.capture, row.plan, row.step)
    return "| " + " | ".join((*cells, row.mfu, row.memory, row.short)) + " |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="*", default=list(MODEL_FILES))
    arguments.add_argument("--most", type=int, default=240, help="processor seconds of a model")
    arguments.add_argument("--save", type=Path, help="folder for plans and their tables")
    arguments.add_argument("--here", action="store_true", help="one model, in this process")
    given = arguments.parse_args()
    if given.here:
        resource.setrlimit(resource.RLIMIT_CPU, (given.most, given.most))
        (name,) = given.models
        print(json.dumps(asdict(run_case(name, MODEL_FILES[name], given.save))))
        return
    print("| " + " | ".join((*HEADS, "plan in short")) + " |")
    print("|---|" + "---:|" + "---|" + "---:|" * 6 + "---|", flush=True)
    for name in given.models:
        command = [sys.executable, "-m", "tests.benchmarks.models", "--here", name]
        command += ["--most", str(given.most)]
        command += ["--save", str(given.save)] if given.save else []
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        row = Row(short=f"not within {given.most} s of the processor")
        if ended.returncode == 0:
            row = Row(**json.loads(ended.stdout.splitlines()[-1]))
        elif ended.returncode > 0:
            row = Row(short="failed: " + ended.stderr.strip().splitlines()[-1])
        print(line(name, MODEL_FILES[name], row), flush=True)


if __name__ == "__main__":
    main()
