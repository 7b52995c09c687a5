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
from autopar.configs import Wanted, build_model, read_config
from autopar.errors import AutoparError, ClusterError, HintError
from autopar.hint import Hint
from autopar.optim import AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with a batch and the loss to train it with.

    Attributes:
        model: The module.
        batch: An example of the global batch.
        loss: ``loss(model, batch)``; None takes the output or its ``.loss``.
        notes: What was decided on the way.
        recipe: All that model and batch were made from, if that is no Python code; None otherwise.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Any] | None = None
    notes: tuple[str, ...] = ()
    recipe: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What a command says of the model and its batch."""

    batch: int | None
    seq: int | None
    dtype: str | None


def load_subject(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    real: bool = False,
) -> Subject:
    """The model that ``name`` means.

    Args:
        name: ``pkg.module:build`` or ``path/file.py:build``, a function that returns
            ``(model, batch)`` or ``(model, batch, loss)``; or a transformers ``config.json``.
        batch: Samples of the global batch; passed to ``build`` if it takes it.
        seq: Tokens of a sample; likewise.
        dtype: Of a transformers model's weights: ``fp32``, ``bf16`` or ``fp16``; None for what its
            config says. Passed to ``build`` if it takes it.
        real: Give a transformers model memory, drawn after ``torch.manual_seed(0)``; otherwise it
            is on the meta device.

    Raises:
        AutoparError: There is no such model.
    """
    for option, size in (("--batch", batch), ("--seq", seq)):
        if size is not None and size < 1:
            raise AutoparError(
                f"cannot use {option} {size} for {name!r}: give a whole number of at least 1"
            )
    wanted = _Sizes(batch=batch, seq=seq, dtype=dtype)
    if name.endswith(".json"):
        return _from_config(Path(name), wanted, real=real)
    return _from_build(name, wanted)


def _from_build(name: str, wanted: _Sizes) -> Subject:
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
    sizes = {"batch": wanted.batch, "seq": wanted.seq, "dtype": wanted.dtype}
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


def _from_config(path: Path, wanted: _Sizes, *, real: bool) -> Subject:
    if wanted.batch is None:
        raise AutoparError(f"cannot size a batch for '{path}': give --batch (and --seq)")
    if importlib.util.find_spec("transformers") is None:
        raise AutoparError(
            f"cannot read '{path}': transformers is not installed; pip install 'autopar[demo]'"
        )
    file = read_config(path)
    size = Wanted(batch=wanted.batch, seq=wanted.seq, dtype=wanted.dtype, real=real)
    made = build_model(file, size)
    return Subject(
        model=made.model,
        batch=made.batch,
        notes=made.notes,
        recipe=None if real else made.recipe,
    )


def load_cluster(name: str, nodes: int | None = None) -> Cluster:
    """The cluster that ``name`` means.

    Args:
        name: ``local:4`` (CPU processes here), ``h100:8`` (a preset and its number of nodes, 1
            if left out), or the path of a YAML file.
        nodes: Of a preset, where its name does not say.

    Raises:
        ClusterError: There is no such cluster.
    """
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        if nodes is not None:
            raise ClusterError(
                f"cannot set {nodes} nodes for cluster file '{name}': the file says how many "
                "devices there are; change it there, or leave --nodes out"
            )
        return Cluster.from_file(name)
    kind, colon, count = name.partition(":")
    if nodes is not None:
        if colon or kind == "local":
            raise ClusterError(
                f"cannot use cluster {name!r} with {nodes} nodes: write {kind}:{nodes} or "
                f"--cluster {kind} --nodes {nodes}"
                if colon
                else f"cannot use {nodes} nodes of cluster 'local': write local:{nodes}, CPU "
                "processes of this machine"
            )
        return Cluster.preset(kind, nodes=nodes)
    if colon and not (count.isdecimal() and int(count) > 0):
        raise ClusterError(
            f"cannot use cluster {name!r}: {count!r} is no number of nodes; give one of at least 1"
        )
    number = int(count or 1)
    return Cluster.local(number) if kind == "local" else Cluster.preset(kind, nodes=number)


def optimizer_named(name: str) -> type[torch.optim.Optimizer]:
    """The AdamW that a name means: ``torch`` or ``autopar``.

    Raises:
        AutoparError: It is neither.
    """
    kinds: dict[str, type[torch.optim.Optimizer]] = {"torch": torch.optim.AdamW, "autopar": AdamW}
    if name not in kinds:
        raise AutoparError(f"cannot use optimizer {name!r}: there are torch and autopar")
    return kinds[name]


DEGREES = tuple(item.name for item in fields(hint.Degrees))
HINTS = (
    *DEGREES,
    "cut_before",
    "keep",
    "memory_limit",
    "microbatches",
    "offload",
    "per_microbatch",
    "ranks",
    "recompute",
    "replicate",
    "schedule",
    "shard",
    "shares",
    "stage",
)


_OF_PATTERN: Mapping[str, Callable[[str], Hint]] = {
    "cut_before": hint.cut_before,
    "keep": hint.keep,
    "per_microbatch": hint.per_microbatch,
    "recompute": hint.recompute,
    "replicate": hint.replicate,
}
"""Hints that are made of one pattern."""


def parse_hints(texts: Iterable[str]) -> tuple[Hint, ...]:
    """Hints from text.

    Args:
        texts: ``dp=2``, ``zero=3`` (degrees are joined into one hint), ``dp=4/2/1/1`` (one for
            every stage of a pipeline), ``memory_limit=60GiB``,
            ``microbatches=8``, ``schedule=gpipe``, ``schedule=interleaved:3`` (chunks),
            ``shares=5/2/1/0``, ``ranks=4``, ``ranks=4:8`` (from rank 8 on),
            ``cut_before=layers.16``, ``stage=lm_head:3``, ``recompute=*.mlp``, ``keep=*.attn``,
            ``offload=layers.*``, ``offload=layers.*:parameters``, ``per_microbatch=*.bn*``,
            ``replicate=*.norm*``, ``shard=*.q_proj.weight:0:tp``.

    Raises:
        HintError: A text is none of these.
    """
    degrees: dict[str, Any] = {}
    found: list[Hint] = []
    for text in texts:
        name, _, value = text.partition("=")
        if name in HINTS and not value:
            raise HintError(f"cannot read hint {text!r}: it has no value; write {name}=VALUE")
        if name not in HINTS:
            near = difflib.get_close_matches(name, HINTS, 1, cutoff=0.5)
            ask = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(HINTS)}"
            raise HintError(f"cannot read hint {text!r}: write name=value; {ask}")
        if name in DEGREES:
            numbers = _numbers(value, text)
            degrees[name] = numbers[0] if len(numbers) == 1 else tuple(numbers)
        elif name == "memory_limit":
            found.append(hint.memory_limit(value))
        elif name == "microbatches":
            found.append(hint.microbatches(_number(value, text)))
        elif name == "schedule":
            schedule, colon, chunks = value.partition(":")
            found.append(hint.schedule(schedule, _number(chunks, text) if colon else None))
        elif name == "shares":
            found.append(hint.shares(*_numbers(value, text)))
        elif name == "ranks":
            count, colon, first = value.partition(":")
            found.append(hint.ranks(_number(count, text), _number(first, text) if colon else 0))
        elif name in _OF_PATTERN:
            found.append(_OF_PATTERN[name](value))
        elif name == "offload":
            pattern, _, what = value.partition(":")
            found.append(hint.offload(pattern, what or None))
        elif name == "stage":
            pattern, _, number = value.rpartition(":")
            found.append(hint.stage(pattern, _number(number, text)))
        else:
            found.append(_shard(value, text))
    return (hint.degrees(**degrees), *found) if degrees else tuple(found)


def _shard(value: str, text: str) -> Hint:
    parts = value.rsplit(":", 2)
    if len(parts) != 3:
        raise HintError(f"cannot read hint {text!r}: write shard=PATTERN:DIM:AXIS")
    return hint.shard(parts[0], _number(parts[1], text), parts[2])


def _numbers(value: str, text: str) -> list[int]:
    """Numbers between slashes."""
    return [_number(number, text) for number in value.split("/")]


def _number(value: str, text: str) -> int:
    if not value.isdecimal():
        raise HintError(f"cannot read hint {text!r}: {value!r} is no number")
    return int(value)
