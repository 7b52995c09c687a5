"""Placements on clusters: DAPPLE's profiles and winners, two sites joined by a slow network."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class Layer:
    """Of a model that is cut between layers, at some microbatch size."""

    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A model as DAPPLE's authors published it.

    Source:
        Fan et al., DAPPLE, PPoPP 2021, and the profiles published with its code.
    """

    layers: tuple[Layer, ...]
    microbatches: int


BERT = Layer(2.69e-3, 4.47e-3, 4.325 * MB, 50.385 * MB)
BERT_48 = Profile(
    (replace(BERT, parameter_bytes=(50.385 + 127.13) * MB), *(BERT,) * 47), microbatches=64
)
XLNET = Layer(3.4e-3, 4.9e-3, 2 * MB, 52 * MB)
XLNET_INPUT = Layer((3.4 + 17) * 1e-3, 4.9e-3, 2 * MB, (52 + 131) * MB)
ENCODER = (
    (7.646, 11.763, 18.350080, 216.924160),  # embedding and both directions
    (4.743, 8.862, 9.175040, 50.364416),
    (3.514, 6.624, 9.175040, 33.587200),
    (3.519, 6.660, 9.175040, 33.587200),
    (3.505, 6.648, 9.175040, 33.587200),
    (3.504, 6.648, 9.175040, 33.587200),
    (3.506, 6.658, 9.175040, 33.587200),
    (3.510, 7.185, 9.175040, 33.587200),
)
DECODER = (
    (7.017, 11.381, 9.699328, 191.729664),  # embedding and attention
    (4.687, 8.681, 9.699328, 50.364416),
    (4.679, 8.687, 9.699328, 50.364416),
    (4.675, 8.672, 9.699328, 50.364416),
    (4.680, 8.700, 9.699328, 50.364416),
    (4.681, 8.671, 9.699328, 50.364416),
    (4.691, 8.686, 9.699328, 50.364416),
    (4.694, 31.157, 9.437184, 50.364416),
    (17.078, 2.904, 0.0, 149.896000),  # classifier
)
GNMT_16 = Profile(
    tuple(Layer(f / 1e3, b / 1e3, out * MB, held * MB) for f, b, out, held in ENCODER + DECODER),
    microbatches=16,
)
"""Of 64 sentences each. Every LSTM with the dropout in front of it: milliseconds of forward and
backward, megabytes of what crosses behind it (in the decoder with what attention gives to all) and
of parameters."""

XLNET_36 = Profile((XLNET_INPUT, *(XLNET,) * 35), microbatches=128)


CONVOLUTIONS = ((3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56),
                *((256, 256, 56),) * 3, (256, 512, 28), *((512, 512, 28),) * 3,
                *((512, 512, 14),) * 4)  # fmt: skip
"""VGG-19's: channels in and out, width of the image. A pooling follows where the next is half."""

SHARES: dict[str, Callable[[int, int, int], float]] = {
    "FLOPs": lambda c_in, c_out, width: c_in * c_out * width**2,
    "what they read and write": lambda c_in, c_out, width: (c_in + c_out) * width**2,
    "layers alike": lambda c_in, c_out, width: 1.0,
}
"""How the seconds of all convolutions, which are published, may be dealt out to each."""


def vgg_19(share: str, convolution_s: float) -> Profile:
    """VGG-19 at 32 samples a microbatch, 64 of them, in fp32.

    Published are the seconds of the convolutions together and the first linear layer's 392 MiB.
    Sizes follow from the architecture. A linear layer reads its weights once in the forward and
    twice in the backward, at the 0.9 TB/s of a V100; a convolution's backward takes two forwards.
    """
    samples, weights = 32, [SHARES[share](*own) for own in CONVOLUTIONS]
    found = []
    for place, (c_in, c_out, width) in enumerate(CONVOLUTIONS):
        seconds = convolution_s * weights[place] / sum(weights)
        after = CONVOLUTIONS[place + 1][2] if place + 1 < len(CONVOLUTIONS) else 7
        pixels = min(width, after) ** 2
        parameters = 9 * c_in * c_out + c_out
        found.append(
            Layer(seconds / 3, 2 * seconds / 3, 4.0 * samples * c_out * pixels, 4.0 * parameters)
        )
    for wide, narrow in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        num_bytes = 4.0 * wide * narrow
        read_s = num_bytes / 0.9e12
        found.append(Layer(read_s, 2 * read_s, 4.0 * samples * narrow, num_bytes))
    assert found[len(CONVOLUTIONS)].parameter_bytes == 392 * 2**20
    return Profile(tuple(found), microbatches=64)


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
    classes = list(dict.fromkeys(profile.layers))
    fronts = tuple(
        tuple((_point(layer, *kind, reduce_gb_s),) for kind in kinds) for layer in classes
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
        blocks=tuple(classes.index(layer) for layer in profile.layers),
        settings=(
            Setting(
                microbatches=profile.microbatches,
                fronts=fronts,
                send_bytes=tuple(layer.output_bytes for layer in profile.layers[:-1]),
            ),
        ),
        families=tuple(found),
        links=tuple(
            Link(bytes_per_s=(25.0 if n % server else send_gb_s) * GB, lanes=1)
            for n in range(1, DEVICES)
        ),
    )


def _point(layer: Layer, size: int, crosses: bool, reduce_gb_s: float) -> Point:
    """A layer on a stage of some devices, which may lie on several servers."""
    bandwidth = (reduce_gb_s if crosses else 25.0) * GB
    return Point(
        forward_s=layer.forward_s / size,
        backward_s=layer.backward_s / size,
        reduce_s=layer.parameter_bytes * 2 * (size - 1) / size / bandwidth,
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
        (GNMT_16, "A", [8, 8]),
    ],
    ids=["BERT A", "BERT B", "BERT C", "XLNet A", "XLNet C", "GNMT A"],
)
def test_published_winners(profile: Profile, cluster: str, winner: list[int]) -> None:
    """Of data parallelism, two stages and one layer after the other."""
    names = ("data parallel", "straight", "two stages")
    found = solve_inter(placement_problem(profile, cluster, names), gap=1e-3)
    assert found.status == "optimal" and stage_sizes(found) == winner


@pytest.mark.parametrize("convolution_s", [0.147, 0.441], ids=["both ways", "forwards alone"])
@pytest.mark.parametrize("share", SHARES)
def test_the_linear_layers_of_vgg_get_a_device_of_their_own(
    share: str, convolution_s: float
) -> None:
    """On 10 Gbit/s, however the convolutions' seconds are dealt out, and whatever they count.

    The linear layers, which have nearly all parameters, are on one device: nothing reduces them.
    """
    names = ("data parallel", "straight", "two stages")
    found = solve_inter(placement_problem(vgg_19(share, convolution_s), "C", names))
    assert found.status == "optimal" and stage_sizes(found) == [15, 1]
    assert found.best is not None and found.best.pieces[1].first <= len(CONVOLUTIONS)


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
