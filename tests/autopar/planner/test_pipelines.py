"""Pipelines that the search chooses by itself."""

from __future__ import annotations

from autopar import hint
from autopar.capture import capture_step
from autopar.planner.batches import stage_counts
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.oracles.models import gpt2


def analysed() -> Analysis:
    model, batch, loss = gpt2(layers=8, batch=16)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def request(cluster: Cluster, *hints: hint.Hint) -> Request:
    return Request(model="m", fingerprint="f", cluster=cluster, hints=hints)


def test_stages_are_whole_nodes_and_no_more_than_blocks() -> None:
    analysis = analysed()
    assert stage_counts(analysis, Cluster.local(8)) == ()
    assert stage_counts(analysis, Cluster.preset("h100", nodes=4)) == (2, 4)
    assert stage_counts(analysis, Cluster.preset("h100", nodes=64)) == (2, 4, 8)
    assert stage_counts(analysis, Cluster.preset("h100", nodes=3)) == ()


def test_a_pipeline_is_taken_only_where_it_is_predicted_faster() -> None:
    analysis, cluster = analysed(), Cluster.preset("h100", nodes=2)
    chosen = make_plan(analysis, request(cluster))
    alone = make_plan(analysis, request(cluster, hint.degrees(pp=1)))
    assert len(alone.stages) == 1
    assert chosen.prediction.step_s <= alone.prediction.step_s
    if len(chosen.stages) > 1:
        assert chosen.prediction.step_s < alone.prediction.step_s


def test_a_schedule_that_no_pipeline_runs_is_said_to_have_no_effect() -> None:
    asked = hint.schedule("gpipe")
    plan = make_plan(analysed(), request(Cluster.preset("h100", nodes=1), asked))
    assert len(plan.stages) == 1
    (note,) = [note for note in plan.notes if "has no effect" in note]
    assert str(asked) in note and "hint.degrees(pp=...)" in note
    piped = make_plan(
        analysed(), request(Cluster.preset("h100", nodes=2), asked, hint.degrees(pp=2))
    )
    assert piped.schedule == "gpipe"
    assert not [note for note in piped.notes if "has no effect" in note]
