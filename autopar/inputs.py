"""What people name on the command line: a model, a cluster, hints."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar import hint
from autopar.cluster import Cluster
from autopar.errors import AutoparError, ClusterError, HintError
from autopar.hint import Hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with a batch and the loss to train it with.

    Attributes:
        model: The module.
        batch: An example of the global batch.
        loss: ``loss(model, batch)``; None takes the output or its ``.loss``.
        notes: What was decided on the way.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Any] | None = None
    notes: tuple[str, ...] = ()


def load_subject(
    name: str, *, batch: int | None = None, seq: int | None = None, real: bool = False
) -> Subject:
    """The model that ``name`` means.

    Args:
        name: ``pkg.module:build`` or ``path/file.py:build``, a function that returns
            ``(model, batch)`` or ``(model, batch, loss)``; or a transformers ``config.json``.
        batch: Samples of the global batch; passed to ``build`` if it takes it.
        seq: Tokens of a sample; likewise.
        real: Give a transformers model memory, drawn after ``torch.manual_seed(0)``; otherwise it
            is on the meta device.

    Raises:
        AutoparError: There is no such model.
    """
    if name.endswith(".json"):
        return _from_config(Path(name), batch, seq, real=real)
    return _from_build(name, {"batch": batch, "seq": seq})


def _from_build(name: str, sizes: Mapping[str, int | None]) -> Subject:
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise AutoparError(
            f"cannot find model {name!r}: it is neither pkg.module:build nor a transformers "
            "config.json"
        )
    module = _module(place, name)
    build = getattr(module, function, None)
    if not callable(build):
        raise AutoparError(f"cannot find model {name!r}: {place!r} has no function {function!r}")
    taken = inspect.signature(build).parameters
    given = {key: size for key, size in sizes.items() if size is not None}
    for key in given:
        if key not in taken:
            raise AutoparError(
                f"cannot set {key} of {name!r}: {function} takes no argument {key!r}; add it or "
                f"leave out --{key}"
            )
    torch.manual_seed(0)
    made = build(**given)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise AutoparError(
            f"cannot use {name!r}: it returned {type(made).__name__}; return (model, batch) or "
            "(model, batch, loss)"
        )
    return Subject(model=made[0], batch=made[1], loss=made[2] if len(made) == 3 else None)


def _module(place: str, name: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place))
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise AutoparError(f"cannot find model {name!r}: {error}") from error


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file '{path}'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_config(path: Path, batch: int | None, seq: int | None, *, real: bool) -> Subject:
    if batch is None:
        raise AutoparError(f"cannot size a batch for '{path}': give --batch (and --seq)")
    try:
        import transformers
    except ImportError:
        raise AutoparError(
            f"cannot read '{path}': transformers is not installed; pip install 'autopar[demo]'"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AutoparError(f"cannot read transformers config '{path}': {reason}") from None
    notes = _without_dropout(config)
    config.use_cache = False
    names = getattr(config, "architectures", None) or ()
    make = getattr(transformers, names[0], None) if names else None
    torch.manual_seed(0)
    with torch.device("cpu" if real else "meta"):
        if make is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = make(config)
    model.train()
    return Subject(model=model, batch=_batch_for(model, config, batch, seq, real=real), notes=notes)


def _without_dropout(config: Any) -> tuple[str, ...]:
    """Set every dropout of a config to 0, and say so."""
    active = {
        key: value
        for key, value in config.to_dict().items()
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value > 0
    }
    for key in active:
        setattr(config, key, 0.0)
    if not active:
        return ()
    said = ", ".join(f"{key}={value}" for key, value in active.items())
    return (f"dropout is not supported yet and was set to 0 (the config has {said})",)


def _batch_for(
    model: nn.Module, config: Any, batch: int, seq: int | None, *, real: bool
) -> Mapping[str, torch.Tensor]:
    device = "cpu" if real else "meta"
    draw = torch.Generator().manual_seed(1) if real else None
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = (batch, config.num_channels, config.image_size, config.image_size)
        return {
            "pixel_values": torch.randn(size, generator=draw, device=device),
            "labels": torch.randint(config.num_labels, (batch,), generator=draw, device=device),
        }
    if seq is None:
        raise AutoparError("cannot size a batch of text: give --seq, tokens of a sample")
    ids = torch.randint(config.vocab_size, (batch, seq), generator=draw, device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def load_cluster(name: str) -> Cluster:
    """The cluster that ``name`` means.

    Args:
        name: ``local:4`` (CPU processes here), ``h100:8`` (a preset and its number of nodes, 1
            if left out), or the path of a YAML file.

    Raises:
        ClusterError: There is no such cluster.
    """
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return Cluster.from_file(name)
    kind, _, count = name.partition(":")
    if count and not (count.isdecimal() and int(count) > 0):
        raise ClusterError(f"cannot use cluster {name!r}: {count!r} is no number of nodes")
    number = int(count or 1)
    return Cluster.local(number) if kind == "local" else Cluster.preset(kind, nodes=number)


DEGREES = tuple(item.name for item in fields(hint.Degrees))
HINTS = (*DEGREES, "memory_limit", "microbatches", "replicate", "shard")


def parse_hints(texts: Iterable[str]) -> tuple[Hint, ...]:
    """Hints from text.

    Args:
        texts: ``dp=2``, ``zero=3`` (degrees are joined into one hint), ``memory_limit=60GiB``,
            ``microbatches=8``, ``replicate=*.norm*``, ``shard=*.q_proj.weight:0:tp``.

    Raises:
        HintError: A text is none of these.
    """
    degrees: dict[str, int] = {}
    found: list[Hint] = []
    for text in texts:
        name, _, value = text.partition("=")
        if name not in HINTS or not value:
            near = difflib.get_close_matches(name, HINTS, 1, cutoff=0.5)
            ask = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(HINTS)}"
            raise HintError(f"cannot read hint {text!r}: write name=value; {ask}")
        if name in DEGREES:
            degrees[name] = _number(value, text)
        elif name == "memory_limit":
            found.append(hint.memory_limit(value))
        elif name == "microbatches":
            found.append(hint.microbatches(_number(value, text)))
        elif name == "replicate":
            found.append(hint.replicate(value))
        else:
            found.append(_shard(value, text))
    return (hint.degrees(**degrees), *found) if degrees else tuple(found)


def _shard(value: str, text: str) -> Hint:
    parts = value.rsplit(":", 2)
    if len(parts) != 3:
        raise HintError(f"cannot read hint {text!r}: write shard=PATTERN:DIM:AXIS")
    return hint.shard(parts[0], _number(parts[1], text), parts[2])


def _number(value: str, text: str) -> int:
    if not value.isdecimal():
        raise HintError(f"cannot read hint {text!r}: {value!r} is no number")
    return int(value)
