"""A change of sharding as steps that change one mesh axis each.

=======================  ====================================================
step on one axis         what it runs
=======================  ====================================================
whole -> split           a local slice
split -> whole           all-gather
split -> another split   all-to-all, or all-gather and a slice where they overlap
partial -> whole         all-reduce
partial -> split         reduce-scatter
whole -> partial         the first rank has all, the others zeros
=======================  ====================================================

Both the search (as arcs of its layout graphs) and lowering (as the shortest path from what is
there to what is needed) use this one table. The last step is never worth its memory to the search,
which leaves it out; lowering takes it where parts of several plans meet.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.ir.graph import DTYPE_BYTES, TensorType
from autopar.ir.sharding import (
    WHOLE,
    AxisSharding,
    Mesh,
    Partial,
    Sharding,
    Split,
    Whole,
    dim_atoms,
    dim_splits,
    is_legal,
    max_local_elements,
)

SLICE = "slice"
ALL_GATHER = "all_gather"
ALL_TO_ALL = "all_to_all"
ALL_REDUCE = "all_reduce"
REDUCE_SCATTER = "reduce_scatter"
TERM = "term"

CollectiveSeconds = Callable[[str, int, int], float]
"""Seconds of a collective: (kind, bytes of the full tensor, mesh axis)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One axis of a sharding changes.

    Attributes:
        kind: One of the six above.
        axis: Mesh axis.
        before: Sharding before; ``after`` the one behind it.
    """

    kind: str
    axis: int
    before: Sharding
    after: Sharding


@lru_cache(maxsize=1 << 18)
def step_kind(shape: tuple[int, ...], before: Sharding, after: Sharding, axis: int) -> str | None:
    """What runs to change ``axis`` of a value of this global shape; None if nothing can."""
    old, new = before[axis], after[axis]
    if isinstance(new, Partial) or old == new:
        return None
    if isinstance(old, Partial):
        return ALL_REDUCE if isinstance(new, Whole) else REDUCE_SCATTER
    if isinstance(old, Whole):
        return SLICE
    if isinstance(new, Whole):
        return ALL_GATHER
    return ALL_TO_ALL if joint_atoms_exist(shape, before, axis, new) else None


def joint_atoms_exist(shape: Sequence[int], before: Sharding, axis: int, new: AxisSharding) -> bool:
    """Whether the old and the new split of ``axis`` divide the tensor into common pieces."""
    old = before[axis]
    assert isinstance(old, Split) and isinstance(new, Split)
    if old.dim != new.dim:
        return True
    splits = [*dim_splits(before, old.dim), (len(before), new)]
    pieces = dim_atoms(shape[old.dim], splits)
    return pieces is not None


def step_bytes(kind: TensorType, step: Step) -> int:
    """Bytes of the tensor the collective joins or divides: whole over the step's axis."""
    if step.kind == ALL_TO_ALL:
        return max_local_elements(kind.shape, step.before) * DTYPE_BYTES[kind.dtype]
    full = tuple(WHOLE if a == step.axis else s for a, s in enumerate(step.before))
    return max_local_elements(kind.shape, full) * DTYPE_BYTES[kind.dtype]


def copied_elements(kind: TensorType, step: Step) -> int:
    """Elements that a rank copies in a step, beside its collective.

    A collective joins or divides what lies one rank's piece behind another's. Where a split is of
    an inner dim, pieces are brought into that order before it, or out of it behind it; a slice of
    an inner dim is a copy too.
    """
    if step.kind == SLICE:
        inner = _is_inner(kind.shape, step.after, step.axis)
        return max_local_elements(kind.shape, step.after) if inner else 0
    laid_out = {
        ALL_GATHER: (step.before,),
        REDUCE_SCATTER: (step.after,),
        ALL_TO_ALL: (step.before, step.after),
    }.get(step.kind, ())
    often = sum(_is_inner(kind.shape, sharding, step.axis) for sharding in laid_out)
    return often * step_bytes(kind, step) // DTYPE_BYTES[kind.dtype]


