"""What the benchmark of published runs builds: rows, stages and bytes."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace

import pytest

from cost_models.memory import LayerShape, Saved, gpt_layer_saved_bytes
from cost_models.units import GIB
from tests.benchmarks.families import Skipped, run_of
from tests.benchmarks.occupied import Fit, fit, peak_bytes
from tests.benchmarks.predict import saved_bytes
from tests.benchmarks.published import ROWS
from tests.benchmarks.ranking import Ranked, ranking, repeats

with ROWS.open() as file:
    BY_ID = {row["id"]: row for row in csv.DictReader(file)}


def test_every_row_has_a_run_of_all_its_layers_or_a_reason() -> None:
    reasons: Counter[str] = Counter()
    for row in BY_ID.values():
        try:
            run = run_of(row)
        except Skipped as reason:
            reasons[str(reason)] += 1
            continue
        assert sum(run.layers_of_chunk) == pytest.approx(int(row["layers"])), row["id"]
        assert len(run.layers_of_chunk) == run.pp * run.chunks
        assert run.dp * run.tp * run.pp == int(row["n_gpus"]), row["id"]
    assert len(BY_ID) - sum(reasons.values()) > 1450
    assert all(reasons)


@pytest.mark.parametrize("name", ["zerobubble-025", "zerobubble-028"])
def test_a_lowered_layer_saves_what_is_published(name: str) -> None:
    run = run_of(BY_ID[name])
    sizes = run.sizes
    layer = LayerShape(batch=sizes.batch, seq=sizes.seq, hidden=run.hidden, heads=sizes.heads)
    assert saved_bytes(run) == pytest.approx(gpt_layer_saved_bytes(layer, Saved.ALL), rel=1e-3)


@pytest.mark.parametrize("name", ["zerobubble-001", "zerobubble-016", "zerobubble-028"])
def test_peaks_of_zero_bubble_pipelines_are_within_10_percent(name: str) -> None:
    """About twice, once and once the saved values of 1F1B on a middle stage."""
    row = BY_ID[name]
    assert peak_bytes(run_of(row)) == pytest.approx(float(row["mem_gib"]) * GIB, rel=0.1)


def test_a_run_that_ran_out_of_memory_does_not_fit_and_one_that_ran_does() -> None:
    assert fit(run_of(BY_ID["dtfm_grid-038"])) is Fit.NOT
    assert fit(run_of(BY_ID["dtfm_grid-022"])) is Fit.SURE


def test_ranking_leaves_out_ties_and_one_plan_measured_twice() -> None:
    run = run_of(BY_ID["dtfm_grid-022"])
    other, third = replace(run, layers=12), replace(run, layers=6)
    group = [Ranked(run, 1.0, 2.0), Ranked(other, 2.0, 2.01), Ranked(third, 3.0, 1.0)]
    found = ranking([group, [Ranked(run, 1.0, 1.0), Ranked(run, 1.0, 1.1)]])
    assert found.num_groups == 1
    assert found.tau == pytest.approx(-1 / 3)
    assert found.tau_apart == -1
    assert found.regret == pytest.approx(1)
    assert found.num_close == 0
    assert repeats([*group, Ranked(run, 1.0, 2.2)]) == pytest.approx([0.1])
