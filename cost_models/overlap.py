"""What hides behind computation, and how much both suffer while they share the device.

Kernels of a collective take multiprocessors and memory bandwidth from computation, copies take
memory bandwidth from both. Leaving that out costs over 15 % of accuracy (Miao et al., Galvatron,
VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.errors import ClusterSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Two streams that run at once: each takes this many times as long as alone.

    Attributes:
        first: Of the first named stream.
        second: Of the second.
        source: Where the factors come from.
    """

    first: float
    second: float
    source: str

    def __post_init__(self) -> None:
        if min(self.first, self.second) < 1:
            raise ClusterSpecError(
                f"cannot use slowdown {self.first}, {self.second}: sharing a device speeds nothing "
                "up; give factors of at least 1"
            )


_MIST = "measured by Mist (Zhu et al., EuroSys 2025), artifact"
AMPERE_COLLECTIVE = Slowdown(first=1.29, second=1.04, source=f"{_MIST}: A100, compute and NCCL")
VOLTA_COLLECTIVE = Slowdown(first=1.17, second=1.00, source=f"{_MIST}: V100, compute and NCCL")
COLLECTIVE_TO_DEVICE = Slowdown(
    first=1.55, second=1.10, source=f"{_MIST}: A100, NCCL and copies from the host"
)
BOTH_COPIES = Slowdown(
    first=1.52, second=1.27, source=f"{_MIST}: A100, copies from and to the host"
)
PCIE_COLLECTIVE_TO_DEVICE = Slowdown(
    first=1.00, second=2.14, source=f"{_MIST}: L4, NCCL over PCIe and copies from the host"
)
SHARED_CORE = Slowdown(
    first=2.0, second=2.0, source="a CPU core that computes and moves bytes does half of each"
)

NO_SLOWDOWN = Slowdown(
    first=1.0,
    second=1.0,
    source="a copy over the host link moves at most 2 % of what device memory does beside it",
)

COMPUTE_COLLECTIVE: Mapping[str, Slowdown] = {
    "V100-16GB": VOLTA_COLLECTIVE,
    "V100-32GB": VOLTA_COLLECTIVE,
    "TITAN-RTX": VOLTA_COLLECTIVE,
    "cpu-core": SHARED_CORE,
}
"""Computation and a collective, by kind of device; see `compute_collective`."""


def compute_collective(kind: str) -> Slowdown:
    """The slowdown of computation and a collective on a device; A100's where none was measured."""
    return COMPUTE_COLLECTIVE.get(kind, AMPERE_COLLECTIVE)


COMPUTE_COPY: Mapping[str, Slowdown] = {"cpu-core": SHARED_CORE}
"""Computation and copies to or from the host, by kind of device; see `compute_copy`."""


def compute_copy(kind: str) -> Slowdown:
    """The slowdown of computation and copies over the host link, which a device does by itself."""
    return COMPUTE_COPY.get(kind, NO_SLOWDOWN)


def both_copies(kind: str) -> Slowdown:
    """The slowdown of copies from the host (first) and to it (second); A100's for all devices.

    A CPU core, which copies by itself, has no second stream: each takes twice as long.
    """
    return SHARED_CORE if kind == "cpu-core" else BOTH_COPIES


def beside_s(slowdown: Slowdown) -> tuple[float, float]:
    """Seconds that one second of a stream adds to a longer one that it runs beside.

    Of the second stream to the first, and of the first to the second: with x and y seconds alone,
    both take ``max(x + a y, y + b x)``, as `together_s` says.
    """
    first, second = slowdown.first, slowdown.second
    return second * (1 - 1 / first), first * (1 - 1 / second)


def together_s(first_s: float, second_s: float, slowdown: Slowdown) -> float:
    """Seconds of two streams that start together, until both are done.

    Both are slowed until the shorter one ends; the rest of the other runs alone. Never more than
    one after the other: a scheduler that did worse would not overlap them.
    """
    first_end_s = first_s * slowdown.first
    second_end_s = second_s * slowdown.second
    if first_end_s <= second_end_s:
        shared_s = first_end_s
        rest_s = second_s - shared_s / slowdown.second
    else:
        shared_s = second_end_s
        rest_s = first_s - shared_s / slowdown.first
    return min(shared_s + rest_s, first_s + second_s)


def exposed_s(compute_s: float, hidden_s: float, slowdown: Slowdown) -> float:
    """Seconds that a stream adds to the computation it runs beside."""
    return together_s(compute_s, hidden_s, slowdown) - compute_s


def exposed_reduction_s(
    reduce_s: float, backward_s: float, earlier_s: float, num_buckets: int, slowdown: Slowdown
) -> float:
    """Seconds by which a stage's gradient reduction outlasts the step's computation.

    ``max(0, D - (1 - 1/buckets) b / a - earlier)``: all but the first bucket of the last backward
    is beside the reduction, which slows it by a; so are the last backwards of the earlier stages.
    Their whole time for one microbatch as slack, forward included, would be optimistic.

    Args:
        reduce_s: Seconds of the reduction alone, D.
        backward_s: Seconds of the stage's last backward, b.
        earlier_s: Seconds of the last backward of every earlier stage with its message.
        num_buckets: Buckets that the reduction is cut into.
        slowdown: Of computation and a collective.
    """
    ready_s = (1 - 1 / num_buckets) * backward_s / slowdown.first
    return max(0.0, reduce_s - ready_s - earlier_s)


def activation_offload_share(
    *, fraction: float, flops_per_s: float, host_bytes_per_s: float, hidden: int, seq: int
) -> float:
    """Share of a layer's computation that moving its activations to the host takes.

    ``0.94 rho R / (B h (1 + s / 6h))``: at most 1 means that it hides entirely.

    Args:
        fraction: Part of the activations that is moved, rho.
        flops_per_s: FLOP/s that the layer achieves, R.
        host_bytes_per_s: Of the host link, one way, B.
        hidden: Hidden size h of the layer.
        seq: Sequence length s.

    Source:
        34 s b h bytes of a layer, once out and once in, over its 72 b s h^2 (1 + s/6h) FLOPs.
    """
    work = host_bytes_per_s * hidden * (1 + seq / (6 * hidden))
    return 0.94 * fraction * flops_per_s / work
