"""A batch that a model of transformers takes in training, labels included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

IMAGE = 224
"""Height and width of images where a configuration does not say."""

CHOICES = 4
"""Answers of each question of a multiple-choice model."""

Batch = Mapping[str, torch.Tensor | bool]
"""Keyword arguments of a model."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a batch is wanted for.

    Attributes:
        model: A model of transformers.
        path: Of its configuration, for errors.
        batch: Samples.
        seq: Tokens of a sample, or samples of a waveform; None where nothing was said.
        draw: Draws the values; None for a batch on the meta device.
    """

    model: nn.Module
    path: str
    batch: int
    seq: int | None
    draw: torch.Generator | None

    @property
    def name(self) -> str:
        """Of the model's class."""
        return type(self.model).__name__

    @property
    def config(self) -> Any:
        """Of the model."""
        return self.model.config

    def integers(self, most: int, *size: int) -> torch.Tensor:
        """Whole numbers below ``most`` for every sample."""
        device = "meta" if self.draw is None else "cpu"
        return torch.randint(most, (self.batch, *size), generator=self.draw, device=device)

    def numbers(self, *size: int) -> torch.Tensor:
        """Numbers from -1 to 1 for every sample, in the model's dtype."""
        dtype = next(self.model.parameters()).dtype
        return (self.integers(256, *size).float() / 128 - 1).to(dtype)


def batch_of(asked: Asked) -> tuple[Batch, tuple[str, ...]]:
    """A batch for a model, and what to say about it.

    Raises:
        AutoparError: The model takes none that autopar can make, or not of these sizes.
    """
    from transformers.models.auto import modeling_auto

    for table, reason in _REFUSED.items():
        if _is_in(modeling_auto, table, asked.name):
            raise AutoparError(f"cannot plan '{asked.path}': {asked.name} {reason}")
    for table, make in _MAKERS.items():
        if _is_in(modeling_auto, table, asked.name):
            return make(asked)
    raise AutoparError(
        f"cannot make a batch for '{asked.path}': {asked.name} is no model that autopar knows the "
        "labels of; write a function that returns (model, batch), give pkg.module:build"
    )


