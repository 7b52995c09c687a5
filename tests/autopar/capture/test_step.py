"""A captured step equals the eager model: what programs may do, and what they may not."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture_key, capture_step, recorder
from autopar.capture.cache import decode, encode
from autopar.errors import CaptureError, UnsupportedError
from autopar.ir.graph import Phase
from tests.autopar.capture.eager import capture_equals_eager, load_case, ops_of, run_captured


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Program(nn.Module):
    """A linear layer around a function of its output."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def equal(function: Callable[..., Any], x: Tensor | None = None) -> Any:
    """The program of a function, captured, compared and returned."""
    batch = torch.randn(4, 6, 8) if x is None else x
    return capture_equals_eager(Program(function), batch, square)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def labelled(samples: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 8), "y": torch.randint(0, 4, (samples,))}


def test_mlp_equals_eager() -> None:
    captured = capture_equals_eager(mlp(), labelled(), classify)
    assert captured.inputs == ("x", "y")
    assert captured.graph.batch_dims == {"x": 0, "y": 0}


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8, momentum=0.3, affine=False),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


@pytest.mark.parametrize("training", [True, False])
def test_cnn_equals_eager(training: bool) -> None:
    model = small_cnn().train(training)
    model[1].running_var.uniform_(0.5, 2.0)
    batch = {"x": torch.randn(5, 3, 12, 12), "y": torch.randint(0, 4, (5,))}
    graph = capture_equals_eager(model, batch, classify, tolerance=1e-5).graph
    assert len(graph.mutations) == (6 if training else 0)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_equal_eager(layer: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = layer(8, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    capture_equals_eager(Recurrent(), torch.randn(3, 4, 8), square)


@pytest.mark.parametrize("masked", [False, True])
def test_transformer_encoder_equals_eager(masked: bool) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if masked else None
            return self.layers(x, mask=mask)

    captured = capture_equals_eager(Encoder(), torch.randn(3, 6, 16), square, tolerance=1e-5)
    attention = next(n for n in captured.graph.nodes if n.op == "autopar.attention.default")
    assert attention.args[3:5] == (None, masked)


def test_weight_norm_equals_eager() -> None:
    capture_equals_eager(nn.Sequential(weight_norm(nn.Linear(8, 8))), torch.randn(3, 8), square)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_captured_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    captured = capture_equals_eager(Checkpointed(), torch.randn(3, 8), square)
    assert ops_of(captured).count("aten.relu.default") == 1


def test_gradient_penalty_equals_eager() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return (slope.norm(dim=-1) - 1).square().mean()

    capture_equals_eager(mlp(), torch.randn(5, 8), loss)


def test_results_beside_the_loss_are_named() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        logits = model(batch["x"])
        hits = (logits.argmax(-1) == batch["y"]).float()
        return F.cross_entropy(logits, batch["y"]), {"hits": hits.sum(), "logits": logits}

    graph = capture_equals_eager(mlp(), labelled(), loss).graph
    assert [name for name, _ in graph.aux] == ["hits", "logits"]
    assert graph.type_of(graph.aux[1][1]).shape == (6, 4)


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    graph = capture_equals_eager(model, labelled(), classify).graph
    assert set(graph.gradients) == {"2.weight", "2.bias"}
    assert "spare" in {n.target for n in graph.sources("parameter")}


@pytest.mark.parametrize("results", [None, {}])
def test_a_dict_of_further_results_may_be_empty(results: dict[str, Tensor] | None) -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        made = model(x).sum()
        return made if results is None else (made, results)

    captured = capture_step(nn.Linear(3, 2), torch.randn(4, 3), loss, grad=True)
    assert captured.returns_dict == (results is not None)
    assert decode(encode(captured)).returns_dict == captured.returns_dict


def test_buffers_written_or_replaced_are_mutations() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("written", torch.zeros(8))
            self.register_buffer("replaced", torch.zeros((), dtype=torch.int64))
            self.register_buffer("kept", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            self.written[2:].add_(h.detach().mean(0)[2:])
            self.replaced = self.replaced + x.shape[0]
            return h * self.kept + self.written

    graph = capture_equals_eager(Counting(), torch.randn(3, 8), square).graph
    assert set(graph.mutations) == {"written", "replaced"}


def test_the_batch_is_not_written_to() -> None:
    batch = torch.randn(3, 8)
    kept = batch.clone()
    captured = capture_equals_eager(
        mlp(), batch, lambda model, x: model(x.mul_(2.0)).square().sum()
    )
    assert torch.equal(batch, kept)
    assert not captured.graph.mutations


def test_the_model_is_left_as_it_was() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.seen: list[Tensor] = []
            self.table: dict[str, Any] = {"calls": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x)
            self.seen.append(self.last)
            self.table["calls"] += 1
            return self.last

    model = Leaky()
    parameter = model.linear.weight
    capture_step(model, torch.randn(3, 8), square, grad=True)
    assert model.linear.weight is parameter and parameter.grad is None
    assert model.seen == [] and model.table == {"calls": 0} and not hasattr(model, "last")
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    def fail(h: Tensor) -> Tensor:
        raise KeyError("mine")

    model = Program(fail)
    parameter = model.linear.weight
    with pytest.raises(KeyError, match="mine") as caught:
        capture_step(model, torch.randn(3, 8), square, grad=True)
    assert "test_step.py" in caught.value.__notes__[0]
    assert model.linear.weight is parameter
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "unbind": lambda h: torch.stack(h.unbind(1), 2),
    "chunks": lambda h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "permutes": lambda h: h.permute(2, 0, 1).transpose(0, 2).contiguous().flatten(1),
    "repeat": lambda h: h.repeat(2, 1, 3),
    "strided": lambda h: h.as_strided((4, 5, 8), (48, 8, 1)) * 2,
    "windows": lambda h: h.as_strided((4, 3, 16), (48, 8, 1), 8),
    "unfold": lambda h: h.unfold(1, 3, 2).sum(-1),
    "roll": lambda h: h.roll(1, -1).flip(-2).cumsum(-1),
    "slices": lambda h: h[:, ::2, 1:-1] + h[:, 1::2, :-2],
    "outer": lambda h: h[torch.arange(4)[:, None], torch.arange(6)[None]] * 3,
    "crossed": lambda h: h[torch.arange(4)[None, :], torch.arange(6)[:, None]],
    "where": lambda h: h.masked_fill(h > 0.5, -2.0),
    "mean": lambda h: h.mean((0, -1)) + h.mean(),
    "var": lambda h: h.var(1) + h.std((0, 1), correction=0),
    "norm": lambda h: F.normalize(h, dim=-1) + F.group_norm(h, 3),
    "powers": lambda h: (h * 1.0 + 0) ** 1 / 1,
    "complex": lambda h: torch.view_as_real(torch.fft.rfft(h)).abs(),
    "filled": lambda h: h * torch.full_like(h, 2).fill_(3.0) + torch.empty_like(h).zero_(),
    "literal": lambda h: h * torch.tensor([1.0, 2.0] * 4),
    "literal written": lambda h: h * torch.tensor([1.0] * 8).mul_(3.0),
    "item": lambda h: h * torch.arange(3).max().item(),
    "branch": lambda h: h * 2 if (torch.ones(3) > 0).all() else h,
    "scatter": lambda h: h.new_zeros(4, 6, 8).slice_scatter(h[:, :2], 1, 2, 4),
    "setitem": lambda h: _set_items(h),
    "no grad": lambda h: h + h.detach().relu(),
    "top": lambda h: h.topk(2, -1).values.sort(-1).values,
    "maximum": lambda h: h.amax(-1) + h.max(1).values.amin(-1, keepdim=True),
    "einsum": lambda h: torch.einsum("bsh,bth->bst", h, h).softmax(-1),
    "baddbmm": lambda h: torch.baddbmm(h, h, torch.eye(8).expand(4, 8, 8), beta=0.5, alpha=2.0),
    "turned": lambda h: F.group_norm(h.transpose(1, 2), 4),
    "normed": lambda h: F.rms_norm(h, (8,)) + F.layer_norm(h, (6, 8)),
    "mapped": lambda h: torch.vmap(lambda row: row.softmax(-1) * 2)(h),
    "activations": lambda h: F.mish(h) + F.elu(h) + F.hardswish(h) + F.glu(h).repeat(1, 1, 2),
    "added rows": lambda h: torch.zeros(5, 6, 8).index_add_(0, torch.tensor([0, 1, 1, 4]), h),
    "counts": lambda h: h + F.one_hot(h.argmax(-1), 8),
    "trilinear": lambda h: F.bilinear(h, h * 2, torch.arange(192.0).view(3, 8, 8), torch.ones(3)),
    "rank one": lambda h: torch.addr(h[0], h[1, :, 0], h[2, 0], beta=0.5, alpha=2.0),
    "sum of products": lambda h: torch.addbmm(torch.ones(6, 6), h, h.transpose(1, 2), beta=0.5),
    "turns": lambda h: sum((h[0, :, :6].rot90(n) for n in range(-1, 4)), h[1, :, :6].trace()),
    "shuffled": lambda h: F.channel_shuffle(h, 3) * torch.arange(48.0).view(6, 8),
    "both ends": lambda h: torch.sub(*h.aminmax(dim=1)) + torch.sub(*h.aminmax()),
    "solved": lambda h: torch.linalg.solve(h[:, :4, :4] + 9 * torch.eye(4), h[:, :4, 4:]),
    "volumes": lambda h: torch.linalg.det(h[:, :3, :3]) + torch.logdet(h[:, :3] @ h[:, :3].mT),
    "factors": lambda h: (
        torch.linalg.cholesky(h @ h.mT + torch.eye(6)) + torch.linalg.qr(h)[0].sum()
    ),
    "far apart": lambda h: F.triplet_margin_loss(h, h * 2, h + 1, reduction="none"),
    "pool": lambda h: F.avg_pool1d(h, 2) + F.max_pool1d(h, 2),
}


def _set_items(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1] = h[:, 0]
    out[..., :3] += h[..., 3:6]
    out[out > 0.3] = 0.1
    return out.view(4, -1).relu_()


@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_equal_eager(name: str) -> None:
    captured = equal(PROGRAMS[name])
    ops = set(ops_of(captured))
    gone = {"aten.clone.default", "aten.detach.default", "aten.mean.dim", "aten.as_strided.default"}
    assert not ops & gone
    assert not any("backward" in n.op and n.phase is Phase.FORWARD for n in captured.graph.nodes)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda p, t: F.mse_loss(p, t),
    "mse sum": lambda p, t: F.mse_loss(p, t, reduction="sum"),
    "mse none": lambda p, t: F.mse_loss(p, t, reduction="none").amax(),
    "l1": lambda p, t: F.l1_loss(p, t),
    "smooth": lambda p, t: F.smooth_l1_loss(p, t, beta=0.3),
    "smooth zero": lambda p, t: F.smooth_l1_loss(p, t, beta=0.0),
    "huber": lambda p, t: F.huber_loss(p, t, delta=0.4),
    "bce": lambda p, t: F.binary_cross_entropy(p.sigmoid(), t.sigmoid()),
    "bce weighted": lambda p, t: F.binary_cross_entropy(p.sigmoid(), t.sigmoid(), t.exp()),
    "logits": lambda p, t: F.binary_cross_entropy_with_logits(p, t.sigmoid()),
    "logits weighted": lambda p, t: F.binary_cross_entropy_with_logits(
        p, t.sigmoid(), weight=t.exp(), pos_weight=torch.arange(8.0), reduction="sum"
    ),
    "kl": lambda p, t: F.kl_div(p.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "soft margin": lambda p, t: F.soft_margin_loss(p, t.sign()),
    "soft targets": lambda p, t: F.cross_entropy(p.flatten(0, 1), t.flatten(0, 1).softmax(-1)),
    "cosine": lambda p, t: 1 - F.cosine_similarity(p, t, dim=-1).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_eager(name: str) -> None:
    torch.manual_seed(3)
    batch = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6, 8)}
    program = Program(lambda h: h)
    captured = capture_equals_eager(program, batch, lambda m, b: LOSSES[name](m(b["x"]), b["y"]))
    assert not [op for op in ops_of(captured) if "loss" in op or "mean" in op or "entropy" in op]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (5,), (2, 5, 3), (2, 5, 3, 2)])
