"""Stages of unlike sizes against equal ones: ``python -m tests.benchmarks.sizes``.

For convolutions with dense layers behind, on four V100 of a slow network: the step that is chosen
without hints, and the best that hints ask for of all ways to deal replicas out to stages.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from autopar import hint
from autopar.errors import AutoparError
from autopar.plan.records import Plan
from tests.autopar.planner.test_sizes import (
    NETS,
    RANKS,
    analysed,
    ethernet,
    planned,
    shapes,
    sizes_of,
)


def described(plan: Plan) -> str:
    stages = " + ".join(map(str, sizes_of(plan)))
    return f"{stages}, {plan.schedule}, {plan.microbatches} microbatches"


def main() -> None:
    """Print a row for every network and way."""
    table = Table("network", "asked for", "plan", "step, simulated (ms)", "planned (processor s)")
    for name, (_, gigabytes) in NETS.items():
        ways: dict[str, tuple[hint.Hint, ...]] = {
            "nothing": (),
            "one stage": (hint.degrees(pp=1),),
        }
        ways |= {f"dp={shape}": (hint.degrees(dp=shape),) for shape in shapes(RANKS) if shape[1:]}
        for asked, hints in ways.items():
            start = time.process_time()
            try:
                plan = planned(analysed(name), ethernet(gigabytes), *hints)
            except AutoparError as error:
                table.add_row(name, asked, str(error), "", "")
                continue
            seconds = time.process_time() - start
            step_ms = f"{1e3 * plan.prediction.step_s:.1f}"
            table.add_row(name, asked, described(plan), step_ms, f"{seconds:.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
