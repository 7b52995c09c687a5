"""Machines that are detected and measured."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from autopar import cli
from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.plan.records import Plan
from autopar.plan.text import render
from autopar.profile import Samples, _samples_in, _samples_out, fitted, profile_view
from cost_models.calibration import (
    AttentionSample,
    CollectiveSample,
    MatmulSample,
    MemorySample,
)
from cost_models.collectives import Collective
from cost_models.compute import Attention
from cost_models.presets import MACHINES, device_of_card, is_known_card

ROOT = Path(__file__).parents[1]
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)


def _cards(monkeypatch: pytest.MonkeyPatch, count: int, name: str, memory_bytes: int) -> None:
    """Let torch see cards that are not there."""
    card = SimpleNamespace(name=name, total_memory=memory_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def _launched(monkeypatch: pytest.MonkeyPatch, world: Any, per_node: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.1, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80GB"),
        ("NVIDIA H100 96GB", 95.0, "H100-96GB"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA B200", 178.0, "B200"),
        ("NVIDIA GB200", 184.0, "GB200"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA A10G", 22.0, "A10G"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("NVIDIA TITAN RTX", 23.6, "TITAN-RTX"),
        ("AMD Instinct MI250X", 64.0, "MI250X-GCD"),
    ],
)
def test_cards_are_known_by_their_names(name: str, gib: float, kind: str) -> None:
    found = device_of_card(name, int(gib * 2**30))
    assert found.kind == kind and is_known_card(kind)
    assert found.memory_bytes == int(gib * 2**30)


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA A10", "A1000"])
def test_other_cards_are_not_taken_for_known_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cards(monkeypatch, 2, name, 2**35)
    with pytest.raises(ClusterError, match=rf"cannot find card '{name}' .* autopar profile"):
        Cluster.detect()
    found = Cluster.detect(unknown="profile").device(0)
    assert found.memory_bytes == 2**35 and not is_known_card(found.kind)


def test_processes_of_the_cpu_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster.detect(device_type="cpu") == replace(
        Cluster.local(1), name=Cluster.local(1).name
    )
    _launched(monkeypatch, 4, 4)
    assert Cluster.detect(device_type="cpu") == Cluster.local(4)
    _launched(monkeypatch, 8, 4)
    found = Cluster.detect(device_type="cpu")
    assert [(level.name, level.size) for level in found.levels] == [("node", 4), ("fabric", 2)]
    assert {level.transport for level in found.levels} == {"gloo"}


def test_nodes_of_cards_are_those_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    _cards(monkeypatch, 8, "NVIDIA H100 80GB HBM3", 80 * 2**30)
    assert Cluster.detect().levels == Cluster.preset("h100", nodes=1).levels
    _launched(monkeypatch, 32, 8)
    assert Cluster.detect().levels == Cluster.preset("h100", nodes=4).levels
    assert Cluster.detect().devices == Cluster.preset("h100", nodes=4).devices
    _launched(monkeypatch, 2, 1)
    assert [level.size for level in Cluster.detect().levels] == [1, 2]
    _cards(monkeypatch, 4, "NVIDIA A100-PCIE-40GB", 40 * 2**30)
    _launched(monkeypatch, 4, 4)
    inside = Cluster.detect().levels[0]
    assert inside.bandwidth_bytes_per_s < MACHINES["a100"].node.bandwidth_bytes_per_s / 10


@pytest.mark.parametrize(
    ("world", "per_node", "what"),
    [
        (6, 4, "WORLD_SIZE is 6 and LOCAL_WORLD_SIZE 4"),
        (16, 16, "16 processes on this node: it has 8 CUDA devices"),
        ("x", 4, "WORLD_SIZE is 'x'"),
        (4, 0, "LOCAL_WORLD_SIZE is '0'"),
    ],
)
def test_an_environment_that_cannot_be_is_named(
    world: Any, per_node: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cards(monkeypatch, 8, "NVIDIA H200", 2**37)
    _launched(monkeypatch, world, per_node)
    with pytest.raises(ClusterError, match=what):
        Cluster.detect()


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ClusterError, match="torch sees none here"):
        Cluster.detect(device_type="cuda")


# Fits.


def samples_of(cluster: Cluster) -> Samples:
    """What a machine exactly like a cluster would measure."""
    device = cluster.device(0)
    shape = Attention(batch=1, heads=16, queries=2048, keys=2048, head_dim=128, causal=True)
    kernels: list[Any] = [
        *(MatmulSample(m=n, n=n, k=n, dtype="bf16", seconds=1.0) for n in (1024, 4096, 8192)),
        AttentionSample(shape=shape, dtype="bf16", seconds=1.0),
        AttentionSample(shape=shape, dtype="bf16", backward=True, seconds=1.0),
        *(MemorySample(bytes_moved=2.0**size, seconds=1.0) for size in (20, 26, 30)),
    ]
    sizes = tuple(level.size for level in reversed(cluster.levels))
    collectives = {
        level.name: tuple(
            CollectiveSample(
                kind=kind.value, tensor_bytes=size, mesh_sizes=sizes, axis=axis, seconds=1.0
            )
            for kind in Collective
            for size in (1e5, 1e7, 1e9)
        )
        for axis, level in enumerate(reversed(cluster.levels))
    }
    return Samples(
        kernels=tuple(replace(s, seconds=s.predicted_s(device)) for s in kernels),
        collectives={
            level: tuple(replace(s, seconds=s.predicted_s(cluster)) for s in samples)
            for level, samples in collectives.items()
        },
        launch_s=device.launch_s,
        host_op_s=device.host_op_s,
        host_link_bytes_per_s=device.host_link_bytes_per_s,
    )


def test_a_fit_finds_the_machine_that_was_measured() -> None:
    there = Cluster.preset("a100", nodes=2)
    slow = replace(
        there, levels=tuple(replace(v, bandwidth_bytes_per_s=1e10) for v in there.levels)
    )
    found = fitted(slow, samples_of(there))
    assert max(error.median_error for error in found.errors.values()) < 0.05
    assert set(found.errors) == {
        "matmul",
        "attention",
        "pointwise and copy",
        "collectives of level node",
        "collectives of level fabric",
    }
    text = found.yaml()
    assert text.startswith("# Measured 20") and f"with torch {torch.__version__}" in text
    assert Cluster.from_yaml(text) == found.cluster
    assert "16 processes on A100-80GB" in render(profile_view(found))


def test_samples_survive_the_way_to_the_parent() -> None:
    samples = samples_of(Cluster.preset("h100", nodes=2))
    content = yaml.safe_load(yaml.safe_dump(_plain(_samples_out(samples))))
    assert _samples_in(content) == samples


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


# The command.


@pytest.mark.slow
def test_two_processes_are_measured_and_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    cli.profile(path, processes=2)
    printed = capsys.readouterr().out
    for part in ("matmul fp32", "attention fp32, forward", "pointwise, copy", "all_reduce"):
        assert part in printed
    assert f"saved to {path}" in printed
    cluster = Cluster.from_file(path)
    assert cluster.num_devices == 2
    assert cluster.device(0).efficiency.source.startswith("measured 20")
    assert cluster.levels[0].source.startswith("measured 20")
    (tmp_path / "small.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(16, 16)\n"
        "    return model, torch.zeros(8, 16), lambda model, x: model(x).square().mean()\n"
    )
    cli.plan(f"{tmp_path}/small.py:build", str(path), output=tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cluster_ranks == 2


@pytest.mark.slow
def test_ranks_of_torchrun_measure_together(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = subprocess.run(
        [*launch, "-m", "autopar.cli", "profile", "-o", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("saved to") == 1
    assert Cluster.from_file(path).num_devices == 2


def test_processes_that_cannot_be_started_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="cannot profile 0 processes: give at least 1"):
        cli.profile(Path("never.yaml"), processes=0)
    _launched(monkeypatch, 2, 2)
    with pytest.raises(ClusterError, match="torchrun"):
        cli.profile(Path("never.yaml"), processes=2)
