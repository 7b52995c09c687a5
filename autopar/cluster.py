"""`Cluster` as users meet it: the records of `cost_models`, with autopar's errors."""

from __future__ import annotations

import os
from typing import Any

from autopar.errors import ClusterError
from cost_models.cluster import Cluster as _Cluster
from cost_models.errors import ClusterSpecError


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
