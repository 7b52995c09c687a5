"""Casts as a part of the captured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture_step, run_graph, source_values
from autopar.capture.batch import flatten_batch
from autopar.capture.cache import decode, encode
from autopar.capture.precision import Precision, check_held, precision_of
from autopar.errors import UnsupportedError
from autopar.ir.text import graph_text, parse_graph
from tests.autopar.capture.eager import load_case
from tests.oracles.mixed import by_hand
from tests.oracles.models import MODELS


class Scaled(nn.Module):
    """A product, a buffer, an integer parameter; the weight is tied."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.down = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.down.weight = self.up.weight
        self.count = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * self.count) + self.shift


def squares(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) * batch["w"]).sum()


BATCH = {"x": torch.randn(3, 4), "w": torch.randn(3, 4)}

BF16 = """\
fwd %count = parameter count : int64[]
fwd %up_weight = parameter up.weight : float32[4, 4]
fwd %shift = buffer shift : float32[4]
fwd %x = input x : float32[3, 4]
fwd %w = input w : float32[3, 4]
fwd %to_copy_1 = aten._to_copy.default(%x, dtype=#dtype.bfloat16) : bfloat16[3, 4]
fwd %to_copy = aten._to_copy.default(%up_weight, dtype=#dtype.bfloat16) : bfloat16[4, 4] @ up
fwd %permute = aten.permute.default(%to_copy, [1, 0]) : bfloat16[4, 4] @ up
fwd %mm = aten.mm.default(%to_copy_1, %permute) : bfloat16[3, 4] @ up
fwd %relu = aten.relu.default(%mm) : bfloat16[3, 4]
fwd %mul = aten.mul.Tensor(%relu, %count) : bfloat16[3, 4]
fwd %mm_1 = aten.mm.default(%mul, %permute) : bfloat16[3, 4] @ down
fwd %add = aten.add.Tensor(%mm_1, %shift) : float32[3, 4]
"""
"""The forward of the model under ``"bf16"``, as far as the buffer, which promotes it again."""


def text(model: nn.Module, precision: Precision | str | None) -> str:
    found = capture_step(model, BATCH, squares, grad=True, precision=precision_of(precision))
    return graph_text(found.graph, lines=False)


def test_parameters_are_read_through_one_cast() -> None:
    found = text(Scaled(), "bf16")
    assert found.startswith(BF16)
    gradient = next(line for line in found.splitlines() if line.startswith("gradient up.weight"))
    made = next(line for line in found.splitlines() if f"{gradient.split()[-1]} =" in line)
    assert made.endswith(": float32[4, 4] @ up") and "_to_copy" in made
    assert "summed up.weight float32" in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_models_own_dtype_does_not_matter(dtype: torch.dtype) -> None:
    for preset in ("fp32", "bf16"):
        assert text(Scaled(dtype), preset) == text(Scaled(), preset)


def test_right_dtypes_change_nothing() -> None:
    as_it_is = text(Scaled(), None)
    assert text(Scaled(), "fp32") == as_it_is
    assert text(Scaled(), Precision(reduce="fp32", grad="fp32")) == as_it_is
    one, other = (
        capture_step(Scaled(), BATCH, squares, grad=True, precision=precision_of(p)).fingerprint
        for p in (None, "fp32")
    )
    assert one == other


def test_a_gradient_is_cast_only_to_be_summed() -> None:
    found = text(Scaled(torch.bfloat16), Precision(param="bf16", reduce="fp32"))
    casts = [line for line in found.splitlines() if line.startswith("bwd") and "_to_copy" in line]
    assert [line.split(" : ")[1].split("[")[0] for line in casts[-2:]] == ["float32", "bfloat16"]


