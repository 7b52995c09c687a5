"""Fits find the parameters that made the samples."""

from __future__ import annotations

import dataclasses

import pytest

from cost_models import calibration
from cost_models.calibration import (
    AttentionSample,
    CollectiveSample,
    MatmulSample,
    MemorySample,
    accuracy,
    fit_efficiency,
    fit_level,
)
from cost_models.cluster import Cluster
from cost_models.compute import Attention
from cost_models.devices import device_named
from cost_models.errors import ClusterSpecError
from cost_models.records import Device, Level
from tests.cost_models import published

A100 = device_named("A100-80GB")
SIZES = [(64, 64, 64), (512, 512, 512), (2048, 2048, 2048), (8192, 4096, 4096), (8192, 8192, 128)]


def kernel_samples(device: Device) -> list[calibration.KernelSample]:
    samples: list[calibration.KernelSample] = []
    for m, n, k in SIZES:
        for dtype in ("fp32", "bf16"):
            drawn = MatmulSample(m=m, n=n, k=k, dtype=dtype, seconds=1.0)
            samples.append(dataclasses.replace(drawn, seconds=drawn.predicted_s(device)))
    for moved in (1e5, 1e7, 1e9):
        memory = MemorySample(bytes_moved=moved, seconds=1.0)
        samples.append(dataclasses.replace(memory, seconds=memory.predicted_s(device)))
    return samples


def test_a_fit_recovers_what_made_the_samples() -> None:
    truth = dataclasses.replace(
        A100,
        efficiency=dataclasses.replace(
            A100.efficiency,
            matmul_best_at={"fp32": 0.7, "bf16": 0.55},
            matmul_half_flops=1e9,
            matmul_half_k=300,
            memory_best=0.6,
            memory_half_bytes=1e6,
        ),
    )
    samples = kernel_samples(truth)
    fitted = fit_efficiency(A100, samples, source="measured today")
    found = accuracy([s.predicted_s(fitted) for s in samples], [s.seconds for s in samples])
    assert found.largest_error < 0.05, found.text()
    assert fitted.efficiency.matmul_best_at["bf16"] == pytest.approx(0.55, rel=0.05)
    assert fitted.efficiency.memory_best == pytest.approx(0.6, rel=0.05)
    assert fitted.efficiency.source == "measured today"
    assert fitted.efficiency.attention_half_keys == A100.efficiency.attention_half_keys
    assert fitted == fit_efficiency(A100, samples, source="measured today")


def attention_samples() -> list[AttentionSample]:
    return [
        AttentionSample(
            shape=published.attention_shape(item.row),
            dtype="fp16",
            backward=True,
            seconds=item.measured_s,
        )
        for item in published.attentions()
    ]


def test_the_table_is_a_fit_of_the_published_attentions() -> None:
    samples = attention_samples()
    measured = [sample.seconds for sample in samples]
    table = accuracy([sample.predicted_s(A100) for sample in samples], measured)
    fitted = fit_efficiency(A100, samples, source="again")
    again = accuracy([sample.predicted_s(fitted) for sample in samples], measured)
    assert again.median_error <= table.median_error <= again.median_error + 0.01


def test_an_attention_may_be_measured_one_way() -> None:
    shape = Attention(batch=1, heads=8, queries=512, keys=512, head_dim=64, causal=True)
    both = AttentionSample(shape=shape, dtype="bf16", backward=True, seconds=1.0)
    forward = dataclasses.replace(both, backward=False)
    backward = dataclasses.replace(both, forward=False)
    assert both.predicted_s(A100) == forward.predicted_s(A100) + backward.predicted_s(A100)


def collective_samples(cluster: Cluster) -> list[CollectiveSample]:
    samples = []
    for size in (1e3, 1e5, 1e7, 1e9):
        for kind in ("all_reduce", "all_gather", "send"):
            for ranks in (2, 8):
                drawn = CollectiveSample(
                    kind=kind,
                    tensor_bytes=size,
                    mesh_sizes=(8 // ranks, ranks),
                    axis=1,
                    seconds=1.0,
                )
                samples.append(dataclasses.replace(drawn, seconds=drawn.predicted_s(cluster)))
    return samples


def test_a_level_is_found_from_its_collectives() -> None:
    start = Cluster.preset("a100")
    level = start.levels[0]
    truth = dataclasses.replace(
        start,
        levels=(
            dataclasses.replace(level, latency_s=2e-5, setup_s=1e-4, bandwidth_bytes_per_s=5e9),
        ),
    )
    samples = collective_samples(truth)
    fitted = fit_level(start, "node", samples, source="measured today")
    found = accuracy([s.predicted_s(fitted) for s in samples], [s.seconds for s in samples])
    assert found.median_error < 0.02, found.text()
    assert fitted.levels[0].bandwidth_bytes_per_s == pytest.approx(5e9, rel=0.03)
    assert isinstance(fitted.levels[0], Level)
    assert fitted.levels[0].source == "measured today"
    assert Cluster.from_yaml(fitted.to_yaml()) == fitted


def test_a_measured_device_replaces_its_kind() -> None:
    cluster = Cluster.preset("a100", nodes=2)
    measured = dataclasses.replace(cluster.device(0), launch_s=1e-5)
    assert calibration.with_device(cluster, measured).device(15).launch_s == 1e-5
    other = dataclasses.replace(measured, kind="other")
    assert calibration.with_device(cluster, other) == cluster


def test_fits_without_samples_or_time_are_refused() -> None:
    cluster = Cluster.preset("a100")
    with pytest.raises(ClusterSpecError, match="there are no samples"):
        fit_efficiency(A100, [], source="")
    with pytest.raises(ClusterSpecError, match="there are no samples"):
        fit_level(cluster, "node", [], source="")
    with pytest.raises(ClusterSpecError, match="cannot fit level 'fabric' of cluster 'a100 x1'"):
        fit_level(cluster, "fabric", [], source="")
    with pytest.raises(ClusterSpecError, match="seconds is 0"):
        fit_efficiency(A100, [MemorySample(bytes_moved=1, seconds=0)], source="")
    with pytest.raises(ClusterSpecError, match="there are no samples"):
        accuracy([], [])
