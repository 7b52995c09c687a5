"""Efficiencies and levels fitted to measured samples.

A fit changes the few named parameters of an `Efficiency` or a `Level` so that the mean of
``|log(predicted / measured)|`` over the samples is least, by coordinate descent on their
logarithms: no factor for a sample or a shape, the same result on every run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cost_models.cluster import Cluster
from cost_models.collectives import axis_link, collective_s
from cost_models.compute import Attention, attention_s, matmul_s, memory_s
from cost_models.errors import ClusterSpecError
from cost_models.records import DTYPE_NAMES, Device, Devices, Efficiency, Level, require_amount

ROUNDS = 60
"""Passes over all parameters; steps shrink by a quarter where a pass finds nothing better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSample:
    """One measured product.

    Attributes:
        m: Rows.
        n: Columns.
        k: Contracted length.
        batch: Products in the call.
        dtype: Rate or tensor dtype.
        seconds: Measured, launch included.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str
    seconds: float

    def predicted_s(self, device: Device) -> float:
        """What the cost model says."""
        return matmul_s(device, m=self.m, n=self.n, k=self.k, batch=self.batch, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """One measured fused attention.

    Attributes:
        shape: What it computed.
        dtype: Rate or tensor dtype.
        forward: Whether the forward was measured.
        backward: Whether the gradient was measured; with `forward`, their sum.
        seconds: Measured, launches included.
    """

    shape: Attention
    dtype: str
    forward: bool = True
    backward: bool = False
    seconds: float

    def predicted_s(self, device: Device) -> float:
        """What the cost model says."""
        seconds = 0.0
        if self.forward:
            seconds += attention_s(device, self.shape, dtype=self.dtype)
        if self.backward:
            seconds += attention_s(device, self.shape, dtype=self.dtype, backward=True)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """One measured kernel that only moves bytes.

    Attributes:
        bytes_moved: Read and written.
        seconds: Measured, launch included.
    """

    bytes_moved: float
    seconds: float

    def predicted_s(self, device: Device) -> float:
        """What the cost model says."""
        return device.launch_s + memory_s(device, self.bytes_moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One measured collective over the ranks of one axis.

    Attributes:
        kind: A `Collective`.
        tensor_bytes: As of `collective_s`.
        mesh_sizes: Of the mesh that was laid over the cluster from rank 0.
        axis: Of the mesh.
        seconds: Measured.
    """

    kind: str
    tensor_bytes: float
    mesh_sizes: tuple[int, ...]
    axis: int
    seconds: float

    def predicted_s(self, cluster: Cluster) -> float:
        """What the cost model says."""
        link = axis_link(cluster, self.mesh_sizes, self.axis)
        return collective_s(self.kind, self.tensor_bytes, link)