def test_text_and_cache_keep_what_gradients_are_summed_in() -> None:
    found = capture_step(Scaled(), BATCH, squares, grad=True, precision=precision_of("bf16"))
    assert found.graph.summed == {"up.weight": "float32"}
    assert parse_graph(graph_text(found.graph)) == found.graph
    assert decode(encode(found)).graph == found.graph
    plain = capture_step(
        Scaled(),
        BATCH,
        squares,
        grad=True,
        precision=Precision(param="fp32", compute="bf16", reduce="bf16"),
    )
    assert plain.fingerprint != found.fingerprint


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_the_step_equals_casts_by_hand(name: str) -> None:
    model, batch, loss = MODELS[name]()
    paths, tensors, _ = flatten_batch(batch)
    captured = capture_step(model, batch, loss, grad=True, precision=precision_of("bf16"))
    values = source_values(
        captured.graph,
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
        dict(zip(paths, tensors, strict=True)),
    )
    env = run_graph(captured.graph, values, captured.constants)
    value, gradients = by_hand(model, batch, loss)
    assert captured.graph.loss is not None
    assert torch.allclose(env[captured.graph.loss], value, rtol=1e-2)
    for path, ref in captured.graph.gradients.items():
        wanted = gradients[path]
        assert wanted is not None and env[ref].dtype == wanted.dtype == torch.float32
        worst = float((env[ref] - wanted).abs().max())
        assert worst <= 2e-2 * max(0.1, float(wanted.abs().max())), (path, worst)


def test_the_model_is_left_as_it_was() -> None:
    model = Scaled()
    before = dict(model.up._parameters)
    text(model, "bf16")
    assert model.up._parameters == before
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs


def test_frozen_parameters_are_cast_too() -> None:
    model = Scaled()
    model.head = nn.Linear(4, 4)
    model.up.weight.requires_grad_(False)
    found = capture_step(
        model,
        BATCH,
        lambda m, b: m.head(m(b["x"]).to(m.head.weight.dtype)).sum().float(),
        grad=True,
        precision=precision_of("bf16"),
    ).graph
    assert set(found.gradients) == {"head.weight", "head.bias"}
    read = {n.operands[0].node for n in found.nodes if n.op == "aten._to_copy.default"}
    assert {"up_weight", "head_weight"} <= read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("bf61", "cannot use precision 'bf61': did you mean 'bf16'"),
        ("int8", "the presets are 'fp32', 'bf16', 'zero_paper'"),
        ("fp16", "float16 .* need a loss scale"),
        (3, "cannot use precision 3"),
    ],
)
def test_unknown_precisions_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        precision_of(given)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'fp8' as Precision\(param=...\): give 'fp32'"):
        Precision(param="fp8")
    with pytest.raises(UnsupportedError, match=r"float16 as Precision\(compute=...\)"):
        Precision(compute=torch.float16)
    assert Precision(param="bf16") == Precision(param=torch.bfloat16)


def test_what_no_optimizer_holds_is_refused() -> None:
    paper = precision_of("zero_paper")
    message = r"state of parameter 'up.weight' in float32: it is stored in bfloat16.*'bf16'"
    with pytest.raises(UnsupportedError, match=message):
        check_held(paper, Scaled(), own_optimizer=False)
    check_held(paper, Scaled(), own_optimizer=True)
    narrow = Precision(param="fp32", grad="bf16")
    with pytest.raises(UnsupportedError, match=r"gradient of parameter 'up.weight' in bfloat16"):
        check_held(narrow, Scaled(), own_optimizer=True)
    check_held(precision_of("bf16"), Scaled(torch.bfloat16), own_optimizer=False)


def test_the_case_of_master_weights_is_stored_in_fp32() -> None:
    model, batch, loss = load_case("g15").build()
    graph = capture_step(model, batch, loss, grad=True, precision=precision_of("bf16")).graph
    assert {n.outputs[0].dtype for n in graph.sources("parameter")} == {"float32"}
    assert {graph.type_of(ref).dtype for ref in graph.gradients.values()} == {"float32"}


def test_complex_parameters_are_held_as_they_are() -> None:
    model = nn.Module()
    model.turned = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    check_held(precision_of("bf16"), model, own_optimizer=False)
