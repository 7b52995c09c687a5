"""Seconds of a collective over one mesh axis.

An axis crosses one or more levels of the network; `axis_link` finds out which. The part of it that
crosses one level is a *hop*. Algorithms keep all hops busy at once, so the slowest hop's bytes set
the time and the latencies of all hops add up (the model of multi-dimensional collectives of LIBRA,
Won et al., ISPASS 2024).

With x the bytes a rank sends on a hop of r ranks, bandwidth w and latency a:

====================  ==========================================  =======================
ring gather, scatter  x = (r - 1)/r B                             (r - 1) a
ring all-reduce       x = 2 (r - 1)/r B                           2 (r - 1) a
tree all-reduce       x = 2 B                                     2 ceil(log2 r) a
in-switch all-reduce  B / in-switch bandwidth                     2 a
all-to-all            x = (ranks here - ranks inside)/ranks B     a + peers x message time
broadcast             x = B                                       ceil(log2 r) a
====================  ==========================================  =======================

B shrinks by the ranks of each hop on the way out: a hop has scattered it before the next begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from cost_models.cluster import Cluster
from cost_models.errors import ClusterSpecError, near_misses
from cost_models.records import Level, Transport

PROTOCOL_SHARE = 1.5
"""Extra bytes, for each byte of a short message, of the low-latency protocols.

They carry a flag with every word, so that they reach about 0.4 of the bandwidth of the protocol for
long messages, which pays `Level.half_bandwidth_bytes` once instead. Fitted on 2026-11-30 to the
all-reduces of 2 nodes in the nccl-tests table of AWS's distributed training samples.
"""

MESSAGE_S = 6e-6
"""Seconds a rank takes for each peer of an all-to-all, beside the bytes.

A published fit for 8 H100 on NVLink has 50 us beside the bytes: 7 peers, setup and latency.
"""


class Collective(StrEnum):
    """What the ranks of one axis do together."""

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
        level: The level; its fields hold for the hop too.
        ranks: Of the axis, joined here once those that the levels below join count as one.
        bandwidth_bytes_per_s: One way, of each rank of the axis, while every group of the axis uses
            the level.
        is_innermost: Whether the level is the cluster's first: it joins devices of one node.
    """

    level: Level
    ranks: int
    bandwidth_bytes_per_s: float
    is_innermost: bool = False

    def wire_s(self, sent_bytes: float, *, is_ring: bool = True) -> float:
        """Seconds in which the hop carries what each of its ranks sends.

        Rings of few ranks use few paths; trees and chains are not known to differ by ranks.
        """
        few_paths = 1 + self.level.small_group_ranks / self.ranks if is_ring else 1.0
        return sent_bytes * few_paths / self.bandwidth_bytes_per_s

    def fill_s(self, sent_bytes: float) -> float:
        """Seconds until the hop runs at its full bandwidth."""
        half_bytes = min(self.level.half_bandwidth_bytes, PROTOCOL_SHARE * sent_bytes)
        return half_bytes / self.bandwidth_bytes_per_s


class Stay(NamedTuple):
    """What one hop adds to a collective.

    Attributes:
        latency_s: Messages and filling, which the hops of an axis pay one after the other.
        wire_s: Carrying bytes, which they do at the same time.
    """

    latency_s: float
    wire_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLink:
    """One mesh axis on the network.

    Attributes:
        ranks: Of the axis.
        hops: The levels it crosses, innermost first; none for one rank.
        sharing: Groups of the axis that leave one unit of the outermost hop at the same time.
    """

    ranks: int
    hops: tuple[Hop, ...]
    sharing: int = 1

    @property
    def latency_s(self) -> float:
        """Of one message on the slowest hop; 0 for one rank."""
        return max((hop.level.latency_s for hop in self.hops), default=0.0)

    @property
    def setup_s(self) -> float:
        """Of starting one collective; 0 for one rank."""
        return max((hop.level.setup_s for hop in self.hops), default=0.0)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """One way, of each rank, on the slowest hop; infinite for one rank."""
        return min((hop.bandwidth_bytes_per_s for hop in self.hops), default=math.inf)

    def parts(self) -> Iterator[tuple[int, Hop]]:
        """Each hop, with the number of parts that the hops inside it cut a tensor into."""
        held = 1
        for hop in self.hops:
            yield held, hop
            held *= hop.ranks


