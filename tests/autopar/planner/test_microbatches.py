"""More microbatches where memory asks for them, and none where the model needs its whole batch."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar import hint


def test_a_model_that_needs_its_whole_batch_is_planned_within_memory() -> None:
    model = nn.Sequential(
        nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64), nn.BatchNorm1d(64)
    )
    cluster = autopar.Cluster.local(2)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    batch = torch.zeros(512, 64)
    free = autopar.plan(model, cluster, batch, loss=loss)
    limit = int(0.85 * free.prediction.memory.total_bytes)
    tight = autopar.plan(model, cluster, batch, loss=loss, hints=[hint.memory_limit(limit)])
    assert tight.microbatches == 1
    assert tight.prediction.memory.total_bytes <= limit
