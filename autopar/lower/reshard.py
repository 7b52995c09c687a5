"""Local ops and collectives of one step of a reshard.

Every step reads the local tensor by the atoms it concerns, runs one collective over dim 0, and
reads the result back. Uneven pieces are padded to the largest before a collective and cut behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost import reshard as steps
from autopar.cost.reshard import Step
from autopar.ir.graph import Ref, TensorType
from autopar.ir.sharding import (
    Atom,
    Partial,
    Sharding,
    Split,
    dim_atoms,
    dim_splits,
    local_shape,
)
from autopar.lower.builder import Builder


def emit_step(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    """The rank's piece under ``step.after`` from its piece under ``step.before``.

    Args:
        build: Takes the instructions.
        value: The rank's piece.
        kind: Global type of the value.
        step: The change.
    """
    if build.mesh.sizes[step.axis] == 1:
        return value
    if step.axis == build.mesh.time_axis:
        assert step.kind in (steps.SLICE, steps.ALL_REDUCE), step
    emit = {
        steps.SLICE: _slice,
        steps.ALL_GATHER: _all_gather,
        steps.ALL_REDUCE: _all_reduce,
        steps.REDUCE_SCATTER: _reduce_scatter,
        steps.ALL_TO_ALL: _all_to_all,
        steps.TERM: _term,
    }[step.kind]
    moved = emit(build, value, kind, step)
    return build.reshape(moved, local_shape(kind.shape, step.after, build.coordinates))


def _around(
    build: Builder, shape: Sequence[int], sharding: Sharding, axis: int
) -> tuple[int, Atom, int]:
    """Local elements before the atom that ``axis`` splits, the atom, and those behind it."""
    split = sharding[axis]
    assert isinstance(split, Split)
    local = local_shape(shape, sharding, build.coordinates)
    pieces = dim_atoms(shape[split.dim], dim_splits(sharding, split.dim))
    assert pieces is not None
    at = next(i for i, atom in enumerate(pieces) if atom.axis == axis)
    sizes = [_local_size(build, atom) for atom in pieces]
    before = math.prod(local[: split.dim]) * math.prod(sizes[:at])
    after = math.prod(sizes[at + 1 :]) * math.prod(local[split.dim + 1 :])
    return before, pieces[at], after


def _local_size(build: Builder, atom: Atom) -> int:
    return atom.local(0 if atom.axis is None else build.coordinates[atom.axis])


def _slice(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    before, atom, after = _around(build, kind.shape, step.after, step.axis)
    coordinate = build.coordinates[step.axis]
    rows = build.reshape(value, (before, atom.size, after))
    own = atom.local(coordinate)
    if step.axis == build.mesh.time_axis:
        cut = build.microbatch(rows, atom.chunk, own)
        return cut if before == 1 else build.copy(cut)
    return build.narrow(rows, 1, atom.start(coordinate), own)


def _term(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    """All of a sum on the first rank, zeros on the others; every rank holds as much."""
    if build.coordinates[step.axis] == 0:
        return build.copy(value)
    return build.call("aten.zeros_like.default", (value,), build.types[value])


def _spread(build: Builder, value: Ref, dim: int, atom: Atom, ranks: int) -> Ref:
    """Every rank's part of a dim, padded to the largest: rank i's at i times that."""
    if not atom.shares:
        return build.pad(value, dim, ranks * atom.chunk)
    parts = [build.narrow(value, dim, atom.start(i), atom.local(i)) for i in range(ranks)]
    return build.concatenate([build.pad(part, dim, atom.most) for part in parts], dim)


def _packed(build: Builder, value: Ref, dim: int, atom: Atom, ranks: int) -> Ref:
    """The dim without what padded every rank's part."""
    if not atom.shares:
        return build.narrow(value, dim, 0, atom.size)
    held = [i for i in range(ranks) if atom.local(i)]
    parts = [build.narrow(value, dim, i * atom.most, atom.local(i)) for i in held]
    return build.concatenate(parts, dim)