def test_cross_entropy_equals_eager(reduction: str, weighted: bool, shape: tuple[int, ...]) -> None:
    logits = nn.Parameter(torch.randn(shape))
    model = nn.Module()
    model.register_parameter("logits", logits)
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if len(shape) > 1:
        target.view(-1)[0] = -7
    weight = torch.rand(5) + 0.5 if weighted else None

    def loss(model: Any, batch: Tensor) -> Tensor:
        made = F.cross_entropy(
            model.logits, batch, weight, reduction=reduction, ignore_index=-7, label_smoothing=0.1
        )
        return made.sum()

    captured = capture_equals_eager(model, target, loss)
    assert not [op for op in ops_of(captured) if "nll" in op]


def test_a_count_in_half_precision_is_exact() -> None:
    model = nn.Module()
    model.register_parameter("logits", nn.Parameter(torch.zeros(1025, 2, dtype=torch.bfloat16)))
    target = torch.zeros(1025, dtype=torch.int64)
    captured = capture_step(model, target, lambda m, y: F.cross_entropy(m.logits, y), grad=True)
    assert captured.graph.loss is not None
    loss = run_captured(captured, model, target)[captured.graph.loss]
    assert float(loss) == float(torch.tensor(2.0).log().bfloat16())


def test_batches_of_every_form_are_captured() -> None:
    class Form(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 1)

        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return {"loss": self.linear(x).sum() * scale}

    x = torch.randn(3, 8)
    for batch, inputs in ((x, ("0",)), ((x, 2.0), ("0",)), ({"x": x, "scale": 3.0}, ("x",))):
        assert capture_equals_eager(Form(), batch).inputs == inputs


