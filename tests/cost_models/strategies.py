"""Random devices, levels and clusters for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from cost_models.devices import DEVICES, device_named
from cost_models.records import Device, Devices, Level, Transport


def amounts(least: float, most: float) -> st.SearchStrategy[float]:
    """Finite floats."""
    return st.floats(least, most, allow_nan=False, allow_infinity=False)


def levels(name: str, size: int, *, most_bytes_per_s: float = 1e12) -> st.SearchStrategy[Level]:
    """Levels of a given name and size, with every feature on or off."""
    return st.builds(
        Level,
        name=st.just(name),
        size=st.just(size),
        latency_s=amounts(0, 1e-2),
        setup_s=amounts(0, 1e-3),
        bandwidth_bytes_per_s=amounts(1e6, most_bytes_per_s),
        ports=st.none() | st.integers(1, 64),
        half_bandwidth_bytes=amounts(0, 1e8),
        small_group_ranks=amounts(0, 1),
        oversubscription=amounts(1, 8),
        flow_bytes_per_s=st.none() | amounts(1e6, 1e10),
        flows=st.integers(1, 32),
        in_switch_bytes_per_s=st.none() | amounts(1e6, 1e12),
        staging_bytes_per_s=st.none() | amounts(1e6, 1e12),
        transport=st.sampled_from(Transport),
        source=st.sampled_from(["", "a source: with a colon", "ein Maß"]),
    )


def devices() -> st.SearchStrategy[Device]:
    """Devices of the table, changed ones, and ones it does not have."""
    base = device_named("A100-80GB")
    own = st.builds(
        Device,
        kind=st.sampled_from(["H200", "my-chip", "B200"]),
        peak_flops_per_s=st.dictionaries(
            st.sampled_from(["fp32", "bf16", "fp8"]), amounts(1e9, 1e16), min_size=1
        ),
        memory_bytes=st.integers(1, 2**50),
        memory_bytes_per_s=amounts(1e6, 1e14),
        host_memory_bytes=st.integers(0, 2**50),
        host_link_bytes_per_s=amounts(1e6, 1e12),
        launch_s=amounts(0, 1e-3),
        host_op_s=amounts(0, 1e-3),
        efficiency=st.just(base.efficiency),
        unified_memory=st.booleans(),
        source=st.sampled_from(["", "mine"]),
    )
    return st.sampled_from(sorted(DEVICES)).map(device_named) | own


def runs(count: int) -> st.SearchStrategy[Devices]:
    """A run of equal devices."""
    return st.builds(
        Devices,
        device=devices(),
        count=st.just(count),
        node_bandwidth_bytes_per_s=st.none() | amounts(1e6, 1e12),
    )
