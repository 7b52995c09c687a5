"""Table of devices: peaks from vendors' data sheets, efficiencies fitted to published kernels.

Peaks are dense (no structured sparsity) at the boost clock. Memory is the vendor's size in binary
units (32 to 96 GB parts but V100), and what software finds on the others;
bandwidths are decimal. Host memory is an even share of what the vendor's reference machine holds.
`launch_s` and `host_op_s` are eager PyTorch 2.x: 5 to 8 us an op on the host (profiles of public
training runs, 2023 to 2024), about 2 us between kernels of a full queue.

Where a constant has no published measurement, its source says *recalled*: an engineer's figure, to
be replaced by `autopar profile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cost_models.errors import ClusterSpecError, near_misses
from cost_models.records import Device, Efficiency
from cost_models.units import GB, GB_BYTES, GIB, TB, TFLOPS

AMPERE = Efficiency(
    matmul_best=0.80,
    matmul_best_at={"fp32": 0.92, "fp64": 0.92},
    matmul_half_flops=3e9,
    matmul_half_k=150,
    attention_forward_best=0.72,
    attention_backward_best=0.625,
    attention_half_keys=170,
    attention_diagonal_keys=95,
    attention_half_head_dim=23,
    memory_best=0.76,
    memory_half_bytes=4e6,
    source=(
        "fitted 2026-11-30: matmul to EleutherAI cookbook sizing tables (fp16, A100 class; 0.82) "
        "and to the sustained rate of published A100 training (2021 to 2024; 0.77 to 0.80), "
        "attention to the FlashAttention-2 benchmark (A100-80GB, median error 1 %), forward "
        "apart from backward by that paper's 225 TFLOP/s peak; memory to the pointwise, norm and "
        "softmax part of the same training runs; fp32 and fp64 recalled"
    ),
)
VOLTA = replace(
    AMPERE,
    matmul_best=0.78,
    matmul_best_at={"fp32": 0.92, "fp64": 0.92, "bf16": 0.92},
    matmul_half_flops=2.5e9,
    attention_forward_best=0.40,
    attention_backward_best=0.30,
    memory_best=0.83,
    memory_half_bytes=2e6,
    source=(
        "fitted 2026-11-30: small matmuls to published V100 profiles (0.12 of the fp16 peak below "
        "3 GFLOP, with their 50 us of profiling taken off), large ones, which those have at 0.66, "
        "to whole steps at 0.57 of the peak (Megatron-LM, 2020), which leave 0.78; memory 750 of "
        "900 GB/s (Jia et al., arXiv 1804.06826, 2018); attention and fp32 recalled"
    ),
)
HOPPER = replace(
    AMPERE,
    matmul_best=0.72,
    matmul_best_at={"fp32": 0.85, "fp64": 0.85, "fp8": 0.64},
    matmul_half_flops=5e9,
    attention_forward_best=0.545,
    attention_backward_best=0.525,
    memory_half_bytes=7e6,
    source=(
        "2026-11-30: matmul 0.90 of the best shape of the MAMF table of ml-engineering (794.5 "
        "bf16, 1402.6 fp8), between what sharded data-parallel runs imply for H100 (llm-foundry, "
        "2023: 0.67 of peak) and H200 (KempnerForge, 2026: 0.755); attention is cuDNN's, which "
        "PyTorch runs on H200 in KempnerForge's profile (2026-04): 539 TFLOP/s causal forward, 518 "
        "backward at head dim 128 (figures 5 and 6 of arXiv 2407.08608, 2024); fp32, fp64 and "
        "memory recalled"
    ),
)
HOPPER_FLASH = replace(
    HOPPER,
    attention_forward_best=0.375,
    attention_backward_best=0.325,
    source=(
        f"{HOPPER.source}; but attention is FlashAttention-2's, as of runs of 2023: 370 "
        "TFLOP/s forward, 322 backward at head dim 128 (figures 5 and 6 of arXiv 2407.08608)"
    ),
)
BLACKWELL = replace(
    HOPPER,
    matmul_best=0.70,
    matmul_best_at={"fp32": 0.85, "fp64": 0.85, "fp8": 0.69},
    matmul_half_flops=9e9,
    memory_half_bytes=16e6,
    source=(
        "2026-11-30: matmul 0.90 of the best shape of the MAMF table of ml-engineering (1745 "
        "bf16, 3432.5 fp8), as on H100; the rest as on H100, recalled"
    ),
)
CPU = Efficiency(
    matmul_best=0.8,
    matmul_half_flops=1e5,
    matmul_half_k=0,
    attention_forward_best=0.4,
    attention_backward_best=0.4,
    attention_half_keys=0,
    attention_diagonal_keys=0,
    attention_half_head_dim=0,
    memory_best=0.8,
    memory_half_bytes=0,
    source="measured 2026-11-30 with torch 2.13, one thread of a Zen 4 virtual machine",
)

_V100 = Device(
    kind="V100-16GB",
    peak_flops_per_s={
        "fp64": 7.8 * TFLOPS,
        "fp32": 15.7 * TFLOPS,
        "bf16": 15.7 * TFLOPS,
        "fp16": 125 * TFLOPS,
    },
    memory_bytes=int(15.78 * GIB),
    memory_bytes_per_s=0.9 * TB,
    host_memory_bytes=64 * GIB,
    host_link_bytes_per_s=12 * GB,
    launch_s=2.5e-6,
    host_op_s=8e-6,
    efficiency=VOLTA,
    source=(
        "NVIDIA V100 SXM2 data sheet, 2020; bf16 runs on the fp32 units; PCIe 3 x16 recalled; "
        "memory as PyTorch's out-of-memory errors state it"
    ),
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
    launch_s=2e-6,
    host_op_s=7e-6,
    efficiency=AMPERE,
    source="NVIDIA A100 SXM data sheet, 2021; PCIe 4 x16 at 22 to 25 GB/s",
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
    launch_s=2e-6,
    host_op_s=6e-6,
    efficiency=HOPPER,
    source="NVIDIA H100 SXM data sheet, 2023; host link measured on H200 with nvbandwidth",
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
    memory_bytes=180 * GB_BYTES,
    memory_bytes_per_s=8 * TB,
    host_memory_bytes=256 * GIB,
    host_link_bytes_per_s=55 * GB,
    launch_s=2e-6,
    host_op_s=6e-6,
    efficiency=BLACKWELL,
    source="NVIDIA HGX B200 data sheet, 2025; host link as on H200",
)
_GB200 = replace(
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
    memory_bytes=186 * GB_BYTES,
    host_memory_bytes=240 * GIB,
    host_link_bytes_per_s=170 * GB,
    efficiency=replace(
        BLACKWELL,
        matmul_best=0.66,
        matmul_best_at={"fp32": 0.85, "fp64": 0.85, "fp8": 0.65},
        source=(
            "2026-11-30: matmul 0.90 of the best shape of the MAMF table of ml-engineering (1822 "
            "bf16, 3615.6 fp8), as on H100; the rest as on B200"
        ),
    ),
    source=(
        "NVIDIA GB200 NVL72 data sheet, 2025; C2C is 450 GB/s one way for the two GPUs of a chip, "
        "of whose duplex rate copies both ways reach 38 %"
    ),
)
_L4 = Device(
    kind="L4",
    peak_flops_per_s={
        "fp32": 30.3 * TFLOPS,
        "tf32": 60 * TFLOPS,
        "bf16": 121 * TFLOPS,
        "fp16": 121 * TFLOPS,
        "fp8": 242 * TFLOPS,
    },
    memory_bytes=24 * GB_BYTES,
    memory_bytes_per_s=0.3 * TB,
    host_memory_bytes=48 * GIB,
    host_link_bytes_per_s=12 * GB,
    launch_s=2e-6,
    host_op_s=7e-6,
    efficiency=replace(
        AMPERE,
        matmul_best=0.53,
        matmul_half_flops=1e9,
        attention_forward_best=0.37,
        attention_backward_best=0.32,
        memory_half_bytes=6e5,
        source=(
            "2026-11-30: published runs at 1050 MHz, near what 72 W sustains, reach 0.39 to 0.53 "
            "of the peak in products; attention is that of A100 at 1050 of the 2040 MHz that the "
            "peak is for; memory recalled"
        ),
    ),
    source="NVIDIA L4 data sheet, 2023; PCIe 4 x8",
)
_A10G = Device(
    kind="A10G",
    peak_flops_per_s={
        "fp32": 31.5 * TFLOPS,
        "tf32": 35 * TFLOPS,
        "bf16": 70 * TFLOPS,
        "fp16": 70 * TFLOPS,
    },
    memory_bytes=24 * GB_BYTES,
    memory_bytes_per_s=0.6 * TB,
    host_memory_bytes=48 * GIB,
    host_link_bytes_per_s=12 * GB,
    launch_s=2e-6,
    host_op_s=7e-6,
    efficiency=replace(AMPERE, matmul_half_flops=1e9, memory_half_bytes=1.2e6),
    source="NVIDIA A10G data sheet of AWS G5, 2021; efficiency as on A100, recalled",
)
_TITAN_RTX = Device(
    kind="TITAN-RTX",
    peak_flops_per_s={
        "fp32": 16.3 * TFLOPS,
        "bf16": 16.3 * TFLOPS,
        "fp16": 130.5 * TFLOPS,
    },
    memory_bytes=24 * GIB,
    memory_bytes_per_s=0.672 * TB,
    host_memory_bytes=48 * GIB,
    host_link_bytes_per_s=12 * GB,
    launch_s=2.5e-6,
    host_op_s=8e-6,
    efficiency=VOLTA,
    source="NVIDIA TITAN RTX data sheet, 2018; bf16 runs on the fp32 units; PCIe 3 x16",
)
_MI250X = Device(
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
    launch_s=4e-6,
    host_op_s=8e-6,
    efficiency=replace(
        AMPERE,
        matmul_best=0.65,
        attention_forward_best=0.40,
        attention_backward_best=0.33,
        source="recalled: hipBLASLt products and the ROCm port of FlashAttention-2, 2023",
    ),
    source="AMD MI250X data sheet, 2021: one of the module's two dies, as Frontier presents them",
)
_UNIFIED = Device(
    kind="unified",
    peak_flops_per_s={"fp32": 21 * TFLOPS, "bf16": 21 * TFLOPS, "fp16": 21 * TFLOPS},
    memory_bytes=128 * GIB,
    memory_bytes_per_s=0.8 * TB,
    host_memory_bytes=0,
    host_link_bytes_per_s=0.8 * TB,
    launch_s=5e-6,
    host_op_s=10e-6,
    unified_memory=True,
    efficiency=replace(AMPERE, matmul_best=0.7, source="recalled: Metal products, 2023"),
    source="Apple M1 Ultra specifications, 2022; its GPU and CPU share one memory",
)
_CPU_CORE = Device(
    kind="cpu-core",
    peak_flops_per_s={"fp64": 48 * GB, "fp32": 96 * GB, "bf16": 200 * GB, "fp16": 96 * GB},
    memory_bytes=4 * GIB,
    memory_bytes_per_s=20 * GB,
    host_memory_bytes=0,
    host_link_bytes_per_s=20 * GB,
    launch_s=5e-6,
    host_op_s=0.0,
    unified_memory=True,
    efficiency=CPU,
    source=(
        "one core with AVX-512 at 3 GHz: 32 fp32 FLOP a cycle, bf16 twice that; memory between the "
        "40 GB/s of a sum in place and the 4 GB/s of a new large tensor; measured 2026-11-30"
    ),
)

_TABLE = (
    _V100,
    replace(_V100, kind="V100-32GB", memory_bytes=int(31.75 * GIB)),
    _A100,
    replace(
        _A100,
        kind="A100-80GB",
        memory_bytes=80 * GIB,
        memory_bytes_per_s=2.039 * TB,
        host_memory_bytes=256 * GIB,
    ),
    _H100,
    replace(
        _H100,
        kind="H100-96GB",
        memory_bytes=96 * GIB,
        memory_bytes_per_s=2.4 * TB,
        efficiency=replace(
            HOPPER,
            matmul_best=0.56,
            attention_forward_best=0.31,
            attention_backward_best=0.26,
            source=(
                "2026-11-30: as on H100, taken down by the 500 W limit to what torchtitan's "
                "compiled Llama-3 8B on 8 of them implies (2024-12)"
            ),
        ),
        source="H100 SXM with HBM2e at 2.4 TB/s and 500 W, as in Grand Teton (torchtitan, 2024)",
    ),
    replace(
        _H100,
        kind="H200",
        memory_bytes=141 * GB_BYTES,
        memory_bytes_per_s=4.8 * TB,
        source="NVIDIA H200 SXM data sheet, 2024; host link 55 GB/s measured with nvbandwidth",
    ),
    _B200,
    _GB200,
    _L4,
    _A10G,
    _TITAN_RTX,
    _MI250X,
    _UNIFIED,
    _CPU_CORE,
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