def test_constants_of_the_program_are_kept() -> None:
    weight = torch.rand(4)
    captured = capture_equals_eager(
        mlp(), labelled(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight)
    )
    assert [t is weight for t in captured.constants.values()] == [True]


def test_autograd_functions_and_custom_ops_keep_their_backward() -> None:
    load_case("g18")
    capture_equals_eager(*load_case("g18").build())
    # Defined again, as in a notebook.
    model, batch, loss = load_case("g18").build()
    captured = capture_equals_eager(model, batch, loss)
    assert {"apcases_g18.peak_norm.default", "apcases_g18.peak_norm_grad.default"} <= set(
        ops_of(captured)
    )


def test_equal_work_is_done_once() -> None:
    captured = equal(lambda h: (h * 2).relu() + (h * 2).relu())
    assert ops_of(captured).count("aten.relu.default") == 1


def test_views_of_views_are_one() -> None:
    captured = equal(lambda h: h.view(24, 8).view(3, 8, 8).unsqueeze(0).view(4, 48))
    shapes = [n.outputs[0].shape for n in captured.graph.nodes if n.op == "aten.view.default"]
    assert (3, 8, 8) not in shapes and (1, 3, 8, 8) not in shapes


def test_gradients_of_neighbouring_slices_are_joined() -> None:
    captured = equal(lambda h: torch.cat((-h[..., 5:], h[..., 2:5].exp(), h[..., :2]), -1))
    ops = ops_of(captured)
    assert "aten.slice_backward.default" not in ops and ops.count("aten.cat.default") == 3
    partly = equal(lambda h: h[:, :2].exp() + h[:, 2:4].sin())
    assert ops_of(partly).count("aten.slice_backward.default") == 1


