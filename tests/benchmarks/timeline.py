"""Closed forms of step times against simulation: ``python -m tests.benchmarks.timeline``.

300 random pipelines of each kind under 1F1B, with and without reductions of gradients, and 200 of
DAPPLE's plans of each kind under its schedule for costly messages.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from autopar.schedules.makespan import simulate
from autopar.schedules.table import schedule_named
from tests.autopar.schedules import dapple, pipelines

PIPELINES, DAPPLE_PLANS = 300, 200


def errors(kind: str, reduces: bool, form: Callable[[pipelines.Pipeline], float]) -> list[float]:
    """Relative errors of a closed form of 1F1B."""
    draw = random.Random(0)
    plans = [pipelines.random_pipeline(draw, kind, reduces=reduces) for _ in range(PIPELINES)]
    return [form(plan) / pipelines.simulated_s(plan) - 1 for plan in plans]


def dapple_errors(drawn: Callable[[random.Random], dapple.DapplePlan]) -> list[float]:
    """Relative errors of DAPPLE's latency of random plans."""
    draw, found = random.Random(0), []
    for _ in range(DAPPLE_PLANS):
        plan = drawn(draw)
        rows = schedule_named("early-backward-2").generate(len(plan.times), 1, plan.microbatches)
        ends = simulate(rows, plan.times, plan.sends_s).ends_s
        exact_s = max(e[-1] + r for e, r in zip(ends, plan.reduces_s, strict=True))
        found.append(dapple.latency_s(plan) / exact_s - 1)
    return found


def main() -> None:
    table = Table("formula", "pipelines", "within 1 %", "within 2 %", "mean error", "worst")

    def add(formula: str, what: str, found: Sequence[float]) -> None:
        sizes = [abs(error) for error in found]
        within = [f"{sum(s <= limit for s in sizes)} of {len(sizes)}" for limit in (0.01, 0.02)]
        mean, worst = sum(sizes) / len(sizes), max(sizes)
        table.add_row(formula, what, *within, f"{mean:.2%}", f"{worst:.2%}")

    for kind in pipelines.KINDS:
        for reduces in (False, True):
            what = f"{kind}, reductions" if reduces else kind
            add("1F1B", what, errors(kind, reduces, pipelines.closed_s))
            add("1F1B, chained", what, errors(kind, reduces, pipelines.chained_s))
    for spread in (0.0, 0.3):
        drawn = functools.partial(dapple.random_plan, spread=spread)
        add("DAPPLE's L", f"layers within {spread:.0%}", dapple_errors(drawn))
    for profile in dapple.PROFILES:
        placed = functools.partial(dapple.placed_plan, profile=profile)
        add("DAPPLE's L", f"{profile} on 16 devices", dapple_errors(placed))
    Console().print(table)


if __name__ == "__main__":
    main()
