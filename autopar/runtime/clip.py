"""Gradient norm and clipping over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import AutoparError
from autopar.runtime.groups import results_group, this_session
from autopar.runtime.host import by_device, computes_on


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; the norm before.

    Every logical element counts once: shards are summed over their axes, replicas are not, a tied
    parameter is one. The norm is a plain 0-d tensor, bitwise equal on every rank. All ranks must
    call it, one whose stage has none of the parameters too.

    Args:
        parameters: A module, or parameters whose ``.grad`` is clipped; none on the ranks of a stage
            that has none of them.
        max_norm: Largest norm allowed.
        norm_type: The p of the p-norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: As of `torch.nn.utils.clip_grad_norm_`; the fused way is always taken.

    Raises:
        AutoparError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    distinct = _distinct(parameters)
    gradients = [p.grad for p in distinct if p.grad is not None]
    everyone = _everyone(distinct)
    if not gradients and everyone is None:
        return torch.tensor(0.0)
    norm = _total_norm(gradients, float(norm_type), everyone)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AutoparError(
            f"cannot clip gradients: their norm is {norm.item()}; skip this step, or clip without "
            "error_if_nonfinite"
        )
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for device, own in by_device(map(_local, gradients)).items():
        torch._foreach_mul_(own, factor.to(device))
    return norm


def _distinct(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Parameters, each once."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = (parameters,)
    return list({id(p): p for p in parameters}.values())


@dataclass(frozen=True, slots=True)
class _Everyone:
    """All ranks, where the parameters lie on some of them.

    Attributes:
        group: Of all ranks.
        device: Where it exchanges.
        speaks: Whether this rank tells the others of the parameters of its mesh.
    """

    group: Any
    device: torch.device
    speaks: bool


def _everyone(parameters: list[Tensor]) -> _Everyone | None:
    """All ranks, if the parameters lie on some of them only: on one stage, or idle ranks exist.

    Where there are none at all, they lie on other ranks.
    """
    meshes = [p.device_mesh for p in parameters if isinstance(p, DTensor)]
    if parameters and not meshes:
        return None
    mesh = meshes[0] if meshes else None
    group, session = results_group(mesh), this_session()
    if group is None or session is None:
        return None
    speaks = mesh is not None and session.rank == int(mesh.mesh.flatten()[0])
    return _Everyone(group, session.device, speaks)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _total_norm(gradients: list[Tensor], norm_type: float, everyone: _Everyone | None) -> Tensor:
    """Norm over all gradients, joined over the axes that split each of them and over stages."""
    by_axes: dict[Any, list[Tensor]] = {}
    for gradient in filter(_is_here, gradients):
        by_axes.setdefault(_split_axes(gradient), []).append(_local(gradient))
    infinite = norm_type == float("inf")
    if everyone is not None:
        device = everyone.device
    else:
        device = computes_on(gradients[0])
    total = torch.zeros((), dtype=torch.float32, device=device)
    for axes, locals_ in sorted(by_axes.items(), key=lambda item: repr(item[0])):
        # An empty shard has no largest element.
        filled = [g for g in locals_ if g.numel()] if infinite else locals_
        norms = list(torch._foreach_norm(filled, norm_type)) if filled else []
        norms = [n.float().to(device) for n in norms]
        stacked = torch.stack(norms) if norms else total.new_zeros(1)
        part = stacked.max() if infinite else stacked.pow(norm_type).sum()
        for mesh, axis in axes:
            op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
            dist.all_reduce(part, op=op, group=mesh.get_group(axis))
        total = torch.maximum(total, part) if infinite else total + part
    if everyone is not None:
        op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        if not everyone.speaks:
            total.zero_()  # the first rank of a stage speaks for it
        dist.all_reduce(total, op=op, group=everyone.group)
    return total if infinite else total.pow(1.0 / norm_type)


def _is_here(gradient: Tensor) -> bool:
    """Whether this rank is on the gradient's mesh."""
    return not isinstance(gradient, DTensor) or gradient.device_mesh.get_coordinate() is not None


def _split_axes(gradient: Tensor) -> tuple[tuple[Any, int], ...]:
    """(mesh, axis) of every axis that splits a gradient, in mesh order."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        (gradient.device_mesh, axis)
        for axis, placement in enumerate(gradient.placements)
        if isinstance(placement, Shard)
    )
