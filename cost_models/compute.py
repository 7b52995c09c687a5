"""Seconds of one kernel: a roofline whose roofs depend on the size of the problem.

A kernel takes ``launch + max(compute, memory)``. With p the peak rate, w the memory bandwidth and
the fractions and sizes of `Efficiency`:

* memory: ``(bytes + half) / (w best)``
* matmul ``[m, k] @ [k, n]`` of f FLOPs: ``(f + half) / (p best) * (k + half_k) / k``
* attention of f FLOPs, q keys a query, head dim d: ``f / (p best)`` times ``(q + half) / q`` and
  ``(d + half_d) / d`` relative to d = 128
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cost_models.errors import ClusterSpecError
from cost_models.records import DTYPE_NAMES, Device

RATE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one element of an operand at each rate."""

BACKWARD_FLOPS = 2.5
"""FLOPs of a fused attention's gradient over those of its forward: five products for two.

Dao, FlashAttention-2, arXiv 2307.08691, 2023, section 4.1.
"""


class Kind(StrEnum):
    """What bounds a kernel and which efficiency curve it follows."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The shape of one fused attention.

    Attributes:
        batch: Sequences.
        heads: Query heads.
        queries: Of each head.
        keys: Of each head.
        head_dim: Of one head.
        causal: Whether a query sees the keys up to its own position only.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def keys_per_query(self) -> float:
        """Keys that a query sees, on average."""
        return self.keys / 2 if self.causal else float(self.keys)

    @property
    def forward_flops(self) -> float:
        """Of the two products of the forward; half where causal."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys_per_query * self.head_dim

    def bytes_moved(self, element_bytes: int, *, backward: bool) -> float:
        """Least bytes: queries, keys, values, output, and in the backward their gradients."""
        tensors = self.batch * self.heads * (2 * self.queries + 2 * self.keys) * self.head_dim
        return float(tensors * element_bytes * (2 if backward else 1))


def op_s(device: Device, *, kind: str, flops: float, bytes_moved: float, dtype: str) -> float:
    """Seconds of one kernel of which only work and bytes are known, launch included.

    The curves that need lengths (`matmul_s`, `attention_s`) take theirs as long.

    Args:
        device: Where it runs.
        kind: A `Kind`; ``memory`` is for whatever is bound by bytes: pointwise, reduction, copy.
        flops: Floating-point operations; ignored for ``memory``.
        bytes_moved: Bytes read and written in device memory.
        dtype: What it computes in, a rate or a tensor dtype; ignored for ``memory``.

    Raises:
        MissingRateError: The device has no rate for `dtype`.
        ClusterSpecError: No such kind.
    """
    match kind:
        case Kind.MATMUL:
            compute_s = _matmul_compute_s(device, flops, dtype)
        case Kind.ATTENTION:
            best = device.efficiency.attention_forward_best
            compute_s = flops / (device.flops_per_s(dtype) * best)
        case Kind.MEMORY:
            compute_s = 0.0
        case _:
            raise ClusterSpecError(
                f"cannot price an op of kind '{kind}'; known are {', '.join(Kind)}"
            )
    return device.launch_s + max(compute_s, memory_s(device, bytes_moved))


def matmul_s(device: Device, *, m: int, n: int, k: int, batch: int = 1, dtype: str) -> float:
    """Seconds of `batch` products ``[m, k] @ [k, n]`` in one kernel, launch included.

    Raises:
        MissingRateError: The device has no rate for `dtype`.
    """
    if min(m, n, k, batch) == 0:
        return 0.0
    compute_s = _matmul_compute_s(device, 2.0 * batch * m * n * k, dtype)
    compute_s *= (k + device.efficiency.matmul_half_k) / k
    moved = float(element_bytes(dtype) * batch * (m * k + k * n + m * n))
    return device.launch_s + max(compute_s, memory_s(device, moved))


def attention_s(device: Device, shape: Attention, *, dtype: str, backward: bool = False) -> float:
    """Seconds of one fused attention or its gradient, launch included.

    Raises:
        MissingRateError: The device has no rate for `dtype`.
    """
    if min(shape.batch, shape.heads, shape.queries, shape.keys, shape.head_dim) == 0:
        return 0.0
    efficiency = device.efficiency
    best = efficiency.attention_backward_best if backward else efficiency.attention_forward_best
    flops = shape.forward_flops * (BACKWARD_FLOPS if backward else 1.0)
    keys = shape.keys_per_query
    wasted = efficiency.attention_half_keys
    if shape.causal:
        wasted += efficiency.attention_diagonal_keys
    half_dim = efficiency.attention_half_head_dim
    narrow = (shape.head_dim + half_dim) / shape.head_dim / ((128 + half_dim) / 128)
    compute_s = flops / (device.flops_per_s(dtype) * best) * (keys + wasted) / keys
    moved = shape.bytes_moved(element_bytes(dtype), backward=backward)
    return device.launch_s + max(compute_s * max(1.0, narrow), memory_s(device, moved))


def memory_s(device: Device, bytes_moved: float) -> float:
    """Seconds to move `bytes_moved` through device memory, launch apart."""
    if bytes_moved == 0:
        return 0.0
    efficiency = device.efficiency
    bandwidth = device.memory_bytes_per_s * efficiency.memory_best
    return (bytes_moved + efficiency.memory_half_bytes) / bandwidth


def host_copy_s(device: Device, num_bytes: float) -> float:
    """Seconds to copy `num_bytes` to or from host memory; none where they are one memory."""
    if device.unified_memory or num_bytes == 0:
        return 0.0
    return device.launch_s + num_bytes / device.host_link_bytes_per_s


def element_bytes(dtype: str) -> int:
    """Bytes of one element in `dtype`, a rate or a tensor dtype.

    Raises:
        ClusterSpecError: It is neither.
    """
    size = RATE_BYTES.get(DTYPE_NAMES.get(dtype, dtype))
    if size is None:
        raise ClusterSpecError(f"cannot size '{dtype}': known rates are {', '.join(RATE_BYTES)}")
    return size


def _matmul_compute_s(device: Device, flops: float, dtype: str) -> float:
    """Seconds of the arithmetic of a product of long contracted length."""
    if flops == 0:
        return 0.0
    efficiency = device.efficiency
    rate = DTYPE_NAMES.get(dtype, dtype)
    best = efficiency.matmul_best_at.get(rate, efficiency.matmul_best)
    return (flops + efficiency.matmul_half_flops) / (device.flops_per_s(dtype) * best)
