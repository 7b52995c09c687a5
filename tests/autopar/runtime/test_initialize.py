"""Models on meta: the reference is one process after ``to_empty``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime import draws, initialize
from autopar.runtime.initialize import default_init, initialized


def values_of(model: nn.Module, init: Any = None, aliases: Any = None) -> dict[str, torch.Tensor]:
    return dict(initialized(model, aliases or {}, init, 11))


def reference(model: nn.Module, init: Any) -> dict[str, torch.Tensor]:
    made = copy.deepcopy(model).to_empty(device="cpu")
    torch.manual_seed(11)
    with torch.no_grad():
        init(made)
    return dict(made.named_parameters()) | dict(made.named_buffers())


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def plain() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6)),
            nn.Embedding(7, 5, padding_idx=2),
            nn.MultiheadAttention(4, 2),
        )


def test_plain_modules_reset_their_parameters() -> None:
    def init(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        model[4]._reset_parameters()  # type: ignore[operator,index]

    before = torch.random.get_rng_state()
    model = plain()
    found = values_of(model)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(p.is_meta for p in model.parameters())
    assert_same(found, reference(model, init))


def test_own_init_is_used() -> None:
    def init(model: nn.Module) -> None:
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(3)

    assert_same(values_of(plain(), init), reference(plain(), init))


def transformers_model(kind: str) -> nn.Module:
    """A tiny model on meta."""
    import transformers as t

    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24}
    made: Any = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(vocab_size=32, **sizes)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)
        ),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(vocab_size=32, head_dim=8, **sizes)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(vocab_size=32, **sizes)),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(image_size=8, patch_size=4, **sizes)
        ),
    }
    with torch.device("meta"):
        return made[kind]()


def aliases_of(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(p), name)) for name, p in named]
    return {name: owner for name, owner in pairs if name != owner}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "bert", "vit"])
def test_transformers_models_initialize_themselves(kind: str) -> None:
    model = transformers_model(kind)
    aliases = aliases_of(model)
    found = values_of(model, aliases=aliases)
    assert_same(found, reference(model, lambda m: m.init_weights()))
    # Twice: what transformers notes on the first run must not keep it from the second.
    assert_same(values_of(model, aliases=aliases), found)


def test_what_nothing_fills_is_an_error_that_names_it() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.register_buffer("table", torch.arange(5), persistent=False)
            self.register_buffer("mask", torch.ones(9, dtype=torch.bool))
            self.linear = nn.Linear(2, 2)

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(AutoparError, match=r"'scale', 'table', 'mask' of a model on meta: no mod"):
        values_of(model)

    def init(model: Any) -> None:
        model.scale.fill_(1.0)
        model.table = torch.arange(5)
        model.linear.reset_parameters()

    with pytest.raises(AutoparError, match="'mask' of a model on meta: the init function"):
        values_of(model, init)

    def half(model: Any) -> None:
        default_init(model)
        model.scale[:2] = 1.0
        model.table.copy_(torch.arange(5))
        model.mask.fill_(True)

    with pytest.raises(AutoparError, match="'scale' of a model"):
        values_of(model, half)


def test_tensors_that_exist_are_kept() -> None:
    model = plain()
    model[2] = nn.Linear(5, 6)  # type: ignore[operator]
    found = values_of(model)
    assert torch.equal(found["2.weight"], model[2].weight)  # type: ignore[index]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model on meta is too large to be made whole."""
    monkeypatch.setattr(initialize, "MAX_WHOLE_ELEMENTS", 0)
    monkeypatch.setattr(draws, "BLOCK_ELEMENTS", 64)


@pytest.mark.usefixtures("large")
def test_large_models_draw_rows_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 1000), nn.LayerNorm(40), nn.Embedding(9, 4, 2))
    whole = values_of(model)
    bound = 40**-0.5
    weight = whole["0.weight"]
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert len(weight.unique()) > 0.99 * weight.numel()
    assert torch.equal(whole["1.weight"], torch.ones(40))
    assert torch.equal(whole["2.weight"][2], torch.zeros(4))

    def rows(name: str) -> Any:
        return range(500, 507) if name == "0.weight" else None

    part = dict(initialized(model, {}, None, 11, rows))
    assert torch.equal(part["0.weight"][500:507], weight[500:507])
    assert not torch.equal(dict(initialized(model, {}, None, 12))["0.weight"], weight)


@pytest.mark.usefixtures("large")
def test_large_models_may_need_temporaries_and_real_buffers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(6, 4))
            self.register_buffer("table", torch.empty(3))
            self.register_buffer("steps", torch.empty(2))

        def reset_parameters(self) -> None:
            q, _ = torch.linalg.qr(self.weight.new_empty(6, 4).normal_())
            self.weight.copy_(q)
            self.table.copy_(torch.arange(3, device="cpu"))
            self.steps = torch.ones(2)

    with torch.device("meta"):
        model = Odd()
    found = values_of(model)
    product = found["weight"].T @ found["weight"]
    torch.testing.assert_close(product, torch.eye(4), atol=1e-5, rtol=0)
    assert torch.equal(found["table"], torch.arange(3.0))
    assert torch.equal(found["steps"], torch.ones(2))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_large_transformers_models_initialize_themselves(kind: str) -> None:
    model = transformers_model(kind)
    found = values_of(model, aliases=aliases_of(model))
    expected = reference(model, lambda m: m.init_weights())
    for name, tensor in found.items():
        drawn = tensor.numel() > 100
        torch.testing.assert_close(tensor.mean(), expected[name].mean(), atol=0.01, rtol=0)
        assert drawn or torch.equal(tensor, expected[name]), name


@pytest.mark.usefixtures("large")
def test_large_models_that_nothing_fills_are_an_error() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(AutoparError, match="'scale' of a model on meta"):
        values_of(model)
