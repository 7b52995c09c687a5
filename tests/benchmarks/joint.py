"""Sharding and memory at once against one after the other: ``python -m tests.benchmarks.joint``.

Every model is planned on two devices within parts of what its fastest plan holds, with and without
host memory to offload to: by the planner as it is, and with the sharding settled without a limit
first, what it makes then recomputed or offloaded until it fits. Steps are *simulated*, against that
without a limit; - says that nothing was found that fits.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from autopar.capture import capture_step
from autopar.ir.sharding import Mesh
from autopar.planner.request import Candidate
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.oracles.hosts import hosted
from tests.oracles.models import Built, bert, gpt2, llama
from tests.oracles.sequential import planned_on, sharded_first

PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
MESH = Mesh(("a",), (2,))
MODELS: Mapping[str, Built] = {
    "GPT-2, 6 layers": gpt2(layers=6, batch=8),
    "Llama, 4 layers": llama(4),
    "BERT, 2 layers": bert(),
}
CLUSTERS = {"no host memory": Cluster.local(2), "host at 1 GB/s": hosted(2, 1e9)}


def rows(model: Built, cluster: Cluster) -> list[tuple[float, str, str]]:
    """Part of the memory, and the step of both ways of planning."""
    analysis = analyse(capture_step(*model, grad=True).graph)
    free = planned_on(analysis, cluster, MESH, float("inf"))
    assert free is not None
    found = []
    for part in PARTS:
        limit = part * free.memory.total_bytes
        first = planned_on(analysis, cluster, MESH, limit, sharded_first)
        both = planned_on(analysis, cluster, MESH, limit)
        found.append((part, _step(first, free), _step(both, free)))
    return found


def _step(plan: Candidate | None, free: Candidate) -> str:
    return "-" if plan is None else f"{plan.step_s / free.step_s:.3f}"


def main() -> None:
    table = Table("model", "device", "memory", "sharding first", "at once")
    for name, model in MODELS.items():
        for where, cluster in CLUSTERS.items():
            for part, first, both in rows(model, cluster):
                table.add_row(name, where, f"{part:.0%}", first, both)
    Console().print(table)


if __name__ == "__main__":
    main()
