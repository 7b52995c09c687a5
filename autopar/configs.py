"""Models of transformers from a configuration file, with a batch that fits them.

Nothing is downloaded and no code but transformers' own runs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.modelbatch import Asked, Batch, batch_of, names_in

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Names of ``--dtype``."""

REMOTE = ("auto_map", "trust_remote_code")
"""Keys of a configuration that ask for code that is not part of transformers."""


BY_CHANCE: Mapping[str, str] = {
    "layerdrop": "leaves whole layers out by chance",
    "apply_spec_augment": "masks a number of places that depends on chance",
}
"""Ends of keys that make a step another graph every time, and how."""


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
        seq: Tokens of a sample, or samples of a waveform; None where it has none.
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
    batch: Batch
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
    _refuse_chance(file, config)
    options: dict[str, Any] = {"dtype": DTYPES[name]}
    if _has_experts(config):
        grouped = DTYPES[name] == torch.bfloat16
        options["experts_implementation"] = "grouped_mm" if grouped else "batched_mm"
    torch.manual_seed(0)
    with torch.device("cpu" if wanted.real else "meta"), _as_errors(file, made.__name__):
        model = made._from_config(config, **options)
    model.train()
    draw = torch.Generator().manual_seed(1) if wanted.real else None
    batch, more = batch_of(
        Asked(model=model, path=str(file.path), batch=wanted.batch, seq=wanted.seq, draw=draw)
    )
    recipe = {
        "class": made.__name__,
        "config": model.config.to_dict(),
        "options": {key: str(value) for key, value in options.items()},
        "batch": {key: _kind_of(value) for key, value in batch.items()},
        "transformers": version("transformers"),
    }
    return ConfiguredModel(
        model=model,
        batch=batch,
        notes=(*notes, *more),
        recipe=json.dumps(recipe, sort_keys=True, default=str),
    )


def _kind_of(value: torch.Tensor | bool) -> object:
    """What a capture depends on of an argument."""
    return value if isinstance(value, bool) else (str(value.dtype), tuple(value.shape))


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
        usual = names_in(getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(kind, ()))
        if usual:
            return getattr(transformers, usual[0])
    raise AutoparError(
        f"cannot use transformers config '{file.path}': it has no 'architectures', and none is "
        f"usual for model type {kind!r}; name the class, with its loss"
    )


def _refuse_chance(file: ConfigFile, config: Any) -> None:
    """Refuse what makes training another graph in every step."""
    for key, value in sorted(config.to_dict().items()):
        how = next((how for end, how in BY_CHANCE.items() if key.endswith(end)), None)
        if how is not None and value:
            raise AutoparError(
                f"cannot plan transformers config '{file.path}': {key!r} of {value} {how}, so "
                f"the step is no fixed graph; set it to {'false' if value is True else 0}"
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
        to_do = "install it" if isinstance(error, ImportError) else "correct the config"
        raise AutoparError(
            f"cannot make a {name} of transformers config '{file.path}': {_line(error)}; {to_do}"
        ) from error


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), 3, cutoff=0.6)
    return f"did you mean {', '.join(map(repr, near))}?" if near else "update transformers"


def _line(error: BaseException) -> str:
    """An error in a line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
