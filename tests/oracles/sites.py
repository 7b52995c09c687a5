"""GPT-2 on two sites, as an inter-op problem: ``python -m tests.oracles.sites`` prints the sweep.

Two devices a site, in one node each; 100 Gbit/s between the sites. A layer is data parallel
inside its stage; what it costs comes from `cost_models`. A pipeline is cut between the sites or
inside them, takes all four devices or those of one site.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from autopar.search.inter import solve_inter
from autopar.search.interproblem import (
    Choice,
    Family,
    InterProblem,
    Link,
    Place,
    Point,
    Setting,
)
from cost_models.cluster import Cluster
from cost_models.collectives import axis_link, collective_s
from cost_models.records import Devices, Level

ROUND_TRIPS_MS = (0.1, 0.5, 1, 2, 5, 10, 20, 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2:
    """One of the sizes of GPT-2.

    Attributes:
        name: Of the size.
        layers: Number of blocks.
        width: Of the hidden states.
        batch: Sequences of 1,024 tokens.
        vocabulary: Tokens there are.
    """

    name: str
    layers: int
    width: int
    batch: int = 32
    vocabulary: int = 50257


MEDIUM = Gpt2(name="medium", layers=24, width=1024)
LARGE = Gpt2(name="large", layers=36, width=1280)
TOKENS = 1024
ACHIEVED = 0.4
"""Of the device's peak."""


def two_sites(round_trip_ms: float) -> Cluster:
    """Two nodes of two A100, one at each site."""
    a100 = Cluster.preset("a100").devices[0].device
    node = replace(Cluster.preset("a100").levels[0], size=2)
    wan = Level(
        name="wan", size=2, latency_s=round_trip_ms / 2e3, bandwidth_bytes_per_s=12.5e9, ports=1
    )
    return Cluster(
        name=f"two sites, {round_trip_ms:g} ms",
        devices=(Devices(device=a100, count=4),),
        levels=(node, wan),
    )


def site_problem(model: Gpt2, round_trip_ms: float) -> InterProblem:
    """The model on the sites: all families of equal stages, on both sites or on one."""
    cluster = two_sites(round_trip_ms)
    kinds = [(1, False), (2, False), (4, True)]
    families = []
    for first, count, where in ((0, 4, "both sites"), (0, 2, "one site")):
        for kind, (size, _) in enumerate(kinds):
            if count % size == 0:
                places = tuple(
                    Place(first=first + n, size=size, kind=kind, memory_bytes=64e9)
                    for n in range(0, count, size)
                )
                families.append(Family(name=f"{where}, {len(places)} x {size}", places=places))
    node, wan = cluster.levels
    inside = Link(latency_s=node.latency_s, bytes_per_s=node.bandwidth_bytes_per_s)
    between = Link(latency_s=wan.latency_s, bytes_per_s=wan.bandwidth_bytes_per_s, lanes=1)
    return InterProblem(
        blocks=(0,) * model.layers,
        settings=tuple(
            Setting(
                microbatches=count,
                fronts=(tuple(_point(model, cluster, size, count) for size, _ in kinds),),
                send_bytes=(2.0 * model.batch // count * TOKENS * model.width,)
                * (model.layers - 1),
            )
            for count in (1, 2, 4, 8, 16, 32)
        ),
        families=tuple(families),
        links=(inside, between, inside),
        schedules=(("1f1b", 1),),
    )


def _point(model: Gpt2, cluster: Cluster, size: int, count: int) -> tuple[Point, ...]:
    """A block, data parallel on a stage's devices; nothing where a device would have no sample."""
    samples = model.batch / count / size
    if samples < 1:
        return ()
    parameters = 12 * model.width**2
    flops = samples * TOKENS * (2 * parameters + 4 * TOKENS * model.width)
    rate = cluster.device(0).peak_flops_per_s["bf16"] * ACHIEVED
    link = axis_link(cluster, (size,), 0)
    return (
        Point(
            forward_s=flops / rate,
            backward_s=2 * flops / rate,
            weight_s=2 * samples * TOKENS * parameters / rate,
            reduce_s=collective_s("all_reduce", 2 * parameters, link) if size > 1 else 0.0,
            resident_bytes=16 * parameters,
            saved_bytes=samples * TOKENS * model.width * 34,
        ),
    )


def where(choice: Choice) -> str:
    """Which of the ways a choice is."""
    used = sum(place.size for place in choice.places)
    if used < 4:
        return "one site"
    return "one stage" if len(choice.places) == 1 else "pipeline"


def main() -> None:
    table = Table("model", "round trip ms", "choice", "stages", "microbatches", "step ms", "gap")
    for model in (MEDIUM, LARGE):
        for batch in (4, 32, 256):
            for round_trip_ms in ROUND_TRIPS_MS:
                found = solve_inter(site_problem(replace(model, batch=batch), round_trip_ms))
                best = found.best
                assert best is not None
                table.add_row(
                    f"{model.name}, batch {batch}",
                    f"{round_trip_ms:g}",
                    where(best),
                    f"{best.schedule} {len(best.places)} x {best.places[0].size}",
                    str(best.setting.microbatches),
                    f"{1e3 * best.step_s:.1f}",
                    f"{found.gap:.1%}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
