"""M6-10T: ten trillion parameters on 512 GPUs fit with host memory alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import hint
from autopar.errors import InfeasibleError
from autopar.plan.records import Plan
from cost_models.cluster import Cluster, Devices

HIDDEN, INNER, EXPERTS, LAYERS = 1024, 12416, 8192, 48
HOST_BYTES = int(1.5e12 / 8)
"""Of a GPU: its share of the memory of a machine with eight."""


class Experts(nn.Module):
    """Feed-forward experts, to which tokens go by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        by_expert = tokens.reshape(EXPERTS, -1, HIDDEN)
        made = torch.bmm(torch.relu(torch.bmm(by_expert, self.up)), self.down)
        return made.reshape(tokens.shape)


class Block(nn.Module):
    """Attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.enter = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.leave = nn.Linear(HIDDEN, HIDDEN)
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, _ = tokens.shape
        wide = self.enter(self.norms[0](tokens)).reshape(batch, length, 3, 16, HIDDEN // 16)
        query, key, value = wide.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.leave(found.transpose(1, 2).reshape(tokens.shape))
        done: Tensor = tokens + self.experts(self.norms[1](tokens))
        return done


class Model(nn.Module):
    """A language model of such blocks; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32768, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, 32768, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        tokens = self.embed(ids)
        for layer in self.layers:
            tokens = layer(tokens)
        return nn.functional.cross_entropy(self.head(tokens).flatten(0, 1), labels.flatten())


def planned(host_bytes: int) -> tuple[Plan, int]:
    """The plan on 512 V100 with 32 GB, and the parameters."""
    with torch.device("meta"):
        model = Model().half()
        ids = torch.zeros(EXPERTS, 32, dtype=torch.long)
    cluster = Cluster.preset("v100", nodes=64)
    device = replace(cluster.device(0), host_memory_bytes=host_bytes)
    cluster = replace(cluster, devices=(Devices(device=device, count=512),))
    plan = autopar.plan(
        model,
        cluster,
        {"ids": ids, "labels": ids},
        # Weights and gradients in half precision, four bytes of factored state and master copy.
        optimizer=autopar.OptimizerSpec(state_bytes=4, host_bucket_elements=1 << 22),
        hints=[hint.microbatches(1)],
    )
    return plan, sum(p.numel() for p in model.parameters())


@pytest.mark.large
def test_ten_trillion_parameters_fit_512_gpus_with_host_memory_alone() -> None:
    plan, parameters = planned(HOST_BYTES)
    memory = plan.prediction.memory
    assert parameters == pytest.approx(10e12, rel=0.001)
    assert memory.total_bytes <= plan.memory_limit_bytes
    assert memory.host_bytes <= HOST_BYTES
    held = sum(p.type.num_elements for p in plan.stage.parameters if p.on_host)
    # Granular: some of the experts stay.
    assert 0 < held < parameters
    assert all(p.state_on_host for p in plan.stage.parameters if "experts" in p.name)
    with pytest.raises(InfeasibleError, match="cannot fit the step into"):
        planned(0)
