"""The model with fake tensors in place of its own, put back afterwards."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.capture.precision import AS_IT_IS, Precision
from autopar.capture.shapes import Shapes
from autopar.errors import CaptureError, UnsupportedError
from autopar.ir.graph import BUFFER, PARAMETER

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """Fake tensors of a model.

    Attributes:
        parameters: Fake parameter by the first name of it.
        buffers: The same for buffers.
        aliases: Further names of tied parameters and buffers to the first one.
        own: The model's own tensors by first name.
        storages: Of the fake tensors, by first name, as they were made.
        snapshots: Of the modules, as they were before.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    own: Mapping[str, Tensor]
    storages: Mapping[str, torch.UntypedStorage]
    snapshots: Sequence[Snapshot]

    @property
    def stand_ins(self) -> Mapping[int, Tensor]:
        """Fake tensor by the id of the model's own."""
        fakes = {**self.parameters, **self.buffers}
        return {id(tensor): fakes[name] for name, tensor in self.own.items()}

    def moved(self) -> Iterator[str]:
        """First names of tensors that were given other memory, by ``tensor.data = other``."""
        for name, fake in (*self.parameters.items(), *self.buffers.items()):
            if fake.untyped_storage()._cdata != self.storages[name]._cdata:
                yield name


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
    saved = [Snapshot(module) for module in model.modules()]
    # Copies: a module that occurs twice is seen as it was both times.
    held = [
        (path, kind, table, dict(table))
        for path, module in model.named_modules(remove_duplicate=False)
        for kind, table in ((PARAMETER, module._parameters), (BUFFER, module._buffers))
    ]
    fakes: dict[tuple[str, int], tuple[str, Tensor]] = {}
    made: dict[str, dict[str, Tensor]] = {PARAMETER: {}, BUFFER: {}}
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    try:
        for path, kind, table, tensors in held:
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                known = fakes.get((kind, id(tensor)))
                if known is None:
                    known = (name, _fake(tensor, name, shapes, precision))
                    fakes[kind, id(tensor)] = known
                    made[kind][name], own[name] = known[1], tensor
                else:
                    aliases[name] = known[0]
                table[key] = known[1]
        yield Leaves(
            parameters=made[PARAMETER],
            buffers=made[BUFFER],
            aliases=aliases,
            own=own,
            storages={
                name: fake.untyped_storage()
                for table in made.values()
                for name, fake in table.items()
            },
            snapshots=saved,
        )
    finally:
        for snapshot in saved:
            snapshot.restore()


def _fake(tensor: Tensor, name: str, shapes: Shapes, precision: Precision) -> Tensor:
    if torch.nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"cannot capture parameter {name!r}: it is not initialized yet; run the model once on "
            "a small batch before"
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise UnsupportedError(
            f"cannot capture hooks on parameter {name!r}: they would run on shards of gradients, "
            "not on gradients; remove them, and change gradients after the backward"
        )
    if isinstance(tensor, nn.Parameter):
        fake = shapes.like(tensor, precision.stored(tensor.dtype))
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return shapes.like(tensor).requires_grad_(tensor.requires_grad)


class Snapshot:
    """Attributes of a module, and the entries of the containers among them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self._entries = [
            (value, value.copy())
            for value in self.attributes.values()
            if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        attributes = vars(self.module)
        attributes.clear()
        attributes.update(self.attributes)
        for container, entries in self._entries:
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(entries)
            else:
                container.extend(entries)
