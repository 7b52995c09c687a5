"""A small model around every module of `torch.nn` and most functions of its ``functional``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.oracles.models import Built


@dataclass(frozen=True)
class Case:
    """A layer, loss or function.

    Attributes:
        make: Makes what is called.
        inputs: Shape of each input, as `drawn` reads it.
    """

    make: Callable[[], Callable[..., Any]]
    inputs: tuple[Any, ...]


def drawn(shape: Sequence[Any]) -> Tensor:
    """Numbers of a shape; a letter in front says which.

    ``("<", 5, 4, 3)`` are integers below 5, ``("b", ...)`` booleans, ``("p", ...)`` floats between
    0 and 1, ``("s", ...)`` signs.
    """
    kind, rest = (shape[0], shape[1:]) if isinstance(shape[0], str) else ("", shape)
    if kind == "<":
        return torch.randint(rest[0], rest[1:])
    if kind == "p":
        return torch.rand(rest, dtype=torch.float64) * 0.8 + 0.1
    if kind == "s":
        return torch.randint(2, rest) * 2.0 - 1
    return torch.rand(rest) < 0.5 if kind == "b" else torch.randn(rest, dtype=torch.float64)


class Around(nn.Module):
    """What is before a layer, the layer, and a sum in which every element has its own weight."""

    def __init__(self, layer: Callable[..., Any], width: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.layer = layer

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        given = first * self.before if first.is_floating_point() else first
        total = self.before.new_zeros(())
        for value in _floats(self.layer(given, *others)):
            weights = torch.arange(value.numel(), device=value.device).cos().reshape(value.shape)
            total = total + (value * weights).sum() + 0.1 * value.square().sum()
        return total


def _floats(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found] if found.is_floating_point() else []
    return [tensor for item in found or () for tensor in _floats(item)]


def built(case: Case) -> Built:
    """Its model in fp64, its batch and its loss."""
    torch.manual_seed(11)
    inputs = tuple(drawn(shape) for shape in case.inputs)
    layer = case.make()
    model = Around(layer, inputs[0].shape[-1])
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        model(*(value.float() for value in inputs))
    return model.double(), inputs, lambda model, batch: model(*batch)


def case(kind: Any, *inputs: Any, args: tuple[Any, ...] = (), **options: Any) -> Case:
    """Of a module by its class."""
    return Case(lambda: kind(*args, **options), inputs)


def called(function: Callable[..., Any], *inputs: Any) -> Case:
    """Of a function."""
    return Case(lambda: function, inputs)


class With(nn.Module):
    """A module that a function calls."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.inner, *inputs)


def through(make: Callable[[], nn.Module], call: Callable[..., Any], *inputs: Any) -> Case:
    """Of a module that is called in another way than with the inputs."""
    return Case(lambda: With(make(), call), inputs)


FLAT, ROW, LINE, PLANE, SPACE = (4, 6), (4, 3, 6), (4, 6, 8), (4, 6, 8, 8), (4, 6, 4, 4, 4)
PLACES = {1: LINE, 2: PLANE, 3: SPACE}
LABELS, CHANCES, SIGNS, TOKENS = ("<", 6, 4), ("p", *FLAT), ("s", *FLAT), ("<", 12, 4, 3)


def planes(kind: str, *args: Any, **options: Any) -> dict[str, Case]:
    """Of ``kind`` over one, two and three dims."""
    return {
        f"{kind}{n}d": case(getattr(nn, f"{kind}{n}d"), shape, args=args, **options)
        for n, shape in PLACES.items()
    }


def pointwise(names: str) -> dict[str, Case]:
    return {name: case(getattr(nn, name), ROW) for name in names.split()}


ACTIVATIONS: Mapping[str, Case] = {
    **pointwise("CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU"),
    **pointwise("LogSigmoid Mish PReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign"),
    **pointwise("Tanh Tanhshrink AlphaDropout Dropout"),
    "Threshold": case(nn.Threshold, ROW, args=(0.1, 0.5)),
    "Softmax": case(nn.Softmax, ROW, dim=-1),
    "Softmin": case(nn.Softmin, ROW, dim=1),
    "LogSoftmax": case(nn.LogSoftmax, ROW, dim=-1),
    "Softmax2d": case(nn.Softmax2d, PLANE),
    **planes("Dropout"),
    "FeatureAlphaDropout": case(nn.FeatureAlphaDropout, PLANE),
}

