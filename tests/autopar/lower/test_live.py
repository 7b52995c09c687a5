"""Live bytes of programs: what is simulated equals what is counted while they run."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import Captured, capture_step
from autopar.capture.batch import flatten_batch
from autopar.capture.interpret import source_values
from autopar.capture.precision import Precision, precision_of
from autopar.capture.random import make_key
from autopar.cost.node import axis_seconds
from autopar.hint import degrees
from autopar.ir.sharding import Mesh
from autopar.lower.live import DEVICE, HOST, byte_changes, live_bytes, storages
from autopar.lower.overlap import overlap
from autopar.lower.program import Program
from autopar.lower.simulate import Prices, prices
from autopar.lower.spmd import lower
from autopar.lower.strides import dense, is_dense, ordered_like, viewed
from autopar.plan.records import StagePlan
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from tests.autopar.capture import models
from tests.oracles.live import counted_peaks
from tests.oracles.random_plans import offloading, random_stage, recomputing, streaming

Loss = Callable[[Any, Any], Any]


def mlp() -> nn.Module:
    layers = (nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return nn.Sequential(*layers)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


CASES: Mapping[str, tuple[Callable[[], nn.Module], Any, Loss | None]] = {
    "mlp": (mlp, torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), square),
    "llama": (models.llama, models.tokens(), None),
    "gpt2 with dropout": (functools.partial(models.gpt2, 0.1), models.tokens(), None),
    "bert": (models.bert, models.tokens(), None),
}
PLANS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "single": (1, {"dp": 1}),
    "dp": (2, {"dp": 2, "tp": 1, "zero": 0}),
    "tp": (2, {"dp": 1, "tp": 2}),
    "zero3": (2, {"dp": 2, "tp": 1, "zero": 3}),
}


class Turned(nn.Module):
    """Views and a normalisation of what does not lie as they need it."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.norm = nn.GroupNorm(4, 8)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x).view(-1, 8, 8))
        if self.last == "norm":
            return self.norm(h.transpose(1, 2))
        turned = torch.polar(h.abs(), h)
        return torch.view_as_real(turned * turned.conj() + turned).sum(-1)


TURNED = {
    last: (functools.partial(Turned, last), CASES["mlp"][1], square) for last in ("norm", "complex")
}


class Subject:
    """A captured model with the tensors that enter its programs."""

    def __init__(self, name: str, precision: Precision | None = None) -> None:
        make, batch, loss = {**CASES, **TURNED}[name]
        torch.manual_seed(0)
        model = make()
        captured: Captured = capture_step(
            model, batch, loss, grad=True, precision=precision or precision_of(None)
        )
        self.analysis: Analysis = analyse(captured.graph)
        paths, tensors, _ = flatten_batch(batch)
        self.values = source_values(
            captured.graph,
            dict(model.named_parameters(remove_duplicate=False)),
            dict(model.named_buffers(remove_duplicate=False)),
            dict(zip(paths, tensors, strict=True)),
        )
        for node in captured.graph.sources("constant"):
            self.values[node.name] = captured.constants[node.target]
        for node in captured.graph.sources("key"):
            self.values[node.name] = make_key(0, 0)

    def planned(self, ranks: int, hints: Mapping[str, int]) -> StagePlan:
        request = Request(
            model="m",
            fingerprint="f",
            cluster=Cluster.local(ranks),
            hints=(degrees(**hints),),
        )
        return make_plan(self.analysis, request).stage

    def programs(self, stage: StagePlan, cost: Prices | None = None) -> list[Program]:
        mesh = stage.mesh
        seconds = axis_seconds(Cluster.local(mesh.num_ranks), mesh)
        graph, rules = self.analysis.graph, self.analysis.rules
        return [
            overlap(lower(graph, rules, stage, mesh.coordinates(rank), seconds), cost)
            for rank in range(mesh.num_ranks)
        ]


@pytest.fixture(scope="module", params=list(CASES))
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


@pytest.mark.parametrize("plan", PLANS)
def test_live_bytes_are_exact_in_mixed_precision(plan: str) -> None:
    subject = Subject("mlp", precision_of("bf16"))
    assert_same_bytes(subject, subject.planned(*PLANS[plan]))


@pytest.mark.parametrize("name", TURNED)
def test_contiguous_copies_of_operands_are_counted(name: str) -> None:
    subject = Subject(name)
    programs = subject.programs(subject.planned(*PLANS["single"]))
    counts, _ = counted_peaks(programs, subject.values)
    for program, count in zip(programs, counts, strict=True):
        live = live_bytes(byte_changes(program, storages(program)))
        assert int(live[:, DEVICE].max()) == count.peak_bytes


def copying(link_bytes_per_s: float) -> Prices:
    """Prices of a device with a host link."""
    seconds = axis_seconds(Cluster.local(1), Mesh(("a",), (1,)))
    own = prices(Cluster.local(1).device(0), seconds)
    return replace(own, host_link_bytes_per_s=link_bytes_per_s)


