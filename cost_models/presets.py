"""Table of common machines: the kind of their devices and the levels that join them.

The level named ``fabric`` joins nodes; its size is set by the caller. Bandwidths are what libraries
achieve, not line rates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_models.devices import DEVICES, device_named
from cost_models.errors import ClusterSpecError, near_misses
from cost_models.records import Device, Level, Transport
from cost_models.units import GB, GBIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of machine and its network.

    Attributes:
        device: Name in the device table.
        node: The level inside a node.
        fabric: The level that joins nodes; its size stands for any number.
        beyond: Levels that join sites.
    """

    device: str
    node: Level
    fabric: Level
    beyond: tuple[Level, ...] = ()


_NVLINK3 = Level(
    name="node",
    size=8,
    latency_s=3.2e-6,
    setup_s=32e-6,
    bandwidth_bytes_per_s=247 * GB,
    small_group_ranks=0.65,
    source=(
        "fitted 2026-11-30 to all-reduces of 2, 4 and 8 A100 SXM, 1 MiB to 1 GiB, published with "
        "vTrain (MICRO 2024): median error 4 %; 300 GB/s one way on the data sheet"
    ),
)
_NVLINK4 = Level(
    name="node",
    size=8,
    latency_s=2.2e-6,
    setup_s=6e-6,
    bandwidth_bytes_per_s=380 * GB,
    half_bandwidth_bytes=15e6,
    small_group_ranks=0.4,
    in_switch_bytes_per_s=272 * GB,
    source=(
        "fitted 2026-11-30 to nccl-tests on 8 H200 with and without NVLS (ml-engineering, 2025) "
        "and to published latencies of 10 to 31 us for 2 to 8 H100; data sheet 450 GB/s one way"
    ),
)
_NVLINK5 = replace(
    _NVLINK4,
    bandwidth_bytes_per_s=760 * GB,
    half_bandwidth_bytes=30e6,
    in_switch_bytes_per_s=544 * GB,
    source="twice NVLink 4, as on the data sheets (900 against 450 GB/s one way); not measured",
)
_NVLINK2 = replace(
    _NVLINK3,
    latency_s=3.0e-6,
    setup_s=40e-6,
    bandwidth_bytes_per_s=130 * GB,
    small_group_ranks=1.0,
    source=(
        "published all-reduces of 2, 4 and 8 V100: bus bandwidth 40, 78 and 131 GB/s, "
        "45 to 97 us; 150 GB/s one way on the data sheet"
    ),
)
_PCIE3 = Level(
    name="node",
    size=8,
    latency_s=5e-6,
    setup_s=20e-6,
    bandwidth_bytes_per_s=9 * GB,
    half_bandwidth_bytes=1e6,
    source="recalled: NCCL through host bridges of PCIe 3 x16, 2022",
)
_IB200 = Level(
    name="fabric",
    size=1,
    latency_s=8e-6,
    setup_s=20e-6,
    bandwidth_bytes_per_s=22 * GB,
    half_bandwidth_bytes=4e6,
    source="HDR InfiniBand, 25 GB/s a device on the data sheet; 0.88 of it and latency recalled",
)
_IB400 = replace(
    _IB200,
    setup_s=6e-6,
    bandwidth_bytes_per_s=45 * GB,
    half_bandwidth_bytes=8e6,
    source="NDR InfiniBand, 50 GB/s a device on the data sheet; 0.9 of it and latency recalled",
)
_EFA400 = Level(
    name="fabric",
    size=1,
    latency_s=65e-6,
    setup_s=32e-6,
    bandwidth_bytes_per_s=10.7 * GB,
    ports=4,
    half_bandwidth_bytes=2.7e6,
    source=(
        "fitted 2026-11-30 to the nccl-tests table of AWS p4de, 2 nodes, from 16 KiB on: median "
        "error 8 %; four ports of 100 Gb/s a node"
    ),
)
_EFA3200 = replace(
    _EFA400,
    latency_s=35e-6,
    setup_s=6e-6,
    bandwidth_bytes_per_s=12 * GB,
    ports=32,
    half_bandwidth_bytes=14e6,
    source=(
        "fitted 2026-11-30 to the nccl-tests table of AWS p5, 2 nodes, from 16 KiB on: median "
        "error 7 %; 32 ports of 100 Gb/s a node, which NVLink hides at this size"
    ),
)
_ETHERNET10 = Level(
    name="fabric",
    size=1,
    latency_s=50e-6,
    setup_s=40e-6,
    bandwidth_bytes_per_s=1.1 * GB,
    ports=1,
    source="10 Gb/s Ethernet, TCP at 0.88 of the line; latency recalled",
)
_ETHERNET100 = replace(
    _ETHERNET10,
    latency_s=30e-6,
    bandwidth_bytes_per_s=10 * GB,
    source="100 Gb/s Ethernet of a cloud instance, 0.8 of the line; latency recalled",
)
_SLINGSHOT = Level(
    name="fabric",
    size=1,
    latency_s=15e-6,
    setup_s=25e-6,
    bandwidth_bytes_per_s=22 * GB,
    ports=4,
    half_bandwidth_bytes=4e6,
    source="Frontier: four Slingshot ports of 25 GB/s a node (arXiv 2312.12705); 0.88 recalled",
)
_XGMI = Level(
    name="node",
    size=8,
    latency_s=5e-6,
    setup_s=25e-6,
    bandwidth_bytes_per_s=40 * GB,
    half_bandwidth_bytes=2e6,
    source="Frontier: 50 to 200 GB/s between dies, a ring is bound by the narrowest; 0.8 recalled",
)
_WAN = Level(
    name="wan",
    size=2,
    latency_s=20e-3,
    setup_s=0.0,
    bandwidth_bytes_per_s=10 * GBIT,
    ports=1,
    flow_bytes_per_s=0.293 * GBIT,
    flows=16,
    source=(
        "two sites 40 ms apart (round trip), each behind 10 Gb/s; one TCP connection carries "
        "0.293 Gb/s at that distance (Atlas, 2024)"
    ),
)