KernelSample = MatmulSample | AttentionSample | MemorySample


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How far predictions are from measurements.

    Attributes:
        num_samples: Compared.
        median_error: Median of ``|predicted / measured - 1|``.
        largest_error: Its maximum.
        bias: Mean of ``predicted / measured - 1``: above 0 predicts too slow.
    """

    num_samples: int
    median_error: float
    largest_error: float
    bias: float

    def text(self) -> str:
        """The accuracy on one line, in percent."""
        return (
            f"{self.num_samples} samples: median {self.median_error:.1%}, "
            f"largest {self.largest_error:.1%}, bias {self.bias:+.1%}"
        )


def accuracy(predicted_s: Sequence[float], measured_s: Sequence[float]) -> Accuracy:
    """How far each prediction is from its measurement.

    Raises:
        ClusterSpecError: There is nothing to compare.
    """
    if not measured_s:
        raise ClusterSpecError("cannot compare predictions: there are no samples; give at least 1")
    errors = [p / m - 1 for p, m in zip(predicted_s, measured_s, strict=True)]
    return Accuracy(
        num_samples=len(errors),
        median_error=statistics.median(map(abs, errors)),
        largest_error=max(map(abs, errors)),
        bias=statistics.fmean(errors),
    )


_MATMUL = ("matmul_half_flops", "matmul_half_k")
_BEST_AT = "matmul_best_at."
_ATTENTION = (
    "attention_forward_best",
    "attention_backward_best",
    "attention_half_keys",
    "attention_diagonal_keys",
    "attention_half_head_dim",
)
_MEMORY = ("memory_best", "memory_half_bytes")
_LEVEL = (
    "latency_s",
    "setup_s",
    "bandwidth_bytes_per_s",
    "half_bandwidth_bytes",
    "small_group_ranks",
)
_MOST = {
    "attention_forward_best": 1.0,
    "attention_backward_best": 1.0,
    "memory_best": 1.0,
    "small_group_ranks": 1.0,
}


def fit_efficiency(device: Device, samples: Sequence[KernelSample], *, source: str) -> Device:
    """The device with the efficiencies that fit its samples best.

    Parameters of kinds without samples stay. Each rate of the matmul samples gets its own best
    fraction, in `Efficiency.matmul_best_at`.

    Args:
        device: Whose peaks hold and whose efficiencies the search starts from.
        samples: Measured on it.
        source: Written into the efficiency: what was measured, on what, when.

    Raises:
        ClusterSpecError: No samples, or a sample that took no time.
    """

    def error(values: Mapping[str, float]) -> float:
        tried = replace(device, efficiency=_with_values(device.efficiency, values))
        return _mean_log_error(
            [sample.predicted_s(tried) for sample in samples],
            [sample.seconds for sample in samples],
        )

    _require_samples([sample.seconds for sample in samples])
    fitted = _with_values(device.efficiency, _descend(_start(device.efficiency, samples), error))
    return replace(device, efficiency=replace(fitted, source=source))


def _start(efficiency: Efficiency, samples: Sequence[KernelSample]) -> dict[str, float]:
    """The parameters that the samples can tell something about, and their values."""
    start: dict[str, float] = {}
    names: tuple[str, ...]
    for sample in samples:
        match sample:
            case MatmulSample():
                rate = DTYPE_NAMES.get(sample.dtype, sample.dtype)
                best = efficiency.matmul_best_at.get(rate, efficiency.matmul_best)
                start[_BEST_AT + rate] = best
                names = _MATMUL
            case AttentionSample():
                names = _ATTENTION
            case MemorySample():
                names = _MEMORY
        start |= {name: float(getattr(efficiency, name)) for name in names}
    return start


def _with_values(efficiency: Efficiency, values: Mapping[str, Any]) -> Efficiency:
    """The efficiency with some parameters replaced; those of a rate have its name behind a dot."""
    best_at = dict(efficiency.matmul_best_at)
    best_at |= {n.removeprefix(_BEST_AT): v for n, v in values.items() if n.startswith(_BEST_AT)}
    rest = {name: value for name, value in values.items() if not name.startswith(_BEST_AT)}
    return replace(efficiency, matmul_best_at=best_at, **rest)


def fit_level(
    cluster: Cluster, level_name: str, samples: Sequence[CollectiveSample], *, source: str
) -> Cluster:
    """The cluster whose level of that name fits the samples best.

    Args:
        cluster: Whose other levels hold and where the search starts.
        level_name: Level to fit; every sample's axis should cross it.
        samples: Measured on the cluster.
        source: Written into the level: what was measured, on what, when.

    Raises:
        ClusterSpecError: No such level, no samples, or a sample that took no time.
    """
    index = next((i for i, level in enumerate(cluster.levels) if level.name == level_name), None)
    if index is None:
        raise ClusterSpecError(
            f"cannot fit level '{level_name}' of cluster '{cluster.name}': its levels are "
            + ", ".join(level.name for level in cluster.levels)
        )
    position = index

    def with_level(level: Level) -> Cluster:
        levels = (*cluster.levels[:position], level, *cluster.levels[position + 1 :])
        return replace(cluster, levels=levels)

    def error(values: Mapping[str, Any]) -> float:
        tried = with_level(replace(cluster.levels[position], **values))
        return _mean_log_error(
            [sample.predicted_s(tried) for sample in samples],
            [sample.seconds for sample in samples],
        )

    names = [*_LEVEL]
    for optional in ("in_switch_bytes_per_s", "staging_bytes_per_s"):
        if getattr(cluster.levels[position], optional) is not None:
            names.append(optional)
    start = {name: float(getattr(cluster.levels[position], name)) for name in names}
    _require_samples([sample.seconds for sample in samples])
    fitted: dict[str, Any] = _descend(start, error)
    return with_level(replace(cluster.levels[position], **fitted, source=source))


def with_device(cluster: Cluster, device: Device) -> Cluster:
    """The cluster with every device of that kind replaced by a measured one."""
    runs: list[Devices] = [
        replace(run, device=device) if run.device.kind == device.kind else run
        for run in cluster.devices
    ]
    return replace(cluster, devices=tuple(runs))


def _require_samples(measured_s: Sequence[float]) -> None:
    if not measured_s:
        raise ClusterSpecError("cannot fit: there are no samples; measure at least one")
    for seconds in measured_s:
        require_amount("a sample", "seconds", seconds)


def _mean_log_error(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    return statistics.fmean(
        abs(math.log(p / m)) for p, m in zip(predicted_s, measured_s, strict=True)
    )


def _descend(
    start: Mapping[str, float], error: Callable[[Mapping[str, float]], float]
) -> dict[str, float]:
    """Values of least error near `start`: each in turn is multiplied by a step or divided by it.

    A value of 0 says that the effect is absent, and stays.
    """
    best = {name: value for name, value in start.items() if value > 0}
    least = error(best)
    step = math.log(2)
    for _ in range(ROUNDS):
        before = least
        for name in best:
            for factor in (math.exp(step), math.exp(-step)):
                most = 1.0 if name.startswith(_BEST_AT) else _MOST.get(name, math.inf)
                tried = best | {name: min(best[name] * factor, most)}
                if (tried_error := error(tried)) < least:
                    best, least = tried, tried_error
        if least >= before:
            step *= 0.75
    return best
