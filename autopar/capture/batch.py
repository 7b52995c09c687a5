"""Batches of any nesting as named tensors.

A batch is a dict (keyword arguments), a tuple (positional arguments) or one tensor; below that,
mappings, sequences and dataclasses may nest. A tensor's path joins the keys that lead to it:
``input_ids``, ``0``, ``text.mask``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import BatchError


def flatten_batch(batch: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...], Hashable]:
    """Paths and tensors of the batch, in order, and a key of its structure and other leaves.

    Raises:
        BatchError: A leaf is neither a tensor nor a plain value that can be compared.
    """
    paths: list[str] = []
    tensors: list[Tensor] = []

    def leaf(path: str, tensor: Tensor) -> Tensor:
        paths.append(path)
        tensors.append(tensor)
        return tensor

    key = _walk(batch, "", leaf)[1]
    return tuple(paths), tuple(tensors), key


def unflatten_batch(batch: Any, tensors: Sequence[Tensor]) -> Any:
    """A batch of the same structure with other tensors, in the order of `flatten_batch`."""
    rest: Iterator[Tensor] = iter(tensors)
    return _walk(batch, "", lambda path, tensor: next(rest))[0]


def _walk(value: Any, path: str, leaf: Callable[[str, Tensor], Tensor]) -> tuple[Any, Hashable]:
    """The value with its tensors replaced by what ``leaf`` returns, and its key."""
    if isinstance(value, Tensor):
        return leaf(path or "0", value), "tensor"
    if isinstance(value, Mapping):
        names = tuple(value)
        items = [_walk(value[name], _join(path, name), leaf) for name in names]
        made = dict(zip(names, (item for item, _ in items), strict=True))
        rebuilt = made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
        return rebuilt, (type(value).__qualname__, names, tuple(key for _, key in items))
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", range(len(value)))
        items = [_walk(item, _join(path, i), leaf) for i, item in zip(fields, value, strict=True)]
        parts = [item for item, _ in items]
        return (
            type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts),
            (type(value).__qualname__, tuple(key for _, key in items)),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value) if f.init)
        items = [_walk(getattr(value, name), _join(path, name), leaf) for name in names]
        changed = dict(zip(names, (item for item, _ in items), strict=True))
        return (
            dataclasses.replace(value, **changed),
            (type(value).__qualname__, names, tuple(key for _, key in items)),
        )
    return value, _leaf_key(value, path)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _leaf_key(value: Any, path: str) -> Hashable:
    if isinstance(value, Hashable) and (
        value is None
        or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))
        or type(value).__eq__ is not object.__eq__
        or callable(value)
    ):
        return (type(value).__qualname__, value)
    raise BatchError(
        f"cannot use batch entry {path or 'batch'!r}: {type(value).__qualname__} is neither a "
        "tensor nor a plain value that can be compared between batches; pass a tensor, a number or "
        "a string"
    )


def batch_dims(paths: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Which dim of each input counts samples: dim 0 where its size is the commonest one.

    The commonest size of dim 0 among inputs that have dims is taken to be the number of samples
    (the first one wins a tie); inputs of another size are shared by all samples and are absent.
    """
    counts: dict[int, int] = {}
    for tensor in tensors:
        if tensor.ndim:
            counts[tensor.shape[0]] = counts.get(tensor.shape[0], 0) + 1
    if not counts:
        return {}
    samples = max(counts, key=lambda size: counts[size])
    return {
        path: 0
        for path, tensor in zip(paths, tensors, strict=True)
        if tensor.ndim and tensor.shape[0] == samples
    }
