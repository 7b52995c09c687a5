"""Models of transformers from a configuration file, with a batch that fits them.

Nothing is downloaded and no code but transformers' own runs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Names of ``--dtype``."""

REMOTE = ("auto_map", "trust_remote_code")
"""Keys of a configuration that ask for code that is not part of transformers."""

IMAGE = 224
"""Height and width of images where a configuration does not say."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_BATCHES = {
    "CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "TOKEN_CLASSIFICATION": "tokens",
    "IMAGE_TEXT_TO_TEXT": "tokens",
    "SEQUENCE_CLASSIFICATION": "sequences",
    "IMAGE_CLASSIFICATION": "images",
}
"""What a class of each table of transformers is labelled by: every token, sequence or image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration of transformers, as read.

    Attributes:
        path: Where it was.
        content: What it says, without what autopar does not take over.
        notes: What was left out or changed.
    """

    path: Path
    content: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to make of a configuration.

    Attributes:
        batch: Samples of the global batch.
        seq: Tokens of a sample; None where it has none.
        dtype: Of the weights, of `DTYPES`; None for what the configuration says, else fp32.
        real: With memory, drawn after ``torch.manual_seed(0)``; otherwise on the meta device.
    """

    batch: int
    seq: int | None
    dtype: str | None = None
    real: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredModel:
    """A model and a batch.

    Attributes:
        model: In training mode.
        batch: Keyword arguments of the model.
        notes: What was decided on the way.
        recipe: All that they were made from, as text: equal recipes, equal models and batches.
    """

    model: nn.Module
    batch: Mapping[str, torch.Tensor]
    notes: tuple[str, ...]
    recipe: str


def read_config(path: Path) -> ConfigFile:
    """The configuration in a file, checked as far as that can be done without transformers.

    Raises:
        AutoparError: It cannot be read, is none, or needs code that transformers does not have.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AutoparError(
            f"cannot read transformers config '{path}': there is no such file; give the path of a "
            "config.json"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise AutoparError(
            f"cannot read transformers config '{path}': {_line(error)}; give a JSON file"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise AutoparError(_no_config(path, content))
    from transformers import CONFIG_MAPPING

    kind = content["model_type"]
    remote = [key for key in REMOTE if content.get(key)]
    if kind not in CONFIG_MAPPING:
        if remote:
            raise AutoparError(
                f"cannot use transformers config '{path}': '{remote[0]}' asks for code that is not "
                f"part of transformers, which has no model type {kind!r}; autopar runs no such "
                "code: write a function that builds the model and give pkg.module:build"
            )
        raise AutoparError(
            f"cannot read transformers config '{path}': this version of transformers has no model "
            f"type {kind!r}; {_near(kind, CONFIG_MAPPING)}"
        )
    notes = [f"the config's {key!r} was left out: transformers' own {kind!r} is" for key in remote]
    kept = {key: value for key, value in content.items() if key not in REMOTE}
    return ConfigFile(path=path, content=kept, notes=tuple(note + " used" for note in notes))


def build_model(file: ConfigFile, wanted: Wanted) -> ConfiguredModel:
    """The model of a configuration, and a batch for it.

    Raises:
        AutoparError: The configuration describes no model, or the batch is none that it takes.
    """
    config = _config(file)
    notes = list(file.notes)
    config.use_cache = False
    name = _dtype_name(file, wanted)
    if name != "fp32" and wanted.dtype is None:
        notes.append(f"in {name}, as the config says; --dtype fp32 plans full precision")
    made = _class_of(file, config)
    options: dict[str, Any] = {"dtype": DTYPES[name]}
    if _has_experts(config):
        grouped = DTYPES[name] == torch.bfloat16
        options["experts_implementation"] = "grouped_mm" if grouped else "batched_mm"
        if not grouped:
            notes.append("experts are computed for one token at a time; --dtype bf16 groups them")
    torch.manual_seed(0)
    with torch.device("cpu" if wanted.real else "meta"), _as_errors(file, made.__name__):
        model = made._from_config(config, **options)
    model.train()
    batch, more = _batch(file, model, wanted)
    recipe = {
        "class": made.__name__,
        "config": model.config.to_dict(),
        "options": {key: str(value) for key, value in options.items()},
        "batch": {key: (str(value.dtype), tuple(value.shape)) for key, value in batch.items()},
        "transformers": version("transformers"),
    }
    return ConfiguredModel(
        model=model,
        batch=batch,
        notes=(*notes, *more),
        recipe=json.dumps(recipe, sort_keys=True, default=str),
    )


def _config(file: ConfigFile) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[file.content["model_type"]]
    with _as_errors(file, kind.__name__):
        return kind.from_dict(dict(file.content))


def _class_of(file: ConfigFile, config: Any) -> Any:
    """The class that the configuration names, or the usual one of its kind."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = file.content.get("architectures") or ()
    if names:
        made = getattr(transformers, str(names[0]), None)
        if made is None:
            known = [name for name in dir(transformers) if name[:4] == str(names[0])[:4]]
            raise AutoparError(
                f"cannot use transformers config '{file.path}': transformers has no class "
                f"{names[0]!r}; {_near(str(names[0]), known)}"
            )
        return made
    kind = config.model_type
    for table in ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION"):
        usual = _names(getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(kind, ()))
        if usual:
            return getattr(transformers, usual[0])
    raise AutoparError(
        f"cannot use transformers config '{file.path}': it has no 'architectures', and none is "
        f"usual for model type {kind!r}; name the class, with its loss"
    )


