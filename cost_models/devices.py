"""Table of devices: peaks from vendors' data sheets, efficiencies from fits to published kernels.

Peaks are dense (no structured sparsity) at the boost clock. Memory sizes are what the allocator can
see of the nominal size, in binary units as vendors mean them; bandwidths are decimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cost_models.errors import ClusterSpecError, near_misses
from cost_models.records import Device, Efficiency
from cost_models.units import GB, GIB, TB, TFLOPS, US

VOLTA = Efficiency(
    matmul_best=0.68,
    matmul_half_flops=9e9,
    attention_forward_best=0.40,
    attention_backward_best=0.30,
    attention_half_length=300,
    memory_best=0.80,
    memory_half_bytes=4e6,
    source="draft",
)
AMPERE = Efficiency(
    matmul_best=0.84,
    matmul_half_flops=3e9,
    attention_forward_best=0.72,
    attention_backward_best=0.58,
    attention_half_length=200,
    memory_best=0.85,
    memory_half_bytes=4e6,
    source="draft",
)
HOPPER = replace(AMPERE, matmul_best=0.76, matmul_half_flops=8e9, source="draft")
BLACKWELL = replace(AMPERE, matmul_best=0.75, matmul_half_flops=16e9, source="draft")
CPU = Efficiency(
    matmul_best=0.8,
    matmul_half_flops=1e6,
    attention_forward_best=0.4,
    attention_backward_best=0.4,
    attention_half_length=64,
    memory_best=0.8,
    memory_half_bytes=1e5,
    source="draft",
)

_V100 = Device(
    kind="V100-16GB",
    peak_flops_per_s={
        "fp64": 7.8 * TFLOPS,
        "fp32": 15.7 * TFLOPS,
        "bf16": 15.7 * TFLOPS,
        "fp16": 125 * TFLOPS,
    },
    memory_bytes=16 * GIB,
    memory_bytes_per_s=0.9 * TB,
    host_memory_bytes=64 * GIB,
    host_link_bytes_per_s=12 * GB,
    launch_s=5 * US,
    efficiency=VOLTA,
    source="NVIDIA V100 data sheet, 2020; bf16 runs on the fp32 units",
)
_A100 = Device(
    kind="A100-40GB",
    peak_flops_per_s={
        "fp64": 19.5 * TFLOPS,
        "fp32": 19.5 * TFLOPS,
        "tf32": 156 * TFLOPS,
        "bf16": 312 * TFLOPS,
        "fp16": 312 * TFLOPS,
    },
    memory_bytes=40 * GIB,
    memory_bytes_per_s=1.555 * TB,
    host_memory_bytes=128 * GIB,
    host_link_bytes_per_s=24 * GB,
    launch_s=4 * US,
    efficiency=AMPERE,
    source="NVIDIA A100 data sheet, 2021",
)
_H100 = Device(
    kind="H100-80GB",
    peak_flops_per_s={
        "fp64": 67 * TFLOPS,
        "fp32": 67 * TFLOPS,
        "tf32": 494.7 * TFLOPS,
        "bf16": 989.4 * TFLOPS,
        "fp16": 989.4 * TFLOPS,
        "fp8": 1978.9 * TFLOPS,
    },
    memory_bytes=80 * GIB,
    memory_bytes_per_s=3.35 * TB,
    host_memory_bytes=256 * GIB,
    host_link_bytes_per_s=55 * GB,
    launch_s=3 * US,
    efficiency=HOPPER,
    source="NVIDIA H100 SXM data sheet, 2023",
)
_B200 = Device(
    kind="B200",
    peak_flops_per_s={
        "fp64": 37 * TFLOPS,
        "fp32": 75 * TFLOPS,
        "tf32": 1125 * TFLOPS,
        "bf16": 2250 * TFLOPS,
        "fp16": 2250 * TFLOPS,
        "fp8": 4500 * TFLOPS,
    },
    memory_bytes=180 * GIB,
    memory_bytes_per_s=8 * TB,
    host_memory_bytes=256 * GIB,
    host_link_bytes_per_s=55 * GB,
    launch_s=3 * US,
    efficiency=BLACKWELL,
    source="NVIDIA HGX B200 data sheet, 2025",
)

_TABLE = (
    _V100,
    replace(_V100, kind="V100-32GB", memory_bytes=32 * GIB),
    _A100,
    replace(_A100, kind="A100-80GB", memory_bytes=80 * GIB, memory_bytes_per_s=2.039 * TB),
    _H100,
    replace(_H100, kind="H100-96GB", memory_bytes=96 * GIB, memory_bytes_per_s=2.4 * TB),
    replace(_H100, kind="H200", memory_bytes=141 * GIB, memory_bytes_per_s=4.8 * TB),
    _B200,
    replace(
        _B200,
        kind="GB200",
        peak_flops_per_s={
            "fp64": 40 * TFLOPS,
            "fp32": 80 * TFLOPS,
            "tf32": 1250 * TFLOPS,
            "bf16": 2500 * TFLOPS,
            "fp16": 2500 * TFLOPS,
            "fp8": 5000 * TFLOPS,
        },
        memory_bytes=186 * GIB,
        host_memory_bytes=240 * GIB,
        host_link_bytes_per_s=200 * GB,
        source="NVIDIA GB200 NVL72 data sheet, 2025",
    ),
    Device(
        kind="L4",
        peak_flops_per_s={
            "fp32": 30.3 * TFLOPS,
            "tf32": 60 * TFLOPS,
            "bf16": 121 * TFLOPS,
            "fp16": 121 * TFLOPS,
            "fp8": 242 * TFLOPS,
        },
        memory_bytes=24 * GIB,
        memory_bytes_per_s=0.3 * TB,
        host_memory_bytes=48 * GIB,
        host_link_bytes_per_s=16 * GB,
        launch_s=5 * US,
        efficiency=replace(AMPERE, matmul_best=0.53),
        source="NVIDIA L4 data sheet, 2023",
    ),
    Device(
        kind="A10G",
        peak_flops_per_s={
            "fp32": 31.5 * TFLOPS,
            "tf32": 35 * TFLOPS,
            "bf16": 70 * TFLOPS,
            "fp16": 70 * TFLOPS,
        },
        memory_bytes=24 * GIB,
        memory_bytes_per_s=0.6 * TB,
        host_memory_bytes=48 * GIB,
        host_link_bytes_per_s=12 * GB,
        launch_s=5 * US,
        efficiency=AMPERE,
        source="NVIDIA A10G data sheet, 2021",
    ),
    Device(
        kind="TITAN-RTX",
        peak_flops_per_s={
            "fp32": 16.3 * TFLOPS,
            "bf16": 16.3 * TFLOPS,
            "fp16": 130 * TFLOPS,
        },
        memory_bytes=24 * GIB,
        memory_bytes_per_s=0.672 * TB,
        host_memory_bytes=48 * GIB,
        host_link_bytes_per_s=12 * GB,
        launch_s=5 * US,
        efficiency=VOLTA,
        source="NVIDIA TITAN RTX data sheet, 2018; bf16 runs on the fp32 units",
    ),
    Device(
        kind="MI250X-GCD",
        peak_flops_per_s={
            "fp64": 47.9 * TFLOPS,
            "fp32": 47.9 * TFLOPS,
            "bf16": 191.5 * TFLOPS,
            "fp16": 191.5 * TFLOPS,
        },
        memory_bytes=64 * GIB,
        memory_bytes_per_s=1.6384 * TB,
        host_memory_bytes=64 * GIB,
        host_link_bytes_per_s=36 * GB,
        launch_s=6 * US,
        efficiency=replace(AMPERE, matmul_best=0.65),
        source="AMD MI250X data sheet, 2021: half of the module",
    ),
    Device(
        kind="unified",
        peak_flops_per_s={
            "fp32": 21 * TFLOPS,
            "bf16": 21 * TFLOPS,
            "fp16": 21 * TFLOPS,
        },
        memory_bytes=128 * GIB,
        memory_bytes_per_s=0.8 * TB,
        host_memory_bytes=0,
        host_link_bytes_per_s=0.8 * TB,
        launch_s=10 * US,
        unified_memory=True,
        efficiency=replace(AMPERE, matmul_best=0.7),
        source="Apple M1 Ultra specifications, 2022",
    ),
    Device(
        kind="cpu-core",
        peak_flops_per_s={
            "fp64": 0.05 * TFLOPS,
            "fp32": 0.1 * TFLOPS,
            "bf16": 0.1 * TFLOPS,
            "fp16": 0.1 * TFLOPS,
        },
        memory_bytes=4 * GIB,
        memory_bytes_per_s=10 * GB,
        host_memory_bytes=0,
        host_link_bytes_per_s=10 * GB,
        launch_s=5 * US,
        unified_memory=True,
        efficiency=CPU,
        source="draft",
    ),
)
DEVICES: Mapping[str, Device] = {device.kind: device for device in _TABLE}


def device_named(kind: str) -> Device:
    """The device of the table with this name, in either case.

    Raises:
        ClusterSpecError: There is none; the message names near misses.
    """
    folded = {name.lower(): device for name, device in DEVICES.items()}
    device = folded.get(kind.lower())
    if device is None:
        raise ClusterSpecError(
            f"cannot find device '{kind}' in the device table: {near_misses(kind, DEVICES)}"
        )
    return device