def axis_link(
    cluster: Cluster, mesh_sizes: tuple[int, ...], axis: int, first_rank: int = 0
) -> AxisLink:
    """How axis number `axis` of a mesh lies on the network.

    The mesh is row-major over the ranks from `first_rank` on, its last axis fastest: the axis joins
    ranks a stride apart, the stride being the product of the later sizes.

    Args:
        cluster: Devices and levels.
        mesh_sizes: Of every axis of the mesh.
        axis: Index into `mesh_sizes`.
        first_rank: Where a mesh that covers a part of the cluster begins.

    Raises:
        ClusterSpecError: The mesh does not fit into the cluster.
    """
    total = math.prod(mesh_sizes)
    if min(mesh_sizes) < 1 or first_rank < 0 or first_rank + total > cluster.num_devices:
        raise ClusterSpecError(
            f"cannot lay a mesh of {' x '.join(map(str, mesh_sizes))} from rank {first_rank} on "
            f"cluster '{cluster.name}': it has {cluster.num_devices} devices; use a smaller mesh"
        )
    size, stride = mesh_sizes[axis], math.prod(mesh_sizes[axis + 1 :])
    hops: list[Hop] = []
    sharing, inside, unit = 1, 1, 1
    for level in cluster.levels:
        outside = min(size, max(1, unit * level.size // stride))
        if outside > inside:
            bandwidth = cluster.port_bytes_per_s(level, first_rank, total)
            hop = _hop(level, -(-outside // inside), unit, bandwidth)
            hops.append(replace(hop, is_innermost=level is cluster.levels[0]))
            sharing = max(1, min(unit, total) // inside)
            inside = outside
        unit *= level.size
    return AxisLink(ranks=size, hops=tuple(hops), sharing=sharing)


def pair_link(cluster: Cluster, first: int, second: int) -> AxisLink:
    """What joins two ranks, while all ranks of their nodes send alike; no hop for one rank."""
    unit = 1
    for level in cluster.levels:
        below, unit = unit, unit * level.size
        if first != second and first // unit == second // unit:
            ends = [cluster.port_bytes_per_s(level, rank, 1) for rank in (first, second)]
            hop = _hop(level, 2, below, min(ends))
            return AxisLink(ranks=2, hops=(replace(hop, is_innermost=below == 1),))
    return AxisLink(ranks=1, hops=())


def _hop(level: Level, ranks: int, devices_below: int, port_bytes_per_s: float) -> Hop:
    """The hop of an axis on `level`: each device below has an even share of the unit's ports."""
    ports = devices_below if level.ports is None else level.ports
    share = port_bytes_per_s * ports / devices_below / level.oversubscription
    if level.flow_bytes_per_s is not None:
        share = min(share, level.flows * level.flow_bytes_per_s)
    return Hop(
        level=level,
        ranks=ranks,
        bandwidth_bytes_per_s=share,
    )


def collective_s(kind: str, tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds of one collective.

    Args:
        kind: A `Collective`.
        tensor_bytes: Of the full tensor: what an all-gather results in, what a reduce-scatter,
            all-reduce, broadcast or send starts from, what each rank holds in an all-to-all.
        axis: The axis; with one rank, nothing is paid.

    Raises:
        ClusterSpecError: No such collective.
    """
    price = _PRICES.get(kind)
    if price is None:
        raise ClusterSpecError(f"cannot price collective '{kind}': {near_misses(kind, _PRICES)}")
    if axis.ranks == 1 or tensor_bytes == 0:
        return 0.0
    return axis.setup_s + price(tensor_bytes, axis)


def all_reduce_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds, setup apart, to sum a tensor over an axis by the quickest algorithm."""
    rings = [_ring_all_reduce(tensor_bytes / held, hop) for held, hop in axis.parts()]
    quick = [_quick_all_reduce(tensor_bytes / held, hop) for held, hop in axis.parts()]
    choices = [rings, quick]
    if len(rings) > 1:
        choices += [rings[:1] + quick[1:], quick[:1] + rings[1:]]
    return min(map(_pipelined_s, choices))


def _pipelined_s(stays: list[Stay]) -> float:
    """Seconds of hops that all carry bytes at once, after each has begun."""
    if len(stays) == 1:
        return stays[0].latency_s + stays[0].wire_s
    return sum(stay.latency_s for stay in stays) + max(stay.wire_s for stay in stays)


def _stay(hop: Hop, messages: float, sent_bytes: float, *, is_ring: bool = True) -> Stay:
    """What a hop adds when each rank sends `sent_bytes` in so many messages in a row."""
    return Stay(
        latency_s=messages * hop.level.latency_s + hop.fill_s(sent_bytes),
        wire_s=hop.wire_s(sent_bytes, is_ring=is_ring),
    )


def _ring_all_reduce(tensor_bytes: float, hop: Hop) -> Stay:
    """A ring on one hop: 2 (r - 1) rounds, in each of which a rank sends 1/r of the tensor.

    Source:
        Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009.
    """
    rounds = 2 * (hop.ranks - 1)
    return _stay(hop, rounds, rounds / hop.ranks * tensor_bytes)


def _quick_all_reduce(tensor_bytes: float, hop: Hop) -> Stay:
    """What may be quicker than a ring on one hop.

    Inside a node that is a sum in the switch; between nodes two binary trees, each of which carries
    half of the tensor up and down (Sanders, Speck and Traeff, Parallel Computing 35(12), 2009).
    """
    level = hop.level
    if level.in_switch_bytes_per_s is not None:
        wire_s = tensor_bytes / level.in_switch_bytes_per_s
        sent_bytes = wire_s * hop.bandwidth_bytes_per_s
        latency_s = 2 * (hop.ranks - 1) * level.latency_s + hop.fill_s(sent_bytes)
        return Stay(latency_s=latency_s, wire_s=wire_s)
    if hop.is_innermost or level.transport == Transport.GLOO:
        return _ring_all_reduce(tensor_bytes, hop)
    rounds = 2 * math.ceil(math.log2(hop.ranks))
    return _stay(hop, rounds, 2 * tensor_bytes, is_ring=False)


def all_gather_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds, setup apart, until every rank has a tensor of which each rank holds a part."""
    stays = [
        _stay(hop, hop.ranks - 1, (hop.ranks - 1) / hop.ranks * tensor_bytes / held)
        for held, hop in axis.parts()
    ]
    return _pipelined_s(stays) + _staging_s(tensor_bytes, axis)


def reduce_scatter_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds, setup apart, until every rank has its part of the sum of the ranks' tensors.

    gloo reduces the whole tensor everywhere and keeps a part.
    """
    if any(hop.level.transport == Transport.GLOO for hop in axis.hops):
        return all_reduce_s(tensor_bytes, axis) + _staging_s(tensor_bytes, axis)
    return all_gather_s(tensor_bytes, axis)


def all_to_all_s(rank_bytes: float, axis: AxisLink) -> float:
    """Seconds, setup apart, in which every rank sends each other rank an equal part of its bytes.

    What goes to a rank crosses the outermost hop between the two only.
    """
    stays, reached = [], 1
    for hop in axis.hops:
        here = min(axis.ranks, reached * hop.ranks)
        peers = here - reached
        stay = _stay(hop, 1, rank_bytes * peers / axis.ranks)
        stays.append(Stay(latency_s=stay.latency_s + peers * MESSAGE_S, wire_s=stay.wire_s))
        reached = here
    return _pipelined_s(stays)


def broadcast_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds, setup apart, until every rank of an axis has one rank's tensor."""
    return _pipelined_s(
        [
            _stay(hop, math.ceil(math.log2(hop.ranks)), tensor_bytes / held, is_ring=False)
            for held, hop in axis.parts()
        ]
    )


def send_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds, setup apart, to send a tensor to a neighbour on the axis, over its slowest hop."""
    return max(
        hop.level.latency_s + hop.fill_s(tensor_bytes) + hop.wire_s(tensor_bytes, is_ring=False)
        for hop in axis.hops
    )


def _staging_s(tensor_bytes: float, axis: AxisLink) -> float:
    """Seconds of the library's own copy of a gathered or scattered tensor."""
    return max(
        tensor_bytes / hop.level.staging_bytes_per_s
        if hop.level.staging_bytes_per_s is not None
        else 0.0
        for hop in axis.hops
    )


_PRICES: Mapping[str, Callable[[float, AxisLink], float]] = {
    Collective.ALL_REDUCE: all_reduce_s,
    Collective.ALL_GATHER: all_gather_s,
    Collective.REDUCE_SCATTER: reduce_scatter_s,
    Collective.ALL_TO_ALL: all_to_all_s,
    Collective.BROADCAST: broadcast_s,
    Collective.SEND: send_s,
}
