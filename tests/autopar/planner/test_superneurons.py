"""SuperNeurons: AlexNet within no more than its largest layer, and residual networks of depth."""

from __future__ import annotations

import pytest

from tests.benchmarks.superneurons import (
    DEEPER,
    LAYER_BYTES,
    Family,
    activation_bytes,
    alexnet,
    analysed,
    card,
    deeper_blocks,
    kept_blocks,
    planned_within,
)
from tests.oracles.recomputes import OneRank


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
def test_residual_networks_of_more_than_three_times_the_depth_fit_the_same_memory() -> None:
    """Small images and few channels; the memory is that of a network of which all is kept."""
    family = Family(others=(1, 1, 1), inner=4, batch=64, size=64)
    limit = family.planned(6).prediction.memory.total_bytes
    assert kept_blocks(family, limit, few=2) == 6
    third = deeper_blocks(family, 6)
    assert family.layers(third) >= DEEPER * family.layers(6)
    plan = family.planned(third, limit)
    assert plan.prediction.memory.total_bytes <= limit
    assert plan.stage.recomputed
    assert not plan.stage.offloaded
