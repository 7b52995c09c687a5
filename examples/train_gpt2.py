"""Train a small GPT-2 on Python's own documentation, a byte a token.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt2.py

The loop is the one for a single device; only ``autopar.compile`` and the clipping know better.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

BATCH, SEQ = 16, 128


def text() -> torch.Tensor:
    topics = pydoc_data.topics.topics
    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--plan", help="run this saved plan instead of searching one")
    given = arguments.parse_args()

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights and the same text on every rank
    config = GPT2Config(
        vocab_size=256,
        n_positions=SEQ,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).train()
    data = text()

    def draw() -> dict[str, torch.Tensor]:
        starts = torch.randint(len(data) - SEQ, (BATCH,)).tolist()
        ids = torch.stack([data[start : start + SEQ] for start in starts])
        return {"input_ids": ids, "labels": ids}

    parallel = autopar.compile(model, autopar.Cluster.local(ranks), draw(), plan=given.plan)
    if rank == 0:
        print(parallel.plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for step in range(given.steps):
        loss = parallel(draw())
        loss.backward()
        norm = autopar.clip_grad_norm_(parallel, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