SPATIAL: Mapping[str, Case] = {
    **planes("AdaptiveAvgPool", 3),
    **planes("AdaptiveMaxPool", 3),
    **planes("AvgPool", 2),
    **planes("MaxPool", 2),
    **planes("LPPool", 2, 2),
    "FractionalMaxPool2d": case(nn.FractionalMaxPool2d, PLANE, args=(2, 3)),
    "FractionalMaxPool3d": case(nn.FractionalMaxPool3d, SPACE, args=(2, 2)),
    **{
        f"MaxUnpool{n}d": through(
            lambda n=n: getattr(nn, f"MaxUnpool{n}d")(2),
            lambda m, x, n=n: m(*getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)),
            shape,
        )
        for n, shape in PLACES.items()
    },
    **planes("CircularPad", 1),
    **planes("ConstantPad", 1, 0.5),
    **planes("ReflectionPad", 1),
    **planes("ReplicationPad", 1),
    **planes("ZeroPad", 1),
    **planes("Conv", 6, 4, 3, padding=1, padding_mode="circular"),
    **planes("ConvTranspose", 6, 4, 3, stride=2, groups=2),
    **planes("LazyConv", 4, 3),
    **planes("LazyConvTranspose", 4, 3),
    "ChannelShuffle": case(nn.ChannelShuffle, PLANE, args=(2,)),
    "PixelShuffle": case(nn.PixelShuffle, (4, 8, 4, 4), args=(2,)),
    "PixelUnshuffle": case(nn.PixelUnshuffle, PLANE, args=(2,)),
    "Fold": case(nn.Fold, (4, 12, 9), args=((4, 4), 2)),
    "Unfold": case(nn.Unfold, PLANE, args=(2,)),
    "Upsample": case(nn.Upsample, PLANE, scale_factor=2, mode="bilinear"),
    "UpsamplingBilinear2d": case(nn.UpsamplingBilinear2d, PLANE, scale_factor=2),
    "UpsamplingNearest2d": case(nn.UpsamplingNearest2d, PLANE, scale_factor=2),
}

NORMALIZATIONS: Mapping[str, Case] = {
    **planes("BatchNorm", 6),
    **planes("InstanceNorm", 6, affine=True, track_running_stats=True),
    **planes("LazyBatchNorm"),
    **planes("LazyInstanceNorm", affine=True),
    "SyncBatchNorm": case(nn.SyncBatchNorm, PLANE, args=(6,)),
    "GroupNorm": case(nn.GroupNorm, PLANE, args=(2, 6)),
    "LayerNorm": case(nn.LayerNorm, ROW, args=(6,)),
    "RMSNorm": case(nn.RMSNorm, ROW, args=(6,)),
    "LocalResponseNorm": case(nn.LocalResponseNorm, PLANE, args=(2,)),
}

LAYERS: Mapping[str, Case] = {
    "Bilinear": case(nn.Bilinear, ROW, ROW, args=(6, 6, 5)),
    "Linear": case(nn.Linear, ROW, args=(6, 5)),
    "LazyLinear": case(nn.LazyLinear, ROW, args=(5,)),
    "Flatten": case(nn.Flatten, PLANE),
    "Unflatten": case(nn.Unflatten, ROW, args=(-1, (2, 3))),
    "Embedding": case(nn.Embedding, TOKENS, args=(12, 6)),
    "EmbeddingBag": case(nn.EmbeddingBag, TOKENS, args=(12, 6)),
    **{
        f"{kind}{cell}": case(
            getattr(nn, kind + cell), shape, args=(6, 5), **({} if cell else {"batch_first": True})
        )
        for kind in ("GRU", "LSTM", "RNN")
        for cell, shape in {"": ROW, "Cell": FLAT}.items()
    },
    "MultiheadAttention": case(nn.MultiheadAttention, ROW, ROW, ROW, args=(6, 2)),
    "TransformerEncoderLayer": case(nn.TransformerEncoderLayer, ROW, args=(6, 2, 8)),
    "TransformerDecoderLayer": case(nn.TransformerDecoderLayer, ROW, ROW, args=(6, 2, 8)),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2),
        (ROW,),
    ),
    "TransformerDecoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 8, batch_first=True), 2),
        (ROW, ROW),
    ),
    "Transformer": case(nn.Transformer, ROW, ROW, args=(6, 2, 1, 1, 8), batch_first=True),
    "CosineSimilarity": case(nn.CosineSimilarity, ROW, ROW, dim=-1),
    "PairwiseDistance": case(nn.PairwiseDistance, FLAT, FLAT),
}

