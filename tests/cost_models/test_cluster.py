"""Clusters: presets, files, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.cluster import Cluster, Devices
from cost_models.devices import DEVICES, device_named
from cost_models.errors import ClusterSpecError, MissingRateError
from cost_models.presets import MACHINES
from tests.cost_models.strategies import levels, runs

LEVEL = "levels: [{name: node, size: 8, latency: 5us, bandwidth: 3 GB/s}]"
DEVICE = "devices: [{kind: H200, count: 8}]"


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_preset_round_trips_and_says_where_its_numbers_come_from(name: str) -> None:
    cluster = Cluster.preset(name, nodes=4)
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    assert cluster.num_devices == math.prod(level.size for level in cluster.levels)
    assert all(level.source for level in cluster.levels)


@pytest.mark.parametrize("kind", sorted(DEVICES))
def test_every_device_says_where_its_numbers_come_from(kind: str) -> None:
    device = device_named(kind.lower())
    assert device.kind == kind
    assert device.source
    assert device.efficiency.source
    assert device.flops_per_s("float32") == device.peak_flops_per_s["fp32"]


def test_clusters_are_values() -> None:
    cluster = Cluster.preset("h100", nodes=2)
    assert hash(cluster) == hash(Cluster.preset("h100", nodes=2))
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_the_devices_people_ask_for_are_in_the_table() -> None:
    assert set(DEVICES) == {
        "V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100-80GB", "H100-96GB", "H200",
        "B200", "GB200", "L4", "A10G", "TITAN-RTX", "MI250X-GCD", "unified", "cpu-core",
    }  # fmt: skip


def test_host_memory_of_a_unified_device_is_its_own() -> None:
    assert device_named("unified").unified_memory
    assert device_named("unified").host_memory_bytes == 0


@given(st.data())
def test_yaml_round_trip_is_the_identity(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    first = data.draw(st.integers(0, math.prod(sizes) - 1))
    counts = [count for count in (first, math.prod(sizes) - first) if count]
    cluster = Cluster(
        name=data.draw(st.sampled_from(["c", "no", "1", "eins: zwei"])),
        devices=tuple(data.draw(runs(count)) for count in counts),
        levels=tuple(data.draw(levels(f"l{i}", size)) for i, size in enumerate(sizes)),
        usable_memory_fraction=data.draw(st.floats(0.1, 1)),
    )
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


def test_local_processes_share_the_machine() -> None:
    two, four = Cluster.local(2), Cluster.local(4)
    assert two.num_devices == 2
    assert four.device(3).memory_bytes <= two.device(0).memory_bytes // 2 + 1
    assert four.levels[0].bandwidth_bytes_per_s == two.levels[0].bandwidth_bytes_per_s / 2
    assert Cluster.from_yaml(two.to_yaml()) == two
    assert Cluster.local(2, memory_bytes=2**30).device(1).memory_bytes == 2**30


def test_a_preset_of_one_node_has_no_fabric() -> None:
    assert [level.name for level in Cluster.preset("h100").levels] == ["node"]
    assert [level.name for level in Cluster.preset("DGX-H100", nodes=2).levels] == [
        "node",
        "fabric",
    ]
    assert [level.name for level in Cluster.preset("two-sites", nodes=2).levels] == ["node", "wan"]


def test_ranks_follow_the_runs_of_devices() -> None:
    cluster = Cluster(
        name="mixed",
        devices=(
            Devices(device=device_named("A100-80GB"), count=2),
            Devices(device=device_named("V100-16GB"), count=6),
        ),
        levels=Cluster.preset("a100").levels,
    )
    assert [cluster.device(rank).kind for rank in (0, 1, 2, 7)] == [
        "A100-80GB",
        "A100-80GB",
        "V100-16GB",
        "V100-16GB",
    ]
    assert not cluster.is_uniform
    assert cluster.usable_memory_bytes(7) == int(0.8 * device_named("V100-16GB").memory_bytes)
    with pytest.raises(ClusterSpecError, match="cannot find rank 8 in cluster 'mixed'"):
        cluster.device(8)


def test_a_new_device_may_be_described_by_what_differs() -> None:
    text = f"devices: [{{kind: my-chip, like: A100-80GB, count: 8, memory: 1 TiB}}]\n{LEVEL}"
    device = Cluster.from_yaml(text).device(0)
    expected = dataclasses.replace(device_named("A100-80GB"), kind="my-chip", memory_bytes=2**40)
    assert device == expected


def test_a_device_of_the_table_may_be_changed() -> None:
    text = f"devices: [{{kind: H200, count: 8, peak: {{bf16: 800 TFLOPS}}, launch: 9e-6}}]\n{LEVEL}"
    device = Cluster.from_yaml(text).device(0)
    assert device.peak_flops_per_s == {"bf16": 800e12}
    assert device.launch_s == 9e-6
    with pytest.raises(MissingRateError, match="cannot price 'fp8' on device 'H200'"):
        device.flops_per_s("fp8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"devices: [{{kind: H10, count: 8}}]\n{LEVEL}", "did you mean 'H100-80GB' or"),
        (f"devices: [{{kind: H200, count: 0}}]\n{LEVEL}", "'devices[0].count': 0 is not a count"),
        (f"devices: [{{kind: H200, count: -1}}]\n{LEVEL}", "-1 is not a count"),
        (f"devices: [{{kind: H200, cuont: 8}}]\n{LEVEL}", "did you mean 'count'?"),
        (f"devices: [{{kind: 3, count: 8}}]\n{LEVEL}", "3 is not text"),
        (f"devices: [{{kind: H200, count: 8, memory: 80 XB}}]\n{LEVEL}", "has the unit 'XB'"),
        (f"devices: [{{kind: H200, count: 8, memory: 0}}]\n{LEVEL}", "memory_bytes is 0"),
        (f"devices: [{{kind: H200, count: 8, peak: 7}}]\n{LEVEL}", "not a mapping of rates"),
        (
            f"devices: [{{kind: H200, count: 8, peak: {{bf17: 7}}}}]\n{LEVEL}",
            "'bf17' is not a rate",
        ),
        (f"devices: [{{kind: H200, count: 8, unified_memory: 3}}]\n{LEVEL}", "neither true nor"),
        (f"devices: [{{kind: H200, count: 16}}]\n{LEVEL}", "add the missing level"),
        (f"devices: []\n{LEVEL}", "not a list of at least one entry"),
        (DEVICE, "'levels' is missing"),
        (f"{DEVICE}\nlevels: []", "one entry for each level"),
        (f"{DEVICE}\nlevels: [{{name: a, size: 8, latency: 5us}}]", "'bandwidth' is missing"),
        (
            f"{DEVICE}\nlevels: [{{name: a, size: 8, latency: 5us, bandwidth: -3 GB/s}}]",
            "'levels[0].bandwidth': '-3 GB/s' is not a bandwidth",
        ),
        (
            f"{DEVICE}\nlevels: [{{name: a, size: 8, latency: -5us, bandwidth: 3 GB/s}}]",
            "latency_s is -5e-06",
        ),
        (
            f"{DEVICE}\nlevels: [{{name: a, size: 8, latency: 5, bandwidth: 3, transport: tcp}}]",
            "transport is 'tcp'; known are nccl, gloo",
        ),
        (
            f"{DEVICE}\nlevels: [{{name: a, size: 8, latency: 5, bandwidth: 3, flows: two}}]",
            "'two' is not a count",
        ),
        (
            f"{DEVICE}\nlevels: [{{name: a, size: 8, latency: 5, bandwidth: 3, "
            "oversubscription: 0.5}]",
            "oversubscription is 0.5",
        ),
        (
            f"{DEVICE}\nlevels: [{{name: a, size: 2, latency: 5, bandwidth: 3}}, "
            "{name: a, size: 4, latency: 5, bandwidth: 3}]",
            "two levels are named 'a'",
        ),
        (f"usable_memory_fraction: 1.2\n{DEVICE}\n{LEVEL}", "usable_memory_fraction is 1.2"),
        (f"usable_memory_fraction: most\n{DEVICE}\n{LEVEL}", "'most' is not a number"),
        ("a: [", "not YAML"),
        ("3", "found int, not a mapping"),
        ("", "found NoneType, not a mapping"),
    ],
)
def test_each_broken_file_gets_its_message(text: str, message: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        Cluster.from_yaml(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with pytest.raises(ClusterSpecError, match="cannot read cluster file"):
        Cluster.from_file(path)
    path.write_text(DEVICE)
    with pytest.raises(ClusterSpecError, match=r"in cluster file '.*': cannot read the cluster"):
        Cluster.from_file(path)
    path.write_text(f"{DEVICE}\n{LEVEL}")
    assert Cluster.from_file(path).num_devices == 8
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ClusterSpecError, match="cannot read cluster file"):
        Cluster.from_file(path)


@pytest.mark.parametrize("nodes", [0, -2, 1.5, True])
def test_a_node_count_must_be_one_at_least(nodes: int) -> None:
    with pytest.raises(ClusterSpecError, match="the node count is"):
        Cluster.preset("h100", nodes=nodes)


def test_unknown_presets_and_counts_are_refused() -> None:
    with pytest.raises(ClusterSpecError, match="did you mean 'h100'"):
        Cluster.preset("h10")
    with pytest.raises(ClusterSpecError, match="1 nodes do not divide among 2 sites"):
        Cluster.preset("two-sites", nodes=1)
    with pytest.raises(ClusterSpecError, match="the process count is 0"):
        Cluster.local(0)


def test_the_documented_file_is_a_cluster() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    text = page.split("```yaml\n")[1].split("```")[0]
    cluster = Cluster.from_yaml(text)
    assert [cluster.device(rank).kind for rank in (0, 8)] == ["A100-80GB", "my-chip"]
    assert cluster.levels[1].bandwidth_bytes_per_s == 25e9
    for kind in ("peak", "memory_bandwidth", "host_op", "setup", "staging_bandwidth", *MACHINES):
        assert f"`{kind}`" in page
