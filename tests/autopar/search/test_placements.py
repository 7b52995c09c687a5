"""Placements on clusters: DAPPLE's profiles and winners, two sites joined by a slow network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from autopar.search.inter import solve_inter
from autopar.search.interproblem import (
    Family,
    InterProblem,
    InterSolution,
    Link,
    Place,
    Point,
    Setting,
)
from tests.oracles import sites

MB, GB = 1e6, 1e9


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model as DAPPLE's authors published it: equal layers at some microbatch size.

    Source:
        Fan et al., DAPPLE, PPoPP 2021, and the profiles published with its code.
    """

    layers: int
    forward_s: float
    backward_s: float
    output_bytes: float
    layer_bytes: float
    embedding_bytes: float
    input_s: float
    microbatches: int


BERT_48 = Profile(
    layers=48,
    forward_s=2.69e-3,
    backward_s=4.47e-3,
    output_bytes=4.325 * MB,
    layer_bytes=50.385 * MB,
    embedding_bytes=127.13 * MB,
    input_s=0.0,
    microbatches=64,
)
XLNET_36 = Profile(
    layers=36,
    forward_s=3.4e-3,
    backward_s=4.9e-3,
    output_bytes=2 * MB,
    layer_bytes=52 * MB,
    embedding_bytes=131 * MB,
    input_s=17e-3,
    microbatches=128,
)

SERVERS = {"A": (8, 3.0, 1.0), "B": (1, 3.0, 1.0), "C": (1, 1.25, 1.25)}
"""Devices a server; GB/s of an all-reduce and of a message between servers. NVLink carries 25."""

DEVICES = 16


def placement_problem(profile: Profile, cluster: str, families: tuple[str, ...]) -> InterProblem:
    """The profile on sixteen devices; a stage of n takes an n-th of a microbatch on each."""
    server, reduce_gb_s, send_gb_s = SERVERS[cluster]
    kinds: list[tuple[int, bool]] = []
    places = {}
    for size in range(1, DEVICES + 1):
        for first in range(DEVICES + 1 - size):
            crosses = first // server != (first + size - 1) // server
            if (size, crosses) not in kinds:
                kinds.append((size, crosses))
            kind = kinds.index((size, crosses))
            places[first, size] = Place(first=first, size=size, kind=kind, memory_bytes=1.0)
    layer, first_layer = [], []
    for size, crosses in kinds:
        bandwidth = (reduce_gb_s if crosses else 25.0) * GB
        per_byte_s = 2 * (size - 1) / size / bandwidth
        layer.append(
            (
                Point(
                    forward_s=profile.forward_s / size,
                    backward_s=profile.backward_s / size,
                    reduce_s=profile.layer_bytes * per_byte_s,
                ),
            )
        )
        first_layer.append(
            (
                Point(
                    forward_s=(profile.forward_s + profile.input_s) / size,
                    backward_s=profile.backward_s / size,
                    reduce_s=(profile.layer_bytes + profile.embedding_bytes) * per_byte_s,
                ),
            )
        )
    rows = {
        "data parallel": [((0, 16),)],
        "straight": [tuple((n, 1) for n in range(16))],
        "two stages": [((0, n), (n, 16 - n)) for n in range(1, 16)],
        "any": [tuple(places)],
    }
    found = [
        Family(name=" + ".join(str(n) for _, n in row), places=tuple(places[own] for own in row))
        for name in families
        for row in rows[name]
    ]
    return InterProblem(
        blocks=(0,) + (1,) * (profile.layers - 1),
        settings=(
            Setting(
                microbatches=profile.microbatches,
                fronts=(tuple(first_layer), tuple(layer)),
                send_bytes=(profile.output_bytes,) * (profile.layers - 1),
            ),
        ),
        families=tuple(found),
        links=tuple(
            Link(bytes_per_s=(25.0 if n % server else send_gb_s) * GB, lanes=1)
            for n in range(1, DEVICES)
        ),
    )


def stage_sizes(found: InterSolution) -> list[int]:
    assert found.best is not None
    return [place.size for place in found.best.places]


@pytest.mark.parametrize(
    ("profile", "cluster", "winner"),
    [
        (BERT_48, "A", [8, 8]),
        (BERT_48, "B", [1] * 16),
        (BERT_48, "C", [1] * 16),
        (XLNET_36, "A", [8, 8]),
        (XLNET_36, "C", [1] * 16),
    ],
    ids=["BERT A", "BERT B", "BERT C", "XLNet A", "XLNet C"],
)
def test_published_winners(profile: Profile, cluster: str, winner: list[int]) -> None:
    """Of data parallelism, two stages and one layer after the other."""
    names = ("data parallel", "straight", "two stages")
    found = solve_inter(placement_problem(profile, cluster, names), gap=1e-3)
    assert found.status == "optimal" and stage_sizes(found) == winner


def test_unequal_replicas_beat_the_published_winner() -> None:
    """Three stages of any size are no worse than 8:8, and faster here: the ends get more."""
    two = solve_inter(placement_problem(BERT_48, "A", ("two stages",)))
    free = placement_problem(BERT_48, "A", ("two stages", "any"))
    three = solve_inter(replace(free, most_stages=3), gap=0.01)
    assert two.best is not None and three.best is not None
    assert three.best.step_s < 0.9 * two.best.step_s
    assert sum(stage_sizes(three)) == DEVICES and len(set(stage_sizes(three))) > 1


@pytest.mark.parametrize("model", [sites.MEDIUM, sites.LARGE], ids=lambda model: model.name)
def test_the_choice_for_two_sites_follows_the_round_trip(model: sites.Gpt2) -> None:
    """A large batch: one stage on both sites, then a pipeline cut between them by 10 ms.

    A small one: a pipeline, then one of the sites alone. Each step is the optimum.
    """
    ways: dict[int, list[str]] = {}
    for batch in (4, 256):
        own = replace(model, batch=batch)
        steps = []
        for round_trip_ms in sites.ROUND_TRIPS_MS:
            found = solve_inter(sites.site_problem(own, round_trip_ms))
            assert found.status == "optimal" and found.best is not None
            ways.setdefault(batch, []).append(sites.where(found.best))
            steps.append(found.best.step_s)
            if ways[batch][-1] == "pipeline":
                assert [place.size for place in found.best.places] == [2, 2]
        assert steps == sorted(steps)
    flipped = [a for a, b in zip(ways[256], ways[256][1:], strict=False) if a != b]
    assert flipped == ["one stage"] and ways[256][-1] == "pipeline"
    assert ways[256][sites.ROUND_TRIPS_MS.index(10)] == "pipeline"
    flipped = [a for a, b in zip(ways[4], ways[4][1:], strict=False) if a != b]
    assert flipped == ["pipeline"] and ways[4][-1] == "one site"
