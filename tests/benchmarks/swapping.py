"""Against Large Model Support's knobs: ``python -m tests.benchmarks.swapping``.

Four blocks of GPT-2 medium on one V100, over a PCIe link of 12 GB/s and an NVLink to the host of
75 GB/s. Of the tensors that cross into the backward the first n leave, and come back so far ahead;
the planner gets the memory that such a program takes as its limit. Steps are *simulated*; - says
that the planner found nothing that fits.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import InfeasibleError
from autopar.plan.records import Plan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster, Devices
from tests.oracles.models import output_loss
from tests.oracles.swapping import swapped

LINKS = (12e9, 75e9)
PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)
LEADS = (0.0, 0.5, 1.0, 2.0)


def one_device(link_bytes_per_s: float) -> Cluster:
    """A V100 with a host link of so many bytes a second."""
    machine = Cluster.preset("v100", 1)
    device = replace(machine.device(0), host_link_bytes_per_s=link_bytes_per_s)
    return replace(Cluster.local(1), name="v100", devices=(Devices(device=device, count=1),))


def step() -> Analysis:
    config = GPT2Config(
        n_embd=1024,
        n_head=16,
        n_layer=4,
        n_positions=1024,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(8, 1024, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return analyse(capture_step(model.train(), batch, output_loss, grad=True).graph)


def main() -> None:
    analysis = step()
    table = Table("link", "tensors", "lead", "memory", "its step", "ours", "ours / its")
    for link in LINKS:
        cluster = one_device(link)

        def planned(*hints: hint.Hint, cluster: Cluster = cluster) -> Plan:
            request = Request(
                model="GPT-2",
                fingerprint="",
                cluster=cluster,
                hints=(hint.microbatches(1), *hints),
            )
            return make_plan(analysis, request)

        free = planned()
        for own in swapped(analysis, cluster, free, PARTS, LEADS):
            ours, ratio = "-", "-"
            with contextlib.suppress(InfeasibleError):
                ours_s = planned(hint.memory_limit(own.memory_bytes)).prediction.step_s
                ours, ratio = f"{ours_s * 1e3:.1f} ms", f"{ours_s / own.step_s:.3f}"
            table.add_row(
                f"{link / 1e9:.0f} GB/s",
                str(own.count),
                f"{own.lead:g}",
                f"{own.memory_bytes / 2**30:.2f} GiB",
                f"{own.step_s * 1e3:.1f} ms",
                ours,
                ratio,
            )
    Console().print(table)


if __name__ == "__main__":
    main()