def test_gradients_of_sums_are_not_expanded_before_arithmetic() -> None:
    captured = equal(lambda h: h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt())
    assert "aten.expand.default" not in ops_of(captured)
    whole = [n for n in captured.graph.nodes if n.outputs[0].shape == (4, 6, 8)]
    assert not [n for n in whole if n.op == "aten.div.Tensor"]
    doubled = [n for n in whole if n.op == "aten.mul.Tensor" and 2.0 in n.args]
    assert len(doubled) == 1  # the loss's own square, which nothing smaller multiplies


def test_backward_nodes_have_their_forwards_source() -> None:
    graph = capture_equals_eager(mlp(), labelled(), classify).graph
    products = {(n.source.module, n.phase) for n in graph.nodes if n.op == "aten.mm.default"}
    assert products == {
        ("0", Phase.FORWARD),
        ("2", Phase.FORWARD),
        ("0", Phase.BACKWARD),
        ("2", Phase.BACKWARD),
    }
    (threshold,) = (n for n in graph.nodes if n.op == "aten.threshold_backward.default")
    assert threshold.source.module == "1" and threshold.phase is Phase.BACKWARD
    assert threshold.source.line.startswith("test_step.py:")


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    program = (
        "import torch; from torch import nn; from autopar.capture import capture_step;"
        "m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4));"
        "print(capture_step(m, torch.zeros(3, 4), lambda m, x: m(x).sum(), grad=True).fingerprint)"
    )
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    here = capture_step(model, torch.zeros(3, 4), lambda m, x: m(x).sum(), grad=True)
    assert here.fingerprint == there and len(there) == 64


