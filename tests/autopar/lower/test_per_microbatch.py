"""Modules computed from each microbatch alone: programs equal one process that does the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

from autopar.capture import Alone, Captured, capture_step, in_turn, run_graph, source_values
from autopar.errors import HintError, UnsupportedError
from autopar.ir.sharding import Mesh
from autopar.search.analysis import analyse
from autopar.search.stages import balanced_cuts, forward_order, split_lanes, split_stages
from tests.autopar.capture.models import mixtral
from tests.autopar.lower.test_stages import whole_plan
from tests.oracles.alone import ALONE, apart, call
from tests.oracles.models import Built
from tests.oracles.pipeline import assert_exact, assert_pipeline_exact, variants_of

ONE = Mesh(("a",), (1,))
DATA = Mesh(("dp",), (2,), roles=("dp",))
TENSOR = Mesh(("tp",), (2,), roles=("tp",))
MESHES = {
    "one rank": ONE,
    "dp": DATA,
    "free": Mesh(("a", "b"), (2, 2)),
}


def cases(
    names: Iterable[str], meshes: Iterable[str], default: Collection[tuple[str, str, int]]
) -> list[Any]:
    """Every model on every mesh in 2 and 4 microbatches, all but the default ones large."""
    return [
        pytest.param(*case, marks=() if case in default else pytest.mark.large)
        for case in itertools.product(names, meshes, (2, 4))
    ]


def captured_in(name: str, count: int) -> tuple[Built, Captured]:
    """A model whose loss is that of one process in microbatches, and its captured step."""
    build, patterns = ALONE[name]
    model, batch, loss = build()
    captured = capture_step(model, batch, loss, grad=True, alone=Alone(patterns, count))

    def reference(model: nn.Module, batch: Any) -> Tensor:
        return loss(apart(model, captured.graph.alone, count), batch)  # type: ignore[no-any-return]

    return (model, batch, reference), captured


def buffers_of(model: nn.Module, batch: Any, loss: Any) -> dict[str, Tensor]:
    """Buffers after a step of one process."""
    model = copy.deepcopy(model)
    loss(model, batch)
    return dict(model.named_buffers())


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ALONE)
def test_the_step_is_that_of_one_process(name: str, count: int) -> None:
    built, captured = captured_in(name, count)
    values = source_values(
        captured.graph,
        dict(built[0].named_parameters()),
        dict(built[0].named_buffers()),
        dict(zip(captured.inputs, built[1], strict=True)),
    )
    graph = captured.graph
    found = run_graph(graph, values, captured.constants)
    expected = built[2](copy.deepcopy(built[0]), built[1])
    whole = ALONE[name][0]()[2](copy.deepcopy(built[0]), built[1])
    assert graph.loss is not None
    torch.testing.assert_close(found[graph.loss], expected.detach())
    assert abs(float((whole - expected).detach())) > 1e-4, "the whole batch gives another loss"
    buffers = buffers_of(*built)
    assert set(graph.mutations) == set(buffers)
    for path, ref in graph.mutations.items():
        torch.testing.assert_close(found[ref], buffers[path])


@pytest.mark.parametrize(
    ("name", "mesh", "count"),
    cases(ALONE, MESHES, {("norms", "dp", 2), ("mixture", "dp", 2), ("norms", "free", 2)}),
)
def test_ranks_and_microbatches_are_exact(name: str, mesh: str, count: int) -> None:
    built, captured = captured_in(name, count)
    analysis = analyse(captured.graph)
    own = MESHES[mesh].with_time(count, in_turn=True)
    stage = whole_plan(analysis, own)
    variants = variants_of(analysis, stage, lambda kind, axis, size: 1e-6)
    assert_exact(*built, analysis, variants, captured)


def balanced(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a Mixtral whose balance is that of two halves of the batch."""
    out = model(**batch)
    halves = zip(*(logits.chunk(2) for logits in out.router_logits), strict=True)
    own = model.config.num_local_experts, model.config.num_experts_per_tok
    each = [modeling_mixtral.load_balancing_loss_func(tuple(half), *own) for half in halves]
    scale = model.config.router_aux_loss_coef
    return out.loss + scale * (torch.stack(each).mean() - out.aux_loss)  # type: ignore[no-any-return]


