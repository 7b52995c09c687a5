"""Loads saved values into a compiled model, whatever plan it runs by.

Saving needs nothing of ours: ``torch.distributed.checkpoint.save(parallel.state_dict(), ...)``
writes every shard once, with its place in the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import AutoparError
from autopar.runtime.executor import EXTRA_STATE, ParallelModule

_Result = TypeVar("_Result")


def load(parallel: ParallelModule, path: str | PathLike[str]) -> None:
    """Copy saved values into this rank's parameters and buffers; every rank must call it.

    One name of a tied parameter is enough; a saved step count is taken too. What else is saved,
    such as an optimizer's state, is left alone.

    Args:
        parallel: Compiled, with a plan.
        path: Folder that `torch.distributed.checkpoint.save` wrote, of ``parallel.state_dict()``
            or of a dict that holds it; or a safetensors file, or a folder of such files.

    Raises:
        AutoparError: It is none of these, or values are missing or have other shapes.
    """
    own = parallel.state_dict(keep_vars=True)
    copy = _together(parallel, "the check of a checkpoint", lambda: _checked(parallel, own, path))
    _together(parallel, "loading a checkpoint", copy)


def _together(parallel: ParallelModule, phase: str, work: Callable[[], _Result]) -> _Result:
    """What a phase results in on this rank, once it has gone well on all."""
    failed: Exception | None = None
    try:
        with torch.no_grad():
            result = work()
    except (AutoparError, OSError, ValueError, RuntimeError) as error:
        failed = error
    parallel.session.agree(phase, failed)
    return result


def _checked(
    parallel: ParallelModule, own: dict[str, Any], given: str | PathLike[str]
) -> Callable[[], None]:
    """What copies the values, if they fit."""
    path = Path(given)
    extra = own.pop(EXTRA_STATE)
    if (path / ".metadata").is_file():
        return _checked_dcp(parallel, own, extra, path)
    files = _safetensors_files(path)
    if not files:
        raise AutoparError(
            f"cannot load {str(path)!r}: it is neither a folder of torch.distributed.checkpoint "
            "nor a safetensors file or folder; convert it to one of these"
        )
    return lambda: _load_safetensors(own, files)


def _checked_dcp(
    parallel: ParallelModule, own: Mapping[str, Tensor], extra: Tensor, path: Path
) -> Callable[[], None]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    prefix = _prefix(own, metadata)
    wanted = {
        prefix + name: tensor.detach() for name, tensor in own.items() if prefix + name in metadata
    }
    _check_missing(own, {key.removeprefix(prefix) for key in wanted}, path)
    for key, tensor in wanted.items():
        saved = metadata[key]
        shape = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else ()
        _check_shape(key, shape, tensor)
    if prefix + EXTRA_STATE in metadata:
        wanted[prefix + EXTRA_STATE] = extra

    def copy() -> None:
        load_dcp(wanted, checkpoint_id=path)
        parallel.set_extra_state(extra)

    return copy


def _prefix(own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> str:
    """What stands before the model's names in a checkpoint, ``model.`` or the like."""
    if any(name in saved for name in own):
        return ""
    for name in own:
        for key in saved:
            if key.endswith(f".{name}") and "optim" not in key:
                return key.removesuffix(name)
    return ""


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [path / name for name in names]
    return sorted(path.glob("*.safetensors"))


@contextmanager
def _opened(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Name to the open file that holds it."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise AutoparError(
            f"cannot read {files[0]}: the package safetensors is not installed; install it"
        ) from None
    with ExitStack() as stack:
        by_name = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            by_name.update(dict.fromkeys(opened.keys(), opened))
        yield by_name


def _load_safetensors(own: Mapping[str, Tensor], files: list[Path]) -> None:
    with _opened(files) as by_name:
        _check_missing(own, set(by_name), files[0].parent)
        for name, tensor in own.items():
            if name not in by_name:
                continue
            saved = by_name[name].get_slice(name)
            _check_shape(name, tuple(saved.get_shape()), tensor)
            if isinstance(tensor, DTensor):
                local = tensor.to_local()
                if local.numel():
                    ranges = _ranges(tensor)
                    local.copy_(saved[ranges] if ranges else by_name[name].get_tensor(name))
            else:
                tensor.copy_(by_name[name].get_tensor(name))


def _ranges(tensor: DTensor) -> tuple[slice, ...]:
    """This rank's piece as slices of the whole."""
    ranges = [(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            start, stop = ranges[placement.dim]
            chunk = -(-(stop - start) // mesh.size(axis))
            start = min(start + mesh.get_local_rank(axis) * chunk, stop)
            ranges[placement.dim] = (start, min(start + chunk, stop))
    return tuple(slice(*ends) for ends in ranges)


def _check_missing(own: Mapping[str, Tensor], saved: set[str], path: Path) -> None:
    loaded = {id(tensor) for name, tensor in own.items() if name in saved}
    missing = [name for name, tensor in own.items() if id(tensor) not in loaded]
    if missing:
        raise AutoparError(
            f"cannot load {str(path)!r}: {len(missing)} of the model's {len(own)} tensors are not "
            f"in it, {missing[0]!r} the first; save the state of the same model"
        )


def _check_shape(name: str, saved: tuple[int, ...], tensor: Tensor) -> None:
    if saved != tuple(tensor.shape):
        raise AutoparError(
            f"cannot load {name!r}: the saved shape is {list(saved)}, the model's "
            f"{list(tensor.shape)}; load a state of this model"
        )
