"""Random ops are captured with keys, and an eager run with the same key draws the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import attention_dropout, capture_step
from autopar.capture.keyed import keyed
from autopar.capture.random import make_key
from autopar.errors import CaptureError, UnsupportedError
from autopar.ir.graph import STREAM, Const, Graph
from autopar.ir.text import graph_text, parse_graph
from tests.autopar.capture.eager import capture_equals_eager, load_case, ops_of
from tests.oracles.models import DRAWING


class Program(nn.Module):
    """A function of a linear layer's output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).square().sum()


def equal(function: Callable[[Tensor], Tensor]) -> Graph:
    torch.manual_seed(1)
    return capture_equals_eager(Program(function), torch.randn(4, 6, 8)).graph


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "in place": lambda h: F.dropout(h * 1.0, 0.3, inplace=True),
    "all dropped": lambda h: F.dropout(h, 1.0) + h,
    "of whole samples": lambda h: F.dropout1d(h, 0.3) + F.feature_alpha_dropout(h, 0.3, True),
    "of planes": lambda h: F.dropout2d(F.dropout3d(h[:, :, None, None], 0.3)[:, :, 0], 0.3),
    "alpha": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "native": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "other names": lambda h: torch.dropout(h, 0.3, True) + torch.feature_dropout(h, 0.2, True),
    "rand": lambda h: h * torch.rand(6, 8) + torch.rand_like(h),
    "randn": lambda h: h * torch.randn(8) + torch.randn_like(h),
    "double": lambda h: h * torch.rand(8, dtype=torch.float64) + torch.randn(8).double(),
    "half": lambda h: h * torch.rand(8, dtype=torch.bfloat16) + torch.randn_like(h.half()),
    "randint": lambda h: h * torch.randint(9, (8,)) + torch.randint_like(h, 2, 5),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()) + torch.bernoulli(h.detach(), 0.3),
    "normal": lambda h: h + torch.normal(h, 2.0) + torch.normal(0.0, h.abs()),
    "fills": lambda h: (
        h
        + torch.empty_like(h).uniform_(-2, 1)
        + torch.empty_like(h).normal_(1, 2)
        + torch.empty_like(h).bernoulli_(0.2)
        + torch.empty_like(h).random_(2, 9)
    ),
    "waits": lambda h: (
        h
        + torch.empty_like(h).exponential_(2.0)
        + torch.empty_like(h).geometric_(0.3)
        + torch.empty_like(h).log_normal_(0.1, 0.2)
        + torch.empty_like(h).cauchy_(1.0, 0.1)
    ),
    "gumbel": lambda h: F.gumbel_softmax(h, tau=0.7, hard=True),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.4),
    "causal attention": lambda h: F.scaled_dot_product_attention(
        h, h, h, dropout_p=0.4, is_causal=True
    ),
    "biased attention": lambda h: F.scaled_dot_product_attention(
        h[:, None], h[:, None], h[:, None], h[:, None, :, :6], dropout_p=0.4
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_keyed_random_op_equals_eager(name: str) -> None:
    graph = equal(PROGRAMS[name])
    assert parse_graph(graph_text(graph)) == graph
    assert any(graph.sources("key"))


@pytest.mark.parametrize("name", DRAWING)
def test_models_that_draw_equal_eager(name: str) -> None:
    capture_equals_eager(*DRAWING[name]())


def test_a_recurrent_layer_with_dropout_equals_eager() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 8, num_layers=2, dropout=0.4)
    capture_equals_eager(model, torch.randn(3, 2, 8), lambda m, x: m(x)[0].square().sum())


def test_dropout_has_one_op_and_draws_its_mask_again_in_the_backward() -> None:
    captured = capture_equals_eager(*load_case("g02").build())
    drawn = [n for n in captured.graph.nodes if n.op == "autopar.dropout.default"]
    streams = [f"drop/dropout/{number}" for number in range(3)]
    assert [n.args[2] for n in drawn] == [Const(STREAM, s) for s in streams + streams[::-1]]


def test_dropout_that_drops_nothing_is_no_op() -> None:
    model, batch, loss = load_case("g02").build()
    assert "key" not in ops_of(capture_equals_eager(model.eval(), batch, loss))
    assert not any(equal(lambda h: F.dropout(h, 0.0)).sources("key"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_is_drawn_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            held: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=reentrant)
            return held.square().sum()

    captured = capture_equals_eager(Checkpointed(), torch.randn(3, 8))
    drawn = {n.args[2] for n in captured.graph.nodes if n.op == "autopar.dropout.default"}
    assert drawn == {Const(STREAM, "inner.1/dropout/0")}


def test_meta_and_cpu_models_that_draw_give_the_same_graph() -> None:
    here, batch, loss = DRAWING["gpt2 dropout"]()
    with torch.device("meta"):
        far = type(here)(here.config)
    found = [capture_step(model, batch, loss, grad=True).fingerprint for model in (here, far)]
    assert found[0] == found[1]


def test_eager_runs_of_other_keys_draw_other_numbers() -> None:
    model = nn.Dropout(0.5)

    def drawn(seed: int, step: int) -> list[float]:
        with keyed(model, seed, step):
            found: list[float] = model(torch.ones(64)).tolist()
        return found

    assert drawn(1, 2) == drawn(1, 2)
    assert len({tuple(drawn(seed, step)) for seed in range(3) for step in range(3)}) == 9


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "multinomial": lambda h: h * torch.multinomial(h.detach().exp()[0], 8, replacement=True)[0],
    "randperm": lambda h: h[..., torch.randperm(8)],
    "rrelu_with_noise": lambda h: F.rrelu(h, training=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_random_ops_are_refused_by_name(name: str) -> None:
    model, batch = Program(REFUSED[name]), torch.randn(4, 6, 8)
    with pytest.raises(UnsupportedError, match=rf"'aten\.{name}\S*' in .*draws random numbers"):
        capture_step(model, batch, grad=True)
    with keyed(model, 1, 0), pytest.raises(UnsupportedError, match="draws random numbers"):
        model(batch)


def test_a_branch_on_a_random_number_is_refused() -> None:
    with pytest.raises(CaptureError, match="turns a tensor into a Python value"):
        equal(lambda h: h if torch.rand([]) < 0.5 else -h)


@pytest.mark.parametrize("block", [1, 100])
def test_the_size_of_blocks_of_attention_does_not_matter(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 5, 2, dtype=torch.float64, generator=draw)
    k, v = torch.randn(2, 3, 2, 6, 2, dtype=torch.float64, generator=draw)
    random = (make_key(1, 2), "a", 0.4)
    for samples in (1, 3):
        mask = torch.randn(samples, 1, 5, 6, dtype=torch.float64, generator=draw)
        found = []
        for size in (attention_dropout.BLOCK_ELEMENTS, block):
            monkeypatch.setattr(attention_dropout, "BLOCK_ELEMENTS", size)
            made = torch.ops.autopar.attention_dropout(q, k, v, mask, False, 0.5, *random)
            args = (q, q, k, v, mask, *made, False, 0.5, *random)
            found.append((*made, *torch.ops.autopar.attention_dropout_backward_mask(*args)))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
