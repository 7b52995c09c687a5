"""Plans that keep values in host memory: when, that they fit, and that they stay exact."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from autopar import hint
from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.errors import AutoparError, InfeasibleError
from autopar.hint import Hint
from autopar.ir.graph import Ref, TensorType
from autopar.ir.sharding import Mesh, Split
from autopar.lower.overlap import overlap
from autopar.lower.program import Program, ProgramInput
from autopar.lower.simulate import prices
from autopar.lower.spmd import lower
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.plan.serialize import from_json, to_json
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.planner.update import update_of
from autopar.report.diff import diff
from autopar.search.analysis import Analysis, analyse
from autopar.search.intra import solve
from autopar.search.problem import Choices, Link, Problem
from cost_models.cluster import Cluster
from cost_models.memory import PIECES, piece_elements
from cost_models.overlap import BOTH_COPIES, together_s
from tests.oracles.hosts import hosted
from tests.oracles.live import counted_peaks
from tests.oracles.models import gpt2
from tests.oracles.pipeline import values_of
from tests.oracles.swapping import swapped

BUILT = gpt2(layers=6, batch=8)
LINKS = (1e8, 1e9, 2e10)
"""Bytes a second: copies that hide hardly, in part, and wholly."""


@pytest.fixture(scope="module")
def captured() -> tuple[Analysis, Any]:
    found = capture_step(*BUILT, grad=True)
    return analyse(found.graph), found


def planned(analysis: Analysis, cluster: Cluster, *hints: Hint) -> Plan:
    hints = (hint.microbatches(1), *hints)
    return make_plan(analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=hints))


def within(analysis: Analysis, cluster: Cluster, part: float, *hints: Hint) -> Plan:
    """The plan within a part of what the fastest takes."""
    free = planned(analysis, cluster)
    limit = int(part * free.prediction.memory.total_bytes)
    return planned(analysis, cluster, hint.memory_limit(limit), *hints)


@pytest.mark.parametrize(
    ("ranks", "link", "has_room"), [(1, 1e8, False), (2, 1e9, True), (1, 2e10, False)]
)
def test_predicted_bytes_are_counted_and_nothing_changes_to_the_bit(
    captured: tuple[Analysis, Any], ranks: int, link: float, has_room: bool
) -> None:
    analysis, found = captured
    cluster = hosted(ranks, link)
    plan = within(analysis, cluster, 0.6)
    assert plan.stage.offloaded
    assert (plan.stage.copy_room_bytes is not None) == has_room
    assert from_json(to_json(plan)) == plan
    mesh = plan.mesh
    seconds = axis_seconds(cluster, mesh)
    cost = prices(cluster.device(0), seconds)
    lowered = [
        lower(analysis.graph, analysis.rules, stage, mesh.coordinates(rank), seconds)
        for stage in (plan.stage,)
        for rank in range(mesh.num_ranks)
    ]
    values = values_of(BUILT[0], BUILT[1], analysis, found)
    counts, results = counted_peaks([overlap(program, cost) for program in lowered], values)
    memory = plan.prediction.memory
    entered = memory.parameters_bytes + memory.inputs_bytes + memory.buffers_bytes
    peaks = [entered + memory.optimizer_bytes + count.peak_bytes for count in counts]
    assert max(peaks) == memory.total_bytes
    assert max(count.host_peak_bytes for count in counts) == memory.host_bytes
    plain = planned(analysis, cluster)
    if plain.stage.nodes != plan.stage.nodes:
        return
    programs = [
        lower(analysis.graph, analysis.rules, plain.stage, mesh.coordinates(rank), seconds)
        for rank in range(mesh.num_ranks)
    ]
    _, wanted = counted_peaks([overlap(program, cost) for program in programs], values)
    for rank in range(mesh.num_ranks):
        for one, other in zip(results[rank], wanted[rank], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("link", LINKS)
def test_nothing_leaves_or_runs_again_where_everything_fits(
    captured: tuple[Analysis, Any], link: float
) -> None:
    plan = planned(captured[0], hosted(1, link))
    assert not plan.stage.offloaded and not plan.stage.recomputed
    assert not plan.prediction.copies and plan.prediction.memory.host_bytes == 0


@pytest.mark.parametrize("link", LINKS[:2])
def test_more_memory_is_never_slower_and_both_together_never_slower_than_one(
    captured: tuple[Analysis, Any], link: float
) -> None:
    analysis, _ = captured
    times, recomputing = [], []
    for part in (0.55, 0.75, 0.9, 1.0):
        times.append(within(analysis, hosted(1, link), part).prediction.step_s)
        recomputing.append(within(analysis, Cluster.local(1), part).prediction.step_s)
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(times))
    assert all(both <= one * (1 + 1e-9) for both, one in zip(times, recomputing, strict=True))
    assert times[0] < recomputing[0]


@pytest.mark.parametrize("link", [3e8, 2e9])
def test_no_number_of_swapped_tensors_is_faster_within_its_memory(
    captured: tuple[Analysis, Any], link: float
) -> None:
    """Its knobs are how many tensors leave and how early they come back; ours are chosen."""
    analysis, _ = captured
    cluster = hosted(1, link)
    free = planned(analysis, cluster)
    before = free.prediction.memory.total_bytes
    for own in swapped(analysis, cluster, free, (0.125, 0.25, 0.5), (1.0, 0.0)):
        plan = planned(analysis, cluster, hint.memory_limit(own.memory_bytes))
        assert plan.prediction.memory.total_bytes <= own.memory_bytes
        assert plan.prediction.step_s <= own.step_s * (1 + 1e-9)
        if own.lead:
            assert own.memory_bytes < before
            before = own.memory_bytes


def test_a_plan_fits_where_what_leaves_comes_back_late(captured: tuple[Analysis, Any]) -> None:
    """Copies ahead wait for the room that memory leaves them; the plan says how much."""
    analysis, _ = captured
    cluster = hosted(1, 1e9)
    free = planned(analysis, cluster)
    (own,) = swapped(analysis, cluster, free, (0.75,), (0.0,))
    plan = planned(analysis, cluster, hint.memory_limit(own.memory_bytes))
    assert plan.prediction.memory.total_bytes <= own.memory_bytes
    assert plan.prediction.step_s < own.step_s
    assert plan.stage.copy_room_bytes is not None
    assert from_json(to_json(plan)) == plan
    for text in (str(plan), plan.explain("h.1"), diff(free, plan)):
        assert "of copies more than is held without any" in text


def test_every_stage_of_a_pipeline_offloads_what_its_own_backward_reads(
    captured: tuple[Analysis, Any],
) -> None:
    analysis, _ = captured

    def piped(*hints: Hint) -> Plan:
        own = (
            hint.degrees(pp=2, dp=1, tp=1),
            hint.schedule("1f1b"),
            hint.microbatches(4),
            *hints,
        )
        cluster = hosted(2, 1e9)
        return make_plan(analysis, Request(model="m", fingerprint="f", cluster=cluster, hints=own))

    free = piped()
    limit = int(0.8 * free.prediction.memory.total_bytes)
    plan = piped(hint.memory_limit(limit))
    assert plan.prediction.memory.total_bytes <= limit
    first, second = (set(stage.offloaded) for stage in plan.stages)
    assert first and second
    assert first & second <= {transfer.value for transfer in plan.transfers}


def test_chunks_that_read_each_other_on_one_rank_offload_too(
    captured: tuple[Analysis, Any],
) -> None:
    """Under ZB-V the last rank sends itself values and gradients, in both directions."""
    analysis, _ = captured
    asked = (hint.degrees(pp=2), hint.microbatches(4), hint.schedule("zb-v"))
    hints = (*asked, hint.offload("transformer.h.*"))
    request = Request(model="m", fingerprint="f", cluster=hosted(2, 1e9), hints=hints)
    plan = make_plan(analysis, request)
    assert len(plan.stages) == 4 and any(stage.offloaded for stage in plan.stages)


def test_a_hint_says_what_leaves(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    plan = planned(analysis, hosted(1, 1e9), hint.offload("*.h.1.mlp"))
    modules = {plan.modules[value.partition(":")[0]] for value in plan.stage.offloaded}
    assert modules and all(module.startswith("transformer.h.1.mlp") for module in modules)
    assert not plan.stage.recomputed
    saving = sum(s.saved_bytes for s in plan.prediction.savings)
    assert saving == plan.prediction.memory.host_bytes
    assert sum(copy.num_bytes for copy in plan.prediction.copies) == 2 * saving
    text = str(plan)
    assert "offloaded to host memory" in text and "host copies" in text
    assert "offloaded to host memory" in plan.explain("h.1.mlp")
    assert "offloaded to host memory" in diff(planned(analysis, hosted(1, 1e9)), plan)


def test_what_a_hint_keeps_does_not_leave(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    plan = within(analysis, hosted(1, 2e10), 0.85, hint.keep("*.mlp"))
    modules = {plan.modules[value.partition(":")[0]] for value in plan.stage.offloaded}
    assert modules and not any(".mlp" in module for module in modules)


def test_too_little_host_memory_is_named_in_bytes(captured: tuple[Analysis, Any]) -> None:
    cluster = hosted(1, 1e9, host_bytes=100_000)
    with pytest.raises(
        InfeasibleError, match=r"needs \S+ MB of host memory a rank, each has 100 kB"
    ):
        planned(captured[0], cluster, hint.offload("*.h.*"))


def test_host_memory_is_never_filled_over_its_size(captured: tuple[Analysis, Any]) -> None:
    plan = within(captured[0], hosted(1, 2e10, host_bytes=200_000), 0.75)
    assert plan.stage.offloaded and plan.stage.recomputed
    assert plan.prediction.memory.host_bytes <= 200_000


def test_keeps_that_a_limit_forbids_are_the_smallest_set(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    with pytest.raises(InfeasibleError) as raised:
        within(analysis, Cluster.local(1), 0.6, hint.keep("*.attn"), hint.keep("*.mlp"))
    text = str(raised.value)
    assert "hint.keep('*.mlp') within" in text and "attn" not in text
    assert "what they keep needs at least" in text


def test_the_least_bytes_are_named_with_the_module_that_holds_them(
    captured: tuple[Analysis, Any],
) -> None:
    with pytest.raises(InfeasibleError, match=r"needs \S+ kB (in the|at the) \w+"):
        within(captured[0], hosted(1, 1e9), 0.2)


IN_BUCKETS = OptimizerSpec(moments=2, host_bucket_elements=512)


def test_the_optimizers_state_leaves_where_a_hint_says_so(captured: tuple[Analysis, Any]) -> None:
    analysis, _ = captured
    cluster = hosted(1, 1e9)
    request = Request(
        model="m",
        fingerprint="f",
        cluster=cluster,
        hints=(hint.microbatches(1), hint.offload("optimizer")),
        optimizer=IN_BUCKETS,
    )
    free, found = planned(analysis, cluster), make_plan(analysis, request)
    before, after = free.prediction.memory, found.prediction.memory
    assert all(p.state_on_host for p in found.stage.parameters)
    assert (after.optimizer_bytes, after.host_bytes) == (0, before.optimizer_bytes)
    assert after.total_bytes == before.total_bytes - before.optimizer_bytes
    # Out and back at once, which slows both; the first piece of the two moments to come and the
    # last to go have nothing beside them.
    piece_s = piece_elements(512) * 8 / 1e9
    each_s = after.host_bytes / 1e9 - piece_s
    link_s = together_s(each_s, each_s, BOTH_COPIES) + 2 * piece_s
    more = found.prediction.optimizer_s - free.prediction.optimizer_s
    assert more == pytest.approx(link_s - 2 * after.host_bytes / 20e9, rel=0.3)
    assert "state on host" in str(found)


def test_an_update_in_buckets_holds_four_bytes_a_parameter_and_sixteen_a_bucket() -> None:
    """AxoNN: 20 bytes a parameter become 4 and 16 of a bucket; 5.00 and 1.26 GB of 0.25e9."""
    num, bucket = 250_000_000, 16_000_000
    kind = TensorType((num,), "bfloat16")
    entry = ProgramInput(
        name="w", kind="parameter", target="w", global_type=kind, sharding=(), local_type=kind
    )
    program = Program(
        mesh=Mesh((), ()),
        coordinates=(),
        inputs=(entry,),
        instructions=(),
        loss=None,
        gradients={"w": Ref("w")},
    )
    # Master, gradient and moments in fp32; three pieces of a third are on the device at a time.
    spec = OptimizerSpec(state_bytes=16, host_bucket_elements=bucket // 2)
    here, away = update_of(program, spec), update_of(program, spec, away=("w",))
    totals = [
        u.parameter_bytes + u.gradient_bytes + u.state_bytes + u.scratch_bytes for u in (here, away)
    ]
    assert totals == [20 * num, 4 * num + 16 * PIECES * (bucket // PIECES)]
    assert totals[0] / totals[1] == pytest.approx(3.98, rel=0.01)


def test_an_optimizer_that_may_update_from_the_host_is_never_slower_within_memory(
    captured: tuple[Analysis, Any],
) -> None:
    """Its space has all that the other's has.

    Nothing that is gathered is stored along an inner dim, which would take as many bytes of
    communication, but copies beside it.
    """
    analysis, cluster = captured[0], hosted(2, 1e9)
    total = planned(analysis, cluster).prediction.memory.total_bytes
    hints = (hint.microbatches(1), hint.degrees(dp=2, zero=3), hint.memory_limit(int(0.5 * total)))
    plans = [
        make_plan(
            analysis,
            Request(model="m", fingerprint="f", cluster=cluster, hints=hints, optimizer=optimizer),
        )
        for optimizer in (OptimizerSpec(moments=2), IN_BUCKETS)
    ]
    one, other = (plan.prediction.step_s for plan in plans)
    assert other <= one * (1 + 1e-9)
    stored = {split for plan in plans for p in plan.stage.parameters for split in p.stored}
    assert all(isinstance(split, Split) and split.dim == 0 for split in stored)


@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_set_of_states_leaves(seed: int) -> None:
    """M6-10T: as few bytes as fit, as a knapsack says."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 60) * 1e6 for _ in range(11)]
    nodes = tuple(
        Choices(
            name=str(n),
            count=1,
            seconds=(0.0,),
            resident_bytes=(size,),
            gradient_bytes=(0.0,),
            state_bytes=(size,),
        )
        for n, size in enumerate(sizes)
    )
    link = Link(early=(), late=(), host_limit_bytes=1e12, state_s_per_byte=1e-9)
    limit = draw.uniform(0.3, 0.9) * sum(sizes)
    found = solve(Problem(nodes=nodes, values=(), memory_limit_bytes=limit, link=link), gap=0.0)
    away = sum(sizes[n] for n in found.state_shares)
    subsets = (s for k in range(12) for s in itertools.combinations(sizes, k))
    assert away == min(sum(s) for s in subsets if sum(sizes) - sum(s) <= limit)


@pytest.mark.parametrize(
    ("cluster", "hints", "words"),
    [
        (Cluster.local(1), (hint.offload("*.mlp"),), "host memory is its own memory"),
        (hosted(1, 1e9, host_bytes=0), (hint.offload("*.mlp"),), "has no host memory"),
        (hosted(1, 1e9), (hint.offload("*.mpl"),), "did you mean"),
        (hosted(1, 1e9), (hint.offload("optimizer"),), "keeps its state on the device"),
        (Cluster.local(1), (hint.offload("optimizer"),), "host memory is its own memory"),
        (
            hosted(1, 1e9),
            (hint.offload("*.mlp"), hint.recompute("*.h.*")),
            "forgets its activations, the other keeps them in host memory",
        ),
        (hosted(1, 1e9), (hint.offload("*.h.*"), hint.keep("*.mlp")), "on the device"),
    ],
)
def test_wrong_hints_are_refused(
    captured: tuple[Analysis, Any], cluster: Cluster, hints: tuple[Hint, ...], words: str
) -> None:
    with pytest.raises(AutoparError, match=words):
        planned(captured[0], cluster, *hints)
