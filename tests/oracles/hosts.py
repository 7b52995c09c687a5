"""Clusters of devices that have host memory of their own."""

from __future__ import annotations

from dataclasses import replace

from cost_models.cluster import Cluster, Devices


def hosted(ranks: int, link_bytes_per_s: float, host_bytes: int = 1 << 40) -> Cluster:
    """CPU processes as if each computed on a device with a link to its host's memory."""
    local = Cluster.local(ranks)
    device = replace(
        local.device(0),
        kind="cpu-hosted",
        unified_memory=False,
        host_memory_bytes=host_bytes,
        host_link_bytes_per_s=link_bytes_per_s,
    )
    return replace(local, devices=(Devices(device=device, count=ranks),))