@lru_cache(maxsize=1 << 18)
def _is_inner(shape: tuple[int, ...], sharding: Sharding, axis: int) -> bool:
    """Whether a rank holds more than one run of what an axis splits."""
    split = sharding[axis]
    assert isinstance(split, Split)
    for dim, size in enumerate(shape[: split.dim + 1]):
        for atom in dim_atoms(size, dim_splits(sharding, dim)) or ():
            if atom.axis == axis:
                return False
            if atom.most > 1:
                return True
    return False


def replaced(sharding: Sharding, axis: int, new: AxisSharding) -> Sharding:
    """The sharding with one axis changed."""
    return (*sharding[:axis], new, *sharding[axis + 1 :])


def step_s(kind: TensorType, step: Step, mesh: Mesh, collective_s: CollectiveSeconds) -> float:
    """Seconds of a step in all microbatches; a slice is free, and so is accumulating."""
    if step.kind in (SLICE, TERM):
        return 0.0
    if step.axis == mesh.time_axis:
        return 0.0 if step.kind == ALL_REDUCE else float("inf")
    return collective_s(step.kind, step_bytes(kind, step), step.axis) * repeats(mesh, step.before)


def repeats(mesh: Mesh, *shardings: Sharding) -> int:
    """How often a step runs what works on values of these shardings."""
    axis = mesh.time_axis
    if axis is None or all(sharding[axis] == WHOLE for sharding in shardings):
        return 1
    return mesh.sizes[axis]


def is_sum(sharding: AxisSharding) -> bool:
    """Whether ranks of an axis have terms of a sum."""
    return isinstance(sharding, Partial) and sharding.reduce == "sum"


def steps_towards(kind: TensorType, now: Sharding, target: Sharding, mesh: Mesh) -> Iterable[Step]:
    """Steps that bring one axis to its target or to whole."""
    for axis, (old, wanted) in enumerate(zip(now, target, strict=True)):
        for new in dict.fromkeys((wanted, WHOLE)) if old != wanted else ():
            after = replaced(now, axis, new)
            what = step_kind(kind.shape, now, after, axis)
            if axis != mesh.time_axis and isinstance(old, Whole) and is_sum(new):
                what = TERM
            if what is not None and is_legal(kind.shape, after, mesh, empty=True):
                yield Step(what, axis, now, after)


def cheapest_path(
    kind: TensorType,
    starts: Mapping[Sharding, object] | Sequence[Sharding],
    target: Sharding,
    mesh: Mesh,
    collective_s: CollectiveSeconds,
) -> tuple[Step, ...] | None:
    """Cheapest steps from any of ``starts`` to ``target``, by seconds then by their number.

    None if the target cannot be reached (another partial target than a sum, of a complete value).
    """
    queue: list[tuple[float, int, int, Sharding]] = []
    best: dict[Sharding, tuple[float, int]] = {}
    came: dict[Sharding, Step] = {}
    for order, start in enumerate(starts):
        best[start] = (0.0, 0)
        heapq.heappush(queue, (0.0, 0, order, start))
    count = len(queue)
    while queue:
        seconds, hops, _, now = heapq.heappop(queue)
        if (seconds, hops) > best[now]:
            continue
        if now == target:
            path: list[Step] = []
            while now in came:
                path.append(came[now])
                now = came[now].before
            return tuple(reversed(path))
        for step in sorted(steps_towards(kind, now, target, mesh), key=lambda s: (s.axis, s.kind)):
            cost = (seconds + step_s(kind, step, mesh, collective_s), hops + 1)
            if cost[0] == float("inf"):
                continue
            if step.after not in best or cost < best[step.after]:
                best[step.after] = cost
                came[step.after] = step
                count += 1
                heapq.heappush(queue, (*cost, count, step.after))
    return None
