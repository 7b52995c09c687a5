"""Which piece of a value goes from which rank to which, between two meshes.

A rank's piece of a dim is a list of intervals of global indices, in rising order. What a source and
a target rank both hold of a dim is the intersection of their intervals, and what they both hold of
a value the product over its dims; runs of equal intervals at equal distances are one loop, so that
a piece is a few boxes, whatever splits meet. A value that several source ranks hold is taken from
the one that has sent least so far. Of a value that arrives partial, the first rank along an axis
gets all and the others hold zeros.

Every rank works this out alone, for all ranks, in the same order: so they agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.ir.sharding import (
    Mesh,
    Partial,
    Sharding,
    Split,
    Whole,
    dim_atoms,
    dim_splits,
    local_shape,
)


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a rank's piece, as nested loops over its contiguous memory, outermost first.

    Attributes:
        start: Number of the first element.
        sizes: Of the loops; ``strides`` in elements.
    """

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in memory."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank sends to, or receives from, another of one value.

    Attributes:
        place: Number of the other rank on its mesh.
        boxes: In this rank's piece, in the order in which their elements travel.
    """

    place: int
    boxes: tuple[Box, ...]

    @property
    def num_elements(self) -> int:
        return sum(box.num_elements for box in self.boxes)

    @property
    def is_contiguous(self) -> bool:
        """Whether it travels from, or to, where it lies, without a copy."""
        return len(self.boxes) == 1 and self.boxes[0].is_contiguous


@dataclass(frozen=True, slots=True)
class Side:
    """How a value lies on one side of a border.

    Attributes:
        mesh: Mesh of the ranks.
        sharding: Sharding of the value on it.
        microbatch: The microbatch that is meant, if the mesh has a time axis.
    """

    mesh: Mesh
    sharding: Sharding
    microbatch: int = 0

    def coordinates(self, place: int) -> tuple[int, ...]:
        """Mesh coordinates of a rank, the microbatch included."""
        own = self.mesh.coordinates(place)
        return own if self.mesh.time_axis is None else (*own, self.microbatch)

    @property
    def space(self) -> Sharding:
        """What the axes of ranks do."""
        return self.sharding[: len(self.mesh.space.sizes)]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Everything that crosses a border of one value.

    Attributes:
        sends: For every source rank its parts, by rising target rank.
        takes: For every target rank its parts, by rising source rank.
    """

    sends: Mapping[int, tuple[Part, ...]]
    takes: Mapping[int, tuple[Part, ...]]


def sent_parts(shape: tuple[int, ...], source: Side, target: Side, place: int) -> tuple[Part, ...]:
    """What a rank of the source sends.

    Args:
        shape: Global shape of the value.
        source: How it leaves; whole or split over the axes of ranks, unless it arrives alike.
        target: How it arrives.
        place: Number of the rank on the source's mesh.
    """
    if _alike(source, target):
        return _own_piece(shape, source, place)
    return exchange(shape, source, target).sends.get(place, ())


def taken_parts(shape: tuple[int, ...], source: Side, target: Side, place: int) -> tuple[Part, ...]:
    """What a rank of the target receives; arguments as of `sent_parts`."""
    if _alike(source, target):
        return _own_piece(shape, target, place)
    return exchange(shape, source, target).takes.get(place, ())


def _alike(source: Side, target: Side) -> bool:
    """Whether every rank's piece goes as it is to the rank at the same place."""
    sizes = source.mesh.space.sizes == target.mesh.space.sizes
    return sizes and source.sharding == target.sharding


def _own_piece(shape: tuple[int, ...], side: Side, place: int) -> tuple[Part, ...]:
    count = math.prod(local_shape(shape, side.sharding, side.coordinates(place)))
    return (Part(place, (Box(0, (count,), (1,)),)),) if count else ()


Interval = tuple[int, int]
"""First index and number of indices."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal intervals at equal distances that two ranks hold of a dim.

    Attributes:
        length: Of each interval; ``count`` of them.
        starts: Local index of the first on the source and on the target.
        steps: Distance from one to the next, on either.
    """

    length: int
    count: int
    starts: tuple[int, int]
    steps: tuple[int, int]


@lru_cache(maxsize=1 << 12)
def exchange(shape: tuple[int, ...], source: Side, target: Side) -> Exchange:
    """What every rank sends and receives; arguments as of `sent_parts`."""
    assert all(isinstance(axis, Split | Whole) for axis in source.space), source
    replicas = [
        range(size if isinstance(axis, Whole) else 1)
        for axis, size in zip(source.space, source.mesh.space.sizes, strict=True)
    ]
    dims = [_Dim(size, dim, source) for dim, size in enumerate(shape)]
    sends: dict[int, list[Part]] = {}
    takes: dict[int, list[Part]] = {}
    sent = [0] * source.mesh.num_ranks
    for place in range(target.mesh.num_ranks):
        where = target.coordinates(place)
        if _holds_zeros(target.sharding, where):
            continue
        own = local_shape(shape, target.sharding, where)
        met = [list(dim.met(target.sharding, where)) for dim in dims]
        for choice in itertools.product(*met):
            fixed = {axis: at for coordinates, _ in choice for axis, at in coordinates}
            holders = [
                source.mesh.space.rank([fixed.get(axis, at) for axis, at in enumerate(copy)])
                for copy in itertools.product(*replicas)
            ]
            holder = min(holders, key=lambda rank: (sent[rank], rank))
            theirs = local_shape(shape, source.sharding, source.coordinates(holder))
            boxes = list(itertools.product(*(runs for _, runs in choice)))
            given = tuple(_box(runs, theirs, 0) for runs in boxes)
            taken = tuple(_box(runs, own, 1) for runs in boxes)
            sent[holder] += sum(box.num_elements for box in given)
            sends.setdefault(holder, []).append(Part(place, given))
            takes.setdefault(place, []).append(Part(holder, taken))
    return Exchange(
        sends={rank: tuple(parts) for rank, parts in sends.items()},
        takes={
            rank: tuple(sorted(parts, key=lambda part: part.place)) for rank, parts in takes.items()
        },
    )


