"""Published kernels and collectives beside what the cost model says of them.

``python -m tests.cost_models.published`` prints the errors by source.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cost_models.calibration import Accuracy, accuracy
from cost_models.cluster import Cluster
from cost_models.collectives import AxisLink, axis_link, collective_s
from cost_models.compute import Attention, attention_s, matmul_s, memory_s
from cost_models.devices import device_named

DATA = Path(__file__).parents[1] / "data"

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One published measurement.

    Attributes:
        row: Its line in the file.
        group: Rows that belong together.
        predicted_s: What the cost model says.
        measured_s: What was published.
    """

    row: Row
    group: str
    predicted_s: float
    measured_s: float


def rows(name: str) -> list[Row]:
    """The lines of one file of `tests/data`."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _axis(row: Row) -> AxisLink | None:
    """The axis of all GPUs of a row, or None where no preset describes the machine."""
    num_ranks, nodes = int(row["n_gpus"]), int(row["nodes"])
    presets = {
        ("A100-80GB", 2): "a100-efa",
        ("H100-80GB", 2): "h100-efa",
        ("H200", 1): "h200",
        ("A100", 1): "a100",
        ("A100-80GB-SXM4", 1): "a100",
    }
    preset = presets.get((row["gpu"], nodes))
    if preset is None:
        return None
    link = axis_link(Cluster.preset(preset, nodes=nodes), (1, num_ranks), axis=1)
    if row["algo"] != "Ring":
        return link
    hops = (
        dataclasses.replace(hop, level=dataclasses.replace(hop.level, in_switch_bytes_per_s=None))
        for hop in link.hops
    )
    return dataclasses.replace(link, hops=tuple(hops))


def collectives() -> Iterator[Compared]:
    """Every row of `collectives.csv` that a preset and a collective of ours describe.

    Left out: MI300X, whose fully connected links are not modelled; the total of two directions at
    once; host links, which are inputs of the device table. Where a source says only "large", the
    size is taken as 16 GiB.
    """
    kinds = {"p2p d2d write uni": "send"}
    for row in rows("collectives.csv"):
        kind = kinds.get(row["collective"], row["collective"])
        axis = _axis(row)
        if axis is None or kind not in ("all_reduce", "all_gather", "reduce_scatter", "send"):
            continue
        tensor_bytes = float(row["size_bytes"] or 2**34)
        volume = {"all_reduce": 2 * (axis.ranks - 1) / axis.ranks, "send": 1.0}
        if row["time_us"]:
            measured_s = float(row["time_us"]) * 1e-6
        else:
            bus = float(row["busbw_GBps"] or row["algbw_GBps"]) * 1e9
            share = volume.get(kind, (axis.ranks - 1) / axis.ranks)
            measured_s = tensor_bytes * share / bus
        yield Compared(
            row=row,
            group=row["source"],
            predicted_s=collective_s(kind, tensor_bytes, axis),
            measured_s=measured_s,
        )


def attention_shape(row: Row) -> Attention:
    """The attention of a row of `kernels.csv`."""
    return Attention(
        batch=int(row["batch"]),
        heads=int(row["heads"]),
        queries=int(row["seq"]),
        keys=int(row["seq"]),
        head_dim=int(row["head_dim"]),
        causal=row["causal"] == "1",
    )


def attentions() -> Iterator[Compared]:
    """FlashAttention-2, forward and backward together, on A100-80GB."""
    device = device_named("A100-80GB")
    for row in rows("kernels.csv"):
        if row["kernel"] != "attention":
            continue
        shape = attention_shape(row)
        yield Compared(
            row=row,
            group="FlashAttention-2, A100",
            predicted_s=attention_s(device, shape, dtype="fp16")
            + attention_s(device, shape, dtype="fp16", backward=True),
            measured_s=3.5 * shape.forward_flops / (float(row["value"]) * 1e12),
        )


_BEST_SHAPE_DEVICES = {
    "A100-SXM": "A100-80GB",
    "H100-SXM (H200 same)": "H100-80GB",
    "H100-SXM": "H100-80GB",
    "H200-SXM": "H200",
    "B200-SXM": "B200",
    "GB200-SXM": "GB200",
}


def matmuls() -> Iterator[Compared]:
    """Products on devices of the table; `mm.out` is timed with its launch and synchronization."""
    for row in rows("kernels.csv"):
        if row["kernel"] not in ("gemm", "bmm"):
            continue
        best = row["source"].startswith("stas00")
        kind = _BEST_SHAPE_DEVICES.get(row["gpu"]) if best else "A100-40GB"
        if kind is None:
            continue
        m, n, k, batch = (int(row[name] or 1) for name in ("m", "n", "k", "batch"))
        dtype = row["dtype"].removesuffix("_e4m3")
        if best:
            group = "best shapes (upper envelope)"
        elif row["source"].endswith("mm.out"):
            group = "products below 4 GFLOP, A100"
        else:
            group = "products of a transformer, A100"
        yield Compared(
            row=row,
            group=group,
            predicted_s=matmul_s(device_named(kind), m=m, n=n, k=k, batch=batch, dtype=dtype),
            measured_s=2.0 * batch * m * n * k / (float(row["value"]) * 1e12),
        )


_POINTWISE_BYTES = {
    "attention_dropout (4x16x2048x2048)": 4 * 16 * 2048 * 2048 * (2 + 2 + 1),
    "fused_gelu (2048x4x16384)": 2048 * 4 * 16384 * (2 + 2),
    "layer_norm (2048x4x4096)": 2048 * 4 * 4096 * (2 + 2),
}
"""Bytes that one pass moves; the unfused softmax and add-bias-dropout are several kernels."""


def pointwise() -> Iterator[Compared]:
    """Kernels bound by bytes, whose published times are rounded to 0.1 ms."""
    device = device_named("A100-40GB")
    for row in rows("kernels.csv"):
        moved = _POINTWISE_BYTES.get(row["op"])
        if moved is None:
            continue
        yield Compared(
            row=row,
            group="pointwise, A100",
            predicted_s=device.launch_s + memory_s(device, moved),
            measured_s=float(row["value"]) * 1e-6,
        )


def by_group(compared: Iterator[Compared]) -> dict[str, Accuracy]:
    """Accuracy of each group, in the order of the file."""
    groups: dict[str, list[Compared]] = {}
    for item in compared:
        groups.setdefault(item.group, []).append(item)
    return {
        name: accuracy([item.predicted_s for item in items], [item.measured_s for item in items])
        for name, items in groups.items()
    }


def main() -> None:
    """Print the accuracy of every group."""
    for title, compared in (
        ("attention", attentions),
        ("matmul", matmuls),
        ("memory", pointwise),
        ("collectives", collectives),
    ):
        print(title)
        for name, result in by_group(compared()).items():
            print(f"  {name:36} {result.text()}")


if __name__ == "__main__":
    main()