def assert_same_bytes(subject: Subject, stage: StagePlan, cost: Prices | None = None) -> None:
    """Every allocation of every rank leaves as many bytes as simulated."""
    programs = subject.programs(stage, cost)
    counts, _ = counted_peaks(programs, subject.values)
    for program, count in zip(programs, counts, strict=True):
        memory = storages(program)
        everything = live_bytes(byte_changes(program, memory))
        live = everything[:, DEVICE].tolist()
        assert max(live) == count.peak_bytes
        here = {ref: s for ref, s in memory.num_bytes.items() if ref not in memory.on_host}
        made = sorted({memory.made[ref] for ref, size in here.items() if size})
        assert [live[at] for at in made] == [now for _, now in count.history]
        assert everything[:, HOST].max() == count.host_peak_bytes


@pytest.mark.parametrize("plan", list(PLANS))
def test_simulated_bytes_are_those_counted_at_every_allocation(subject: Subject, plan: str) -> None:
    assert_same_bytes(subject, subject.planned(*PLANS[plan]))


@pytest.mark.parametrize("seed", range(3))
def test_simulated_bytes_are_those_counted_under_random_plans(subject: Subject, seed: int) -> None:
    mesh = [Mesh(("a", "b"), (2, 2)), Mesh(("a",), (3,)), Mesh(("a",), (2,))][seed]
    assert_same_bytes(subject, random_stage(subject.analysis, mesh, seed))


def test_simulated_bytes_are_those_counted_under_recompute(subject: Subject) -> None:
    stage = random_stage(subject.analysis, Mesh(("a",), (2,)), seed=3)
    again = recomputing(subject.analysis, stage, random.Random(3))
    assert again.recomputed
    assert_same_bytes(subject, again)


@pytest.mark.parametrize("seed", range(3))
def test_simulated_bytes_are_those_counted_under_offload(subject: Subject, seed: int) -> None:
    """On the device and on the host, with copies beside compute of any speed."""
    stage = random_stage(subject.analysis, Mesh(("a",), (1 + seed % 2,)), seed=5)
    stage = offloading(subject.analysis, stage, random.Random(seed))
    if seed:
        stage = recomputing(subject.analysis, stage, random.Random(seed))
    assert stage.offloaded
    assert_same_bytes(subject, stage, copying(link_bytes_per_s=10.0 ** (6 + seed)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.large) for n in (1, 2))])
def test_simulated_bytes_are_those_counted_with_parameters_at_home_on_the_host(
    subject: Subject, seed: int
) -> None:
    stage = random_stage(subject.analysis, Mesh(("a",), (1 + seed % 2,)), seed=5)
    stage = streaming(subject.analysis, stage, random.Random(seed))
    if seed:
        stage = recomputing(subject.analysis, stage, random.Random(seed))
        stage = offloading(subject.analysis, stage, random.Random(seed))
    assert stage.copies
    assert_same_bytes(subject, stage, copying(link_bytes_per_s=10.0 ** (6 + seed)))


@pytest.mark.parametrize("seed", range(200))
def test_view_strides_are_torchs(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = [1, 2, 3, 4]
    rank = int(torch.randint(0, 5, (), generator=draw))
    shape = [sizes[int(torch.randint(0, 4, (), generator=draw))] for _ in range(rank)]
    order = torch.randperm(rank, generator=draw).tolist()
    tensor = torch.empty(shape).permute(order) if rank else torch.empty(())
    if rank and int(torch.randint(0, 2, (), generator=draw)):
        tensor = tensor[..., : max(1, tensor.shape[-1] - 1)]
    pieces = [d for size in tensor.shape for d in ((2, 2) if size == 4 else (size,))]
    merged = [pieces[0] * pieces[1], *pieces[2:]] if len(pieces) > 1 else pieces
    for new in (pieces, merged, [1, *merged], [tensor.numel()]):
        try:
            wanted = tensor.view(new).stride()
        except RuntimeError:
            wanted = None
        assert viewed(tuple(tensor.shape), tensor.stride(), new) == wanted, (tensor.stride(), new)


@pytest.mark.parametrize("seed", range(100))
def test_pointwise_results_lie_as_torch_lays_them(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = [int(torch.randint(1, 4, (), generator=draw)) for _ in range(3)]
    operands = []
    for _ in range(2):
        order = torch.randperm(3, generator=draw)
        physical = [shape[d] for d in order]
        wide = [1 if int(torch.randint(0, 4, (), generator=draw)) == 0 else s for s in physical]
        operands.append(torch.empty(wide).permute(torch.argsort(order).tolist()))
    result = operands[0] + operands[1]
    read = [(tuple(t.shape), t.stride()) for t in operands]
    found = ordered_like(tuple(result.shape), read)
    long = [d for d in range(3) if result.shape[d] > 1]
    if all(is_dense(*pair) for pair in read):
        found = dense(tuple(result.shape))
    assert [found[d] for d in long] == [result.stride()[d] for d in long], (read, result.stride())