def _holds_zeros(sharding: Sharding, coordinates: Sequence[int]) -> bool:
    """Whether a rank's term of a partial value is zero: the first rank along the axis has all."""
    return any(
        isinstance(axis, Partial) and axis.reduce == "sum" and at > 0
        for axis, at in zip(sharding, coordinates, strict=True)
    )


class _Dim:
    """One dim of a value, as the source's ranks hold it."""

    def __init__(self, size: int, dim: int, source: Side) -> None:
        self.size = size
        self.dim = dim
        time = source.mesh.time_axis
        splits = dim_splits(source.sharding, dim)
        axes = [axis for axis, _ in splits if axis != time]
        self.held: list[tuple[tuple[tuple[int, int], ...], list[Interval]]] = []
        for places in itertools.product(*(range(source.mesh.sizes[axis]) for axis in axes)):
            chosen = dict(zip(axes, places, strict=True))
            where = chosen if time is None else {**chosen, time: source.microbatch}
            self.held.append((tuple(chosen.items()), intervals(size, splits, where)))

    def met(
        self, sharding: Sharding, coordinates: Sequence[int]
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], list[_Run]]]:
        """Source coordinates that hold some of what a target rank holds, and what that is."""
        where = dict(enumerate(coordinates))
        own = intervals(self.size, dim_splits(sharding, self.dim), where)
        for chosen, theirs in self.held:
            if runs := list(_runs(theirs, own)):
                yield chosen, runs


def intervals(
    size: int, splits: Sequence[tuple[int, Split]], coordinates: Mapping[int, int]
) -> list[Interval]:
    """Global indices of a dim that a rank holds, in rising order: as `local_indices`, joined.

    Args:
        size: Of the dim.
        splits: (axis, split) of every axis that splits it.
        coordinates: Of the rank, by axis.
    """
    pieces = dim_atoms(size, splits)
    assert pieces is not None, (size, splits)
    found: list[Interval] = [(0, 1)]
    for atom in pieces:
        at = 0 if atom.axis is None else coordinates[atom.axis]
        first, count = atom.start(at), atom.local(at)
        if count == atom.size:
            found = [(start * count, length * count) for start, length in found]
        elif count == 0:
            return []
        else:
            found = [
                (index * atom.size + first, count)
                for start, length in found
                for index in range(start, start + length)
            ]
    return found


def _runs(theirs: Sequence[Interval], own: Sequence[Interval]) -> Iterator[_Run]:
    """What two lists of intervals share, in local indices of both."""
    run: _Run | None = None
    for at_source, at_target, length in _shared(theirs, own):
        now = (at_source, at_target)
        if run is not None and length == run.length:
            steps = tuple(b - a for a, b in zip(run.starts, now, strict=True))
            if run.count == 1:
                run = _Run(length, 2, run.starts, (steps[0], steps[1]))
                continue
            if steps == tuple(step * run.count for step in run.steps):
                run = _Run(length, run.count + 1, run.starts, run.steps)
                continue
        if run is not None:
            yield run
        run = _Run(length, 1, now, (0, 0))
    if run is not None:
        yield run


def _shared(theirs: Sequence[Interval], own: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """Local index on either side and length of every stretch that both hold."""
    i = j = at_source = at_target = 0
    while i < len(theirs) and j < len(own):
        (a, m), (b, n) = theirs[i], own[j]
        first, last = max(a, b), min(a + m, b + n)
        if first < last:
            yield at_source + first - a, at_target + first - b, last - first
        if a + m <= b + n:
            at_source += m
            i += 1
        if b + n <= a + m:
            at_target += n
            j += 1


def _box(runs: Sequence[_Run], shape: Sequence[int], side: int) -> Box:
    """The product of a run of every dim, in a piece of this local shape.

    Args:
        runs: One a dim.
        shape: Local shape.
        side: 0 for the source, 1 for the target.
    """
    start, stride = 0, 1
    loops: list[tuple[int, int]] = []
    for run, size in zip(reversed(runs), reversed(shape), strict=True):
        start += run.starts[side] * stride
        loops.append((run.length, stride))
        loops.append((run.count, run.steps[side] * stride))
        stride *= size
    kept = [loop for loop in reversed(loops) if loop[0] > 1] or [(1, 1)]
    return Box(start, tuple(n for n, _ in kept), tuple(s for _, s in kept))
