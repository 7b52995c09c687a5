"""Published training runs, predicted: ``python -m tests.benchmarks.published [family ...] [-v]``.

Each row is a pinned plan: what the row and its framework did. One microbatch of one stage is
lowered and simulated for few layers and folded by their number; around it are the schedules of
pipelines (closed forms, or autopar's own tables run action by action), the layers that each stage
recomputes, the accumulation and reduction of gradients and the update. Reports per family: median
absolute relative error of the step and its signed bias; Kendall's tau and regret within groups of
one model, number of GPUs and batch; memory; false fits and misfits; and what is skipped, with the
reason. With ``-v``, every row.

Yardstick: vTrain, which replays profiled kernels, errs by 8.4 % (MAPE) on one node and 14.7 % on
several; its runs on several nodes are not among the rows.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from cost_models.units import GIB
from tests.benchmarks.families import Row, Skipped, run_of
from tests.benchmarks.occupied import Fit, fit, peak_bytes, stage_bytes
from tests.benchmarks.predict import step_s
from tests.benchmarks.run import Run

ROWS = Path(__file__).parents[1] / "data" / "throughput.csv"

OF_FIRST_RANK = frozenset({"kempner_dense"})
"""Families whose memory is that of rank 0; of the others it is that of the fullest."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row, its run and what is predicted of it."""

    row: Row
    run: Run
    step_s: float
    peak_bytes: float
    fit: Fit

    @property
    def measured_s(self) -> float | None:
        """Of the step, where it was measured."""
        return float(self.row["derived_step_s"]) if self.row["derived_step_s"] else None

    @property
    def ran_out(self) -> bool:
        """Whether the run is published as one that did not fit."""
        return not self.row["derived_step_s"] and not self.row["mem_gib"]


def case_of(row: Row) -> Case:
    """A row predicted.

    Raises:
        Skipped: It is not.
    """
    run = run_of(row)
    peak = stage_bytes(run, 0) if row["family"] in OF_FIRST_RANK else peak_bytes(run)
    return Case(row, run, step_s(run), peak, fit(run))


def tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (predicted, measured)."""
    agree = total = 0
    for at, (predicted, measured) in enumerate(pairs):
        for other_predicted, other_measured in pairs[at + 1 :]:
            if measured == other_measured:
                continue
            sign = (predicted - other_predicted) * (measured - other_measured)
            total += 1
            agree += (sign > 0) - (sign < 0)
    return agree / total if total else None


def groups(cases: Iterable[Case]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) steps of plans for the same model, GPUs and batch."""
    found: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    keys = ("model", "layers", "hidden", "seq", "n_gpus", "gpu", "global_batch", "precision")
    for case in cases:
        key = tuple(case.row[name] for name in keys)
        found[key].append((case.step_s, float(case.row["derived_step_s"])))
    return [group for group in found.values() if len(group) > 1]


def report(family: str, cases: Sequence[Case]) -> float:
    """Print one line; the median absolute relative error."""
    timed = [c for c in cases if c.row["derived_step_s"]]
    ran = [c for c in cases if not c.ran_out]
    errors = [c.step_s / float(c.row["derived_step_s"]) - 1 for c in timed]
    ranked = groups(timed)
    taus = [found for found in map(tau, ranked) if found is not None]
    regrets = [min(group)[1] / min(m for _, m in group) - 1 for group in ranked]
    memory = [c.peak_bytes / (float(c.row["mem_gib"]) * GIB) - 1 for c in cases if c.row["mem_gib"]]
    oom = [c for c in cases if c.ran_out]
    error = median(map(abs, errors)) if errors else float("nan")
    columns = [f"{family:19}{cases[0].row['quality']:>2}{len(cases):6}"]
    if errors:
        columns.append(f"{error:8.1%}{median(errors):+8.1%}{mean(map(abs, errors)):8.1%}")
    else:
        columns.append(f"{'-':>8}" * 3)
    if taus:
        columns.append(f"{mean(taus):7.2f}{mean(regrets):8.1%}{len(ranked):5}")
    else:
        columns.append(f"{'-':>7}{'-':>8}{0:5}")
    if memory:
        columns.append(f"{median(map(abs, memory)):8.1%}{median(memory):+8.1%}")
    else:
        columns.append(f"{'-':>8}{'-':>8}")
    columns.append(f"{sum(c.fit is Fit.SURE for c in oom):6}/{len(oom):<3}")
    columns.append(f"{sum(c.fit is Fit.NOT for c in ran):5}/{len(ran)}")
    print("".join(columns))
    return error


def main(wanted: Sequence[str], *, verbose: bool = False) -> None:
    with ROWS.open() as file:
        rows = [r for r in csv.DictReader(file) if not wanted or r["family"] in wanted]
    cases: dict[str, list[Case]] = defaultdict(list)
    skipped: Counter[tuple[str, str]] = Counter()
    for row in rows:
        try:
            case = case_of(row)
            cases[row["family"]].append(case)
        except Skipped as reason:
            skipped[row["family"], str(reason)] += 1
    print(
        f"{'family':19}{'q':>2}{'rows':>6}{'median':>8}{'bias':>8}{'mean':>8}{'tau':>7}{'regret':>8}"
        f"{'grps':>5}{'memory':>8}{'bias':>8}{'false fit':>10}{'misfit':>9}"
    )
    errors = {family: report(family, found) for family, found in cases.items()}
    best = [e for f, e in errors.items() if cases[f][0].row["quality"] == "A" and e == e]
    if best:
        print(
            f"mean of medians over families of quality A: {mean(best):.1%}; worst {max(best):.1%}"
        )
    print("vTrain (replays profiled kernels): 8.4 % MAPE on one node, 14.7 % on several")
    for (family, why), count in sorted(skipped.items()):
        print(f"skipped {family} ({count}): {why}")
    if verbose:
        for found in cases.values():
            for case in found:
                measured = case.row["derived_step_s"]
                keys = (
                    "id",
                    "model",
                    "n_gpus",
                    "seq",
                    "micro_batch",
                    "tp",
                    "pp",
                    "vp",
                    "recompute",
                )
                error = f"{case.step_s / float(measured) - 1:+.1%}" if measured else "oom"
                print(
                    *(case.row[name] for name in keys),
                    measured,
                    f"{case.step_s:.4g}",
                    error,
                    case.row["mem_gib"],
                    f"{case.peak_bytes / GIB:.4g}",
                )


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if a != "-v"], verbose="-v" in sys.argv)
