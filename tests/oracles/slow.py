"""Ranks on which tiny models are worth splitting."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import Cluster
from cost_models.cluster import Device, Devices


def slow_core() -> Device:
    """A core so slow that every split pays, whatever it moves."""
    core = Cluster.local(1).device(0)
    return replace(
        core,
        peak_flops_per_s={rate: 1e-6 * peak for rate, peak in core.peak_flops_per_s.items()},
        memory_bytes_per_s=1e-6 * core.memory_bytes_per_s,
    )


def slow_network(ranks: int) -> Cluster:
    """Ranks that compute five hundred times for a byte they send, and do nothing else."""
    made = Cluster.local(ranks)
    core, (level,) = made.device(0), made.levels
    device = replace(
        core,
        host_op_s=0.0,
        peak_flops_per_s=dict.fromkeys(core.peak_flops_per_s, 1e9),
        memory_bytes_per_s=1e11,
    )
    return replace(
        made,
        devices=(Devices(device=device, count=ranks),),
        levels=(replace(level, latency_s=1e-6, setup_s=0.0, bandwidth_bytes_per_s=2e6),),
    )