MACHINES: Mapping[str, Machine] = {
    "a100": Machine(device="A100-80GB", node=_NVLINK3, fabric=_IB200),
    "a100-40gb": Machine(device="A100-40GB", node=_NVLINK3, fabric=_IB200),
    "a100-efa": Machine(device="A100-80GB", node=_NVLINK3, fabric=_EFA400),
    "h100": Machine(device="H100-80GB", node=_NVLINK4, fabric=_IB400),
    "h100-efa": Machine(device="H100-80GB", node=_NVLINK4, fabric=_EFA3200),
    "h200": Machine(device="H200", node=_NVLINK4, fabric=_IB400),
    "b200": Machine(device="B200", node=_NVLINK5, fabric=_IB400),
    "gb200-nvl72": Machine(device="GB200", node=replace(_NVLINK5, size=72), fabric=_IB400),
    "l4": Machine(
        device="L4",
        node=replace(
            _PCIE3,
            bandwidth_bytes_per_s=8 * GB,
            source="recalled: NCCL through host memory, PCIe 4 x8, without peer access",
        ),
        fabric=_ETHERNET100,
    ),
    "a10g": Machine(device="A10G", node=_PCIE3, fabric=_ETHERNET100),
    "v100": Machine(device="V100-32GB", node=_NVLINK2, fabric=replace(_ETHERNET100, ports=4)),
    "v100-10gbe": Machine(device="V100-16GB", node=replace(_PCIE3, size=4), fabric=_ETHERNET10),
    "titan-rtx": Machine(device="TITAN-RTX", node=_PCIE3, fabric=_ETHERNET100),
    "mi250x": Machine(device="MI250X-GCD", node=_XGMI, fabric=_SLINGSHOT),
    "two-sites": Machine(device="A100-80GB", node=_NVLINK3, fabric=_IB200, beyond=(_WAN,)),
}

LOOPBACK = Level(
    name="node",
    size=1,
    latency_s=95e-6,
    setup_s=150e-6,
    bandwidth_bytes_per_s=2.4 * GB,
    staging_bytes_per_s=1.6 * GB,
    transport=Transport.GLOO,
    source=(
        "measured 2026-11-30 with torch 2.13: gloo over TCP loopback, 2 processes of one thread on "
        "2 cores, 1 KiB to 64 MiB; the bandwidth is that of all processes together"
    ),
)
"""What joins CPU processes of one machine, before they share it."""


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


_CARDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GB200", ("GB200",)),
    ("B200", ("B200",)),
    ("H200", ("H200",)),
    ("H100", ("H100-80GB", "H100-96GB")),
    ("A100", ("A100-40GB", "A100-80GB")),
    ("V100", ("V100-16GB", "V100-32GB")),
    ("MI250X", ("MI250X-GCD",)),
    ("TITAN RTX", ("TITAN-RTX",)),
    ("A10G", ("A10G",)),
    ("L4", ("L4",)),
)
"""What a driver's name of a card holds as whole words, and devices of the table by their memory."""


def device_of_card(name: str, memory_bytes: int) -> Device:
    """The device of the table that a driver's name means, with the memory the driver reports.

    Args:
        name: Such as ``NVIDIA A100-SXM4-80GB``.
        memory_bytes: Of the card, as the driver reports it.

    Raises:
        ClusterSpecError: The table has no such device.
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    for text, kinds in _CARDS:
        if all(part in words for part in text.split()):
            found = min(
                (device_named(kind) for kind in kinds),
                key=lambda device: abs(device.memory_bytes - memory_bytes),
            )
            return replace(found, memory_bytes=memory_bytes)
    raise ClusterSpecError(
        f"cannot find card '{name}' in the device table: it has {', '.join(DEVICES)}; describe "
        "the cluster in a file ('like: A100-80GB' and what differs), or let autopar profile "
        "measure it"
    )


def card_like(name: str, memory_bytes: int, like: str = "A10G") -> Device:
    """A device of a card that the table lacks: a base for measurements, its peaks not its own."""
    kind = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return replace(
        device_named(like),
        kind=kind,
        memory_bytes=memory_bytes,
        source=f"no data sheet: what was not measured is as on {like}",
    )


def is_known_card(kind: str) -> bool:
    """Whether the table has data-sheet peaks of a kind of accelerator."""
    return any(kind in kinds for _, kinds in _CARDS)


def found_levels(kind: str, per_node: int, nodes: int, *, pcie: bool = False) -> tuple[Level, ...]:
    """The usual levels between cards of a kind.

    Args:
        kind: Of the device table, or another.
        per_node: Devices in use of each node.
        nodes: Such nodes.
        pcie: Whether the cards have no links of their own.
    """
    usual = next((m for m in MACHINES.values() if m.device == kind), MACHINES["a10g"])
    inside = replace(_PCIE3 if pcie else usual.node, size=per_node)
    fabric = () if nodes == 1 else (replace(usual.fabric, size=nodes),)
    return (inside, *fabric)


def found_processes(per_node: int, nodes: int) -> tuple[Level, ...]:
    """The levels between CPU processes of one or several machines, which talk through gloo."""
    inside = loopback(per_node)
    if nodes == 1:
        return (inside,)
    fabric = replace(_ETHERNET10, size=nodes, transport=Transport.GLOO)
    return (inside, fabric)


def levels_of(machine: Machine, nodes: int) -> tuple[Level, ...]:
    """The levels of `nodes` such machines; a level that would join one unit is left out.

    Raises:
        ClusterSpecError: `nodes` is not at least 1, or does not divide among the sites.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ClusterSpecError(
            f"cannot build a cluster: the node count is {nodes!r}; "
            "give a whole number of at least 1"
        )
    sites = 1
    for level in machine.beyond:
        sites *= level.size
    if nodes % sites:
        raise ClusterSpecError(
            f"cannot build a cluster: {nodes} nodes do not divide among {sites} sites; "
            f"give a multiple of {sites}"
        )
    fabric = () if nodes == sites else (replace(machine.fabric, size=nodes // sites),)
    return (machine.node, *fabric, *machine.beyond)


def loopback(num_processes: int) -> Level:
    """The level that joins processes of one machine, each with an even share of its bandwidth.

    Raises:
        ClusterSpecError: `num_processes` is not at least 1.
    """
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ClusterSpecError(
            f"cannot build a local cluster: the process count is {num_processes!r}; "
            "give a whole number of at least 1"
        )
    share = LOOPBACK.bandwidth_bytes_per_s / num_processes
    return replace(LOOPBACK, size=num_processes, bandwidth_bytes_per_s=share)