def test_the_key_tells_what_needs_another_capture() -> None:
    model, batch = mlp(), labelled()
    key = capture_key(model, batch, grad=True)
    assert key == capture_key(model, labelled(), grad=True)
    assert hash(key) == hash(capture_key(model, labelled(), grad=True))
    assert key != capture_key(model, labelled(5), grad=True)
    assert key != capture_key(model, batch, grad=False)
    assert key != capture_key(model, {**batch, "mode": "a"}, grad=True)
    assert key != capture_key(copy.deepcopy(model).eval(), batch, grad=True)
    frozen = copy.deepcopy(model)
    frozen[0].weight.requires_grad_(False)
    assert key != capture_key(frozen, batch, grad=True)


DEPENDENT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nonzero": (lambda h: h[h.sum(-1).nonzero()], "'aten.nonzero.default'"),
    "mask": (lambda h: h[h.sum(-1) > 0], "'aten.index.Tensor'"),
    "item": (lambda h: h * h.sum().item(), "'aten._local_scalar_dense.default'"),
    "branch": (lambda h: h if h.sum() > 0 else -h, "'aten._local_scalar_dense.default'"),
    "unique": (lambda h: h.round().unique(), "'aten._unique2.default'"),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_data_dependent_programs_are_refused_by_name(name: str) -> None:
    function, op = DEPENDENT[name]
    model = nn.Sequential(nn.Identity(), Program(function))
    with pytest.raises(CaptureError) as caught:
        capture_step(model, torch.randn(4, 8), square, grad=True)
    message = str(caught.value)
    assert op in message and "module '1'" in message and "test_step.py:" in message
    assert "\n" not in message


def test_values_read_outside_of_torch_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"the model \(test_step.py:\d+\): it reads the values"):
        equal(lambda h: h * float(h.detach().numpy().sum()))


