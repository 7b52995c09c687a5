"""This rank's parameters and buffers, from a real model or one on meta.

Stored shardings are plain: each axis keeps a parameter whole or splits a dim into the pieces of
``torch.chunk``, nested in mesh order, so that a DTensor says the same with `Shard` and `Replicate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autopar.errors import AutoparError
from autopar.ir.sharding import (
    Sharding,
    Split,
    Whole,
    dim_splits,
    local_indices,
    whole,
)
from autopar.lower.program import ProgramInput
from autopar.runtime.groups import MeshGroups
from autopar.runtime.host import at_home
from autopar.runtime.initialize import Init, initialized


@dataclass(frozen=True)
class ModelState:
    """What a rank keeps between steps.

    Attributes:
        parameters: The model's names to this rank's DTensors; tied names hold one object.
        buffers: The model's names to plain tensors, the same on every rank.
        not_saved: Names of buffers that are not persistent.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    not_saved: frozenset[str] = frozenset()


def shard_model(
    model: nn.Module,
    *,
    stored: Mapping[str, Sharding],
    dtypes: Mapping[str, torch.dtype] | None = None,
    aliases: Mapping[str, str],
    groups: MeshGroups,
    coordinates: Sequence[int] | None,
    device: torch.device,
    on_host: Collection[str] = (),
    init: Init | None = None,
    seed: int = 0,
    owned: Collection[str] | None = None,
    homes: Mapping[str, MeshGroups] | None = None,
) -> ModelState:
    """This rank's parameters and buffers of a model, which is left as it is.

    Args:
        model: On any device; tensors on meta are made and filled by ``init``.
        stored: Sharding of parameters by name; one that is absent is whole on every rank.
        dtypes: What parameters are stored in, by name, where it is not the model's own dtype:
            their values are the model's, cast.
        aliases: Second names of tied parameters and buffers to the first.
        groups: Groups of the plan's mesh.
        coordinates: This rank's place on it; None on an idle rank.
        device: Where the tensors go.
        on_host: Names of parameters that stay in host memory.
        init: Fills a model on meta; the default is `initialize.default_init`.
        seed: Seed of ``init``.
        owned: First names of the parameters this rank has; None for all.
        homes: Groups of the meshes of parameters by first name, where that is not ``groups``. Of a
            DTensor on a mesh that this rank is not on, it holds no element.

    Raises:
        AutoparError: Nothing fills a parameter or buffer on meta.
    """
    everything = whole(groups.mesh)
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}

    def is_owned(name: str) -> bool:
        return owned is None or name in owned or name not in shapes

    def home_of(name: str) -> MeshGroups:
        return (homes or {}).get(name, groups)

    def is_away(name: str) -> bool:
        return name in shapes and home_of(name).device_mesh.get_coordinate() is None

    def rows(name: str) -> Sequence[int] | None:
        if coordinates is None or not is_owned(name) or is_away(name):
            return () if name in shapes else None
        splits = dim_splits(stored.get(name, everything), 0)
        return local_indices(shapes[name][0], splits, coordinates) if splits else None

    kept: dict[str, Tensor] = {}
    for name, full in initialized(model, aliases, init, seed, rows):
        if not is_owned(name):
            continue
        sharding = stored.get(name, everything) if name in shapes else everything
        dtype = (dtypes or {}).get(name, full.dtype)
        piece = (
            full.new_empty(0) if is_away(name) else local_piece(full, sharding, coordinates or ())
        )
        kept[name] = at_home(piece, device, dtype) if name in on_host else piece.to(device, dtype)
    parameters: dict[str, nn.Parameter] = {}
    for name, old in model.named_parameters(remove_duplicate=False):
        owner = aliases.get(name, name)
        if not is_owned(owner):
            continue
        if owner not in parameters:
            sharding = stored.get(owner, everything)
            parameters[owner] = as_parameter(
                kept[owner], old.shape, sharding, home_of(owner), old.requires_grad
            )
        parameters[name] = parameters[owner]
    buffers = {
        name: kept[aliases.get(name, name)]
        for name, _ in model.named_buffers(remove_duplicate=False)
    }
    not_saved = {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in module._non_persistent_buffers_set
    }
    return ModelState(parameters, buffers, frozenset(not_saved))


