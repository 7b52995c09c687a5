"""Seconds of one kernel: a roofline whose roof depends on the size of the problem.

``launch + max(flops / (peak * best * f / (f + half)), bytes / (bandwidth * best * b / (b + half)))``
"""

from __future__ import annotations

from enum import StrEnum

from cost_models.records import DTYPE_NAMES, Device

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Kind(StrEnum):
    """What bounds a kernel and which efficiency curve it follows."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"


def op_s(device: Device, *, kind: str, flops: float, bytes_moved: float, dtype: str) -> float:
    """Seconds of one kernel, launch included.

    Args:
        device: Where it runs.
        kind: A `Kind`: ``matmul``, ``attention`` or ``memory`` (pointwise, reduction, copy).
        flops: Floating-point operations; ignored for ``memory``.
        bytes_moved: Bytes read and written in device memory.
        dtype: What it computes in, a rate or a tensor dtype; ignored for ``memory``.

    Raises:
        MissingRateError: The device has no rate for `dtype`.
    """
    seconds = memory_s(device, bytes_moved)
    match Kind(kind):
        case Kind.MATMUL:
            seconds = max(seconds, _matmul_flops_s(device, flops, dtype))
        case Kind.ATTENTION:
            peak = device.flops_per_s(dtype) * device.efficiency.attention_forward_best
            seconds = max(seconds, flops / peak)
        case Kind.MEMORY:
            pass
    return device.launch_s + seconds


def matmul_s(device: Device, m: int, n: int, k: int, batch: int, dtype: str) -> float:
    """Seconds of `batch` products ``[m, k] @ [k, n]`` in one kernel, launch included."""
    flops = 2.0 * batch * m * n * k
    element_bytes = DTYPE_BYTES[DTYPE_NAMES.get(dtype, dtype)]
    bytes_moved = float(element_bytes * batch * (m * k + k * n + m * n))
    return op_s(device, kind=Kind.MATMUL, flops=flops, bytes_moved=bytes_moved, dtype=dtype)


def attention_s(
    device: Device,
    *,
    flops: float,
    keys_per_query: float,
    head_dim: int,
    dtype: str,
    backward: bool,
) -> float:
    """Seconds of one fused attention kernel, launch included.

    Args:
        device: Where it runs.
        flops: 4 x queries x keys seen x head dim x heads x batch forward, 2.5 times that backward.
        keys_per_query: Keys that a query sees, on average; half of the sequence where causal.
        head_dim: Of one head.
        dtype: What it computes in.
        backward: The gradient kernel.
    """
    efficiency = device.efficiency
    best = efficiency.attention_backward_best if backward else efficiency.attention_forward_best
    reached = keys_per_query / (keys_per_query + efficiency.attention_half_length)
    head = min(1.0, head_dim / 128) ** 0.2
    return device.launch_s + flops / (device.flops_per_s(dtype) * best * reached * head)


def memory_s(device: Device, bytes_moved: float) -> float:
    """Seconds to move `bytes_moved` through device memory, without the launch."""
    efficiency = device.efficiency
    bandwidth = device.memory_bytes_per_s * efficiency.memory_best
    if bytes_moved == 0:
        return 0.0
    return (bytes_moved + efficiency.memory_half_bytes) / bandwidth


def _matmul_flops_s(device: Device, flops: float, dtype: str) -> float:
    if flops == 0:
        return 0.0
    efficiency = device.efficiency
    peak = device.flops_per_s(dtype) * efficiency.matmul_best
    return (flops + efficiency.matmul_half_flops) / peak
