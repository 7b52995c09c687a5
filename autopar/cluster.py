"""`Cluster` as users meet it: the records of `cost_models`, with autopar's errors."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import ClusterError
from cost_models import presets
from cost_models.cluster import Cluster as _Cluster
from cost_models.errors import ClusterSpecError
from cost_models.records import Device, Devices


class Cluster(_Cluster):
    """Devices in levels of network; see `cost_models.cluster.Cluster`.

    Raises:
        ClusterError: The description is incomplete or contradicts itself.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        try:
            _Cluster.__post_init__(self)
        except ClusterSpecError as error:
            raise ClusterError(str(error)) from error

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Cluster:
        """A common machine, ``nodes`` times."""
        return _translated(lambda: _of(_Cluster.preset(name, nodes)))

    @classmethod
    def local(cls, num_processes: int, *, memory_bytes: int | None = None) -> Cluster:
        """CPU processes of this machine that talk through gloo."""
        return _translated(lambda: _of(_Cluster.local(num_processes, memory_bytes=memory_bytes)))

    @classmethod
    def detect(cls, *, device_type: str | None = None, unknown: str = "refuse") -> Cluster:
        """The cluster of the processes that ``torchrun`` started, or of this machine alone.

        Devices are found by their name and memory, nodes from ``WORLD_SIZE`` and
        ``LOCAL_WORLD_SIZE``; links are those of the usual machine with such devices, until
        ``autopar profile`` measures them. Every node is taken to be like this one; once the
        process group is initialized, ranks tell each other what they are.

        Args:
            device_type: ``cuda`` or ``cpu``; None for ``cuda`` where there is a device.
            unknown: What to do with a card that the device table lacks: ``refuse`` it, or let it
                pass for one to ``profile``.

        Raises:
            ClusterError: The environment contradicts itself or the devices, or a card is unknown.
        """
        cuda = torch.cuda.is_available() if device_type is None else device_type == "cuda"
        if cuda and not torch.cuda.is_available():
            raise ClusterError(
                "cannot detect a cluster of CUDA devices: torch sees none here; use "
                "Cluster.detect(device_type='cpu'), or describe them in a file"
            )
        found = torch.cuda.device_count() if cuda else 1
        world = _environment("WORLD_SIZE", None)
        per_node = _environment("LOCAL_WORLD_SIZE", world) or found
        world = world or per_node
        nodes, rest = divmod(world, per_node)
        if rest or not nodes:
            raise ClusterError(
                f"cannot detect the nodes: WORLD_SIZE is {world} and LOCAL_WORLD_SIZE {per_node}, "
                "which does not divide it; start as many processes on every node"
            )
        if cuda and per_node > found:
            raise ClusterError(
                f"cannot detect devices for {per_node} processes on this node: it has {found} CUDA "
                f"devices; start {found} with torchrun --nproc-per-node={found}"
            )
        return _translated(lambda: _detected(cuda, per_node, nodes, unknown))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """A cluster from a YAML file."""
        return _translated(lambda: _of(_Cluster.from_file(path)))

    @classmethod
    def from_yaml(cls, text: str) -> Cluster:
        """A cluster from YAML text."""
        return _translated(lambda: _of(_Cluster.from_yaml(text)))

    @classmethod
    def from_dict(cls, content: object) -> Cluster:
        """A cluster from plain lists, mappings, strings and numbers."""
        return _translated(lambda: _of(_Cluster.from_dict(content)))


def _environment(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ClusterError(
            f"cannot detect the cluster: {name} is {text!r} in the environment; start with torchrun"
        )
    return int(text)


def _detected(cuda: bool, per_node: int, nodes: int, unknown: str) -> Cluster:
    pcie = False
    if cuda:
        properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        name, memory_bytes = properties.name, properties.total_memory
        pcie = "PCIE" in name.upper()
        try:
            device = presets.device_of_card(name, memory_bytes)
        except ClusterSpecError:
            if unknown != "profile":
                raise
            device = presets.card_like(name, memory_bytes)
        levels = presets.found_levels(device.kind, per_node, nodes, pcie=pcie)
    else:
        device = _Cluster.local(per_node).device(0)
        levels = presets.found_processes(per_node, nodes)
    count = per_node * nodes
    named = f"local:{count}" if not cuda and nodes == 1 else f"{nodes} x {per_node} {device.kind}"
    return Cluster(name=named, devices=_everywhere(device, count), levels=levels)


def _everywhere(device: Device, count: int) -> tuple[Devices, ...]:
    """What every rank found, in rank order; this rank's device for all if they cannot be asked."""
    found: list[Any] = [device] * count
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == count > 1:
        dist.all_gather_object(found, device)
    runs = [(same, len(list(group))) for same, group in itertools.groupby(found)]
    return tuple(Devices(device=same, count=length) for same, length in runs)


def _of(made: Any) -> Cluster:
    return Cluster(
        name=made.name,
        devices=made.devices,
        levels=made.levels,
        usable_memory_fraction=made.usable_memory_fraction,
    )


def _translated(make: Any) -> Cluster:
    try:
        return make()  # type: ignore[no-any-return]
    except ClusterSpecError as error:
        raise ClusterError(str(error)) from error