LOSSES: Mapping[str, Case] = {
    "BCELoss": through(nn.BCELoss, lambda m, x, y: m(x.sigmoid(), y), FLAT, CHANCES),
    "BCEWithLogitsLoss": case(nn.BCEWithLogitsLoss, FLAT, CHANCES),
    "CosineEmbeddingLoss": case(nn.CosineEmbeddingLoss, FLAT, FLAT, ("s", 4)),
    "CrossEntropyLoss": case(nn.CrossEntropyLoss, FLAT, LABELS, label_smoothing=0.1),
    "GaussianNLLLoss": case(nn.GaussianNLLLoss, FLAT, FLAT, CHANCES, full=True),
    "HingeEmbeddingLoss": case(nn.HingeEmbeddingLoss, FLAT, SIGNS),
    "HuberLoss": case(nn.HuberLoss, FLAT, FLAT),
    "KLDivLoss": case(nn.KLDivLoss, FLAT, CHANCES, reduction="batchmean"),
    "L1Loss": case(nn.L1Loss, FLAT, FLAT),
    "MSELoss": case(nn.MSELoss, FLAT, FLAT),
    "MarginRankingLoss": case(nn.MarginRankingLoss, (4,), (4,), ("s", 4), margin=0.2),
    "MultiLabelMarginLoss": case(nn.MultiLabelMarginLoss, FLAT, ("<", 6, *FLAT)),
    "MultiLabelSoftMarginLoss": case(nn.MultiLabelSoftMarginLoss, FLAT, CHANCES),
    "MultiMarginLoss": case(nn.MultiMarginLoss, FLAT, LABELS),
    "NLLLoss": case(nn.NLLLoss, FLAT, LABELS),
    "NLLLoss2d": case(nn.NLLLoss, PLANE, ("<", 6, 4, 8, 8)),
    "PoissonNLLLoss": case(nn.PoissonNLLLoss, FLAT, CHANCES, full=True),
    "SmoothL1Loss": case(nn.SmoothL1Loss, FLAT, FLAT),
    "SoftMarginLoss": case(nn.SoftMarginLoss, FLAT, SIGNS),
    "TripletMarginLoss": case(nn.TripletMarginLoss, FLAT, FLAT, FLAT, swap=True),
    "TripletMarginWithDistanceLoss": case(nn.TripletMarginWithDistanceLoss, FLAT, FLAT, FLAT),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    LOSSES = {
        **LOSSES,
        "LinearCrossEntropyLoss": case(nn.LinearCrossEntropyLoss, FLAT, ("<", 10, 4), args=(6, 10)),
    }

MODULES: Mapping[str, Case] = {**ACTIVATIONS, **SPATIAL, **NORMALIZATIONS, **LAYERS, **LOSSES}
"""By the name in ``torch.nn``."""


def lengths(x: Tensor, y: Tensor, loss: nn.Module) -> Tensor:
    """A CTC loss of samples of 5 steps and 2 labels."""
    steps = x.log_softmax(-1).transpose(0, 1)
    found: Tensor = loss(steps, y, torch.full((4,), 5), torch.full((4,), 2))
    return found


REFUSED: Mapping[str, tuple[Case, str]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        case(nn.AdaptiveLogSoftmaxWithLoss, FLAT, ("<", 10, 4), args=(6, 10, [4, 8], 2.0)),
        "the shape of its result depends on the data",
    ),
    "CTCLoss": (
        through(nn.CTCLoss, lambda m, x, y: lengths(x, y, m), (4, 5, 6), ("<", 5, 4, 2)),
        "the shape of its result depends on the data",
    ),
    "CrossMapLRN2d": (case(nn.CrossMapLRN2d, PLANE, args=(2,)), "it resizes a tensor"),
    "RReLU": (case(nn.RReLU, ROW), "it draws random numbers in a way"),
}
"""Modules that are refused, and in which words."""

NO_LAYERS = (
    "Container DataParallel Module ModuleDict ModuleList ParameterDict ParameterList RNNBase "
    "RNNCellBase Sequential"
)
"""Classes of ``torch.nn`` that compute nothing themselves."""


class Bag(nn.EmbeddingBag):
    """Bags of one list of tokens, by their offsets."""

    offsets = (0, 3, 3, 8)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        ends = (12,) if self.include_last_offset else ()
        return super().forward(tokens.flatten(), torch.tensor((*self.offsets, *ends)))


class Weighed(nn.EmbeddingBag):
    """Bags of weighed tokens."""

    def __init__(self) -> None:
        super().__init__(12, 6, mode="sum", padding_idx=2)
        self.weights = nn.Parameter(torch.randn(4, 3))

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, per_sample_weights=self.weights)


def lists(targets: Tensor) -> Tensor:
    """Targets that end at the first that is negative."""
    return torch.where(targets > 3, -1, targets)