def names_in(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """The classes of an entry of a table of transformers: one, or several."""
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _is_in(tables: Any, table: str, name: str) -> bool:
    entries = getattr(tables, f"MODEL_FOR_{table}_MAPPING_NAMES").values()
    return any(name in names_in(entry) for entry in entries)


Made = tuple[Batch, tuple[str, ...]]


def _tokens(asked: Asked) -> Made:
    ids, notes = _ids(asked)
    begins = getattr(asked.config, "decoder_start_token_id", None) is not None
    if asked.config.is_encoder_decoder and not begins:
        raise AutoparError(
            f"cannot make a batch for '{asked.path}': its 'decoder_start_token_id', which texts of "
            f"{asked.name} begin with, is not set; set it in the config"
        )
    return {"input_ids": ids, "labels": ids.clone()}, notes


def _without_images(asked: Asked) -> Made:
    batch, notes = _tokens(asked)
    return batch, (*notes, "text alone is planned: the batch has no images")


def _sentences(asked: Asked) -> Made:
    """Every token labelled, and the order of two sentences where the class learns that."""
    ids, notes = _ids(asked)
    taken = inspect.signature(asked.model.forward).parameters
    orders = [name for name in ("next_sentence_label", "sentence_order_label") if name in taken]
    if asked.name.startswith("Electra"):
        return {"input_ids": ids, "labels": asked.integers(2, *ids.shape[1:])}, notes
    more = {name: asked.integers(2) for name in orders}
    return {"input_ids": ids, "labels": ids.clone(), **more}, notes


def _tagged(asked: Asked) -> Made:
    ids, notes = _ids(asked)
    labels = asked.integers(asked.config.num_labels, *ids.shape[1:])
    return {"input_ids": ids, "labels": labels}, notes


def _sequences(asked: Asked) -> Made:
    """One class a sequence; said in the config, since DeBERTa else looks for samples without."""
    ids, notes = _ids(asked)
    if asked.config.problem_type is None and asked.config.num_labels > 1:
        asked.config.problem_type = "single_label_classification"
    return {"input_ids": ids, "labels": asked.integers(asked.config.num_labels)}, notes


def _choices(asked: Asked) -> Made:
    ids, notes = _ids(asked)
    several = asked.integers(asked.config.get_text_config().vocab_size, CHOICES, ids.shape[1])
    return {"input_ids": several, "labels": asked.integers(CHOICES)}, notes


def _answers(asked: Asked) -> Made:
    ids, notes = _ids(asked)
    ends = {name: asked.integers(ids.shape[1]) for name in ("start_positions", "end_positions")}
    return {"input_ids": ids, **ends}, notes


def _images(asked: Asked) -> Made:
    _refuse_seq(asked, "images of the config's size")
    pixels, notes = _pixels(asked)
    return {"pixel_values": pixels, "labels": asked.integers(asked.config.num_labels)}, notes


def _areas(asked: Asked) -> Made:
    _refuse_seq(asked, "images of the config's size")
    pixels, notes = _pixels(asked)
    labels = asked.integers(asked.config.num_labels, *pixels.shape[2:])
    return {"pixel_values": pixels, "labels": labels}, notes


def _pairs(asked: Asked) -> Made:
    """An image and a text for it; every other pair of the batch is a wrong one."""
    text = asked.config.text_config
    seq = asked.seq or text.max_position_embeddings
    ids = asked.integers(text.vocab_size, seq)
    pixels, notes = _pixels(asked)
    said = () if asked.seq else (f"texts of {seq} tokens; --seq sets others",)
    more = _check_length(asked, seq)
    batch: Batch = {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    return batch, (*notes, *said, *more)


def _speech(asked: Asked) -> Made:
    """Spectrograms of the length that the encoder takes, and a text for each."""
    spectrograms = _spectrograms(asked)
    if spectrograms is None:
        raise AutoparError(
            f"cannot make a batch for '{asked.path}': {asked.name} takes no spectrograms of a "
            "length that its config says; write a function that returns (model, batch), give "
            "pkg.module:build"
        )
    ids, notes = _ids(asked)
    return {**spectrograms, "labels": ids}, notes


def _sounds(asked: Asked) -> Made:
    """Spectrograms where the config says how long they are, else waveforms; a label each."""
    labels = asked.integers(asked.config.num_labels)
    spectrograms = _spectrograms(asked)
    if spectrograms is not None:
        _refuse_seq(asked, "spectrograms of the config's length")
        return {**spectrograms, "labels": labels}, ()
    if asked.seq is None:
        raise AutoparError(
            f"cannot size a batch of sound for '{asked.path}': give --seq, samples of a waveform "
            "(10 s at 16 kHz: 160000)"
        )
    return {"input_values": asked.numbers(asked.seq), "labels": labels}, ()


def _spectrograms(asked: Asked) -> Batch | None:
    """Spectrograms as Whisper or the audio spectrogram transformer takes them; None of others."""
    config, taken = asked.config, str(asked.model.main_input_name)
    bins = getattr(config, "num_mel_bins", None)
    if taken == "input_features" and bins and hasattr(config, "max_source_positions"):
        # Whisper halves the length by a convolution.
        return {taken: asked.numbers(bins, 2 * config.max_source_positions)}
    if taken == "input_values" and bins and hasattr(config, "max_length"):
        return {taken: asked.numbers(config.max_length, bins)}
    return None


_MAKERS: Mapping[str, Callable[[Asked], Made]] = {
    "CAUSAL_LM": _tokens,
    "MASKED_LM": _tokens,
    "SEQ_TO_SEQ_CAUSAL_LM": _tokens,
    "TOKEN_CLASSIFICATION": _tagged,
    "SEQUENCE_CLASSIFICATION": _sequences,
    "MULTIPLE_CHOICE": _choices,
    "QUESTION_ANSWERING": _answers,
    "IMAGE_CLASSIFICATION": _images,
    "SEMANTIC_SEGMENTATION": _areas,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": _pairs,
    "SPEECH_SEQ_2_SEQ": _speech,
    "AUDIO_CLASSIFICATION": _sounds,
    "IMAGE_TEXT_TO_TEXT": _without_images,
    "PRETRAINING": _sentences,
}
"""How the classes of each table of transformers are labelled; the first that has a class counts."""

_FIXED = (
    "so the step is no fixed graph; write a function that returns (model, batch, loss) with a loss "
    "that is, give pkg.module:build"
)
_REFUSED: Mapping[str, str] = {
    "OBJECT_DETECTION": f"matches the boxes of each image by an assignment on the host, {_FIXED}",
    "UNIVERSAL_SEGMENTATION": f"matches masks by an assignment on the host, {_FIXED}",
    "CTC": f"is trained by CTC, whose shapes depend on the lengths of the texts, {_FIXED}",
}
"""Tables of classes whose own loss cannot be captured, and why."""


def _ids(asked: Asked) -> tuple[torch.Tensor, tuple[str, ...]]:
    if asked.seq is None:
        raise AutoparError(
            f"cannot size a batch of text for '{asked.path}': give --seq, tokens of a sample"
        )
    notes = _check_length(asked, asked.seq)
    return asked.integers(asked.config.get_text_config().vocab_size, asked.seq), notes


def _pixels(asked: Asked) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Images of the config's size."""
    vision = getattr(asked.config, "vision_config", asked.config)
    size = getattr(vision, "image_size", None)
    notes = () if size else (f"the config has no image size: images of {IMAGE} x {IMAGE}",)
    size = size or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    return asked.numbers(getattr(vision, "num_channels", 3), height, width), notes


def _refuse_seq(asked: Asked, takes: str) -> None:
    if asked.seq is not None:
        raise AutoparError(
            f"cannot use --seq {asked.seq} with '{asked.path}': {asked.name} takes {takes}; leave "
            "--seq out"
        )


def _check_length(asked: Asked, seq: int) -> tuple[str, ...]:
    """Refuse sequences longer than a table of learned positions; warn of others."""
    config = asked.config.get_text_config()
    key = next((key for key in _LIMITS if isinstance(getattr(config, key, None), int)), None)
    if key is None or seq <= getattr(config, key):
        return ()
    limit = getattr(config, key)
    inputs: Any = asked.model.get_input_embeddings()  # type: ignore[operator]
    # OPT and others keep two rows more than there are positions.
    learned = [
        path
        for path, module in asked.model.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not inputs
        and limit <= module.num_embeddings <= limit + 2
    ]
    if learned:
        raise AutoparError(
            f"cannot use --seq {seq} with '{asked.path}': '{learned[0]}' has {limit} positions "
            f"({key}); give --seq {limit} or less"
        )
    return (f"--seq {seq} is beyond the config's {key} of {limit}",)
