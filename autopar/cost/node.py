"""Seconds of one node under one strategy, and of a collective over a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.cost.kernel import (
    QUERIES,
    KernelSeconds,
    is_causal,
    kernel_seconds,
    late_kernels,
)
from autopar.cost.reshard import CollectiveSeconds, Step, copied_elements, repeats, step_s
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
    """The largest rank's piece: the one of the first rank, or of the largest share."""
    largest = tuple(
        axis.shares.index(max(axis.shares)) if isinstance(axis, Split) and axis.shares else 0
        for axis in sharding
    )
    return TensorType(local_shape(kind.shape, sharding, largest), kind.dtype)


def own_part(
    whole: int, mesh: Mesh, shardings: Sequence[Sharding], coordinates: Sequence[int]
) -> int:
    """A rank's part of what all ranks do of a node, of whose loop each runs its share.

    Args:
        whole: Operations, or bytes, of all.
        mesh: The mesh.
        shardings: Of its operands and outputs: the axes that split any divide the loop.
        coordinates: Of the rank.
    """
    shares: dict[int, tuple[int, ...]] = {}
    for sharding in shardings:
        for axis, split in enumerate(sharding):
            if type(split) is Split:
                shares[axis] = split.shares
    own = of = 1
    for axis, held in shares.items():
        own *= held[coordinates[axis]] if held else 1
        of *= sum(held) if held else mesh.sizes[axis]
    return whole * own // of


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
    fullest: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fullest", self.mesh.fullest)
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
        own = own_part(rule.flops, self.mesh, (*operands, *outputs), self.fullest)
        kernel_s = sum(
            self.kernel_s(node.op, read, writes, causal, own)
            for read, causal in _kernels(node, reads, writes)
        )
        times = repeats(self.mesh, *operands, *outputs)
        return (kernel_s + self._synced_s(rule, operands, outputs)) * times

    def step_s(self, kind: TensorType, step: Step) -> float:
        """Seconds of a change of sharding in all microbatches, and of the copies beside it."""
        seconds = step_s(kind, step, self.mesh, self.collective_s)
        copied = copied_elements(kind, step) if step.axis != self.mesh.time_axis else 0
        if not copied:
            return seconds
        moved = (TensorType((copied,), kind.dtype),)
        copied_s = self.kernel_s("aten.clone.default", moved, moved, False, 0)
        return seconds + copied_s * repeats(self.mesh, step.before)

    def _synced_s(
        self, rule: Rule, operands: Sequence[Sharding], outputs: Sequence[Sharding]
    ) -> float:
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
                    both = (*operands, *outputs)
                    own = own_part(rule.sync_bytes * ranks, self.mesh, both, self.fullest)
                    size = max(1, own)
                    total += self.collective_s("all_reduce", size, axis)
                    break
        return total


def _kernels(
    node: Node, reads: tuple[TensorType, ...], writes: Sequence[TensorType]
) -> Sequence[tuple[tuple[TensorType, ...], bool]]:
    """What a rank runs: (operands, causal); of split causal queries, the rank that sees most."""
    if not is_causal(node.op, node.args):
        return ((reads, False),)
    rows = node.outputs[0].shape[QUERIES]
    if writes[0].shape[QUERIES] == rows:
        return ((reads, True),)
    return late_kernels(node.op, reads, rows)
