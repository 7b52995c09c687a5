"""The model with fake tensors in place of its own, put back afterwards."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.precision import AS_IT_IS, Precision
from autopar.capture.shapes import Shapes
from autopar.errors import CaptureError, UnsupportedError

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """Fake tensors of a model.

    Attributes:
        parameters: Fake parameter by the first name of its storage.
        buffers: The same for buffers.
        aliases: Further names of tied parameters and buffers to the first one.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]


@contextmanager
def substituted(
    model: nn.Module, shapes: Shapes, precision: Precision = AS_IT_IS
) -> Iterator[Leaves]:
    """The model with fake parameters and buffers; every attribute is put back at the end.

    Attributes of modules, and the entries of plain containers among them, are restored; objects
    deeper than that keep what the forward does to them.

    Args:
        model: Any module.
        shapes: Makes the fake tensors.
        precision: Says in which dtype parameters are stored.
    """
    saved = [_Snapshot(module) for module in model.modules()]
    fakes: dict[Any, tuple[str, Tensor]] = {}
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    try:
        for path, module in model.named_modules():
            for table, names in ((module._parameters, parameters), (module._buffers, buffers)):
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    name = f"{path}.{key}" if path else key
                    known = fakes.get(_identity(tensor, name))
                    if known is None:
                        fake = _fake(tensor, name, shapes, precision)
                        fakes[_identity(tensor, name)] = known = (name, fake)
                        names[name] = fake
                    elif name != known[0]:
                        aliases[name] = known[0]
                    table[key] = known[1]
        yield Leaves(parameters=parameters, buffers=buffers, aliases=aliases)
    finally:
        for snapshot in saved:
            snapshot.restore()


def _fake(tensor: Tensor, name: str, shapes: Shapes, precision: Precision) -> Tensor:
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise UnsupportedError(
            f"cannot capture hooks on parameter {name!r}: they would run on shards of gradients, "
            "not on gradients; remove them, and change gradients after the backward"
        )
    if isinstance(tensor, nn.Parameter):
        fake = shapes.like(tensor, precision.stored(tensor.dtype))
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return shapes.like(tensor).requires_grad_(tensor.requires_grad)


def _identity(tensor: Tensor, name: str) -> Any:
    """Equal for tensors that are one: same storage, same part of it."""
    if torch.nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"cannot capture parameter {name!r}: it is not initialized yet; run the model once on "
            "a small batch before"
        )
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


class _Snapshot:
    """Attributes of a module, and the entries of the containers among them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._entries = [
            (value, value.copy())
            for value in self._attributes.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        attributes = vars(self._module)
        attributes.clear()
        attributes.update(self._attributes)
        for container, entries in self._entries:
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(entries)
            else:
                container.extend(entries)
