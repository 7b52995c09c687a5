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


MEMORY = """
import functools
import gc

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import hint

AWAY = (hint.offload("transformer.h.*"), hint.offload("optimizer"), hint.offload("parameters"))
LAYOUTS = {
    "kept": (),
    "recomputed": (hint.recompute("transformer.h.*"),),
    "activations": AWAY[:1],
    "states": AWAY[1:2],
    "parameters": AWAY[2:],
    "all": AWAY,
    "all in microbatches": (*AWAY, hint.microbatches(2)),
}
DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
cluster = autopar.Cluster.detect(device_type="cuda")
ids = torch.randint(1000, (8, 256), generator=torch.Generator().manual_seed(0)).cuda()
batch = {"input_ids": ids, "labels": ids}
found = {}
for name, hints in LAYOUTS.items():
    torch.manual_seed(6)
    sizes = {"vocab_size": 1000, "n_positions": 256, "n_embd": 512, "n_layer": 4, "n_head": 8}
    config = GPT2Config(**sizes, **DROPOUTS, use_cache=False, loss_type="ForCausalLMLoss")
    model = GPT2LMHeadModel(config).train()
    make = functools.partial(autopar.optim.AdamW, lr=1e-3, bucket_elements=1 << 18)
    parallel = autopar.compile(model, cluster, batch, optimizer=make, hints=hints)
    optimizer = make(parallel.parameters())
    losses = []
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        value = parallel(batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        del value
    torch.cuda.synchronize()
    # What libraries hold between steps is no part of a plan.
    own = [p.to_local() for p in parallel.parameters()]
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    own += [getattr(v, "to_local", lambda v=v: v)() for v in states]
    held = sum(v.nbytes for v in (*own, *parallel.buffers(), ids) if v.is_cuda)
    library = torch.cuda.memory_allocated() - held
    peak = torch.cuda.max_memory_allocated() - library
    predicted = parallel.plan.prediction.memory.total_bytes
    print(f"{name}: {peak:,} bytes, predicted {predicted:,}; of libraries {library:,}")
    assert abs(peak - predicted) <= 0.01 * predicted + (1 << 20), name
    found[name] = losses, [v.full_tensor().cpu() for v in parallel.parameters()]
    del parallel, optimizer, own, states
    gc.collect()
microbatches = found.pop("all in microbatches")
torch.testing.assert_close(microbatches[0], found["kept"][0], rtol=1e-4, atol=1e-4)
for name in found:
    assert found[name][0] == found["kept"][0], name
    assert all(map(torch.equal, found[name][1], found["kept"][1])), name
print("ENDED")
"""


@pytest.mark.gpu
def test_host_memory_and_recompute_on_cuda_change_no_bit_and_hold_what_is_predicted() -> None:
    import torch

    devices = min(2, torch.cuda.device_count())
    ended = run_torchrun(MEMORY, world_size=devices, timeout_s=600)
    assert ended.stdout.count("ENDED") == devices, ended.stdout + ended.stderr
