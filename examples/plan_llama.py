"""Plan Llama-3-8B for 64 H100s on any computer: no GPU, no weights, no process group.

    python examples/plan_llama.py [-o plan.json]

The same as

    autopar plan examples/configs/llama-3-8b.json --cluster h100:8 --batch 16 --seq 8192
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autopar

CONFIG = Path(__file__).parent / "configs" / "llama-3-8b.json"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--nodes", type=int, default=8, help="of 8 H100s each")
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--seq", type=int, default=8192)
    arguments.add_argument("-o", "--output", help="save the plan as JSON")
    given = arguments.parse_args()

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(CONFIG)))
        ids = torch.zeros(given.batch, given.seq, dtype=torch.int64)

    cluster = autopar.Cluster.preset("h100", nodes=given.nodes)
    plan = autopar.plan(model.train(), cluster, {"input_ids": ids, "labels": ids})
    print(plan)
    if given.output:
        plan.save(given.output)


if __name__ == "__main__":
    main()
