"""Measure the machine this runs on, and fit a cluster file to it.

Every process measures at the same time, as it would train: matmuls, fused attention, kernels that
move bytes, copies to the host, and collectives over the groups of every level of the network. What
rank 0 found (of collectives: the slowest rank) is fitted by `cost_models.calibration`.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group, RenderableType
from rich.text import Text
from torch.nn.functional import scaled_dot_product_attention

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.plan.text import add_row, section, table
from autopar.plan.wording import seconds_text
from autopar.spawn import Event, Job, run_workers, work
from cost_models.calibration import (
    Accuracy,
    AttentionSample,
    CollectiveSample,
    KernelSample,
    MatmulSample,
    MemorySample,
    accuracy,
    fit_efficiency,
    fit_level,
    with_device,
)
from cost_models.collectives import Collective
from cost_models.compute import Attention
from cost_models.presets import is_known_card
from cost_models.records import Device
from cost_models.units import MIB

RATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What products are measured in."""

KERNEL_S = 0.25
"""Most seconds that one kernel or collective is repeated for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What to measure.

    Attributes:
        matmuls: Rows, columns and contracted length.
        attentions: Batch, heads, tokens and head dim of a causal one.
        attention_dtype: Of those.
        moved_bytes: Of one operand of a kernel that moves bytes.
        host_bytes: Of a copy to the host and back; 0 where there is none.
        tensor_bytes: Of the tensor of a collective.
    """

    matmuls: tuple[tuple[int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    attention_dtype: str
    moved_bytes: tuple[int, ...]
    host_bytes: int
    tensor_bytes: tuple[int, ...]


ON_CPU = Sizes(
    matmuls=(
        (64, 64, 64),
        (128, 128, 128),
        (256, 256, 256),
        (512, 512, 512),
        (1024, 1024, 512),
        (128, 1024, 256),
        (512, 512, 64),
        (64, 512, 2048),
    ),
    attentions=((1, 4, 128, 64), (1, 4, 256, 64), (2, 4, 512, 64), (1, 2, 512, 128)),
    attention_dtype="fp32",
    moved_bytes=(2**20, 2**22, 2**24, 2**25),
    host_bytes=0,
    tensor_bytes=(2**12, 2**16, 2**20, 2**22, 2**24),
)
ON_CUDA = Sizes(
    matmuls=(
        (512, 512, 512),
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 1024, 8192),
        (8192, 8192, 1024),
        (8192, 8192, 128),
        (4096, 14336, 4096),
        (16384, 4096, 512),
    ),
    attentions=(
        (16, 16, 512, 128),
        (8, 16, 1024, 128),
        (4, 16, 2048, 128),
        (2, 16, 4096, 128),
        (1, 16, 8192, 128),
        (2, 32, 4096, 64),
    ),
    attention_dtype="bf16",
    moved_bytes=(2**16, 2**20, 2**23, 2**26, 2**28),
    host_bytes=2**28,
    tensor_bytes=(2**12, 2**16, 2**20, 2**23, 2**26, 2**28),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What one machine measured.

    Attributes:
        kernels: Products, attention, moved bytes.
        collectives: By the name of the level they cross.
        launch_s: From one tiny kernel to the next.
        host_op_s: Of the host to issue an op; 0 where the device is the host.
        host_link_bytes_per_s: The slower way; None where it was not measured.
    """

    kernels: tuple[KernelSample, ...]
    collectives: Mapping[str, tuple[CollectiveSample, ...]]
    launch_s: float
    host_op_s: float
    host_link_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A measured machine.

    Attributes:
        cluster: Fitted to the samples.
        samples: What was measured.
        errors: How far the fitted model is from the samples, by kind.
        measured: On what, with what and when.
    """

    cluster: Cluster
    samples: Samples
    errors: Mapping[str, Accuracy]
    measured: str

    def yaml(self) -> str:
        """The cluster file: the cluster behind comments that say how it was made."""
        lines = [f"Measured {self.measured}.", "Fitted against measured seconds:"]
        lines += [f"  {kind}: {found.text()}" for kind, found in self.errors.items()]
        return "".join(f"# {line}\n" for line in lines) + self.cluster.to_yaml()


def profile_machine(
    processes: int | None = None,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Profile | None:
    """Measure this machine.

    Under ``torchrun`` every rank must call it. Otherwise processes are started here: one for each
    CUDA device, or `processes` on the CPU.

    Args:
        processes: CPU processes to start; None for 2. Must be left out under ``torchrun``.
        on_event: Called with what is measured next: ``{"doing": ...}``.

    Returns:
        What was measured; None on ranks other than 0 under ``torchrun``.

    Raises:
        AutoparError: A process failed, or there is another number of devices.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if processes is not None:
            raise ClusterError(
                f"cannot start {processes} processes under torchrun: it has started "
                f"{os.environ['WORLD_SIZE']}; leave --processes out"
            )
        found = _measure_here(lambda doing: on_event({"doing": doing}))
        return None if found is None else fitted(*found)
    count = _processes(processes)
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as name:
        folder = Path(name)
        (folder / "job.json").write_text("{}")
        run_workers("autopar.profile", folder, count, on_event=on_event)
        content = json.loads((folder / "samples.json").read_text())
    return fitted(Cluster.from_dict(content["cluster"]), _samples_in(content["samples"]))


def _processes(asked: int | None) -> int:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is None:
        return devices or 2
    if asked < 1 or (devices and asked > devices):
        raise ClusterError(
            f"cannot profile {asked} processes: give at least 1"
            + (f" and at most {devices}, one for each CUDA device" if devices else "")
        )
    return asked


def fitted(cluster: Cluster, samples: Samples) -> Profile:
    """The cluster whose predictions are nearest to the samples.

    Args:
        cluster: Devices and levels to start from.
        samples: Measured on it.
    """
    day = datetime.date.today().isoformat()
    measured = (
        f"{day} with torch {torch.__version__}, {cluster.num_devices} processes on "
        f"{cluster.device(0).kind}"
    )
    device = fit_efficiency(
        _with_peaks(cluster.device(0), samples), samples.kernels, source=f"measured {measured}"
    )
    found: Any = with_device(cluster, device)
    for level, collectives in samples.collectives.items():
        found = fit_level(found, level, collectives, source=f"measured {measured}")
    errors = {}
    for kind, name in _KERNEL_NAMES.items():
        own = [sample for sample in samples.kernels if isinstance(sample, kind)]
        if own:
            predicted = [sample.predicted_s(device) for sample in own]
            errors[name] = accuracy(predicted, [sample.seconds for sample in own])
    for level, collectives in samples.collectives.items():
        predicted = [sample.predicted_s(found) for sample in collectives]
        taken = [sample.seconds for sample in collectives]
        errors[f"collectives of level {level}"] = accuracy(predicted, taken)
    return Profile(
        cluster=Cluster.from_dict(found.to_dict()),
        samples=samples,
        errors=errors,
        measured=measured,
    )


_KERNEL_NAMES: Mapping[type, str] = {
    MatmulSample: "matmul",
    AttentionSample: "attention",
    MemorySample: "pointwise and copy",
}


def _with_peaks(device: Device, samples: Samples) -> Device:
    """The device with measured latencies; with measured peaks where no data sheet gives them."""
    device = replace(device, launch_s=samples.launch_s, host_op_s=samples.host_op_s)
    if samples.host_link_bytes_per_s is not None:
        device = replace(device, host_link_bytes_per_s=samples.host_link_bytes_per_s)
    if is_known_card(device.kind):
        return device
    peaks = dict(device.peak_flops_per_s)
    for rate in RATES:
        rates = [
            2.0 * s.m * s.n * s.k * s.batch / s.seconds
            for s in samples.kernels
            if isinstance(s, MatmulSample) and s.dtype == rate
        ]
        if rates:
            peaks[rate] = max(rates)
    moved = [s.bytes_moved / s.seconds for s in samples.kernels if isinstance(s, MemorySample)]
    bandwidth = max(moved, default=device.memory_bytes_per_s)
    return replace(device, peak_flops_per_s=peaks, memory_bytes_per_s=bandwidth)


# The measuring side: every rank runs this.


def _measure_here(tell: Callable[[str], None]) -> tuple[Cluster, Samples] | None:
    """Measure with the processes of torchrun's environment; None on ranks other than 0."""
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    cluster = Cluster.detect(unknown="profile")
    sizes = ON_CUDA if cuda else ON_CPU
    meter = _Meter(device)
    kernels = tuple(_kernels(meter, sizes, tell))
    launch_s, host_op_s = _latencies(meter)
    link = _host_link(meter, sizes.host_bytes) if sizes.host_bytes else None
    collectives = _collectives(meter, cluster, sizes, tell) if world > 1 else {}
    if world > 1 and dist.get_rank() != 0:
        return None
    samples = Samples(
        kernels=kernels,
        collectives=collectives,
        launch_s=launch_s,
        host_op_s=host_op_s,
        host_link_bytes_per_s=link,
    )
    return cluster, samples


@dataclass(frozen=True)
class _Meter:
    """Times work on a device.

    Attributes:
        device: Of this process.
    """

    device: torch.device

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median seconds of a call, in a full queue.

        Every rank makes the same number of calls, as long as their first take about as long.
        """
        for _ in range(2):
            run()
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        once = max(time.perf_counter() - start, 1e-6)
        return self.repeated(run, once)

    def repeated(self, run: Callable[[], object], once: float) -> float:
        """Median over rounds of the mean of the calls of a round."""
        rounds = 5
        calls = max(1, min(200, int(KERNEL_S / rounds / once)))
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            self.wait()
            found.append((time.perf_counter() - start) / calls)
        return statistics.median(found)

    def together(self, run: Callable[[], object]) -> float:
        """Like `seconds`, of a collective: all ranks agree on the calls, the slowest counts."""
        for _ in range(2):
            run()
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        once = _slowest(max(time.perf_counter() - start, 1e-6))
        dist.barrier()
        return _slowest(self.repeated(run, once))


def _slowest(seconds: float) -> float:
    """The most of all ranks."""
    found = [seconds] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return max(found)


def _kernels(meter: _Meter, sizes: Sizes, tell: Callable[[str], None]) -> Iterator[KernelSample]:
    for rate, dtype in RATES.items():
        tell(f"{rate} matmuls")
        for m, n, k in sizes.matmuls:
            a = torch.randn(m, k, device=meter.device, dtype=dtype)
            b = torch.randn(k, n, device=meter.device, dtype=dtype)
            seconds = meter.seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
            yield MatmulSample(m=m, n=n, k=k, dtype=rate, seconds=seconds)
    tell("attention")
    for batch, heads, tokens, head_dim in sizes.attentions:
        yield from _attention(meter, (batch, heads, tokens, head_dim), sizes.attention_dtype)
    tell("pointwise and copies")
    for size in sizes.moved_bytes:
        a = torch.ones(size // 4, device=meter.device)
        b = torch.ones_like(a)
        for run, tensors in (
            (lambda a=a, b=b: torch.mul(a, b), 3),
            (lambda a=a, b=b: a.copy_(b), 2),
        ):
            yield MemorySample(bytes_moved=float(tensors * size), seconds=meter.seconds(run))


def _attention(
    meter: _Meter, size: tuple[int, int, int, int], rate: str
) -> Iterator[AttentionSample]:
    """A fused causal attention: its forward, and both passes."""
    batch, heads, tokens, head_dim = size
    shape = Attention(
        batch=batch, heads=heads, queries=tokens, keys=tokens, head_dim=head_dim, causal=True
    )
    q, k, v = (
        torch.randn(*size, device=meter.device, dtype=RATES[rate], requires_grad=True)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    gradient = torch.ones_like(forward())

    def both() -> object:
        made = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(made, (q, k, v), gradient)

    yield AttentionSample(shape=shape, dtype=rate, seconds=meter.seconds(forward))
    yield AttentionSample(shape=shape, dtype=rate, backward=True, seconds=meter.seconds(both))


def _latencies(meter: _Meter) -> tuple[float, float]:
    """Seconds from one tiny kernel to the next, and of the host to issue an op."""
    tiny = torch.zeros(8, device=meter.device)
    if meter.device.type != "cuda":
        return meter.seconds(lambda: tiny.add_(1)), 0.0
    cuda: Any = torch.cuda
    events = [cuda.Event(enable_timing=True) for _ in range(2)]
    count = 500
    tiny.add_(1)
    meter.wait()
    # Keep the device busy until all is queued, so that it never waits for the host.
    cuda._sleep(100_000_000)
    events[0].record()
    start = time.perf_counter()
    for _ in range(count):
        tiny.add_(1)
    host_op_s = (time.perf_counter() - start) / count
    events[1].record()
    meter.wait()
    return float(events[0].elapsed_time(events[1])) / 1e3 / count, host_op_s


def _host_link(meter: _Meter, size: int) -> float:
    """Bytes a second of large copies between device and pinned host memory, the slower way."""
    here = torch.empty(size, dtype=torch.uint8, device=meter.device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ways = (
        lambda: here.copy_(host, non_blocking=True),
        lambda: host.copy_(here, non_blocking=True),
    )
    return size / max(meter.seconds(way) for way in ways)


def _meshes(cluster: Cluster) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name of a level, mesh sizes and the axis of the mesh that crosses this level alone."""
    sizes = tuple(level.size for level in reversed(cluster.levels))
    for axis, level in enumerate(reversed(cluster.levels)):
        if level.size > 1:
            yield level.name, sizes, axis
        if level.size >= 4 and level.size % 2 == 0:
            parts = (*sizes[:axis], level.size // 2, 2, *sizes[axis + 1 :])
            yield level.name, parts, axis + 1


def _collectives(
    meter: _Meter, cluster: Cluster, sizes: Sizes, tell: Callable[[str], None]
) -> Mapping[str, tuple[CollectiveSample, ...]]:
    """Every kind of collective, over all groups of an axis at once, for each level."""
    found: dict[str, list[CollectiveSample]] = {}
    for level, mesh, axis in _meshes(cluster):
        tell(f"collectives of {mesh[axis]} ranks on level {level}")
        group = _group(mesh, axis)
        for kind in Collective:
            if kind is Collective.SEND:
                continue
            for size in sizes.tensor_bytes:
                run = _collective(kind, size, mesh[axis], group, meter.device)
                sample = CollectiveSample(
                    kind=kind.value,
                    tensor_bytes=float(size),
                    mesh_sizes=mesh,
                    axis=axis,
                    seconds=meter.together(run),
                )
                found.setdefault(level, []).append(sample)
    return {level: tuple(samples) for level, samples in found.items()}


def _group(mesh: tuple[int, ...], axis: int) -> Any:
    """This rank's group along an axis of a mesh over all ranks."""
    ranks = torch.arange(dist.get_world_size()).reshape(mesh).movedim(axis, -1)
    own = None
    for members in ranks.reshape(-1, mesh[axis]).tolist():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            own = (group, members)
    assert own is not None
    return own


def _collective(
    kind: Collective, size: int, ranks: int, group: Any, device: torch.device
) -> Callable[[], object]:
    """A call of one collective; the whole tensor has about `size` bytes."""
    handle, members = group
    part = max(1, size // 4 // ranks)
    whole, piece = torch.ones(part * ranks, device=device), torch.ones(part, device=device)
    other = torch.empty_like(whole)
    match kind:
        case Collective.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=handle)
        case Collective.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(whole, piece, group=handle)
        case Collective.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(piece, whole, group=handle)
        case Collective.ALL_TO_ALL:
            return lambda: dist.all_to_all_single(other, whole, group=handle)
        case Collective.BROADCAST:
            return lambda: dist.broadcast(whole, src=members[0], group=handle)
        case _:
            raise AssertionError(f"{kind} is not measured")


# Samples as JSON, from the worker to its parent.


def _samples_out(samples: Samples) -> dict[str, Any]:
    content = asdict(samples)
    content["kernels"] = [[type(s).__name__, asdict(s)] for s in samples.kernels]
    return content


def _samples_in(content: Mapping[str, Any]) -> Samples:
    kinds = {kind.__name__: kind for kind in (MatmulSample, AttentionSample, MemorySample)}

    def kernel(name: str, fields: dict[str, Any]) -> Any:
        if "shape" in fields:
            fields = fields | {"shape": Attention(**fields["shape"])}
        return kinds[name](**fields)

    def collective(fields: dict[str, Any]) -> CollectiveSample:
        return CollectiveSample(**fields | {"mesh_sizes": tuple(fields["mesh_sizes"])})

    return Samples(
        kernels=tuple(kernel(*item) for item in content["kernels"]),
        collectives={
            level: tuple(collective(fields) for fields in samples)
            for level, samples in content["collectives"].items()
        },
        launch_s=content["launch_s"],
        host_op_s=content["host_op_s"],
        host_link_bytes_per_s=content["host_link_bytes_per_s"],
    )


# What is printed.


def profile_view(found: Profile) -> RenderableType:
    """Tables of what was measured, against what the fitted model says."""
    device = found.cluster.device(0)
    right = ("measured", "fitted", "error")
    kernels = table("kernel", "size", *right, right=right)
    for sample in found.samples.kernels:
        add_row(kernels, *_kernel_words(sample), *_compared(sample, device))
    parts: list[RenderableType] = [
        Text(f"{found.cluster.name}: measured {found.measured}"),
        section("kernels", [kernels]),
    ]
    for level, samples in found.samples.collectives.items():
        made = table("collective", "ranks", "tensor", *right, right=("tensor", *right))
        for item in samples:
            words = (item.kind, str(item.mesh_sizes[item.axis]), _size(item.tensor_bytes))
            add_row(made, *words, *_compared(item, found.cluster))
        parts.append(section(f"level {level}", [made]))
    errors = table("kind", "fitted against measured")
    for kind, error in found.errors.items():
        add_row(errors, kind, error.text())
    return Group(*parts, section("errors", [errors]))


def _kernel_words(sample: KernelSample) -> tuple[str, str]:
    match sample:
        case MatmulSample():
            return f"matmul {sample.dtype}", f"{sample.m} x {sample.n} x {sample.k}"
        case AttentionSample():
            passes = "forward, backward" if sample.backward else "forward"
            shape = sample.shape
            size = f"{shape.batch} x {shape.heads} x {shape.queries} x {shape.head_dim}"
            return f"attention {sample.dtype}, {passes}", size
        case MemorySample():
            return "pointwise, copy", _size(sample.bytes_moved)


def _compared(sample: Any, model: Any) -> tuple[str, str, str]:
    predicted = sample.predicted_s(model)
    error = f"{predicted / sample.seconds - 1:+.0%}"
    return seconds_text(sample.seconds), seconds_text(predicted), error


def _size(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.3g} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.3g} KiB"


def main(folder: str) -> None:
    """One worker."""
    torch.set_num_threads(1)
    with work(folder) as job:
        _run(job)
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(job: Job) -> None:
    found = _measure_here(lambda doing: job.tell(doing=doing))
    if found is None:
        return
    cluster, samples = found
    content = {"cluster": cluster.to_dict(), "samples": _samples_out(samples)}
    (job.folder / "samples.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main(sys.argv[1])
