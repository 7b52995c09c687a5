"""Plans on a part of the cluster: what is offered, what is chosen, what the plan says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import HintError
from autopar.plan.records import Plan
from autopar.plan.text import mesh_text
from autopar.planner.driver import make_plan
from autopar.planner.hints import settle
from autopar.planner.parts import parts
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from cost_models.records import Devices, Level
from tests.benchmarks import sites
from tests.oracles.models import gpt2
from tests.oracles.sites import Gpt2


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    model, batch, loss = gpt2(layers=2, batch=8)
    return analyse(capture_step(model, batch, loss, grad=True).graph)


def request(cluster: Cluster, *hints: hint.Hint) -> Request:
    return Request(model="m", fingerprint="f", cluster=cluster, hints=hints)


def offered(analysis: Analysis, asked: Request) -> list[tuple[int, ...]]:
    settled = settle(analysis, asked.cluster, asked.hints, None)
    return [part.ranks for part in parts(asked, settled)]


def spread(ranks: range) -> tuple[int, ...]:
    return tuple(ranks)


SITES = replace(
    Cluster.preset("a100", nodes=4),
    levels=(
        replace(Cluster.preset("a100").levels[0], size=8),
        Level(name="fabric", size=2, latency_s=1e-5, bandwidth_bytes_per_s=25e9),
        Level(name="wan", size=2, latency_s=5e-3, bandwidth_bytes_per_s=1e9),
    ),
)


def test_a_site_and_a_node_are_offered(analysis: Analysis) -> None:
    assert offered(analysis, request(SITES)) == [
        spread(range(32)),
        spread(range(16)),
        spread(range(8)),
    ]
    assert offered(analysis, request(Cluster.local(4))) == [spread(range(4))]


def test_runs_of_equal_devices_and_the_fastest_node_are_offered(analysis: Analysis) -> None:
    fast, slow = Cluster.preset("h100").devices[0], Cluster.preset("a100").devices[0]
    two = Cluster.preset("h100", nodes=2)
    mixed = replace(two, devices=(replace(slow, count=8), replace(fast, count=8)))
    assert offered(analysis, request(mixed)) == [
        spread(range(16)),
        spread(range(8, 16)),
        spread(range(8)),
    ]


def test_a_hint_says_which_ranks_take_part(analysis: Analysis) -> None:
    asked = request(Cluster.local(4), hint.ranks(2, first=1), hint.degrees(dp=2))
    assert offered(analysis, asked) == [(1, 2)]
    plan = make_plan(analysis, asked)
    assert plan.ranks_of_stages == (range(1, 3),)
    assert plan.idle_ranks == (0, 3)
    assert "ranks 0, 3 of 4 are idle: as hint.ranks asks" in plan.notes
    assert plan.mesh.names == ("dp",)


def test_degrees_that_are_less_than_the_ranks_name_the_hint(analysis: Analysis) -> None:
    with pytest.raises(HintError, match=r"or leave the others idle with hint.ranks\(2\)"):
        make_plan(analysis, request(Cluster.local(4), hint.degrees(dp=2, tp=1, cp=1)))
    with pytest.raises(HintError, match=r"idle with hint.ranks\(2\)"):
        make_plan(analysis, request(Cluster.local(4), hint.degrees(pp=2, dp=1, tp=1, cp=1)))
    with pytest.raises(HintError, match="has ranks 0 to 3; name ranks that are there"):
        make_plan(analysis, request(Cluster.local(4), hint.ranks(3, first=2)))
    with pytest.raises(HintError, match="give a count, 1 or more"):
        hint.ranks(0)


def test_slow_devices_are_left_idle_where_they_hold_the_others_up(analysis: Analysis) -> None:
    cluster = Cluster.local(4)
    core = cluster.devices[0].device
    crawling = replace(
        core,
        kind="cpu-old",
        peak_flops_per_s={rate: peak / 50 for rate, peak in core.peak_flops_per_s.items()},
        memory_bytes_per_s=core.memory_bytes_per_s / 50,
    )
    mixed = replace(
        cluster, devices=(Devices(device=crawling, count=2), Devices(device=core, count=2))
    )
    plan = make_plan(analysis, request(mixed))
    assert plan.idle_ranks == (0, 1)
    assert any("ranks 0 to 1 of 4 are idle: no plan that uses them" in note for note in plan.notes)


def test_a_plan_for_another_batch_keeps_the_ranks(analysis: Analysis) -> None:
    cluster = Cluster.local(4)
    first = make_plan(analysis, request(cluster, hint.ranks(3, 1), hint.degrees(dp=(2, 1))))
    assert first.ranks_of_stages == (range(1, 3), range(3, 4))
    again = make_plan(analysis, replace(request(cluster), settled_plan=first))
    assert again.ranks_of_stages == first.ranks_of_stages
    apart = replace(
        first,
        stages=tuple(replace(s, first_rank=0 if s.first_rank == 1 else 3) for s in first.stages),
    )
    again = make_plan(analysis, replace(request(cluster), settled_plan=apart))
    assert again.ranks_of_stages == (range(2), range(3, 4))


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_plan_on_a_part_is_faster_than_what_is_proven_of_it(
    analysis: Analysis, ranks: int
) -> None:
    cluster = Cluster.preset("h100")
    plan = make_plan(analysis, request(cluster, hint.ranks(ranks)))
    whole = make_plan(analysis, request(cluster))
    assert 0 < plan.search.all_ways.bound_s <= plan.prediction.step_s
    assert whole.search.all_ways.bound_s <= plan.prediction.step_s


def test_a_part_that_cannot_be_faster_is_left_out_by_proof(analysis: Analysis) -> None:
    """A site of two, where the step is work alone, would take twice as long."""
    cluster = replace(
        Cluster.local(2),
        levels=(
            replace(Cluster.local(2).levels[0], size=1),
            Level(name="net", size=2, latency_s=0.0, bandwidth_bytes_per_s=1e12),
        ),
    )
    heavy = replace(
        cluster.devices[0].device, launch_s=0.0, memory_bytes_per_s=1e6, memory_bytes=1 << 40
    )
    cluster = replace(cluster, devices=(Devices(device=heavy, count=2),))
    plan = make_plan(analysis, request(cluster))
    assert plan.idle_ranks == ()
    assert plan.search.all_ways.excluded > 0
    assert not any(mesh.startswith("rank") for mesh, _ in plan.search.meshes)


@given(st.data())
def test_a_part_of_a_cluster_has_its_devices_and_joins_them(data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 31))
    count = data.draw(st.integers(1, 32 - first))
    part = SITES.part(first, count)
    assert part.num_devices == count
    assert part.device(0) == SITES.device(first)
    if first % 8 == 0 and count % 8 == 0 and first // 16 == (first + count - 1) // 16:
        assert part.levels[0] == SITES.levels[0]
    if first // 8 == (first + count - 1) // 8:
        assert [level.name for level in part.levels] == ["node"]


@pytest.fixture(scope="module")
def wide() -> Analysis:
    """Four layers of the width of GPT-2 medium, on tensors without memory."""
    size = Gpt2(name="wide", layers=4, width=1024, batch=256, vocabulary=2048)
    return analyse(capture_step(*sites.gpt2(size), None, grad=True).graph)


def test_the_plan_for_two_sites_follows_the_round_trip(wide: Analysis) -> None:
    def planned(round_trip_ms: float, *hints: hint.Hint) -> Plan:
        return make_plan(wide, request(sites.cluster(round_trip_ms, 12.5e9), *hints))

    near, between, far = map(planned, (0.1, 5, 200))
    assert sites.choice(near) == "one stage"
    assert sites.choice(between) == "cut at the WAN"
    assert between.ranks_of_stages == (range(2), range(2, 4))
    assert "(dp)" in mesh_text(between.stages[0])
    assert sites.choice(far) == "one site"
    alone = planned(200, hint.ranks(2), hint.degrees(pp=1))
    assert far.prediction.step_s == pytest.approx(alone.prediction.step_s)
    everyone = planned(200, hint.degrees(dp=4, tp=1, cp=1, pp=1))
    assert far.prediction.step_s < everyone.prediction.step_s
    assert near.prediction.step_s < alone.prediction.step_s
