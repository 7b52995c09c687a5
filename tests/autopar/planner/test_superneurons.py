"""SuperNeurons: AlexNet within no more than its largest layer, and residual networks of depth."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.planner import prove
from autopar.planner.request import Candidate
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.benchmarks.superneurons import (
    DEEPER,
    LAYER_BYTES,
    Family,
    ResNet,
    activation_bytes,
    alexnet,
    analysed,
    card,
    classified,
    deeper_blocks,
    kept_blocks,
    planned_within,
)
from tests.oracles.live import counted_peaks
from tests.oracles.lockstep import run_lockstep
from tests.oracles.pipeline import programs_of, values_of
from tests.oracles.recomputes import ONE, OneRank
from tests.oracles.sequential import planned_on


@pytest.mark.large
def test_alexnet_fits_its_largest_layer_and_nothing_fits_less() -> None:
    rank = OneRank(analysed(alexnet(), 200, 227), card())
    least = planned_within(rank, 1.01 * LAYER_BYTES)
    assert least is not None
    assert activation_bytes(least) <= 1.01 * LAYER_BYTES
    assert planned_within(rank, 0.99 * LAYER_BYTES) is None
    everything = planned_within(rank, activation_bytes(rank.free))
    assert everything is not None
    assert not everything.pipeline.stages[0].recomputed
    assert not everything.pipeline.stages[0].offloaded


@pytest.mark.large
@pytest.mark.parametrize("few", [prove.FEW, 0])
def test_residual_networks_of_more_than_three_times_the_depth_fit_the_same_memory(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small images and few channels; the memory is that of a network of which all is kept.

    Of long steps the spacing of checkpoints that is modelled fastest is lowered first.
    """
    monkeypatch.setattr(prove, "FEW", few)
    family = Family(others=(1, 1, 1), inner=4, batch=64, size=64)
    limit = family.planned(6).prediction.memory.total_bytes
    assert kept_blocks(family, limit, few=2) == 6
    third = deeper_blocks(family, 6)
    assert family.layers(third) >= DEEPER * family.layers(6)
    plan = family.planned(third, limit)
    assert plan.prediction.memory.total_bytes <= limit
    assert plan.stage.recomputed
    assert not plan.stage.offloaded


@pytest.mark.large
def test_a_residual_network_in_less_memory_is_the_same_to_the_bit_and_holds_what_is_predicted() -> (
    None
):
    """With memory for everything nothing runs again nor leaves; with less, all results stay."""
    model = ResNet((2, 2, 1, 1), inner=4)
    batch = torch.rand(16, 3, 32, 32), torch.randint(1000, (16,))
    captured = capture_step(model, batch, classified, grad=True)
    analysis, cluster = analyse(captured.graph), Cluster.local(1)
    values = values_of(model, batch, analysis, captured)

    def results(plan: Candidate) -> list[torch.Tensor]:
        programs = programs_of(analysis, plan.pipeline.stages[0], axis_seconds(cluster, ONE))
        counts, _ = counted_peaks(programs, values)
        assert counts[0].peak_bytes == plan.simulation.peak_bytes
        (found,) = run_lockstep(programs, values)
        return [found[ref] for ref in programs[0].results]

    free = planned_on(analysis, cluster, ONE, float("inf"))
    assert free is not None
    same, less = (
        planned_on(analysis, cluster, ONE, p * free.memory.total_bytes) for p in (1, 0.95)
    )
    assert same is not None
    assert not same.pipeline.stages[0].recomputed
    assert not same.pipeline.stages[0].offloaded
    assert less is not None
    assert less.pipeline.stages[0].recomputed
    assert less.memory.total_bytes <= 0.95 * free.memory.total_bytes
    assert all(map(torch.equal, results(free), results(less)))