WAYS: Mapping[str, Case] = {
    "bags joined by sum": case(nn.EmbeddingBag, TOKENS, args=(12, 6), mode="sum"),
    "bags joined by max": case(nn.EmbeddingBag, TOKENS, args=(12, 6), mode="max", padding_idx=-1),
    "bags with padding": case(nn.EmbeddingBag, TOKENS, args=(12, 6), padding_idx=2),
    "bags of weighed tokens": Case(Weighed, (TOKENS,)),
    "bags by offset": case(Bag, TOKENS, args=(12, 6), padding_idx=1),
    "bags by offset, max": case(Bag, TOKENS, args=(12, 6), mode="max"),
    "bags by offset, the last": case(Bag, TOKENS, args=(12, 6), include_last_offset=True),
    "multi margin, weighed": called(
        lambda x, y, w: F.multi_margin_loss(x, y, p=2, weight=w.abs(), reduction="none"),
        *(FLAT, LABELS, (6,)),
    ),
    "multi margin, one sample": called(F.multi_margin_loss, (6,), ("<", 6, 1)),
    "multilabel margin of lists": called(
        lambda x, y: F.multilabel_margin_loss(x, lists(y)), FLAT, ("<", 6, *FLAT)
    ),
    "multilabel margin, one sample": called(
        lambda x, y: F.multilabel_margin_loss(x, lists(y), reduction="sum"), (6,), ("<", 6, 6)
    ),
    "one variance a sample": called(
        lambda x, y, v: F.gaussian_nll_loss(x, y, v, reduction="sum"), FLAT, FLAT, ("p", 4)
    ),
    "affine grid": called(lambda m: F.affine_grid(m, [4, 2, 5, 6], align_corners=False), (4, 2, 3)),
    "affine grid of a space": called(
        lambda m: F.affine_grid(m, [4, 2, 3, 5, 6], align_corners=True), (4, 3, 4)
    ),
    "spatial transformer": called(
        lambda m, x: F.grid_sample(
            x, F.affine_grid(m, [4, 6, 5, 5], align_corners=True), align_corners=True
        ),
        (4, 2, 3),
        PLANE,
    ),
    "space read at places": called(
        lambda x, g: F.grid_sample(x, g.tanh(), "bilinear", "border", False), SPACE, (4, 2, 2, 2, 3)
    ),
    "pdist": called(F.pdist, FLAT),
    "cdist": called(torch.cdist, ROW, ROW),
    "conv_tbc": called(lambda x, w, b: F.conv_tbc(x, w, b, 1), (5, 4, 6), (3, 6, 5), (5,)),
    "gumbel_softmax": called(lambda x: F.gumbel_softmax(x, hard=True), FLAT),
    "interpolate area": called(lambda x: F.interpolate(x, size=(3, 5), mode="area"), PLANE),
    "interpolate antialias": called(
        lambda x: F.interpolate(x, size=(5, 5), mode="bicubic", antialias=True), PLANE
    ),
    "interpolate nearest-exact": called(
        lambda x: F.interpolate(x, size=(3, 5, 5), mode="nearest-exact"), SPACE
    ),
    "interpolate trilinear": called(
        lambda x: F.interpolate(x, size=(3, 5, 5), mode="trilinear"), SPACE
    ),
    "normalize": called(F.normalize, FLAT),
    "one_hot": called(lambda x, i: F.one_hot(i, 6) * x, FLAT, LABELS),
    "histc": called(lambda x, i: x * torch.histc(i.to(x.dtype), 6, 0, 6), FLAT, LABELS),
    "histc of other bins": called(lambda x: x * torch.histc(x.detach(), 6, -2, 2), FLAT),
    "cross entropy, weighed": called(
        lambda x, y, w: F.cross_entropy(x, y, weight=w.abs(), ignore_index=2), FLAT, LABELS, (6,)
    ),
    "kl_div of logarithms": called(
        lambda a, b: F.kl_div(
            a.log_softmax(-1), b.log_softmax(-1), reduction="sum", log_target=True
        ),
        FLAT,
        FLAT,
    ),
    "padded keys": through(
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        lambda m, x, k: m(x, x, x, key_padding_mask=k, need_weights=False)[0],
        *(ROW, ("b", 4, 3)),
    ),
    "causal encoder": through(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=True),
        lambda m, x: m(x, nn.Transformer.generate_square_subsequent_mask(3), is_causal=True),
        ROW,
    ),
    "deep LSTM both ways": case(
        nn.LSTM, ROW, args=(6, 5, 2), bidirectional=True, proj_size=3, dropout=0.5
    ),
    "weight_norm": Case(lambda: parametrizations.weight_norm(nn.Linear(6, 5)), (ROW,)),
    "spectral_norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(6, 5)), (ROW,)),
    "orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(6, 5)), (ROW,)),
}
"""Other ways to call modules, and functions."""
