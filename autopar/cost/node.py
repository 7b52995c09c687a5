"""Seconds of one node under one strategy, and of a collective over a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.cost.kernel import KernelSeconds, is_causal, kernel_seconds
from autopar.cost.reshard import CollectiveSeconds, repeats
from autopar.ir.graph import DTYPE_BYTES, Node, TensorType
from autopar.ir.sharding import Mesh, Sharding, Split, local_shape, max_local_elements
from autopar.rules.notation import Rule
from cost_models.cluster import Cluster, Device
from cost_models.collectives import axis_link, collective_s


def axis_seconds(cluster: Cluster, mesh: Mesh, first_rank: int = 0) -> CollectiveSeconds:
    """Seconds of a collective over an axis of a mesh that begins at this rank of a cluster."""
    sizes = mesh.space.sizes
    links = [axis_link(cluster, sizes, axis, first_rank) for axis in range(len(sizes))]

    @lru_cache(maxsize=1 << 16)
    def seconds(kind: str, tensor_bytes: int, axis: int) -> float:
        if mesh.sizes[axis] == 1:
            return 0.0
        if axis == mesh.time_axis:
            return float("inf")
        return collective_s(kind, tensor_bytes, links[axis])

    return seconds


def local_bytes(kind: TensorType, sharding: Sharding) -> int:
    """Bytes of the largest rank's piece."""
    return max_local_elements(kind.shape, sharding) * DTYPE_BYTES[kind.dtype]


@lru_cache(maxsize=1 << 17)
def local_type(kind: TensorType, sharding: Sharding) -> TensorType:
    """The largest rank's piece: the one of the rank with all coordinates 0."""
    return TensorType(local_shape(kind.shape, sharding, (0,) * len(sharding)), kind.dtype)


def work_share(mesh: Mesh, shardings: Sequence[Sharding]) -> int:
    """Ranks among which a node's loop is divided: the axes that split any operand or output."""
    axes = {
        axis for sharding in shardings for axis, s in enumerate(sharding) if isinstance(s, Split)
    }
    return math.prod(mesh.sizes[axis] for axis in axes)


def update_bytes_per_s(device: Device) -> float:
    """Rate at which an optimizer's update reads and writes: that of any kernel that moves bytes."""
    return device.memory_bytes_per_s * device.efficiency.memory_best


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Prices nodes on one device."""

    device: Device
    mesh: Mesh
    collective_s: CollectiveSeconds
    kernel_s: KernelSeconds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel_s", kernel_seconds(self.device))

    def seconds(
        self,
        node: Node,
        rule: Rule,
        operand_types: Sequence[TensorType],
        operands: Sequence[Sharding],
        outputs: Sequence[Sharding],
    ) -> float:
        """Seconds of the local kernel and of the collectives inside its expansion.

        That the host may be slower to issue it than the device to run it is left to the simulator:
        the host works ahead, so no single node can tell.
        """
        if rule.alias or rule.view:
            return 0.0
        reads = tuple(map(local_type, operand_types, operands))
        writes = tuple(map(local_type, node.outputs, outputs))
        share = work_share(self.mesh, (*operands, *outputs))
        causal = is_causal(node.op, node.args)
        kernel_s = self.kernel_s(node.op, reads, writes, causal, rule.flops // share)
        times = repeats(self.mesh, *operands, *outputs)
        return (kernel_s + self._synced_s(rule, operands, share)) * times

    def _synced_s(self, rule: Rule, operands: Sequence[Sharding], share: int) -> float:
        if not rule.synced:
            return 0.0
        total = 0.0
        for axis, ranks in enumerate(self.mesh.sizes):
            for dims, sharding in zip(rule.operands, operands, strict=True):
                split = sharding[axis]
                if not isinstance(split, Split):
                    continue
                found = rule.factor_of(dims, split, ranks)
                if found is not None and found[0] in rule.synced:
                    size = max(1, rule.sync_bytes * ranks // share)
                    total += self.collective_s("all_reduce", size, axis)
                    break
        return total
