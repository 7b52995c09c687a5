"""Table of common machines: the kind of their devices and the levels that join them.

The outermost level's size is the number of nodes (of sites for `wan`) and is set by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_models.errors import ClusterSpecError, near_misses
from cost_models.records import Level
from cost_models.units import GB, GBIT, MS, US


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of machine and its network, innermost level first; the last level joins nodes."""

    device: str
    levels: tuple[Level, ...]


_NVLINK3 = Level(
    name="node",
    size=8,
    latency_s=6 * US,
    bandwidth_bytes_per_s=240 * GB,
    half_bandwidth_bytes=10e6,
    source="draft",
)
_NVLINK4 = Level(
    name="node",
    size=8,
    latency_s=4 * US,
    bandwidth_bytes_per_s=367 * GB,
    half_bandwidth_bytes=15e6,
    in_switch_bytes_per_s=265 * GB,
    source="draft",
)
_NVLINK5 = replace(_NVLINK4, bandwidth_bytes_per_s=735 * GB, in_switch_bytes_per_s=530 * GB)
_PCIE3 = Level(name="node", size=8, latency_s=10 * US, bandwidth_bytes_per_s=10 * GB)
_IB200 = Level(name="fabric", size=1, latency_s=10 * US, bandwidth_bytes_per_s=22 * GB)
_IB400 = Level(name="fabric", size=1, latency_s=10 * US, bandwidth_bytes_per_s=44 * GB)
_ETHERNET10 = Level(
    name="fabric", size=1, latency_s=50 * US, bandwidth_bytes_per_s=1.1 * GB, ports=1
)

MACHINES: Mapping[str, Machine] = {
    "a100": Machine(device="A100-80GB", levels=(_NVLINK3, _IB200)),
    "a100-40gb": Machine(device="A100-40GB", levels=(_NVLINK3, _IB200)),
    "h100": Machine(device="H100-80GB", levels=(_NVLINK4, _IB400)),
    "h200": Machine(device="H200", levels=(_NVLINK4, _IB400)),
    "b200": Machine(device="B200", levels=(_NVLINK5, _IB400)),
    "gb200-nvl72": Machine(device="GB200", levels=(replace(_NVLINK5, size=72), _IB400)),
    "l4": Machine(
        device="L4", levels=(replace(_PCIE3, bandwidth_bytes_per_s=12 * GB), _ETHERNET10)
    ),
    "v100-10gbe": Machine(
        device="V100-16GB",
        levels=(replace(_PCIE3, size=4), _ETHERNET10),
    ),
    "titan-rtx": Machine(device="TITAN-RTX", levels=(_PCIE3, replace(_IB200, ports=1))),
    "two-sites": Machine(
        device="A100-80GB",
        levels=(
            _NVLINK3,
            replace(_IB200, size=2),
            Level(
                name="wan",
                size=2,
                latency_s=20 * MS,
                bandwidth_bytes_per_s=10 * GBIT,
                ports=1,
                flow_bytes_per_s=0.3 * GBIT,
                flows=16,
                source="draft",
            ),
        ),
    ),
}


def machine_named(name: str) -> Machine:
    """The machine of the table with this name, in either case; ``dgx-`` in front is accepted.

    Raises:
        ClusterSpecError: There is none; the message names near misses.
    """
    machine = MACHINES.get(name.lower().removeprefix("dgx-"))
    if machine is None:
        raise ClusterSpecError(
            f"cannot find cluster preset '{name}': {near_misses(name, MACHINES)}"
        )
    return machine


def with_nodes(machine: Machine, nodes: int) -> tuple[Level, ...]:
    """The levels of `nodes` such machines; the level that joins nodes is left out for one.

    Raises:
        ClusterSpecError: `nodes` is not at least 1, or does not divide among the sites.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ClusterSpecError(
            f"cannot build a cluster: the node count is {nodes!r}; give a whole number of at least 1"
        )
    node, fabric, *beyond = machine.levels
    sites = 1
    for level in beyond:
        sites *= level.size
    if nodes % sites:
        raise ClusterSpecError(
            f"cannot build a cluster: {nodes} nodes do not divide among {sites} sites; "
            f"give a multiple of {sites}"
        )
    per_site = nodes // sites
    if per_site == 1 and not beyond:
        return (node,)
    return (node, replace(fabric, size=per_site), *beyond)


CPU_MEMORY_BYTES_PER_S = 20 * GB
"""Memory bandwidth of a small virtual machine, shared by its processes. draft"""


def loopback(num_processes: int) -> Level:
    """The level that joins processes of one machine through gloo over TCP loopback.

    Raises:
        ClusterSpecError: `num_processes` is not at least 1.
    """
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ClusterSpecError(
            f"cannot build a local cluster: the process count is {num_processes!r}; "
            "give a whole number of at least 1"
        )
    return Level(
        name="node",
        size=num_processes,
        latency_s=100 * US,
        bandwidth_bytes_per_s=2 * GB / num_processes,
        source="draft",
    )
