"""Seconds of kernels that are cut into equal pieces: what no way to split an op goes below.

Of a kernel of a seconds of arithmetic and b of bytes, one of p equal pieces takes

    launch + max(a / p + a0, b / p + b0)

where a0 and b0 are what every kernel pays once, however small it is. A piece of a real split takes
no less: operands that a split leaves whole are read in every piece, shorter contracted lengths are
less efficient, and parts that are not equal have one that is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost.kernel import KernelSeconds, counts_flops, kernel_seconds
from autopar.ir.graph import TensorType
from cost_models.cluster import Device
from cost_models.errors import MissingRateError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, whole.

    Attributes:
        op: What it computes.
        operands: Types it reads; ``outputs`` those it writes.
        causal: Whether an attention's queries see the keys up to their own position only.
        flops: As its rule counts them.
        pieces: Most pieces that it can be cut into.
    """

    op: str
    operands: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    causal: bool
    flops: int
    pieces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastSeconds:
    """Many kernels on one device.

    Attributes:
        launch_s: Of each, once a piece.
        compute_s: Arithmetic of the whole; ``compute_once_s`` what every piece adds to its part.
        moved_s: The same of bytes; ``moved_once_s`` what every piece adds.
        pieces: Most pieces of each.
        flops: Of each that is priced by them; more pieces may count none. Infinite for the others.
    """

    launch_s: Floats
    compute_s: Floats
    compute_once_s: Floats
    moved_s: Floats
    moved_once_s: Floats
    pieces: Floats
    flops: Floats

    def of(self, pieces: int) -> Floats:
        """Least seconds of the longest of so many pieces, of every kernel."""
        cut = np.minimum(pieces, self.pieces)
        compute_s = (self.compute_s / cut + self.compute_once_s) * (pieces <= self.flops)
        moved_s = self.moved_s / cut + self.moved_once_s
        found: Floats = self.launch_s + np.maximum(compute_s, moved_s)
        return found

    def parts_of(self, ranks: int) -> Floats:
        """Least seconds of all parts of every kernel together, however so many ranks share it."""
        rounded_s = self.compute_s * (ranks / self.flops)
        found: Floats = np.maximum(self.compute_s - rounded_s, self.moved_s)
        return found


def least_seconds(device: Device, kernels: Sequence[Kernel]) -> LeastSeconds:
    """Prices kernels in pieces; what the device has no rate for takes for ever."""
    parts = _parts(device)
    found = np.array([parts(kernel) for kernel in kernels]).reshape(len(kernels), 5).T
    counted = [counts_flops(kernel.op) and kernel.flops > 0 for kernel in kernels]
    launch_s, compute_s, compute_once_s, moved_s, moved_once_s = found
    return LeastSeconds(
        launch_s=launch_s,
        compute_s=compute_s,
        compute_once_s=compute_once_s,
        moved_s=moved_s,
        moved_once_s=moved_once_s,
        pieces=np.array(
            [
                # A rank counts its share of FLOPs, though it may hold a larger piece.
                math.inf if by_flops else max(1, kernel.pieces)
                for kernel, by_flops in zip(kernels, counted, strict=True)
            ]
        ),
        flops=np.array(
            [
                float(kernel.flops) if by_flops else math.inf
                for kernel, by_flops in zip(kernels, counted, strict=True)
            ]
        ),
    )


_ENDLESS = 1e300
"""A rate at which nothing takes time."""

_LACKING_S = 1e30
"""Seconds of what a device cannot compute."""


def _parts(device: Device) -> Callable[[Kernel], tuple[float, ...]]:
    """Launch, arithmetic, bytes, and what a piece adds to either, by pricing devices without."""
    bare = replace(device, launch_s=0.0)
    endless = dict.fromkeys(device.peak_flops_per_s, _ENDLESS)
    computes = replace(bare, memory_bytes_per_s=_ENDLESS)
    moves = replace(bare, peak_flops_per_s=endless)
    whole_s, compute_s, moved_s = map(kernel_seconds, (device, computes, moves))
    compute_linear_s, moved_linear_s = (kernel_seconds(_linear(own)) for own in (computes, moves))

    def parts(kernel: Kernel) -> tuple[float, ...]:
        def priced(seconds: KernelSeconds) -> float:
            return seconds(kernel.op, kernel.operands, kernel.outputs, kernel.causal, kernel.flops)

        try:
            launch_s = device.launch_s if priced(whole_s) else 0.0
            linear_s, moved = priced(compute_linear_s), priced(moved_linear_s)
            once_s = priced(compute_s) - linear_s
            if counts_flops(kernel.op) and kernel.flops:
                # A rank's share is rounded down to whole operations.
                once_s -= linear_s / kernel.flops
            return launch_s, linear_s, once_s, moved, priced(moved_s) - moved
        except MissingRateError:
            return 0.0, _LACKING_S, 0.0, 0.0, 0.0

    return parts


def _linear(device: Device) -> Device:
    """The device on which half of the work takes half as long."""
    efficiency = replace(device.efficiency, matmul_half_flops=0.0, memory_half_bytes=0.0)
    return replace(device, efficiency=efficiency)
