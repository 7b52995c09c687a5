"""Seconds of a collective over one mesh axis.

An axis crosses one or more levels of the network. On each level it crosses, some of its ranks form a
*hop*. Algorithms that keep every level busy at once are bound by the slowest hop's bytes, and pay
the latency of each (the model of multi-dimensional collectives of Rashidi et al., ISCA 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from cost_models.cluster import Cluster
from cost_models.errors import ClusterSpecError
from cost_models.records import Level


class Collective(StrEnum):
    """What ranks of one axis do together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The part of an axis that crosses one level.

    Attributes:
        level: Name of the level.
        ranks: Of the axis, joined by this level once those of the levels below count as one.
        latency_s: Of one message.
        bandwidth_bytes_per_s: One way, of each rank of the axis, with the groups that use the level
            at the same time.
        half_bandwidth_bytes: Bytes a rank sends at which half of the bandwidth is reached.
        in_switch_bytes_per_s: See `Level`; None where the switch does not sum.
    """

    level: str
    ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float
    half_bandwidth_bytes: float = 0.0
    in_switch_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLink:
    """One mesh axis on the network.

    Attributes:
        ranks: Of the axis.
        hops: The levels it crosses, innermost first; none for one rank.
        sharing: Groups of the axis that leave a node of the outermost hop at the same time.
    """

    ranks: int
    hops: tuple[Hop, ...]
    sharing: int = 1

    @property
    def latency_s(self) -> float:
        """Of one message on the slowest hop; 0 for one rank."""
        return max((hop.latency_s for hop in self.hops), default=0.0)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """One way, of each rank, on the slowest hop; infinite for one rank."""
        return min((hop.bandwidth_bytes_per_s for hop in self.hops), default=math.inf)


def axis_link(
    cluster: Cluster, mesh_sizes: tuple[int, ...], axis: int, first_rank: int = 0
) -> AxisLink:
    """How axis number `axis` of a mesh lies on the network.

    The mesh is row-major over ranks from `first_rank` on, its last axis fastest: the axis joins
    ranks a stride apart, the stride being the product of the later sizes.

    Args:
        cluster: Devices and levels.
        mesh_sizes: Of every axis of the mesh.
        axis: Index into `mesh_sizes`.
        first_rank: Where a mesh that covers a part of the cluster begins.

    Raises:
        ClusterSpecError: The mesh does not fit into the cluster.
    """
    size = mesh_sizes[axis]
    stride = math.prod(mesh_sizes[axis + 1 :])
    total = math.prod(mesh_sizes)
    if min(mesh_sizes) < 1 or first_rank < 0 or first_rank + total > cluster.num_devices:
        raise ClusterSpecError(
            f"cannot lay a mesh of {' x '.join(map(str, mesh_sizes))} from rank {first_rank} on "
            f"cluster '{cluster.name}': it has {cluster.num_devices} devices; use a smaller mesh"
        )
    hops: list[Hop] = []
    sharing = 1
    inside, unit = 1, 1
    for level in cluster.levels:
        outside = min(size, max(1, unit * level.size // stride))
        if outside > inside:
            ranks = -(-outside // inside)
            hops.append(_hop(level, ranks, unit, slowest_s=None))
            sharing = max(1, min(unit, total) // inside)
            inside = outside
        unit *= level.size
    return AxisLink(ranks=size, hops=tuple(hops), sharing=sharing)


def _hop(level: Level, ranks: int, devices_below: int, slowest_s: float | None) -> Hop:
    """The hop of an axis on `level`, with an even share of the ports of a unit below it."""
    ports = devices_below if level.ports is None else level.ports
    share = level.bandwidth_bytes_per_s * ports / devices_below / level.oversubscription
    if level.flow_bytes_per_s is not None:
        share = min(share, level.flows * level.flow_bytes_per_s)
    return Hop(
        level=level.name,
        ranks=ranks,
        latency_s=level.latency_s,
        bandwidth_bytes_per_s=share,
        half_bandwidth_bytes=level.half_bandwidth_bytes,
        in_switch_bytes_per_s=level.in_switch_bytes_per_s,
    )


def collective_s(kind: str, tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds of one collective.

    Args:
        kind: A `Collective`.
        tensor_bytes: Of the full tensor: what an all-gather results in, what a reduce-scatter,
            all-reduce, broadcast or send starts from, what each rank holds in an all-to-all.
        axis: The axis; of one rank, nothing is paid.
    """
    if axis.ranks == 1 or tensor_bytes == 0:
        return 0.0
    match Collective(kind):
        case Collective.ALL_REDUCE:
            return all_reduce_s(tensor_bytes, axis)
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return gather_s(tensor_bytes, axis)
        case Collective.ALL_TO_ALL:
            return all_to_all_s(tensor_bytes, axis)
        case Collective.BROADCAST:
            return broadcast_s(tensor_bytes, axis)
        case Collective.SEND:
            return send_s(tensor_bytes, axis)


def all_reduce_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds to sum a tensor over the ranks of an axis, by the quickest algorithm."""
    ring = 2 * gather_s(tensor_bytes, axis)
    tree = sum(2 * hop.latency_s * math.ceil(math.log2(hop.ranks)) for hop in axis.hops) + max(
        2 * tensor_bytes / held / hop.bandwidth_bytes_per_s for held, hop in _held(axis)
    )
    return min(ring, tree)


def gather_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds to gather a tensor whose parts lie on the ranks of an axis, or to reduce and scatter."""
    return sum((hop.ranks - 1) * hop.latency_s for hop in axis.hops) + max(
        (hop.ranks - 1) / hop.ranks * tensor_bytes / held / hop.bandwidth_bytes_per_s
        + hop.half_bandwidth_bytes / hop.bandwidth_bytes_per_s
        for held, hop in _held(axis)
    )


def all_to_all_s(rank_bytes: float, axis: AxisLink) -> float:
    """Seconds in which every rank sends an equal part of its `rank_bytes` to every other."""
    seconds = 0.0
    latency = 0.0
    reached = 1
    for hop in axis.hops:
        outside = reached * hop.ranks
        latency += (hop.ranks - 1) * hop.latency_s
        sent = rank_bytes * (outside - reached) / axis.ranks
        seconds = max(seconds, sent / hop.bandwidth_bytes_per_s)
        reached = outside
    return latency + seconds


def broadcast_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds until every rank of an axis has one rank's tensor."""
    return sum(hop.latency_s * math.ceil(math.log2(hop.ranks)) for hop in axis.hops) + max(
        tensor_bytes / hop.bandwidth_bytes_per_s for hop in axis.hops
    )


def send_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds to send a tensor from one rank of an axis to the next, over its slowest hop."""
    return max(
        hop.latency_s + (tensor_bytes + hop.half_bandwidth_bytes) / hop.bandwidth_bytes_per_s
        for hop in axis.hops
    )


def _held(axis: AxisLink) -> list[tuple[int, Hop]]:
    """Each hop with the number of parts that the hops inside it cut the tensor into."""
    pairs: list[tuple[int, Hop]] = []
    held = 1
    for hop in axis.hops:
        pairs.append((held, hop))
        held *= hop.ranks
    return pairs
