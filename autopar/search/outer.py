"""Outer choices: the meshes worth solving for a cluster and its hints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import HintError, UnsupportedError
from autopar.hint import Degrees
from autopar.ir.sharding import Mesh
from cost_models.cluster import Cluster

ROLES = ("dp", "cp", "tp")
"""Order of role axes, outermost first: what talks most lies innermost."""


def meshes(
    cluster: Cluster, degrees: Degrees | None, *, num_stages: int = 1, max_axes: int = 2
) -> tuple[Mesh, ...]:
    """Meshes of one stage to try, the likeliest first.

    Without degrees: one axis a network level, and the in-node level in two. With degrees: one axis
    a role, and what is left of the ranks as a free axis.

    Args:
        cluster: Devices and levels.
        degrees: The ``hint.degrees``, if any.
        num_stages: Pipeline stages, of equally many ranks that follow each other.
        max_axes: Most axes without roles.

    Raises:
        HintError: The degrees do not multiply to the ranks.
        UnsupportedError: Expert degrees, for now.
    """
    if cluster.num_devices % num_stages:
        raise HintError(
            f"cannot cut {cluster.num_devices} ranks of cluster {cluster.name!r} into {num_stages} "
            "stages of equal size: use a number of stages that divides the ranks"
            f"{_with_fewer(cluster.num_devices // num_stages * num_stages, cluster.num_devices)}"
        )
    if degrees is None or is_free(degrees):
        return tuple(_free_meshes(cluster, num_stages, max_axes))
    where = f"of cluster {cluster.name!r}"
    if num_stages > 1:
        where = f"of each of {num_stages} stages {where}"
    return tuple(_role_meshes(cluster.num_devices // num_stages, where, degrees, num_stages))


def stage_meshes(
    cluster: Cluster, degrees: Degrees | None, num_stages: int
) -> tuple[tuple[Mesh, ...], ...]:
    """Choices of a mesh for every stage, the likeliest first: alike, or of degrees of their own.

    Raises:
        HintError: The degrees do not multiply to the ranks.
        UnsupportedError: Expert degrees, for now.
    """
    if degrees is None or not degrees.is_unlike:
        return tuple(
            (mesh,) * num_stages for mesh in meshes(cluster, degrees, num_stages=num_stages)
        )
    found: list[Mesh] = []
    for stage in range(num_stages):
        own = degrees.of_stage(stage)
        ranks = math.prod(getattr(own, role) for role in ROLES)
        found += _role_meshes(ranks, f"of stage {stage}", own)
    total = sum(mesh.num_ranks for mesh in found)
    if total != cluster.num_devices:
        counts = " + ".join(str(mesh.num_ranks) for mesh in found)
        raise HintError(
            f"cannot lay stages of {counts} = {total} ranks on the {cluster.num_devices} ranks of "
            f"cluster {cluster.name!r}: every rank is on one stage; change a degree"
            f"{_with_fewer(total, cluster.num_devices)}"
        )
    return (tuple(found),)


def run_meshes(cluster: Cluster) -> tuple[tuple[Mesh, ...], ...]:
    """A stage for every run of equal devices, split over the batch or over the layers.

    None where the devices are all alike, or the runs have one size, which `meshes` gives too.
    """
    sizes = tuple(run.count for run in cluster.devices)
    if len(set(sizes)) == 1:
        return ()
    return tuple(
        tuple(Mesh((role,), (size,), roles=(role,)) for size in sizes) for role in ("dp", "tp")
    )


def common_rows(meshes: Sequence[Mesh]) -> int:
    """Rows of the batch that let unlike meshes run the same microbatches; see `Mesh`.

    An axis without a role may split the batch too.
    """
    if len(set(meshes)) == 1 and not meshes[0].shares:
        return 1
    return math.lcm(*(batch_parts(mesh, free=True) for mesh in meshes))


def batch_parts(mesh: Mesh, *, free: bool = False) -> int:
    """Equal parts into which the batch is cut over a mesh, of which ranks take their shares.

    Args:
        mesh: The mesh.
        free: Whether axes without a role cut it too.
    """
    roles = ("dp", "") if free else ("dp",)
    return math.prod(
        sum(mesh.shares_of(axis)) or size
        for axis, (size, role) in enumerate(zip(mesh.sizes, mesh.roles, strict=True))
        if role in roles
    )


def with_shares(mesh: Mesh, parts: Sequence[int]) -> Mesh:
    """The mesh with parts of the batch for the ranks of its ``dp`` axis, in lowest terms."""
    least = math.gcd(*parts)
    own = tuple(n // least for n in parts)
    if len(set(own)) == 1:
        return mesh
    shares = tuple(own if role == "dp" else () for role in mesh.roles)
    return replace(mesh, shares=shares)


def proportional(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Samples for each of several ranks, so that the one that takes longest takes least.

    Args:
        total: Samples.
        speeds: Of the ranks, in samples a second or any other unit.
    """
    rows = [0] * len(speeds)
    for _ in range(total):
        at = min(range(len(speeds)), key=lambda rank: ((rows[rank] + 1) / speeds[rank], rank))
        rows[at] += 1
    return tuple(rows)