def _has_experts(config: Any) -> bool:
    text = config.get_text_config()
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    return any(getattr(text, name, None) for name in names)


def _dtype_name(file: ConfigFile, wanted: Wanted) -> str:
    if wanted.dtype is not None:
        if wanted.dtype not in DTYPES:
            raise AutoparError(f"cannot use dtype {wanted.dtype!r}: there are {', '.join(DTYPES)}")
        return wanted.dtype
    if wanted.real:
        return "fp32"
    said = file.content.get("dtype") or file.content.get("torch_dtype") or "float32"
    by_torch = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    return by_torch.get(str(said), "fp32")


def _batch(
    file: ConfigFile, model: nn.Module, wanted: Wanted
) -> tuple[Mapping[str, torch.Tensor], tuple[str, ...]]:
    """A batch of the model, and what to say about it."""
    kind, name = _batch_kind(type(model).__name__), type(model).__name__
    config: Any = model.config
    device = "cpu" if wanted.real else "meta"
    draw = torch.Generator().manual_seed(1) if wanted.real else None

    def integers(most: int, *size: int) -> torch.Tensor:
        return torch.randint(most, size, generator=draw, device=device)

    if kind == "images":
        if wanted.seq is not None:
            raise AutoparError(
                f"cannot use --seq {wanted.seq} with '{file.path}': {name} takes images of the "
                "config's size; leave --seq out"
            )
        return _images(config, wanted.batch, next(model.parameters()).dtype, integers)
    if kind is None:
        raise AutoparError(
            f"cannot make a batch for '{file.path}': {name} is no model of text or image "
            "classification; write a function that returns (model, batch), give pkg.module:build"
        )
    if wanted.seq is None:
        raise AutoparError(
            f"cannot size a batch of text for '{file.path}': give --seq, tokens of a sample"
        )
    notes = _check_length(file, model, wanted.seq)
    ids = integers(config.get_text_config().vocab_size, wanted.batch, wanted.seq)
    if kind == "sequences":
        return {"input_ids": ids, "labels": integers(config.num_labels, wanted.batch)}, notes
    return {"input_ids": ids, "labels": ids.clone()}, notes


def _images(
    config: Any, batch: int, dtype: torch.dtype, integers: Callable[..., torch.Tensor]
) -> tuple[Mapping[str, torch.Tensor], tuple[str, ...]]:
    """Images of the config's size with a label each."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    notes = () if size else (f"the config has no image size: images of {IMAGE} x {IMAGE}",)
    size = size or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    shape = (batch, getattr(vision, "num_channels", 3), height, width)
    pixels = (integers(256, *shape).float() / 128 - 1).to(dtype)
    return {"pixel_values": pixels, "labels": integers(config.num_labels, batch)}, notes


def _batch_kind(name: str) -> str | None:
    """What labels a class takes; None where autopar cannot tell."""
    from transformers.models.auto import modeling_auto

    for table, kind in _BATCHES.items():
        entries = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values()
        if any(name in _names(entry) for entry in entries):
            return kind
    return None


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """The classes of an entry of a table of transformers: one, or several."""
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _check_length(file: ConfigFile, model: nn.Module, seq: int) -> tuple[str, ...]:
    """Refuse sequences longer than a table of learned positions; warn of others."""
    config: Any = model.config
    config = config.get_text_config()
    key = next((key for key in _LIMITS if isinstance(getattr(config, key, None), int)), None)
    if key is None or seq <= getattr(config, key):
        return ()
    limit = getattr(config, key)
    inputs: Any = model.get_input_embeddings()  # type: ignore[operator]
    # OPT and others keep two rows more than there are positions.
    learned = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not inputs
        and limit <= module.num_embeddings <= limit + 2
    ]
    if learned:
        raise AutoparError(
            f"cannot use --seq {seq} with '{file.path}': '{learned[0]}' has {limit} positions "
            f"({key}); give --seq {limit} or less"
        )
    return (f"--seq {seq} is beyond the config's {key} of {limit}",)


def _no_config(path: Path, content: object) -> str:
    if isinstance(content, dict) and "stages" in content:
        found = "it is a saved plan; autopar explain shows it"
    elif isinstance(content, dict):
        keys = ", ".join(map(repr, list(content)[:4])) or "none"
        found = f"it has no 'model_type' (its first keys: {keys}); give a config.json that names it"
    else:
        found = f"it holds a {type(content).__name__}, no object; give a config.json"
    return f"cannot use '{path}' as a transformers config: {found}"


@contextmanager
def _as_errors(file: ConfigFile, name: str) -> Iterator[None]:
    """What transformers refuses, as an error that names the file."""
    from huggingface_hub.errors import StrictDataclassError

    refused = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    )
    try:
        yield
    except refused as error:
        raise AutoparError(
            f"cannot make a {name} of transformers config '{file.path}': {_line(error)}; correct "
            "the config"
        ) from error


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), 3, cutoff=0.6)
    return f"did you mean {', '.join(map(repr, near))}?" if near else "update transformers"


def _line(error: BaseException) -> str:
    """An error in a line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
