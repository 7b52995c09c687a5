"""Captures kept for the next plan: on disk for model files, in memory for models of Python code.

A stored capture is one file, named by a hash of all that the capture depends on: the recipe (what
model and batch were made from), the versions of torch and Python, and autopar's own code. It is
compressed JSON behind a checksum, written under another name first and then renamed, so readers see
a whole file or none. A file that is not as it was written counts as absent and is written again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import tempfile
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopar.capture.precision import AS_IT_IS
from autopar.capture.step import Captured, capture_key
from autopar.ir.graph import Arg, Const, Graph, Node, Phase, Ref, Source, TensorType

VARIABLE = "AUTOPAR_CACHE"
"""Environment variable that names the folder; ``off`` stores nothing."""

MOST_BYTES = 2**30
"""Of all stored captures; those not used for longest go first."""

MOST_REMEMBERED = 4
"""Captures of Python models kept in memory; those not used for longest go first."""

_MAGIC = b"autopar capture 1\n"
_DIGEST_BYTES = 32


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Where captures are stored: by the convention of the platform unless `VARIABLE` says.

    Args:
        environment: Variables; None for the process's own.

    Returns:
        The folder, which need not exist; None where nothing is to be stored.
    """
    given = os.environ if environment is None else environment
    own = given.get(VARIABLE)
    if own:
        return None if own == "off" else Path(own)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(given.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(given.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "autopar"


def stored_capture(
    recipe: str, make: Callable[[], Captured], folder: Path | None = None
) -> Captured:
    """The capture that was stored for a recipe, or a new one, stored for the next time.

    Args:
        recipe: All that the captured model, batch and loss were made from.
        make: Captures.
        folder: Where; None for `cache_folder`.
    """
    folder = cache_folder() if folder is None else folder
    if folder is None:
        return make()
    path = folder / f"{_key(recipe)}.capture"
    found = _load(path)
    if found is None:
        found = make()
        _store(found, path)
    return found


def _key(recipe: str) -> str:
    parts = (recipe, torch.__version__, sys.version, _code())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """A hash of the code that captures: an edited autopar is another version."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted((*here.glob("*.py"), *(here.parent / "ir").glob("*.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _load(path: Path) -> Captured | None:
    """The capture in a file; None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
        body = content[len(_MAGIC) + _DIGEST_BYTES :]
        digest = hashlib.sha256(body).digest()
        if content[: len(_MAGIC) + _DIGEST_BYTES] != _MAGIC + digest:
            return None
        found = decode(json.loads(zlib.decompress(body)))
    except (OSError, ValueError, zlib.error, LookupError, TypeError):
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def _store(captured: Captured, path: Path) -> None:
    """Write a capture; a full or read-only disk is no reason to fail."""
    text = json.dumps(encode(captured), separators=(",", ":"))
    body = zlib.compress(text.encode(), 1)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=path.stem, suffix=".new", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        temporary.replace(path)
        _trim(path.parent)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def _trim(folder: Path) -> None:
    """Remove what was not used for longest until the rest is within `MOST_BYTES`."""
    files = []
    for path in (*folder.glob("*.capture"), *folder.glob("*.new")):
        with suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES:
            with suppress(OSError):
                path.unlink()


# Captures as JSON.


class _Table:
    """Distinct values by number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Hashable, written: Any) -> int:
        """The number of a value, which is written once."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(written)
        return found


def encode(captured: Captured) -> dict[str, Any]:
    """A capture in lists, objects, numbers and text."""
    graph = captured.graph
    types, sources, ops = _Table(), _Table(), _Table()
    names = {node.name: number for number, node in enumerate(graph.nodes)}

    def ref(value: Ref) -> list[int]:
        return [names[value.node], value.index]

    def arg(value: Arg) -> Any:
        if isinstance(value, Ref):
            return {"r": ref(value)}
        if isinstance(value, Const):
            return {"c": [value.kind, value.value]}
        if isinstance(value, tuple):
            return [arg(item) for item in value]
        return value

    nodes = [
        [
            node.name,
            ops.number(node.op, node.op),
            [arg(item) for item in node.args],
            {key: arg(item) for key, item in node.kwargs},
            [types.number(kind, [kind.dtype, *kind.shape]) for kind in node.outputs],
            node.phase == Phase.BACKWARD,
            sources.number(node.source, [node.source.module, node.source.line]),
            node.target,
        ]
        for node in graph.nodes
    ]
    return {
        "nodes": nodes,
        "types": types.values,
        "sources": sources.values,
        "ops": ops.values,
        "loss": None if graph.loss is None else ref(graph.loss),
        "aux": [[name, ref(value)] for name, value in graph.aux],
        "gradients": {name: ref(value) for name, value in graph.gradients.items()},
        "mutations": {name: ref(value) for name, value in graph.mutations.items()},
        "aliases": dict(graph.aliases),
        "batch_dims": dict(graph.batch_dims),
        "summed": dict(graph.summed),
        "alone": list(graph.alone),
        "microbatches": graph.microbatches,
        "constants": {name: _tensor_out(value) for name, value in captured.constants.items()},
        "inputs": list(captured.inputs),
        "fingerprint": captured.fingerprint,
        "returns_dict": captured.returns_dict,
    }


def decode(content: Mapping[str, Any]) -> Captured:
    """The capture that `encode` wrote.

    Raises:
        LookupError: Something is missing or numbered wrongly.
        TypeError: Something is of another kind than it must be.
        ValueError: Something is of another form than it must have.
    """
    types = [TensorType(tuple(shape), dtype) for dtype, *shape in content["types"]]
    sources = [Source(module, line) for module, line in content["sources"]]
    ops: list[str] = content["ops"]
    names: list[str] = [node[0] for node in content["nodes"]]

    def ref(value: list[int]) -> Ref:
        return Ref(names[value[0]], value[1])

    def arg(value: Any) -> Arg:
        if isinstance(value, dict):
            return ref(value["r"]) if "r" in value else Const(*value["c"])
        if isinstance(value, list):
            return tuple([arg(item) for item in value])
        return value  # type: ignore[no-any-return]

    nodes = tuple(
        Node(
            name=name,
            op=ops[op],
            args=tuple([arg(item) for item in args]),
            kwargs=tuple([(key, arg(item)) for key, item in kwargs.items()]),
            outputs=tuple([types[number] for number in outputs]),
            phase=Phase.BACKWARD if backward else Phase.FORWARD,
            source=sources[source],
            target=target,
        )
        for name, op, args, kwargs, outputs, backward, source, target in content["nodes"]
    )
    graph = Graph(
        nodes=nodes,
        loss=None if content["loss"] is None else ref(content["loss"]),
        aux=tuple((name, ref(value)) for name, value in content["aux"]),
        gradients={name: ref(value) for name, value in content["gradients"].items()},
        mutations={name: ref(value) for name, value in content["mutations"].items()},
        aliases=content["aliases"],
        batch_dims=content["batch_dims"],
        summed=content["summed"],
        alone=tuple(content["alone"]),
        microbatches=content["microbatches"],
    )
    return Captured(
        graph=graph,
        constants={name: _tensor_in(value) for name, value in content["constants"].items()},
        inputs=tuple(content["inputs"]),
        fingerprint=content["fingerprint"],
        returns_dict=content["returns_dict"],
    )


def _tensor_out(value: torch.Tensor) -> list[Any]:
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return [dtype, list(value.shape), base64.b64encode(raw).decode()]


def _tensor_in(value: list[Any]) -> torch.Tensor:
    name, shape, text = value
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    raw = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


# Captures in memory.


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A capture, and what must be alive and as it was for it to hold."""

    model: weakref.ref[nn.Module]
    loss: object
    key: Hashable
    captured: Captured


class RememberedCaptures:
    """The latest captures of models of Python code.

    A capture holds for the same module object with the same batch types, as long as the modules in
    it, their plain attributes, parameters, buffers and hooks are those it was made with. Losses
    that close over something are captured every time.
    """

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[int, int], _Remembered] = OrderedDict()

    def get(
        self,
        model: nn.Module,
        batch: Any,
        loss: object,
        make: Callable[[], Captured],
        options: Hashable = AS_IT_IS,
    ) -> Captured:
        """The capture of a training step, made if there is none that holds.

        Args:
            model: As of `autopar.capture.capture_step`, as are batch and loss.
            batch: Global batch.
            loss: Function, or None.
            make: Captures.
            options: What else the step depends on: its precision, modules computed apart.
        """
        if loss is not None and (not isinstance(loss, FunctionType) or loss.__closure__):
            return make()
        key = (capture_key(model, batch, grad=True), options, tuple(_state(model)))
        at = (id(model), id(loss))
        kept = self._kept.get(at)
        if kept is None or kept.model() is not model or kept.key != key:
            made = make()
            # What the capture itself changes for good (lazy modules) is part of what holds.
            key = (capture_key(model, batch, grad=True), options, tuple(_state(model)))
            kept = self._kept[at] = _Remembered(weakref.ref(model), loss, key, made)
        self._kept.move_to_end(at)
        for place, other in list(self._kept.items()):
            if other.model() is None or len(self._kept) > self._most:
                del self._kept[place]
        return kept.captured


_PLAIN = (bool, int, float, str, torch.dtype, FunctionType, MethodType)


def _state(model: nn.Module) -> Iterator[Hashable]:
    """What of a model decides its graph and can be told cheaply."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield name, id(module), type(module)
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                yield from (
                    (key, own, None if t is None else (id(t), tuple(t.shape), t.dtype))
                    for own, t in value.items()
                )
            elif "hooks" in key and isinstance(value, Mapping):
                yield key, tuple(map(id, value.values()))
            elif isinstance(value, _PLAIN):
                yield key, type(value), value
            elif isinstance(value, tuple | list):
                yield key, repr(value)
            elif hasattr(value, "to_dict"):
                yield key, repr(value.to_dict())
