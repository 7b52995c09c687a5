"""Models on meta: the reference is one process after ``to_empty``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.initialize import default_init, initialized


def values_of(model: nn.Module, init: Any = None, aliases: Any = None) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    initialized(model, aliases or {}, init, 11, lambda name, full: found.update({name: full}))
    return found


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


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "bert", "vit"])
def test_transformers_models_initialize_themselves(kind: str) -> None:
    import transformers as t

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24}
    made = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(vocab_size=32, **sizes)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)
        ),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(vocab_size=32, head_dim=8, **sizes)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(vocab_size=32, **sizes)),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(image_size=8, patch_size=4, **sizes)
        ),
    }[kind]
    with torch.device("meta"):
        model = made()
    names = list(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in names:
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
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