def test_a_function_that_the_model_calls_is_named() -> None:
    model, pattern = mixtral(), "load_balancing_loss_func"
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    ids = torch.randint(0, 6, (4, 6)) + 3 * torch.arange(4)[:, None]
    batch = {"input_ids": ids, "labels": ids}
    before = modeling_mixtral.load_balancing_loss_func

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    captured = capture_step(model, batch, loss, grad=True, alone=Alone((pattern,), 2))
    assert captured.graph.alone == (pattern,)
    assert modeling_mixtral.load_balancing_loss_func is before
    assert pattern not in dict(model.named_modules())
    with in_turn(model, batch, loss, alone=Alone((pattern,), 2)):
        found = float(loss(model, batch).detach())
    assert found == pytest.approx(float(balanced(model, batch).detach()), rel=1e-6)
    assert abs(found - float(loss(model, batch).detach())) > 1e-5
    analysis = analyse(captured.graph)
    stage = whole_plan(analysis, DATA.with_time(2, in_turn=True))
    variants = variants_of(analysis, stage, lambda kind, axis, size: 1e-6)
    assert_exact(model, batch, balanced, analysis, variants, captured)


@pytest.mark.parametrize(
    ("name", "mesh", "count"),
    cases(
        ALONE,
        ("one rank", "dp"),
        {("norms", "one rank", 4), ("mixture", "one rank", 2), ("mixture", "dp", 4)},
    ),
)
def test_pipelines_are_exact(name: str, mesh: str, count: int) -> None:
    built, captured = captured_in(name, count)
    analysis = analyse(captured.graph)
    whole = whole_plan(analysis, MESHES[mesh].with_time(count, in_turn=True))
    cuts = balanced_cuts([1.0] * len(forward_order(analysis)), 2)
    pipeline = split_stages(analysis, whole, cuts, (0, 1))
    assert_pipeline_exact(*built, analysis, pipeline, captured)


@pytest.mark.large
def test_stages_of_unlike_meshes_run_the_same_microbatches() -> None:
    built, captured = captured_in("mixture", 2)
    analysis = analyse(captured.graph)
    wholes = [
        replace(whole_plan(analysis, mesh.with_time(2, in_turn=True)), first_rank=first)
        for mesh, first in ((DATA, 0), (TENSOR, 2))
    ]
    cuts = balanced_cuts([1.0] * len(forward_order(analysis)), 2)
    pipeline = split_lanes(analysis, wholes, cuts, (0, 1))
    assert_pipeline_exact(*built, analysis, pipeline, captured)


@pytest.mark.parametrize("name", ALONE)
def test_the_eager_model_can_run_in_turn(name: str) -> None:
    model, batch, loss = ALONE[name][0]()
    twin = apart(copy.deepcopy(model), capture(name).graph.alone, 2)
    with in_turn(model, batch, loss, alone=Alone(ALONE[name][1], 2)):
        found = loss(model, batch)
    torch.testing.assert_close(found, loss(twin, batch))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert all("forward" not in vars(module) for module in model.modules())


def capture(name: str) -> Captured:
    return captured_in(name, 2)[1]


class Refused(nn.Module):
    """A layer, something that no microbatch can do alone, and a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return (h.mean() + self.inner(h).mean()) ** 2


class Similar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Loads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) - x.mean(0)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (Similar(), "a tensor of shape [4, 4], and [8, 8] where there are twice as many samples"),
        (Loads(), "it returns a tensor of shape [4] for each, and others read it"),
        (Moving(), "it changes buffer 'calls', which the next microbatch would read"),
        (Centred(), "draws random numbers"),
    ],
    ids=["similarities", "a value a microbatch", "state", "dropout"],
)
def test_what_no_microbatch_can_do_alone_is_refused(inner: nn.Module, says: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        capture_step(
            Refused(inner), (torch.randn(8, 4),), call, grad=True, alone=Alone(("inner",), 2)
        )
    assert str(caught.value).startswith("cannot compute module 'inner' from each microbatch alone")
    assert says in str(caught.value)
    assert "hint.per_microbatch" in str(caught.value)


def test_microbatches_of_unlike_size_are_refused() -> None:
    model, batch, loss = ALONE["norms"][0]()
    with pytest.raises(HintError, match="8 samples are no multiple of 3 microbatches"):
        capture_step(model, batch, loss, grad=True, alone=Alone(("bn1",), 3))
