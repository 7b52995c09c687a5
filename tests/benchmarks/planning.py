"""Seconds and bytes that planning takes at full scale: ``python -m tests.benchmarks.planning``.

Each case runs in a fresh process on the meta device; imports are not counted. The model is built,
captured, analysed and planned in bfloat16, without the capture cache. Parts are seconds of the
processor (of all threads), so that other work on the machine does not count; ``wall`` is by the
clock. Names of cases as arguments run those alone; ``--save FOLDER`` keeps the plans, ``--profile``
adds the functions that took longest.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster of H100.

    Attributes:
        config: Stem of a file in ``examples/configs``.
        nodes: Of 8 devices.
        batch: Sequences of the global batch; ``seq`` tokens each.
        allowed_s: What it may take, capture in and imports out.
    """

    config: str
    nodes: int
    batch: int
    seq: int = 8192
    allowed_s: float


CASES = {
    "8b": Case(config="llama-3-8b", nodes=8, batch=64, allowed_s=10),
    "70b": Case(config="llama-3-70b", nodes=128, batch=1024, allowed_s=20),
    "405b": Case(config="llama-3-405b", nodes=2048, batch=2048, allowed_s=60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case took.

    Attributes:
        build_s: Making the model on meta.
        capture_s: Capturing its step.
        analyse_s: Rules, aliases and folding.
        problem_s: Building the problems of all meshes.
        solve_s: Solving them.
        simulate_s: Lowering and simulating what was found.
        total_s: All of the above and the rest, imports apart.
        wall_s: The same by the clock.
        peak_bytes: Largest resident memory of the process, imports included.
        plan: In a line, or the error.
        profile: Functions that took longest, as text; empty unless asked for.
    """

    build_s: float
    capture_s: float
    analyse_s: float
    problem_s: float
    solve_s: float
    simulate_s: float
    total_s: float
    wall_s: float
    peak_bytes: int
    plan: str
    profile: str = ""


class Clock:
    """Seconds inside some functions, without those of others inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Count what a module's function takes."""
        setattr(owner, function, self._timed(getattr(owner, function), name))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - start
                own = took - self._inside.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + own
                if self._inside:
                    self._inside[-1] += took

        return run


def run_case(case: Case, save: Path | None, *, profiled: bool) -> Outcome:
    """Plan one case in this process."""
    import autopar.cli  # noqa: F401  (its imports are not counted)
    from autopar import api
    from autopar.cluster import Cluster
    from autopar.errors import AutoparError
    from autopar.inputs import load_subject
    from autopar.options import Options
    from autopar.planner import evaluate, lanes, prove

    clock = Clock()
    clock.watch(api, "capture_step", "capture")
    clock.watch(api, "analyse", "analyse")
    clock.watch(lanes, "build_problem", "problem")
    clock.watch(lanes, "solve", "solve")
    clock.watch(evaluate, "decode", "solve")
    for function in ("evaluate", "evaluate_stages"):
        clock.watch(prove, function, "simulate")
    # What transformers and sympy import late.
    _warm(Cluster.preset("h100", 1))
    clock.seconds.clear()
    profile = cProfile.Profile()
    begin, start = time.perf_counter(), time.process_time()
    if profiled:
        profile.enable()
    subject = load_subject(str(CONFIGS / f"{case.config}.json"), batch=case.batch, seq=case.seq)
    build_s = time.process_time() - start
    try:
        found = api.plan(
            subject.model,
            Cluster.preset("h100", case.nodes),
            subject.batch,
            options=Options(time_limit_s=TIME_LIMIT_S),
        )
        mesh = " ".join(
            f"{name}={size}"
            for name, size in zip(
                found.stages[0].mesh.names, found.stages[0].mesh.sizes, strict=True
            )
        )
        every = found.search.all_ways
        plan = (
            f"{found.num_stages} stages, {found.schedule}, {len(found.stages)} chunks, "
            f"{found.microbatches} microbatches, {mesh}: "
            f"{found.prediction.step_s:.3g} s, "
            f"{found.prediction.memory.total_bytes / 2**30:.3g} GiB, {found.search.status}, "
            f"gap {found.search.gap:.1%}; "
            f"no plan under {every.bound_s:.3g} s, gap {every.gap:.1%}, {every.tried} ways tried, "
            f"{every.excluded} left out by proof, {every.estimated} by estimate"
        )
        if save is not None:
            found.save(save / f"{case.config}-{case.nodes}.json")
    except AutoparError as error:
        plan = f"{type(error).__name__}: {error}"
    total_s, wall_s = time.process_time() - start, time.perf_counter() - begin
    profile.disable()
    return Outcome(
        build_s=build_s,
        capture_s=clock.seconds.get("capture", 0.0),
        analyse_s=clock.seconds.get("analyse", 0.0),
        problem_s=clock.seconds.get("problem", 0.0),
        solve_s=clock.seconds.get("solve", 0.0),
        simulate_s=clock.seconds.get("simulate", 0.0),
        total_s=total_s,
        wall_s=wall_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        plan=plan,
        profile=_slowest(profile) if profiled else "",
    )


def _warm(cluster: Any) -> None:
    """Plan a small model once, for what is imported or built at the first use."""
    import torch
    from torch import nn
    from transformers import LlamaForCausalLM

    from autopar import api

    assert LlamaForCausalLM is not None
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    api.plan(model, cluster, torch.zeros(8, 16), loss=lambda m, x: m(x).sum())


def _slowest(profile: cProfile.Profile, count: int = 40) -> str:
    import io

    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.sort_stats("cumulative").print_stats(
        r"autopar|ortools|torch/(autograd|_subclasses)", count
    )
    stats.sort_stats("tottime").print_stats(count)
    return text.getvalue()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("cases", nargs="*", default=list(CASES), help="of " + ", ".join(CASES))
    arguments.add_argument("--save", type=Path, help="folder for the plans")
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--here", action="store_true", help="one case, in this process")
    given = arguments.parse_args()
    if given.here:
        outcome = run_case(CASES[given.cases[0]], given.save, profiled=given.profile)
        print(json.dumps(asdict(outcome)))
        return
    heads = ("model", "capture", "analyse", "problem", "solve", "simulate", "total", "wall")
    heads += ("allowed", "peak")
    print(f"{'case':16}" + "".join(f"{head:>10}" for head in heads), flush=True)
    for name in given.cases:
        case = CASES[name]
        command = [sys.executable, "-m", "tests.benchmarks.planning", "--here", name]
        command += ["--save", str(given.save)] if given.save else []
        command += ["--profile"] if given.profile else []
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if ended.returncode:
            print(f"{name:16}failed:\n{ended.stderr}", flush=True)
            continue
        outcome = Outcome(**json.loads(ended.stdout.splitlines()[-1]))
        took = (
            outcome.build_s,
            outcome.capture_s,
            outcome.analyse_s,
            outcome.problem_s,
            outcome.solve_s,
            outcome.simulate_s,
            outcome.total_s,
            outcome.wall_s,
            case.allowed_s,
        )
        row = "".join(f"{seconds:8.1f} s" for seconds in took)
        print(f"{name + f' x{case.nodes * 8}':16}{row}{outcome.peak_bytes / 2**30:6.2f} GiB")
        print(f"    {outcome.plan}{outcome.profile}", flush=True)


if __name__ == "__main__":
    main()
