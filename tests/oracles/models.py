"""Small models that tests share: built alike in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any, Callable[[Any, Any], Any]]


class Mlp(nn.Module):
    """Two hidden layers, a shared scale, a normalisation."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mid = nn.Linear(hidden, hidden, bias=False)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.up(x))
        h = h + self.scale * torch.tanh(self.mid(self.norm(h)))
        return self.down(h)


def mlp_loss(model: Any, batch: Any) -> torch.Tensor:
    # Torch 2.11 cannot differentiate the loss of two dtypes.
    found = model(batch["x"]).to(batch["y"].dtype)
    return torch.nn.functional.mse_loss(found, batch["y"])


def mlp(batch_size: int = 8) -> Built:
    torch.manual_seed(3)
    model = Mlp()
    return model, {"x": torch.randn(batch_size, 16), "y": torch.randn(batch_size, 16)}, mlp_loss


def output_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def llama(layers: int = 2) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 64, (4, 8))
    return model, {"input_ids": ids, "labels": ids}, output_loss


def gpt2(layers: int = 2, dropout: float = 0.0, batch: int = 4) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    config = GPT2Config(
        vocab_size=48,
        n_positions=16,
        n_embd=24,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(1, 48, (batch, 10))
    labels = ids.clone()
    labels[1, 6:] = -100
    return model, {"input_ids": ids, "labels": labels}, output_loss


def bert(layers: int = 2, dropout: float = 0.0) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )
    model = BertForMaskedLM(config).train()
    ids = torch.randint(0, 40, (4, 8))
    mask = torch.ones_like(ids)
    mask[2, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}, output_loss


def mixtral(layers: int = 2) -> Built:
    """Experts of which every token goes to two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(9)
    config = MixtralConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    ids = torch.randint(0, 40, (4, 8))
    return MixtralForCausalLM(config).train(), {"input_ids": ids, "labels": ids}, output_loss


def t5(layers: int = 2, dropout: float = 0.0, batch: int = 4) -> Built:
    """Encoder and decoder, one embedding for both and for the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(8)
    config = T5Config(
        vocab_size=40,
        d_model=24,
        d_kv=6,
        d_ff=48,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).train()
    ids = torch.randint(1, 40, (batch, 8))
    labels = torch.randint(1, 40, (batch, 6))
    labels[1, 4:] = -100
    return model, {"input_ids": ids, "labels": labels}, output_loss


class Drawing(nn.Module):
    """Masks, noise and integers in several shapes, one of them of no sample."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)
        self.drop = nn.Dropout(0.4)
        self.planes = nn.Dropout1d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.up(x))
        h = h + torch.randn_like(h) * torch.rand(12)
        h = self.planes(h) * torch.bernoulli(torch.full_like(h, 0.8))
        h = h + torch.randint(0, 3, (x.shape[0], 1, 1))
        h = h + torch.empty_like(h).uniform_(-1.0, 1.0)
        return self.drop(self.down(h))


def drawing(batch_size: int = 8) -> Built:
    torch.manual_seed(9)
    model = Drawing()
    return model, {"x": torch.randn(batch_size, 4, 8), "y": torch.randn(batch_size, 4, 8)}, mlp_loss


class Penalised(nn.Module):
    """Weights read several times, whose products and distances are in the loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.read = nn.ParameterList(torch.randn(width, width) / 3 for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b, c = self.read
        for layer in self.layers:
            x = torch.tanh(torch.tanh(x @ a) @ b + x)
            x = layer(torch.tanh(x @ c) + x)
        product = (a @ b @ c).pow(2).mean()
        apart = (a - self.layers[2].weight).pow(2).sum()
        return nn.functional.mse_loss(x, y) + product + 0.1 * apart


def penalised() -> Built:
    torch.manual_seed(10)
    batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
    return Penalised(), batch, lambda model, b: model(b["x"], b["y"])


class Twice(nn.Module):
    """A normalised layer that is two of the model's modules."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8))
        self.first = shared
        self.others = nn.ModuleList([nn.Linear(8, 8), shared])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.others:
            x = layer(x)
        return x


def twice() -> Built:
    torch.manual_seed(11)
    batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
    return Twice(), batch, mlp_loss


class UNet(nn.Module):
    """Convolutions down and up again, every level read again on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 3, stride=2, padding=1) for i in range(2)
        )
        self.middle = nn.Conv2d(width * 4, width * 4, 3, padding=1)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2**i, 2, stride=2) for i in (1, 0)
        )
        self.join = nn.ModuleList(
            nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 3, padding=1) for i in (1, 0)
        )
        self.leave = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.enter(x))
        levels = []
        for down in self.down:
            levels.append(h)
            h = torch.relu(down(h))
        h = torch.relu(self.middle(h))
        for up, joined in zip(self.up, self.join, strict=True):
            h = torch.relu(joined(torch.cat([up(h), levels.pop()], dim=1)))
        return self.leave(h)


def unet() -> Built:
    torch.manual_seed(9)
    batch = {"x": torch.randn(4, 3, 8, 8), "y": torch.randn(4, 2, 8, 8)}
    return UNet(), batch, mlp_loss


class ResNet(nn.Module):
    """Two residual blocks of convolutions and batch normalisation by running statistics."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.stem(x))
        for block in self.blocks:
            h = torch.relu(h + block(h))
        return self.head(h.mean((2, 3)))


def class_loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def resnet() -> Built:
    torch.manual_seed(10)
    model = ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval(), {"x": torch.randn(4, 3, 6, 6), "y": torch.tensor([0, 3, 1, 4])}, class_loss


def convolutions(
    *,
    width: int = 8,
    image: int = 8,
    side: int = 4,
    layers: int = 6,
    hidden: int = 128,
    dense: int = 5,
    classes: int = 5,
    samples: int = 48,
) -> Built:
    """Convolutions that compute most, then dense layers that hold most parameters.

    Args:
        width: Channels.
        image: Side of the images; ``side`` once they are pooled.
        side: Of what the first dense layer reads.
        layers: Convolutions.
        hidden: Width of the dense layers.
        dense: How many there are, beside the classifier.
        classes: To tell apart.
        samples: Of the batch.
    """
    torch.manual_seed(11)
    wide, deep = [width] * layers, [hidden] * dense
    convs = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise([3, *wide])]
    linears = [nn.Linear(a, b) for a, b in pairwise([width * side**2, *deep])]
    model = nn.Sequential(
        *(part for own in convs for part in (own, nn.ReLU())),
        nn.AvgPool2d(image // side),
        nn.Flatten(),
        *(part for own in linears for part in (own, nn.ReLU())),
        nn.Linear(hidden, classes),
    )
    batch = {"x": torch.randn(samples, 3, image, image), "y": torch.arange(samples) % classes}
    return model, batch, class_loss


MODELS: dict[str, Callable[[], Built]] = {"mlp": mlp, "llama": llama, "gpt2": gpt2, "bert": bert}

DRAWING: dict[str, Callable[[], Built]] = {
    "drawing": drawing,
    "gpt2 dropout": functools.partial(gpt2, dropout=0.1),
    "bert dropout": functools.partial(bert, dropout=0.1),
    "t5 dropout": functools.partial(t5, dropout=0.1),
}
"""Models that draw random numbers while they train."""