def _free_meshes(cluster: Cluster, num_stages: int, max_axes: int) -> Iterator[Mesh]:
    sizes = _stage_sizes(cluster, num_stages)
    names = [f"{level.name}0" for level in reversed(cluster.levels)]
    kept = [(n, s) for n, s in zip(names, sizes, strict=True) if s > 1] or [("all0", 1)]
    while len(kept) > max_axes:
        (outer, a), (_, b) = kept[0], kept[1]
        kept[:2] = [(outer, a * b)]
    base = Mesh(tuple(n for n, _ in kept), tuple(s for _, s in kept))
    yield base
    if len(kept) < max_axes:
        name, size = kept[-1]
        for inner in _halves(size):
            axes = [*kept[:-1], (name, size // inner), (f"{name[:-1]}1", inner)]
            yield Mesh(tuple(n for n, _ in axes), tuple(s for _, s in axes))


def is_free(degrees: Degrees | None) -> bool:
    """Whether degrees leave the mesh of a stage open."""
    roles = ("dp", "tp", "cp", "ep", "zero")
    return degrees is None or all(getattr(degrees, role) is None for role in roles)


def flat_mesh(cluster: Cluster) -> Mesh | None:
    """All ranks of several levels as one axis; None where there is one level.

    What all ranks do alike is one collective over all levels there, not one for each.
    """
    several = sum(level.size > 1 for level in cluster.levels) > 1
    return Mesh(("all0",), (cluster.num_devices,)) if several else None


def _stage_sizes(cluster: Cluster, num_stages: int) -> list[int]:
    """Sizes of the levels inside one stage, outermost first: stages divide the outer levels."""
    sizes = []
    for level in reversed(cluster.levels):
        shared = math.gcd(level.size, num_stages)
        num_stages //= shared
        sizes.append(level.size // shared)
    return sizes


def _halves(size: int) -> Sequence[int]:
    """Proper divisors near the square root, at most two."""
    divisors = [d for d in range(2, size) if size % d == 0]
    return sorted(divisors, key=lambda d: (abs(math.log(d * d / size)), d))[:2]


def _role_meshes(ranks: int, where: str, degrees: Degrees, num_stages: int = 1) -> Iterator[Mesh]:
    if degrees.ep is not None and degrees.ep > 1:
        raise UnsupportedError(
            f"cannot plan with ep={degrees.ep}: this version has no expert axis; use ep=1"
        )
    given = {role: getattr(degrees, role) for role in ROLES}
    fixed = math.prod(d for d in given.values() if d is not None)
    open_roles = [role for role, degree in given.items() if degree is None]
    said = " x ".join(f"{role}={d}" for role, d in given.items() if d is not None)
    if ranks % fixed or (fixed != ranks and not open_roles):
        fewer = _with_fewer(fixed * num_stages, ranks * num_stages)
        raise HintError(
            f"cannot lay degrees {said} = {fixed} on {ranks} ranks {where}: they must multiply to "
            f"{ranks}; change a degree or leave one out{fewer}"
        )
    rest = ranks // fixed
    for split in _factorings(rest, len(open_roles)):
        sizes = dict(given)
        sizes.update(zip(open_roles, split, strict=True))
        axes = [(role, size) for role in ROLES if (size := sizes[role]) and size > 1]
        axes = axes or [("dp", 1)]
        names = tuple(name for name, _ in axes)
        yield Mesh(names, tuple(size for _, size in axes), roles=names)


def _with_fewer(wanted: int, ranks: int) -> str:
    """What else to do where degrees want fewer ranks than there are, as part of a sentence."""
    return f", or leave the others idle with hint.ranks({wanted})" if 0 < wanted < ranks else ""


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write ``number`` as an ordered product of ``parts`` factors."""
    if parts == 0:
        if number == 1:
            yield ()
        return
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    for chosen in itertools.product(divisors, repeat=parts):
        if math.prod(chosen) == number:
            yield chosen