def values_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Equal where tensors of equal names have equal values, bit by bit.

    What has none yet, on meta, is left out. Reads every element once, at the speed of a sum.
    """
    found = hashlib.sha256()
    for name, tensor in named:
        full = tensor.detach()
        if full.is_meta or type(full) is not Tensor:
            continue
        if full.is_complex():
            full = torch.view_as_real(full.resolve_conj())
        elif full.dtype.itemsize == 1:
            full = full.contiguous().view(torch.uint8)
        found.update(f"{name} {torch.hash_tensor(full).view(torch.int64).item()}".encode())
    return found.hexdigest()[:16]


def local_piece(full: Tensor, sharding: Sharding, coordinates: Sequence[int]) -> Tensor:
    """The rank's piece of a whole tensor, as contiguous memory of its own."""
    piece = full.detach()
    for dim in range(full.ndim):
        piece = _cut(piece, dim, dim_splits(sharding, dim), coordinates)
    copied = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
    return copied.copy_(piece)


def _cut(
    tensor: Tensor, dim: int, splits: Sequence[tuple[int, Split]], coordinates: Sequence[int]
) -> Tensor:
    """The rank's piece along one dim."""
    if not splits:
        return tensor
    size = tensor.shape[dim]
    indices = local_indices(size, splits, coordinates)
    if isinstance(indices, range) or not indices:
        start = indices[0] if indices else size
        return tensor.narrow(dim, start, len(indices))
    if indices[-1] - indices[0] == len(indices) - 1:
        return tensor.narrow(dim, indices[0], len(indices))
    return tensor.index_select(dim, torch.tensor(indices, device=tensor.device))


def placements_of(
    sharding: Sharding, groups: MeshGroups, shape: Sequence[int]
) -> tuple[Placement, ...]:
    """DTensor placements of a stored sharding, one for each axis of ``groups.device_mesh``.

    It must be plain, which the planner guarantees: `verify_plain` says what that means.
    """
    verify_plain(sharding, groups, shape)
    if not sharding:
        return (Replicate(),)
    return tuple(_placement(sharding[axis]) for axis in groups.active)


def _placement(axis: object) -> Placement:
    return Shard(axis.dim) if isinstance(axis, Split) else Replicate()


