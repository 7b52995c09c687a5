"""Small models that captures are tested on."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 48
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens(*, padded: bool = False) -> dict[str, torch.Tensor]:
    """Four sequences of ten; with ``padded``, the first starts with padding."""
    ids = torch.randint(3, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def llama(**changes: Any) -> nn.Module:
    config = transformers.LlamaConfig(**{**_DECODER, **changes})
    return transformers.LlamaForCausalLM(config).train()


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**_DECODER, sliding_window=4)
    return transformers.MistralForCausalLM(config).train()


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**_DECODER, head_dim=8)
    return transformers.Qwen3ForCausalLM(config).train()


def mixtral(way: str = "batched_mm") -> nn.Module:
    config = transformers.MixtralConfig(
        **_DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation=way,
    )
    return transformers.MixtralForCausalLM(config).train()


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).train()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=44,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).train()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=44,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=44,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config).train()


def images() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=draw),
        "labels": torch.randint(0, 5, (4,), generator=draw),
    }