def _all_gather(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    ranks = build.mesh.sizes[step.axis]
    before, atom, after = _around(build, kind.shape, step.before, step.axis)
    own = _local_size(build, atom)
    rows = build.pad(build.reshape(value, (before, own, after)), 1, atom.most)
    if before == 1:
        flat = build.all_gather(build.reshape(rows, (atom.most, after)), step.axis)
        return _packed(build, flat, 0, atom, ranks)
    gathered = build.all_gather(rows, step.axis)
    parts = build.reshape(gathered, (ranks, before, atom.most, after))
    joined = build.permute(parts, (1, 0, 2, 3))
    joined = build.reshape(joined, (before, ranks * atom.most, after))
    return _packed(build, joined, 1, atom, ranks)


def _all_reduce(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    old = step.before[step.axis]
    assert isinstance(old, Partial)
    if step.axis == build.mesh.time_axis:
        return build.accumulate(value, old.reduce)
    return build.all_reduce(value, (step.axis,), old.reduce)


def _reduce_scatter(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    old = step.before[step.axis]
    assert isinstance(old, Partial)
    ranks = build.mesh.sizes[step.axis]
    before, atom, after = _around(build, kind.shape, step.after, step.axis)
    own = _local_size(build, atom)
    rows = _spread(build, build.reshape(value, (before, atom.size, after)), 1, atom, ranks)
    parts = build.reshape(rows, (before, ranks, atom.most, after))
    parts = build.permute(parts, (1, 0, 2, 3))
    flat = build.reshape(parts, (ranks * before, atom.most, after))
    scattered = build.reduce_scatter(flat, step.axis, old.reduce)
    return build.narrow(scattered, 1, 0, own)


def _all_to_all(build: Builder, value: Ref, kind: TensorType, step: Step) -> Ref:
    """Cut by the new split, send, and join by the old one."""
    axis, ranks = step.axis, build.mesh.sizes[step.axis]
    new = step.after[axis]
    old = step.before[axis]
    assert isinstance(new, Split) and isinstance(old, Split)
    marker = len(step.before)
    joint = (*step.before, new)
    pieces: list[Atom] = []
    for dim, size in enumerate(kind.shape):
        found = dim_atoms(size, dim_splits(joint, dim))
        assert found is not None
        pieces += found
    give = next(i for i, atom in enumerate(pieces) if atom.axis == marker)
    take = next(i for i, atom in enumerate(pieces) if atom.axis == axis)
    local = [atom.size if i == give else _local_size(build, atom) for i, atom in enumerate(pieces)]
    moved = build.reshape(value, local)
    moved = build.pad(moved, take, pieces[take].most)
    moved = _spread(build, moved, give, pieces[give], ranks)
    padded = list(local)
    padded[take] = pieces[take].most
    cut = [*padded[:give], ranks, pieces[give].most, *padded[give + 1 :]]
    moved = build.reshape(moved, cut)
    order = [give, *(i for i in range(len(cut)) if i != give)]
    moved = build.permute(moved, order)
    sent = build.types[moved].shape
    moved = build.reshape(moved, (sent[0] * sent[1], *sent[2:]) if len(sent) > 1 else sent)
    moved = build.reshape(build.all_to_all(moved, axis), sent)
    # Now [source rank, pieces ...]: put the source rank in front of the piece it is joined with.
    order = [i + 1 for i in range(len(pieces))]
    order.insert(take, 0)
    moved = build.permute(moved, order)
    joined = [*padded[:take], ranks * pieces[take].most, *padded[take + 1 :]]
    joined[give] = pieces[give].most
    moved = build.reshape(moved, joined)
    moved = _packed(build, moved, take, pieces[take], ranks)
    return build.narrow(moved, give, 0, pieces[give].local(build.coordinates[axis]))
