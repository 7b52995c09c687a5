"""Records of a machine: a device, how well its kernels do, a level of its network.

Defaults and tables live in `devices` and `presets`; a cluster file or a measured profile replaces
any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cost_models.errors import ClusterSpecError, MissingRateError

DTYPE_NAMES: Mapping[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
    "complex64": "fp32",
    "complex128": "fp64",
}
"""The rate that a dtype of a tensor computes at, where their names differ."""

RATES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
"""Every rate a device can have, widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of a device's peaks its kernels reach, as functions of problem size.

    `best` is the fraction of a peak that a huge problem reaches. A curve ``x / (x + half)`` takes
    it down for smaller ones, `half` being the size x at which half of it is left.

    Attributes:
        matmul_best: Fraction of the peak rate.
        matmul_best_at: The same by rate, where it differs from `matmul_best`.
        matmul_half_flops: FLOPs of one call: starting and draining the multiprocessors.
        matmul_half_k: Contracted length: the prologue and epilogue of an output tile.
        attention_forward_best: Fraction of the peak rate of a fused attention, head dim 128.
        attention_backward_best: The same of its gradient.
        attention_half_keys: Keys that a query sees, on average.
        attention_diagonal_keys: Keys a query that are computed only to be masked, on the blocks of
            a causal diagonal.
        attention_half_head_dim: Head dim, relative to 128.
        memory_best: Fraction of the memory bandwidth of a kernel that only moves bytes.
        memory_half_bytes: Bytes moved by one call.
        source: Where the numbers come from, and when they were fitted.
    """

    matmul_best: float
    matmul_best_at: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_half_flops: float
    matmul_half_k: float
    attention_forward_best: float
    attention_backward_best: float
    attention_half_keys: float
    attention_diagonal_keys: float
    attention_half_head_dim: float
    memory_best: float
    memory_half_bytes: float
    source: str

    def __post_init__(self) -> None:
        named = {
            "matmul_best": self.matmul_best,
            "attention_forward_best": self.attention_forward_best,
            "attention_backward_best": self.attention_backward_best,
            "memory_best": self.memory_best,
        } | {f"matmul_best_at.{rate}": best for rate, best in self.matmul_best_at.items()}
        for name, fraction in named.items():
            if not 0 < fraction <= 1:
                raise ClusterSpecError(
                    f"cannot use efficiency '{name}': {fraction} is not a fraction of peak; "
                    "give a number above 0 and at most 1"
                )
        for name in (
            "matmul_half_flops",
            "matmul_half_k",
            "attention_half_keys",
            "attention_diagonal_keys",
            "attention_half_head_dim",
            "memory_half_bytes",
        ):
            require_amount("efficiency", name, getattr(self, name), least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of a CPU.

    Attributes:
        kind: Name in the device table, or the user's own.
        peak_flops_per_s: Dense peak FLOP/s by rate, of `RATES`.
        memory_bytes: Memory of the device.
        memory_bytes_per_s: Peak bandwidth of that memory, reads and writes together.
        host_memory_bytes: This device's share of its machine's memory.
        host_link_bytes_per_s: To or from host memory, one way, achieved by large copies.
        launch_s: From the end of one kernel to the start of the next, in a full queue.
        host_op_s: Time of the host to issue one op of an eager program. A stretch of program takes
            at least this times its ops, however quick the device; 0 where the device is the host.
        unified_memory: Host memory *is* device memory, so offloading frees nothing.
        efficiency: How much of the peaks is reached.
        source: Where the peaks come from.
    """

    kind: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    host_memory_bytes: int
    host_link_bytes_per_s: float
    launch_s: float
    host_op_s: float
    efficiency: Efficiency
    unified_memory: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        where = f"device '{self.kind}'"
        if not self.peak_flops_per_s:
            raise ClusterSpecError(f"cannot use {where}: it has no peak rate; give at least one")
        for rate, flops_per_s in self.peak_flops_per_s.items():
            if rate not in RATES:
                raise ClusterSpecError(
                    f"cannot use {where}: '{rate}' is not a rate; known are {', '.join(RATES)}"
                )
            require_amount(where, f"peak_flops_per_s.{rate}", flops_per_s)
        for name in ("memory_bytes", "memory_bytes_per_s", "host_link_bytes_per_s"):
            require_amount(where, name, getattr(self, name))
        for name in ("host_memory_bytes", "launch_s", "host_op_s"):
            require_amount(where, name, getattr(self, name), least=0)

    def flops_per_s(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, a rate (``bf16``) or a tensor dtype (``bfloat16``).

        Raises:
            MissingRateError: The device cannot compute in it.
        """
        rate = DTYPE_NAMES.get(dtype, dtype)
        peak = self.peak_flops_per_s.get(rate)
        if peak is None:
            raise MissingRateError(
                f"cannot price '{dtype}' on device '{self.kind}': it has rates for "
                f"{', '.join(self.peak_flops_per_s)} only; compute in one of them, "
                f"or give the device a peak for '{rate}'"
            )
        return peak


class Transport(StrEnum):
    """The library that moves bytes on a level, which decides the algorithms."""

    NCCL = "nccl"
    GLOO = "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a network: what joins `size` units of the level below.

    A unit of the innermost level is a device; of the next, what the innermost joins (a node); and
    so on. Every unit has `ports` ports of `bandwidth_bytes_per_s` each onto the level.

    Attributes:
        name: ``node``, ``fabric``, ``wan`` ...
        size: Units joined.
        latency_s: Of one message between two units, with the software above it.
        setup_s: Of starting one collective that crosses the level.
        bandwidth_bytes_per_s: One way, of one port, achieved by large messages.
        ports: Ports of one unit; None gives every device its own.
        half_bandwidth_bytes: Bytes a rank sends at which half of the bandwidth is reached.
        small_group_ranks: Of a group of this many ranks, half of the bandwidth is reached: small
            groups use fewer paths.
        oversubscription: By what the ports together exceed what the level can carry.
        flow_bytes_per_s: Most that one connection carries (window over round trip); None: no cap.
        flows: Connections that a pair of ranks opens.
        in_switch_bytes_per_s: Tensor bytes a second of an all-reduce that the switch itself sums;
            None where it cannot.
        staging_bytes_per_s: Rate at which the library copies a tensor it gathers or scatters;
            None where it works in place.
        transport: The library.
        source: Where the numbers come from.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    setup_s: float = 0.0
    ports: int | None = None
    half_bandwidth_bytes: float = 0.0
    small_group_ranks: float = 0.0
    oversubscription: float = 1.0
    flow_bytes_per_s: float | None = None
    flows: int = 1
    in_switch_bytes_per_s: float | None = None
    staging_bytes_per_s: float | None = None
    transport: str = Transport.NCCL
    source: str = ""

    def __post_init__(self) -> None:
        where = f"level '{self.name}'"
        require_count(where, "size", self.size)
        require_count(where, "flows", self.flows)
        require_amount(where, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        for name in ("latency_s", "setup_s", "half_bandwidth_bytes", "small_group_ranks"):
            require_amount(where, name, getattr(self, name), least=0)
        if self.small_group_ranks > 1:
            raise ClusterSpecError(
                f"cannot use {where}: small_group_ranks is {self.small_group_ranks}; above 1 a "
                "larger group would be quicker than a smaller one"
            )
        if not (math.isfinite(self.oversubscription) and self.oversubscription >= 1):
            raise ClusterSpecError(
                f"cannot use {where}: oversubscription is {self.oversubscription}; "
                "give 1 for a full fabric, 2 where half of the ports' bandwidth is behind it"
            )
        if self.ports is not None:
            require_count(where, "ports", self.ports)
        for name in ("flow_bytes_per_s", "in_switch_bytes_per_s", "staging_bytes_per_s"):
            if getattr(self, name) is not None:
                require_amount(where, name, getattr(self, name))
        if self.transport not in tuple(Transport):
            raise ClusterSpecError(
                f"cannot use {where}: transport is {self.transport!r}; "
                f"known are {', '.join(Transport)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """A run of equal devices in rank order.

    Attributes:
        device: What each of them is.
        count: How many.
        node_bandwidth_bytes_per_s: One way on the innermost level, where it differs from the
            level's own; None: it does not.
    """

    device: Device
    count: int
    node_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        where = f"devices '{self.device.kind}'"
        require_count(where, "count", self.count)
        if self.node_bandwidth_bytes_per_s is not None:
            require_amount(where, "node_bandwidth_bytes_per_s", self.node_bandwidth_bytes_per_s)


def require_count(where: str, name: str, value: object) -> None:
    """Refuses what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterSpecError(
            f"cannot use {where}: {name} is {value!r}; give a whole number of at least 1"
        )


def require_amount(where: str, name: str, value: float, *, least: float | None = None) -> None:
    """Refuses what is not finite, not above 0, or, where `least` is given, below it."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if known and (value > 0 if least is None else value >= least):
        return
    wanted = "a finite number above 0" if least is None else f"a finite number of at least {least}"
    raise ClusterSpecError(f"cannot use {where}: {name} is {value}; give {wanted}")