@pytest.mark.parametrize("name", ["numpy.random", "random"])
def test_numbers_that_torch_does_not_draw_are_refused(name: str) -> None:
    draw = importlib.import_module(name).random

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() * draw()

    with pytest.raises(CaptureError, match=f"it draws from the module '{name}'"):
        capture_step(nn.Linear(2, 2), torch.zeros(4, 2), loss, grad=True)


def test_loops_of_very_many_turns_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_STEPS", 50)

    def scan(h: Tensor) -> Tensor:
        for _ in range(40):
            h = h * 0.5 + 1
        return h

    with pytest.raises(CaptureError, match=r"more than 50 ops, \d+ of them from the model \(test_"):
        equal(scan)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_modules_are_captured_as_they_were() -> None:
    captured = capture_step(torch.compile(mlp()), torch.randn(3, 8), square, grad=True)
    assert "aten.relu.default" in ops_of(captured)


def test_autocast_is_captured() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().sum()

    captured = capture_equals_eager(mlp(), torch.randn(3, 8), loss, tolerance=0.03)
    products = [n for n in captured.graph.nodes if n.op == "aten.mm.default"]
    assert {n.outputs[0].dtype for n in products} == {"bfloat16"}


def test_autocast_of_an_absent_device_is_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cuda", True)
        try:
            return square(model, x)
        finally:
            torch.set_autocast_enabled("cuda", False)

    with pytest.raises(UnsupportedError, match="autocast of device type 'cuda'"):
        capture_step(mlp(), torch.randn(3, 8), loss, grad=True)


def test_data_dependent_experts_are_refused_by_name() -> None:
    model, batch, loss = load_case("g09").build()
    with pytest.raises(CaptureError, match=r"'aten.nonzero.default' in the model \(g09_moe"):
        capture_step(model, batch, loss, grad=True)


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_embeddings_whose_gradient_is_special_are_refused(option: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, **{option: True}))
    with pytest.raises(UnsupportedError, match=option):
        capture_step(model, torch.zeros(3, dtype=torch.int64), square, grad=True)


def test_hooks_on_parameters_are_refused_by_name() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(UnsupportedError, match=r"'0.weight'"):
        capture_step(model, labelled(), classify, grad=True)


def test_writes_that_would_be_lost_are_refused_by_name() -> None:
    counter = torch.zeros(())
    with pytest.raises(CaptureError, match="no buffer of the model"):
        equal(lambda h: h + counter.add_(1.0))

    def write(model: Any, x: Tensor) -> Tensor:
        model.linear.weight.data.mul_(0.9)
        return square(model, x)

    with pytest.raises(CaptureError, match=r"write to parameter 'linear\.weight'"):
        capture_step(Program(lambda h: h), torch.randn(3, 8), write, grad=True)


def test_foreign_parameters_are_refused() -> None:
    stranger = nn.Parameter(torch.zeros(8))
    with pytest.raises(CaptureError, match="no parameter of the model"):
        equal(lambda h: h + stranger)


NO_LOSS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "vector": (lambda m, x: m(x), r"a tensor of shape \[3, 4\]"),
    "integer": (lambda m, x: m(x).argmax(), "a tensor of dtype int64"),
    "number": (lambda m, x: 1.0, "a float"),
    "detached": (lambda m, x: m(x).sum().detach(), "does not require grad"),
    "triple": (lambda m, x: (m(x), 1, 2), "a tuple of 3"),
    "number beside": (lambda m, x: (m(x).sum(), {"a": 1.0}), "result 'a': found float"),
}


@pytest.mark.parametrize("name", NO_LOSS)
def test_what_is_no_loss_is_said(name: str) -> None:
    loss, found = NO_LOSS[name]
    with pytest.raises(CaptureError, match=found):
        capture_step(mlp(), torch.randn(3, 8), loss, grad=True)


def test_a_model_without_a_loss_is_told_to_name_one() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"logits": x}

    with pytest.raises(CaptureError, match="found dict without a 'loss'"):
        capture_step(Named(), torch.randn(3, 8), grad=False)
