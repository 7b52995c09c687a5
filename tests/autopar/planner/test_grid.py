"""The planner's own choice against every point of Megatron's uniform grid, under the same costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar import hint
from autopar.errors import AutoparError
from autopar.planner.driver import make_plan
from cost_models.cluster import Cluster
from tests.autopar.planner.test_pipelines import request, wide

COUNTS = (1, 2, 4, 8, 16)


def nodes_of(size: int, devices: int, bytes_per_s: float) -> Cluster:
    """Cores in nodes of some size, joined by a network of some bandwidth."""
    alike = Cluster.local(devices)
    outer = replace(
        alike.levels[0], name="net", size=devices // size, bandwidth_bytes_per_s=bytes_per_s
    )
    return replace(alike, levels=(replace(alike.levels[0], size=size), outer))


def grid(devices: int) -> Iterator[tuple[hint.Hint, ...]]:
    """All of dp x tp x pp, numbers of microbatches, and chunks a stage."""
    powers = [2**n for n in range(devices.bit_length())]
    for dp, tp, pp in itertools.product(powers, repeat=3):
        if dp * tp * pp != devices:
            continue
        for count, chunks in itertools.product(COUNTS, (1, 2) if pp > 1 else (1,)):
            schedule = ("1f1b", 1) if chunks == 1 else ("interleaved", chunks)
            yield (
                hint.degrees(dp=dp, tp=tp, pp=pp),
                hint.microbatches(count),
                *((hint.schedule(schedule[0], chunks=schedule[1]),) if pp > 1 else ()),
            )


@pytest.mark.parametrize(
    ("size", "devices", "bytes_per_s"),
    [
        pytest.param(2, 2, 2e7, id="one slow node of 2"),
        pytest.param(4, 4, 2e7, id="one slow node of 4", marks=pytest.mark.large),
        pytest.param(2, 4, 2e7, id="2 x 2", marks=pytest.mark.large),
        pytest.param(4, 8, 2e7, id="2 x 4", marks=pytest.mark.large),
        pytest.param(1, 8, 1e8, id="8 x 1", marks=pytest.mark.large),
        pytest.param(8, 8, 1e10, id="one fast node of 8", marks=pytest.mark.large),
    ],
)
def test_no_point_of_the_grid_is_faster(size: int, devices: int, bytes_per_s: float) -> None:
    cluster = nodes_of(size, devices, bytes_per_s)
    if size == devices:
        level = replace(cluster.levels[0], bandwidth_bytes_per_s=bytes_per_s)
        cluster = replace(cluster, levels=(level,))
    chosen = make_plan(wide(), request(cluster))
    slower = 0
    for hints in grid(devices):
        try:
            other = make_plan(wide(), request(cluster, *hints))
        except AutoparError:
            continue
        assert chosen.prediction.step_s <= 1.001 * other.prediction.step_s, hints
        slower += 1
    assert slower > 10
