"""AlexNet within no more than its largest layer: SuperNeurons' least memory."""

from __future__ import annotations

import pytest

from tests.benchmarks.superneurons import (
    LAYER_BYTES,
    activation_bytes,
    alexnet,
    analysed,
    card,
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
