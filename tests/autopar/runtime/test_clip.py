"""`clip_grad_norm_` against torch's on the whole gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.sharding import WHOLE, Mesh, Split
from autopar.runtime.clip import clip_grad_norm_
from autopar.runtime.groups import open_session
from autopar.runtime.params import as_dtensor, as_parameter, local_piece, placements_of

SHAPES = [(5, 3), (4, 6), (1, 2), (7,), ()]


def shardings(rows: int, columns: int) -> list[tuple[Any, ...]]:
    """Split by one axis, by both, into an empty shard, over a dim of one, and whole."""
    return [
        (Split(0, 1, -(-5 // rows)), WHOLE),
        (Split(0, 1, 4 // rows), Split(1, 1, 6 // columns)),
        (WHOLE, Split(0, 1, 1)),
        (WHOLE, WHOLE),
        (WHOLE, WHOLE),
    ]


def clip(sizes: tuple[int, int], norm_type: float, max_norm: float) -> tuple[Any, ...]:
    mesh = Mesh(("a", "b"), sizes)
    session = open_session("cpu", mesh.num_ranks)
    groups, coordinates = session.groups(mesh), mesh.coordinates(session.rank)
    generator = torch.Generator().manual_seed(4)
    whole, parameters = [], []
    for shape, sharding in zip(SHAPES, shardings(*sizes), strict=True):
        full = nn.Parameter(torch.zeros(shape))
        full.grad = torch.randn(shape, generator=generator)
        whole.append(full)
        local = local_piece(full, sharding, coordinates)
        mine = as_parameter(local, shape, sharding, groups, True)
        placements = placements_of(sharding, groups, shape)
        piece = local_piece(full.grad, sharding, coordinates)
        mine.grad = as_dtensor(piece, shape, placements, groups)
        parameters.append(mine)
    parameters += [nn.Parameter(torch.zeros(2)), parameters[0]]
    expected = nn.utils.clip_grad_norm_(whole, max_norm, norm_type)
    found = clip_grad_norm_(parameters, max_norm, norm_type)
    assert type(found) is torch.Tensor
    assert found.shape == ()
    torch.testing.assert_close(found, expected)
    for mine, full in zip(parameters, whole, strict=False):
        torch.testing.assert_close(mine.grad.full_tensor(), full.grad)  # type: ignore[union-attr]
    parameters[3].grad = parameters[3].grad * float("nan")  # type: ignore[operator]
    with pytest.raises(AutoparError, match="norm is nan"):
        clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    return (found.numpy().tobytes(),)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_norm_counts_every_element_once(pool: Any, norm_type: float, max_norm: float) -> None:
    for sizes in ((1, 1), (2, 1), (2, 2)):
        found = pool(sizes[0] * sizes[1]).run(clip, sizes, norm_type, max_norm)
        assert len(set(found)) == 1


def test_no_gradients_have_norm_zero() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    one = nn.Parameter(torch.ones(2))
    one.grad = torch.full((2,), 3.0)
    assert clip_grad_norm_(one, 1.0).item() == pytest.approx(18**0.5)
