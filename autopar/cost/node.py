"""Seconds of one node under one strategy, and of a collective over a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.cost.reshard import CollectiveSeconds
from autopar.ir.graph import DTYPE_BYTES, Node, TensorType
from autopar.ir.sharding import Mesh, Sharding, Split, max_local_elements
from autopar.rules.notation import Rule
from cost_models.cluster import Cluster, Device
from cost_models.collectives import axis_link, collective_s
from cost_models.compute import op_s


def axis_seconds(cluster: Cluster, mesh: Mesh) -> CollectiveSeconds:
    """Seconds of a collective over an axis of this mesh on this cluster."""
    links = [axis_link(cluster, mesh.sizes, axis) for axis in range(len(mesh.sizes))]

    @lru_cache(maxsize=1 << 16)
    def seconds(kind: str, tensor_bytes: int, axis: int) -> float:
        if mesh.sizes[axis] == 1:
            return 0.0
        return collective_s(kind, tensor_bytes, links[axis])

    return seconds


def local_bytes(kind: TensorType, sharding: Sharding) -> int:
    """Bytes of the largest rank's piece."""
    return max_local_elements(kind.shape, sharding) * DTYPE_BYTES[kind.dtype]


def work_share(mesh: Mesh, shardings: Sequence[Sharding]) -> int:
    """Ranks among which a node's loop is divided: the axes that split any operand or output."""
    axes = {
        axis for sharding in shardings for axis, s in enumerate(sharding) if isinstance(s, Split)
    }
    return math.prod(mesh.sizes[axis] for axis in axes)


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Prices nodes on one device."""

    device: Device
    mesh: Mesh
    collective_s: CollectiveSeconds

    def seconds(
        self,
        node: Node,
        rule: Rule,
        operand_types: Sequence[TensorType],
        operands: Sequence[Sharding],
        outputs: Sequence[Sharding],
    ) -> float:
        """Seconds of the local kernel and of the collectives inside its expansion."""
        if rule.alias:
            return 0.0
        moved = sum(
            local_bytes(kind, sharding)
            for kind, sharding in zip(operand_types, operands, strict=True)
        ) + sum(
            local_bytes(kind, sharding)
            for kind, sharding in zip(node.outputs, outputs, strict=True)
        )
        share = work_share(self.mesh, (*operands, *outputs))
        flops = rule.flops / share
        kind = op_kind(node.op, rule)
        dtype = operand_types[0].dtype if operand_types else node.outputs[0].dtype
        total = op_s(self.device, kind=kind, flops=flops, bytes_moved=moved, dtype=dtype)
        return total + self._synced_s(rule, operands, share)

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


def op_kind(op: str, rule: Rule) -> str:
    """Roofline curve of an op: ``attention``, ``matmul`` or ``memory``."""
    if op.startswith("autopar.attention"):
        return "attention"
    return "matmul" if rule.flops else "memory"
