"""Processor seconds of the inter-op program: ``python -m tests.benchmarks.inter``.

* 100 layers of one class on 128 devices: eight mesh sizes, ten numbers of microbatches, up to 24
  points a layer (tensor and data parallelism, recomputation, sharded states), 1F1B; then with
  ZB-H1, interleaved and ZB-V schedules too;
* 100 layers that all differ, ten points each, on 4, 8 and 16 stages;
* BERT-48 as DAPPLE's authors profiled it, on two servers of 8: up to 16 stages of any sizes;
* the 90 programs of ``tests/data/layer_assignment_instances.json``, against their known optima.

Sizes and seconds of layers are made up. A gap of a thousandth is allowed in the first two, of a
hundredth for BERT.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from autopar.search.assign import assign
from autopar.search.inter import solve_inter
from autopar.search.interproblem import (
    Choice,
    Family,
    InterProblem,
    InterSolution,
    Link,
    Place,
    Point,
    Setting,
)
from tests.autopar.search.test_placements import BERT_48, placement_problem
from tests.oracles.assignments import known_assignments

GAP = 1e-3
LAYERS, DEVICES, BATCH = 100, 128, 512
EVERY = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2))


def one_class(schedules: tuple[tuple[str, int], ...]) -> InterProblem:
    """Alike layers; stages of 1 to 128 devices, all of one size."""
    sizes = [2**n for n in range(8)]
    families = [
        Family(
            name=f"{DEVICES // size} x {size} devices",
            places=tuple(
                Place(first=n * size, size=size, kind=kind, memory_bytes=60e9)
                for n in range(DEVICES // size)
            ),
        )
        for kind, size in enumerate(sizes)
    ]
    counts = [2**n for n in range(10)]
    settings = [
        Setting(
            microbatches=count,
            fronts=(tuple(_points(size, count) for size in sizes),),
            send_bytes=(1e6 * BATCH / count,) * (LAYERS - 1),
        )
        for count in counts
    ]
    return InterProblem(
        blocks=(0,) * LAYERS,
        settings=tuple(settings),
        families=tuple(families),
        links=(Link(latency_s=1e-5, bytes_per_s=25e9),) * (DEVICES - 1),
        schedules=schedules,
    )


def _points(size: int, count: int) -> tuple[Point, ...]:
    """A layer on a stage of some devices: tensor and data parallel, recomputed, states sharded."""
    found = []
    for tensor in (1, 2, 4, 8):
        data = size // tensor
        if tensor > size or BATCH // count < data:
            continue
        samples = BATCH / count / data
        for again in (0.0, 0.5, 1.0):
            for sharded in (False, True):
                forward = samples * 0.01 / tensor * (1 + 0.06 * tensor) * (1 + 0.05 * sharded)
                found.append(
                    Point(
                        forward_s=forward,
                        backward_s=2 * forward * (1 + again / 3),
                        weight_s=0.9 * forward,
                        reduce_s=0.01 if data > 1 else 0.0,
                        resident_bytes=3.2e9 / (tensor * (data if sharded else 1)),
                        saved_bytes=samples * 1e9 / tensor * (1 - 0.9 * again),
                        transient_bytes=samples * 0.2e9 / tensor,
                    )
                )
    return tuple(found)


def all_distinct(num_stages: int) -> InterProblem:
    """Layers of random sizes, each with ten random points."""
    draw = random.Random(1)
    fronts = []
    for _ in range(LAYERS):
        base, points = draw.uniform(0.5, 1.5), []
        for _ in range(10):
            again = draw.random()
            points.append(
                Point(
                    forward_s=base * draw.uniform(1, 1.05),
                    backward_s=base * (2 + 0.8 * again + draw.uniform(0, 0.05)),
                    resident_bytes=draw.uniform(1, 1.1),
                    saved_bytes=base * (1.2 - again),
                    transient_bytes=0.5,
                )
            )
        fronts.append((tuple(points),))
    places = (Place(first=n, size=1, kind=0, memory_bytes=45.0) for n in range(num_stages))
    return InterProblem(
        blocks=tuple(range(LAYERS)),
        settings=(
            Setting(microbatches=64, fronts=tuple(fronts), send_bytes=(0.02,) * (LAYERS - 1)),
        ),
        families=(Family(name=f"{num_stages} devices", places=tuple(places)),),
        links=(Link(bytes_per_s=1.0),) * (num_stages - 1),
    )


def sizes_of(choice: Choice) -> str:
    """Devices of its stages, once if they are the same."""
    sizes = [str(place.size) for place in choice.places]
    return sizes[0] if len(set(sizes)) == 1 else "/".join(sizes)


def known_optima() -> tuple[int, int]:
    """Programs whose optimum is met, and all."""
    known = known_assignments()
    met = 0
    for layers, optimum_s in known:
        found = assign(layers)
        if found is None or optimum_s is None:
            met += found is None and optimum_s is None
        else:
            met += abs(found.seconds - optimum_s) <= 1e-7 * optimum_s
    return met, len(known)


def main() -> None:
    table = Table("program", "processor s", "found", "gap")

    def add(name: str, solve: Callable[[], InterSolution]) -> None:
        start = time.process_time()
        found = solve()
        took = time.process_time() - start
        best = found.best
        assert best is not None
        what = (
            f"{best.schedule}, {len(best.places)} stages of {sizes_of(best)}, "
            f"{best.setting.microbatches} microbatches: {best.step_s:.4g}"
        )
        table.add_row(name, f"{took:.2f}", what, f"{found.gap:.2%}")

    alike = one_class((("1f1b", 1),)), one_class(EVERY)
    add("100 alike layers, 128 devices, 1f1b", lambda: solve_inter(alike[0], gap=GAP))
    add("the same, five schedules", lambda: solve_inter(alike[1], gap=GAP))
    for num_stages in (4, 8, 16):
        problem = all_distinct(num_stages)
        add(
            f"100 distinct layers, {num_stages} stages",
            lambda problem=problem: solve_inter(problem, gap=GAP),  # type: ignore[misc]
        )
    bert = placement_problem(BERT_48, "A", ("any",))
    add("BERT-48, 16 devices, any stages", lambda: solve_inter(bert, gap=0.01))
    start = time.process_time()
    met, number = known_optima()
    took = time.process_time() - start
    table.add_row(f"{number} layer assignments", f"{took:.2f}", f"{met} optima met", "0.00%")
    Console().print(table)


if __name__ == "__main__":
    main()
