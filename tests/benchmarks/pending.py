"""What waits for weight gradients, counted and held: ``python -m tests.benchmarks.pending``.

Llama-3 8B in bfloat16 on one node of 8 H100, a rank a stage, 16 microbatches of a sequence of 8,192
tokens, everything or only MLPs run again. For every schedule: bytes of a rank by the sums of the
problem, bytes of the fullest rank of the lowered program, and their ratio.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from autopar import hint
from autopar.capture import capture_step
from autopar.inputs import load_subject
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.benchmarks.planning import CONFIGS
from tests.oracles.pending import held_bytes

STAGES, MICROBATCHES = 8, 16
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
AGAIN = {"MLPs": "*.mlp", "layers": "*.layers.*"}


def main() -> None:
    subject = load_subject(str(CONFIGS / "llama-3-8b.json"), batch=MICROBATCHES, seq=8192)
    captured = capture_step(subject.model, subject.batch, grad=True)
    analysis, cluster = analyse(captured.graph), Cluster.preset("h100", 1)
    made = Table("run again", "schedule", "by the problem, GiB", "lowered, GiB", "ratio")
    for name, pattern in AGAIN.items():
        for schedule in SCHEDULES:
            hints = (hint.degrees(pp=STAGES), hint.recompute(pattern))
            modelled, lowered = held_bytes(
                analysis, cluster, schedule, hints, (STAGES, MICROBATCHES)
            )
            ratio = lowered / modelled
            sizes = (modelled / 2**30, lowered / 2**30)
            made.add_row(name, schedule, *(f"{size:.1f}" for size in sizes), f"{ratio:.3f}")
    made.title = f"Llama-3 8B, {STAGES} stages of one H100, {MICROBATCHES} microbatches"
    Console().print(made)


if __name__ == "__main__":
    main()