def verify_plain(sharding: Sharding, groups: MeshGroups, shape: Sequence[int]) -> None:
    """Assert that every rank's piece is the one ``torch.chunk`` gives, axis after axis."""
    assert all(isinstance(axis, (Split, Whole)) for axis in sharding), sharding
    for dim, size in enumerate(shape):
        splits = dim_splits(sharding, dim)
        for corner in (0, 1):
            coordinates = [corner * (n - 1) for n in groups.mesh.sizes]
            start, length = 0, size
            for axis, _ in splits:
                chunk = -(-length // groups.mesh.sizes[axis])
                begin = min(coordinates[axis] * chunk, length)
                start, length = start + begin, min(chunk, length - begin)
            found = local_indices(size, splits, coordinates) if splits else range(size)
            ends = (found[0], found[-1]) if len(found) else ()
            expected = (start, start + length - 1) if length else ()
            assert len(found) == length and ends == expected, (sharding, shape, dim)


def as_parameter(
    local: Tensor,
    shape: Sequence[int],
    sharding: Sharding,
    groups: MeshGroups,
    requires_grad: bool,
) -> nn.Parameter:
    """A DTensor parameter of which this rank holds ``local``."""
    placements = placements_of(sharding, groups, shape)
    return nn.Parameter(as_dtensor(local, shape, placements, groups), requires_grad=requires_grad)


@torch.no_grad()
def as_dtensor(
    local: Tensor, shape: Sequence[int], placements: Sequence[Placement], groups: MeshGroups
) -> DTensor:
    """A DTensor of which this rank holds ``local``; nothing is communicated.

    A piece in host memory stays there: ``from_local`` would move it to the mesh's device.
    """
    strides = torch.empty(tuple(shape), device="meta").stride()
    if groups.device_mesh.get_coordinate() is None:
        # ``from_local`` takes the shape of a 0-d tensor from a piece, and here is none. Of such a
        # tensor DTensor keeps a zero on ranks that are not on its mesh, of others no element.
        meta = TensorMeta(torch.Size(shape), strides, local.dtype)
        spec = DTensorSpec(groups.device_mesh, tuple(placements), tensor_meta=meta)
        piece = local if shape else local.new_zeros(())
        return DTensor(piece, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    moves = local.device.type != groups.device_mesh.device_type
    made = DTensor.from_local(
        local.to("meta") if moves else local,
        groups.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
    return DTensor(local, made._spec, requires_grad=False) if moves else made  # type: ignore[no-untyped-call]


def local_of(tensor: DTensor) -> Tensor:
    """This rank's piece itself; ``to_local`` makes a view of it, at 1 us a parameter."""
    return tensor._local_tensor


def wrap_like(parameter: nn.Parameter, local: Tensor) -> DTensor:
    """A DTensor of the parameter's shape and placements of which this rank holds ``local``.

    The constructor takes the parameter's spec as it is; the public ``from_local`` works out the
    same one for 50 us a parameter, more than the rest of a small step.
    """
    spec = cast(DTensor, parameter)._spec
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


@torch.no_grad()
def load_value(name: str, own: Tensor, value: Tensor) -> None:
    """Copy a value into a parameter or buffer, whatever its placements.

    Args:
        name: For the message.
        own: DTensor parameter or plain buffer.
        value: DTensor of any placements, or the whole tensor.

    Raises:
        AutoparError: The shapes differ.
    """
    if value.shape != own.shape:
        raise AutoparError(
            f"cannot load {name!r}: the saved shape is {list(value.shape)}, the model's "
            f"{list(own.shape)}; load a state of this model"
        )
    if isinstance(own, DTensor):
        own.copy_(lying_as(own, value))
    else:
        own.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def lying_as(like: DTensor, value: Tensor) -> DTensor:
    """A value of the shape of ``like`` with its placements, on its mesh.

    Args:
        like: Says where to.
        value: DTensor of any placements and mesh, or the whole tensor.
    """
    if not isinstance(value, DTensor):
        return wrap_whole(like, value)
    if value.device_mesh != like.device_mesh:
        return wrap_whole(like, value.full_tensor())
    return value.redistribute(placements=like.placements)


def wrap_whole(like: DTensor, full: Tensor) -> DTensor:
    """A DTensor of the placements of ``like`` cut from a whole tensor; nothing is communicated."""
    local = full.detach()
    if like.device_mesh.get_coordinate() is None:
        local = local.new_empty(0)
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard) and like.device_mesh.get_coordinate() is not None:
            size = like.device_mesh.size(axis)
            chunk = -(-local.shape[placement.dim] // size)
            start = min(like.device_mesh.get_local_rank(axis) * chunk, local.shape[placement.dim])
            length = min(chunk, local.shape[placement.dim] - start)
            local = local.narrow(placement.dim, start, length)
    spec = like._spec
    return DTensor(local.to(like.device), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def input_piece(
    full: Tensor, entry: ProgramInput, coordinates: Sequence[int], batch_dim: int | None
) -> Tensor:
    """The rank's piece of an input, a view where it can be.

    Args:
        full: The input, whole but for ``batch_dim``.
        entry: How the program takes it.
        coordinates: The rank's place on the mesh.
        batch_dim: Dim that holds this rank's samples already, or None.
    """
    local = entry.local_type.shape
    if tuple(full.shape) == local:
        return full
    piece = full
    for dim, size in enumerate(full.shape):
        if dim != batch_dim and size != local[dim]:
            piece = _cut(piece, dim, dim_splits(entry.sharding, dim), coordinates)
    return piece
