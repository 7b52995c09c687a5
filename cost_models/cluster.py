"""A cluster: devices in rank order, and the levels of network that join them.

Ranks are numbered so that the innermost level varies fastest: with 8 devices a node, ranks 0 to 7
are the first node.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models import cluster_file, presets
from cost_models.devices import device_named
from cost_models.errors import ClusterSpecError
from cost_models.records import Device, Devices, Efficiency, Level
from cost_models.units import GIB

__all__ = ["Cluster", "Device", "Devices", "Efficiency", "Level"]

USABLE_MEMORY_FRACTION = 0.8
"""Of a device's memory, what a plan may fill.

454 runs of Llama models under data, tensor, pipeline and context parallelism on A100 and H100 never
ran out of memory where the estimate was below this fraction (Fujii et al., arXiv 2411.06465, 2024);
the rest covers the allocator's fragmentation, the device's context and libraries' workspaces.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and the network between them.

    Attributes:
        name: For people.
        devices: Runs of equal devices, in rank order.
        levels: Of the network, innermost first; their sizes multiply to the number of devices.
        usable_memory_fraction: See `USABLE_MEMORY_FRACTION`.
    """

    name: str
    devices: tuple[Devices, ...]
    levels: tuple[Level, ...]
    usable_memory_fraction: float = USABLE_MEMORY_FRACTION

    def __post_init__(self) -> None:
        if not self.levels:
            raise ClusterSpecError(
                f"cannot use cluster '{self.name}': it has no level, so no link between its "
                "devices; give at least the level inside a node"
            )
        names = [level.name for level in self.levels]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ClusterSpecError(
                f"cannot use cluster '{self.name}': two levels are named '{repeated}'; "
                "give each its own name"
            )
        slots = math.prod(level.size for level in self.levels)
        if self.num_devices != slots:
            sizes = " x ".join(f"{level.size} ({level.name})" for level in self.levels)
            raise ClusterSpecError(
                f"cannot use cluster '{self.name}': it lists {self.num_devices} devices but its "
                f"levels join {sizes} = {slots}; add the missing level or correct the counts"
            )
        if not 0 < self.usable_memory_fraction <= 1:
            raise ClusterSpecError(
                f"cannot use cluster '{self.name}': usable_memory_fraction is "
                f"{self.usable_memory_fraction}; give a number above 0 and at most 1"
            )

    @property
    def num_devices(self) -> int:
        """Devices of every kind."""
        return sum(run.count for run in self.devices)

    @property
    def devices_per_node(self) -> int:
        """Devices that the innermost level joins."""
        return self.levels[0].size

    @property
    def is_uniform(self) -> bool:
        """Whether every device is of the same kind."""
        return len({run.device.kind for run in self.devices}) == 1

    def run_of(self, rank: int) -> Devices:
        """The run of equal devices that `rank` belongs to."""
        last = 0
        for run in self.devices:
            last += run.count
            if 0 <= rank < last:
                return run
        raise ClusterSpecError(
            f"cannot find rank {rank} in cluster '{self.name}': it has ranks 0 to "
            f"{self.num_devices - 1}"
        )

    def runs_between(self, first: int, last: int) -> tuple[int, ...]:
        """Numbers of the runs of equal devices of ranks `first` to `last` - 1."""
        found, begin = [], 0
        for number, run in enumerate(self.devices):
            if begin < last and begin + run.count > first:
                found.append(number)
            begin += run.count
        return tuple(found)

    def device(self, rank: int) -> Device:
        """The device of `rank`."""
        return self.run_of(rank).device

    def part(self, first_rank: int, count: int) -> Cluster:
        """`count` devices from `first_rank` on, as a cluster of their own.

        Whole units of a level keep the levels below it. Ranks that cut units in pieces are taken to
        be joined by the level that holds all of them alone: they may talk faster than that.

        Raises:
            ClusterSpecError: The cluster does not have these ranks.
        """
        last = first_rank + count
        if first_rank < 0 or count < 1 or last > self.num_devices:
            raise ClusterSpecError(
                f"cannot take {count} ranks from rank {first_rank} on of cluster '{self.name}': it "
                f"has ranks 0 to {self.num_devices - 1}; name ranks that are there"
            )
        ranks = f"ranks {first_rank} to {last - 1}" if count > 1 else f"rank {first_rank}"
        begins = [sum(run.count for run in self.devices[:n]) for n in range(len(self.devices))]
        return replace(
            self,
            name=f"{self.name}, {ranks}",
            devices=tuple(
                replace(run, count=min(last, begin + run.count) - max(first_rank, begin))
                for run, begin in zip(self.devices, begins, strict=True)
                if begin < last and begin + run.count > first_rank
            ),
            levels=self._levels_between(first_rank, last),
        )

    def _levels_between(self, first_rank: int, last: int) -> tuple[Level, ...]:
        """Levels of a cluster of ranks `first_rank` to `last` - 1."""
        inner: list[Level] = []
        below, count = 1, last - first_rank
        for level in self.levels:
            unit = below * level.size
            if first_rank // unit == (last - 1) // unit:
                if first_rank % below == 0 and count % below == 0:
                    return (*inner, replace(level, size=count // below))
                ports = below if level.ports is None else level.ports
                share = level.bandwidth_bytes_per_s * ports / below
                return (replace(level, size=count, ports=None, bandwidth_bytes_per_s=share),)
            inner.append(level)
            below = unit
        raise AssertionError(f"ranks {first_rank} to {last - 1} are not on one unit")

    def port_bytes_per_s(self, level: Level, first_rank: int, count: int) -> float:
        """Bandwidth of one port of `level`, one way: the slowest of the nodes of these ranks."""
        if level is not self.levels[0]:
            return level.bandwidth_bytes_per_s
        slowest, begin = math.inf, 0
        for run in self.devices:
            if begin < first_rank + count and begin + run.count > first_rank:
                own = run.node_bandwidth_bytes_per_s
                slowest = min(slowest, level.bandwidth_bytes_per_s if own is None else own)
            begin += run.count
        return slowest

    def usable_memory_bytes(self, rank: int) -> int:
        """What a plan may fill of the memory of `rank`, in bytes."""
        return int(self.device(rank).memory_bytes * self.usable_memory_fraction)

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Cluster:
        """A common machine, `nodes` times.

        Raises:
            ClusterSpecError: No such preset, or a node count it cannot have.
        """
        machine = presets.machine_named(name)
        levels = presets.levels_of(machine, nodes)
        count = math.prod(level.size for level in levels)
        run = Devices(device=device_named(machine.device), count=count)
        return cls(name=f"{name.lower()} x{nodes}", devices=(run,), levels=levels)

    @classmethod
    def local(cls, num_processes: int, *, memory_bytes: int | None = None) -> Cluster:
        """`num_processes` CPU processes of this machine, talking through gloo's loopback.

        They share the machine's memory and its loopback evenly, and its cores where there are
        fewer of those.

        Args:
            num_processes: Processes of one thread.
            memory_bytes: Of each; None: an even share of what the machine has.

        Raises:
            ClusterSpecError: `num_processes` is not at least 1.
        """
        level = presets.loopback(num_processes)
        core = device_named("cpu-core")
        share = min(1.0, (os.cpu_count() or 1) / num_processes)
        if memory_bytes is None:
            memory_bytes = _machine_memory_bytes() // num_processes
        device = replace(
            core,
            memory_bytes=memory_bytes,
            peak_flops_per_s={rate: peak * share for rate, peak in core.peak_flops_per_s.items()},
            memory_bytes_per_s=core.memory_bytes_per_s * share,
            host_link_bytes_per_s=core.host_link_bytes_per_s * share,
        )
        run = Devices(device=device, count=num_processes)
        return cls(name=f"local:{num_processes}", devices=(run,), levels=(level,))

    @classmethod
    def from_dict(cls, content: object) -> Cluster:
        """A cluster from the plain mapping that `to_dict` gives; schema in docs/cost.md.

        Raises:
            ClusterSpecError: A field is missing, unknown, of the wrong unit or contradictory.
        """
        parts = cluster_file.parse(content)
        fraction = parts.usable_memory_fraction
        return cls(
            name=parts.name,
            devices=parts.devices,
            levels=parts.levels,
            usable_memory_fraction=USABLE_MEMORY_FRACTION if fraction is None else fraction,
        )

    def to_dict(self) -> dict[str, Any]:
        """The cluster as plain lists, mappings, strings and numbers."""
        return {
            "name": self.name,
            "usable_memory_fraction": self.usable_memory_fraction,
            "devices": [cluster_file.devices_dict(run) for run in self.devices],
            "levels": [cluster_file.level_dict(level) for level in self.levels],
        }

    @classmethod
    def from_yaml(cls, text: str) -> Cluster:
        """A cluster from YAML text; schema in docs/cost.md.

        Raises:
            ClusterSpecError: The text is not YAML or not a cluster.
        """
        return cls.from_dict(cluster_file.load(text))

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal cluster."""
        return cluster_file.dump(self.to_dict())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """A cluster from a YAML file.

        Raises:
            ClusterSpecError: The file cannot be read or is not a cluster; the message names it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterSpecError(
                f"cannot read cluster file '{os.fspath(path)}': {error}; "
                "give the path of a YAML file"
            ) from error
        try:
            return cls.from_yaml(text)
        except ClusterSpecError as error:
            raise ClusterSpecError(f"in cluster file '{os.fspath(path)}': {error}") from error


def _machine_memory_bytes() -> int:
    """Memory of this machine, or 8 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 * GIB
