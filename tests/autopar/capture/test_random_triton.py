"""The CUDA kernels of the generator, run by Triton's interpreter and compiled for devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import itertools

import torch

from autopar.capture import random_kernels as kernels, random_triton
from autopar.capture.random import make_key

CPU, KEY = torch.device("cpu"), make_key(5, 9)
PLACES = {
    (): 3000,
    (7, 4096, 3000, 1): 3000,
    ((1 << 32) - 50, 0, 100, 1): 100,
    (4, 16, 2, 3200, 30, 4): 60,
    ((1 << 32) - 3000, 16, 5, 32000, 7, 1 << 31, 9, 1): 315,
    (3, 0, 2, 7 << 33, 3, 900, 4, 70, 5, 1): 120,
}


def drawn(place, numel, microbatch):
    at = place, microbatch
    # bfloat16 is cut off by the interpreter, where devices round.
    for dtype in (torch.float16, torch.float32, torch.float64):
        value = torch.linspace(-3, 3, numel, dtype=dtype)
        yield kernels.dropout(value, KEY, "a", 0.3, *at)
    yield kernels.dropout(value.float(), KEY, "a", 0.0, *at)
    yield kernels.dropout(value.float(), KEY, "a", 1.0, *at)
    yield kernels.uniform(KEY, "a", (numel,), torch.float64, CPU, *at)
    yield kernels.integers(KEY, "a", (numel,), -5, 1000, torch.int64, CPU, *at)
    only = numel // 3, numel // 2
    yield kernels.dropout_factors(numel, only, torch.float32, CPU, KEY, "a", 0.3, *at)


def everything():
    random_triton.LARGEST = kernels.GPU_CHUNK = kernels.CPU_CHUNK = 1 << 20
    for place, numel in PLACES.items():
        yield from drawn(place, numel, microbatch=0)
    yield from drawn((4, 16, 2, 3200, 30, 4), 60, microbatch=3)
    random_triton.LARGEST = kernels.GPU_CHUNK = kernels.CPU_CHUNK = 64
    yield from drawn((7, 4096, 3, 700, 50, 1), 150, microbatch=0)


expected = list(everything())
launched = []
kernels._triton = lambda where, device: launched.append(1) or random_triton
found = list(everything())
assert launched and len(found) == len(expected) == 8 * 8
assert all(map(torch.equal, found, expected))
print("EQUAL")
"""


def test_kernels_draw_the_bits_that_tensor_ops_draw() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stdout == "EQUAL\n", ended.stderr


@pytest.mark.parametrize("arch", [70, 80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_kernels_compile_for_devices(arch: int, dtype: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from autopar.capture import random_triton

    types = {
        "out": f"*{dtype}",
        "given": f"*{dtype}",
        "limit": "i32",
        "scale": "fp32",
        "about": "*i32",
        "numel": "i32",
    }
    constants = {"runs": 2, "rounds": 3, "block": 1024}
    source = triton.compiler.ASTSource(
        fn=random_triton._drop,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=random_triton._OPTIONS
    )
    assert "ld.global" in made.asm["ptx"]
