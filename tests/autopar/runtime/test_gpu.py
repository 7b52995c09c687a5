"""The same programs on CUDA devices with NCCL, one process a device."""

from __future__ import annotations

import pytest

from tests.dist.pool import run_torchrun

STEPS = """
import os

import torch

import autopar
from tests.autopar.runtime.programs import Linear, batch, parallel_linear

world_size = int(os.environ["WORLD_SIZE"])
reference = Linear()
loss = reference(**batch())
loss.backward()
for zero in (False, True):
    parallel = parallel_linear((world_size,), zero=zero, device_type="cuda")
    weight = parallel.get_parameter("weight")
    assert weight.to_local().device == torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    found = parallel(batch())
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.detach().cpu(), loss.detach())
    (2 * found).backward()
    grad = weight.grad.full_tensor().cpu()
    torch.testing.assert_close(grad, 2 * reference.weight.grad, rtol=1e-4, atol=1e-4)
    norm = autopar.clip_grad_norm_(parallel, 1.0)
    torch.testing.assert_close(norm.cpu(), grad.norm(), rtol=1e-4, atol=1e-4)
    optimizer.step()
    with torch.no_grad():
        assert parallel(batch()).item() < loss.item()
print("ENDED")
"""


@pytest.mark.gpu
def test_handmade_programs_run_on_cuda() -> None:
    import torch

    devices = min(2, torch.cuda.device_count())
    ended = run_torchrun(STEPS, world_size=devices, timeout_s=300)
    assert ended.stdout.count("ENDED") == devices, ended.stderr


@pytest.mark.gpu
def test_the_same_is_drawn_on_cuda_as_on_the_cpu() -> None:
    import torch

    from autopar.capture import random_kernels as kernels
    from autopar.capture.random import make_key

    key, there = make_key(3, 1), torch.device("cuda")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        value, place = torch.randn(40, 1000).to(dtype), [500, 0, 40, 2000, 1000, 1]
        here = torch.ops.autopar.dropout(value, key, "a", 0.3, place)
        drawn = torch.ops.autopar.dropout(value.cuda(), key, "a", 0.3, place)
        assert torch.equal(drawn.cpu(), here)
    for dtype in (torch.float32, torch.float64):
        for draw in (kernels.uniform, kernels.normal):
            found = [draw(key, "a", (5000,), dtype, d).cpu() for d in (torch.device("cpu"), there)]
            assert torch.equal(*found)
