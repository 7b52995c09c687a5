"""Predictions from numbers alone: devices, links, kernels, collectives, schedules, memory.

Nothing here knows tensors, graphs or plans.
"""

from cost_models.cluster import Cluster
from cost_models.collectives import AxisLink, axis_link, collective_s
from cost_models.compute import op_s
from cost_models.errors import ClusterSpecError
from cost_models.records import Device, Devices, Efficiency, Level

__all__ = [
    "AxisLink",
    "Cluster",
    "ClusterSpecError",
    "Device",
    "Devices",
    "Efficiency",
    "Level",
    "axis_link",
    "collective_s",
    "op_s",
]
