"""A captured step equals the eager model: whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.capture import capture_step
from autopar.ir.graph import Phase
from tests.autopar.capture import models
from tests.autopar.capture.eager import capture_equals_eager, load_case, ops_of


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    yield
    transformers.logging.set_verbosity(verbosity)


DECODERS = [models.llama, models.qwen3, models.gpt2, models.mistral]


@pytest.mark.parametrize("build", [*DECODERS, models.bert, models.t5, models.mixtral])
def test_text_models_equal_eager(build: Callable[[], nn.Module]) -> None:
    capture_equals_eager(build(), models.tokens())


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_experts_equal_eager_whatever_way_they_are_set_to(way: str) -> None:
    captured = capture_equals_eager(models.mixtral(way), models.tokens())
    assert "autopar.routed_linear.default" in ops_of(captured)
    assert not any("sort" in op or "nonzero" in op for op in ops_of(captured))


@pytest.mark.parametrize("build", [models.llama, models.gpt2, models.bert])
def test_padded_batches_equal_eager(build: Callable[[], nn.Module]) -> None:
    capture_equals_eager(build(), models.tokens(padded=True))


def test_image_model_equals_eager() -> None:
    capture_equals_eager(models.vit(), models.images())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_equal_eager(dtype: torch.dtype) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    capture_equals_eager(models.llama().to(dtype), models.tokens(), tolerance=tolerance)


CASES = ["g01", "g03", "g04", "g05", "g06", "g07", "g08", "g10", "g11", "g12", "g13", "g14"]
CASES += ["g16", "g17", "g18", "g19", "g20"]


@pytest.mark.parametrize("case", CASES)
def test_cases_equal_eager(case: str) -> None:
    model, batch, loss = load_case(case).build()
    capture_equals_eager(model, batch, loss)


def test_half_precision_case_equals_eager() -> None:
    model, batch, loss = load_case("g15").build()
    capture_equals_eager(model, batch, loss, tolerance=0.02)


def test_every_batch_of_a_case_equals_eager() -> None:
    case = load_case("g19")
    model, _, loss = case.build()
    for batch in case.batches():
        capture_equals_eager(model, batch, loss)


def test_a_decoder_is_causal_without_a_mask() -> None:
    for build in (models.llama, models.qwen3, models.gpt2):
        graph = capture_step(build(), models.tokens(), grad=True).graph
        attentions = [n for n in graph.nodes if n.op.startswith("autopar.attention")]
        assert len(attentions) == 4
        forward = attentions[0]
        assert forward.args[3:5] == (None, True)
        assert all(None in n.args and n.args[-2] is True for n in attentions)


def test_a_decoder_is_causal_without_a_mask_whatever_the_batch() -> None:
    with torch.device("meta"):
        model, ids = models.llama(), torch.zeros(64, 8192, dtype=torch.long)
    graph = capture_step(model, {"input_ids": ids, "labels": ids}, grad=True).graph
    attentions = [n for n in graph.nodes if n.op.startswith("autopar.attention")]
    assert attentions
    assert all(None in n.args and n.args[-2] is True for n in attentions)


def test_a_padding_mask_is_apart_from_causality() -> None:
    graph = capture_step(models.llama(), models.tokens(padded=True), grad=True).graph
    attention = next(n for n in graph.nodes if n.op == "autopar.attention.default")
    assert graph.type_of(attention.operands[3]).shape == (4, 1, 1, 10)
    assert attention.args[4] is True
    assert not any(node.outputs[0].shape == (4, 1, 10, 10) for node in graph.nodes)


def test_a_sliding_window_stays_a_mask_of_no_sample() -> None:
    graph = capture_step(models.mistral(), models.tokens(), grad=True).graph
    attention = next(n for n in graph.nodes if n.op == "autopar.attention.default")
    assert graph.type_of(attention.operands[3]).shape == (1, 1, 10, 10)
    assert attention.args[4] is False


def test_a_mask_with_gradient_has_one() -> None:
    captured = capture_step(models.t5(), models.tokens(), grad=True)
    assert "autopar.attention_backward_mask.default" in ops_of(captured)


@pytest.mark.parametrize("padded", [False, True])
def test_key_and_value_heads_are_not_repeated(padded: bool) -> None:
    graph = capture_step(models.llama(), models.tokens(padded=padded), grad=True).graph
    for node in graph.nodes:
        if node.op == "autopar.attention.default":
            q, k, v = (graph.type_of(ref).shape for ref in node.operands[:3])
            assert (q[1], k[1], v[1]) == (4, 2, 2)
        assert len(node.outputs[0].shape) < 5


def test_tied_parameters_are_one() -> None:
    model = models.gpt2()
    graph = capture_equals_eager(model, models.tokens()).graph
    assert graph.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in {n.target for n in graph.sources("parameter")}


def _lines(captured: Any) -> list[str]:
    return [
        f"{n.name} {n.op} {n.args} {n.kwargs} {n.outputs} {n.phase} {n.source}"
        for n in captured.graph.nodes
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_meta_and_cpu_models_give_the_same_text(padded: bool) -> None:
    with torch.device("meta"):
        far = models.llama()
    batch = models.tokens(padded=padded)
    meta = {name: value.to("meta") for name, value in batch.items()}
    here, there = (
        capture_step(models.llama(), batch, grad=True),
        capture_step(far, meta, grad=True),
    )
    assert _lines(here) == _lines(there)
    assert here.fingerprint == there.fingerprint


def test_every_node_of_a_decoder_has_module_and_line() -> None:
    graph = capture_step(models.llama(), models.tokens(), grad=True).graph
    ops = [n for n in graph.nodes if n.op not in ("parameter", "buffer", "input", "constant")]
    assert all(n.source.line for n in ops)
    matmuls = [n for n in ops if n.op == "aten.mm.default"]
    for layer in range(2):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            path = f"model.layers.{layer}.{name}"
            phases = [n.phase for n in matmuls if n.source.module == path]
            assert sorted(phases) == [Phase.BACKWARD, Phase.BACKWARD, Phase.FORWARD], path


def test_the_forward_alone_has_no_backward() -> None:
    graph = capture_step(models.llama().eval(), models.tokens(), grad=False).graph
    assert graph.loss is not None and not graph.gradients
    assert all(n.phase is Phase.FORWARD for n in graph.nodes)
