"""Ranks on which tiny models are worth splitting."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import Cluster
from cost_models.cluster import Device


def slow_core() -> Device:
    """A core so slow that every split pays, whatever it moves."""
    core = Cluster.local(1).device(0)
    return replace(
        core,
        peak_flops_per_s={rate: 1e-6 * peak for rate, peak in core.peak_flops_per_s.items()},
        memory_bytes_per_s=1e-6 * core.memory_bytes_per_s,
    )
