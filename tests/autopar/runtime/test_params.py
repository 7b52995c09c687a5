"""Shards of parameters: sizes of ``torch.chunk``, joined again by DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autopar.errors import AutoparError
from autopar.ir.sharding import WHOLE, Mesh, Sharding, Split
from autopar.runtime.groups import open_session
from autopar.runtime.params import as_parameter, load_value, local_piece, placements_of


def joined(sizes: tuple[int, ...], shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    session = open_session("cpu", mesh.num_ranks)
    groups = session.groups(mesh)
    coordinates = mesh.coordinates(session.rank)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    local = local_piece(full, sharding, coordinates)
    parameter: Any = as_parameter(local, shape, sharding, groups, True)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.shape == torch.Size(shape)
    assert torch.equal(parameter.full_tensor(), full)
    assert parameter.to_local().data_ptr() == local.data_ptr() or not local.numel()
    other = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    load_value("p", parameter, other)
    assert torch.equal(parameter.full_tensor(), other)
    whole = [Replicate()] * groups.device_mesh.ndim
    load_value("p", parameter, parameter.redistribute(placements=whole))
    assert torch.equal(parameter.full_tensor(), other)
    with pytest.raises(AutoparError, match="saved shape"):
        load_value("p", parameter, torch.zeros(1, 1, 1))
    return tuple(local.shape)


@pytest.mark.parametrize(
    ("sizes", "shape", "sharding", "expected"),
    [
        ((2,), (5, 3), (Split(0, 1, 3),), [(3, 3), (2, 3)]),
        ((2,), (5, 3), (Split(1, 1, 2),), [(5, 2), (5, 1)]),
        ((2,), (1, 3), (Split(0, 1, 1),), [(1, 3), (0, 3)]),
        ((4,), (5, 2), (Split(0, 1, 2),), [(2, 2), (2, 2), (1, 2), (0, 2)]),
        ((2, 2), (8, 3), (Split(0, 1, 4), Split(0, 2, 2)), [(2, 3)] * 4),
        ((2, 2), (5, 3), (Split(1, 1, 2), Split(0, 1, 3)), [(3, 2), (2, 2), (3, 1), (2, 1)]),
        ((2, 1, 2), (4, 3), (WHOLE, WHOLE, Split(0, 1, 2)), [(2, 3)] * 4),
    ],
)
def test_shards_are_chunks_and_join(
    pool: Any, sizes: Any, shape: Any, sharding: Any, expected: Any
) -> None:
    ranks = torch.Size(sizes).numel()
    assert pool(ranks).run(joined, sizes, shape, sharding) == expected


def placements() -> None:
    mesh = Mesh(("a", "b"), (1, 2))
    groups = open_session("cpu", 2).groups(mesh)
    assert groups.device_mesh.mesh_dim_names == ("b",)
    assert placements_of((WHOLE, Split(1, 1, 2)), groups, (3, 4)) == (Shard(1),)
    with pytest.raises(AssertionError):
        placements_of((WHOLE, Split(0, 2, 2)), groups, (8, 4))


def test_only_plain_shardings_become_placements(pool: Any) -> None:
    pool(2).run(placements)
