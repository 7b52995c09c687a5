"""How a value lies on a mesh.

A dim of size D is split over a mesh axis of n ranks by two numbers. It is seen as ``outer`` equal
rows of length L = D / outer, and every row is cut into n chunks of ``block`` elements (the last
ones may be shorter); rank i holds chunk i of every row. ``outer = 1, block = ceil(D / n)`` is the
usual contiguous split. A merged dim (batch * sequence) split by sequence is ``outer = batch,
block = sequence / n``: no view loses a sharding, because a view moves neither the rows nor the
chunks, it only renames the dim they are counted in. Two axes on one dim are two such splits, the
outer one with the smaller ``outer``; their order is part of the sharding.

`Atom` is the reading of one dim as a product of pieces, each whole or split by one axis; local
shapes, views of local tensors and collectives all work on atoms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

TIME = "time"
"""Name of the time axis: its size is the number of microbatches, its coordinate the microbatch."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A named grid of ranks, row-major: the last axis varies fastest.

    The last axis may be the time axis: the same ranks run its coordinates one after the other, so
    a value split over it is there a microbatch at a time, one partial over it is accumulated, and
    one whole over it serves all microbatches.

    Attributes:
        names: Axis names, outermost first.
        sizes: Ranks on each axis.
        levels: Network level each axis lies on (an index into the cluster's levels, 0 innermost).
        roles: Role of each axis (``dp``, ``tp`` ...) where a hint created it, else ``""``.
        rows: Equal rows of the batch, each of which the time axis cuts into microbatches. Meshes
            that split the batch into different numbers of parts run the same microbatches if their
            rows are equal and a multiple of those numbers.
        in_turn: Whether the first samples of the batch are the first microbatch, which the ranks'
            axes then split; else every rank's part of the batch is cut into microbatches.
        shares: For every axis, how many equal parts of the batch each of its ranks takes; empty
            for one each. No entries at all: so on every axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    levels: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()
    rows: int = 1
    shares: tuple[tuple[int, ...], ...] = ()
    in_turn: bool = False

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes)
        assert not self.shares or all(
            not own or (len(own) == size and sum(own) > 0 and min(own) >= 0)
            for own, size in zip(self.shares, self.sizes, strict=True)
        )
        if not self.levels:
            object.__setattr__(self, "levels", (0,) * len(self.names))
        if not self.roles:
            object.__setattr__(self, "roles", ("",) * len(self.names))

    @property
    def time_axis(self) -> int | None:
        """Index of the time axis, None if there is one microbatch."""
        return len(self.names) - 1 if self.names and self.names[-1] == TIME else None

    @property
    def microbatches(self) -> int:
        return 1 if self.time_axis is None else self.sizes[-1]

    @property
    def space(self) -> Mesh:
        """The mesh of ranks, without the time axis."""
        if self.time_axis is None:
            return self
        return Mesh(
            self.names[:-1],
            self.sizes[:-1],
            self.levels[:-1],
            self.roles[:-1],
            shares=self.shares[:-1],
        )

    @property
    def turns(self) -> int:
        """Parts of the batch that follow each other and that the ranks' axes split each."""
        return self.microbatches if self.in_turn else 1

    def with_time(self, microbatches: int, rows: int = 1, *, in_turn: bool = False) -> Mesh:
        """The mesh of ranks with a time axis behind it, if there are several microbatches."""
        space = self.space
        if microbatches == 1:
            return space
        return Mesh(
            (*space.names, TIME),
            (*space.sizes, microbatches),
            (*space.levels, 0),
            (*space.roles, TIME),
            rows,
            (*space.shares, ()) if space.shares else (),
            in_turn,
        )

    def shares_of(self, axis: int) -> tuple[int, ...]:
        """Parts of the batch that the ranks of an axis take; empty for one each."""
        return self.shares[axis] if self.shares else ()

    @property
    def even(self) -> Mesh:
        """The mesh with equal parts for all ranks."""
        return replace(self, shares=()) if self.shares else self

    @property
    def fullest(self) -> tuple[int, ...]:
        """Coordinates of a rank that takes most, in the first microbatch."""
        own = (self.shares_of(axis) for axis in range(len(self.sizes)))
        return tuple(shares.index(max(shares)) if shares else 0 for shares in own)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.space.sizes) if self.time_axis is not None else math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank on the axes of ranks (the time axis left out)."""
        found = []
        for size in reversed(self.space.sizes):
            found.append(rank % size)
            rank //= size
        return tuple(reversed(found))

    def rank(self, coordinates: Sequence[int]) -> int:
        rank = 0
        for coordinate, size in zip(coordinates, self.sizes, strict=True):
            rank = rank * size + coordinate
        return rank


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """One axis splits ``dim``: rows of D / outer elements, cut into chunks of ``block``.

    With ``shares``, rank i holds ``shares[i]`` chunks that follow each other instead of one.
    """

    dim: int
    outer: int
    block: int
    shares: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"S{self.dim}" if self.outer == 1 else f"S{self.dim}/{self.outer}"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """Every rank of the axis holds a term; the value is their ``reduce`` (sum, max or min)."""

    reduce: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P{self.reduce}"


@dataclass(frozen=True, slots=True, order=True)
class Whole:
    """Every rank of the axis holds the same."""

    def __str__(self) -> str:
        return "R"


WHOLE = Whole()
SUM = Partial("sum")
AxisSharding = Split | Partial | Whole
Sharding = tuple[AxisSharding, ...]
"""What each mesh axis does to a value, in the order of the mesh's axes."""


def whole(mesh: Mesh) -> Sharding:
    """The sharding in which every rank holds the whole value."""
    return (WHOLE,) * len(mesh.sizes)


def text(sharding: Sharding) -> str:
    """``S0 R`` and the like."""
    return " ".join(str(axis) for axis in sharding) or "R"


@dataclass(frozen=True, slots=True)
class Atom:
    """A piece of a dim.

    Attributes:
        size: Global number of units.
        axis: Mesh axis that splits it, or None.
        chunk: Units a rank holds (the last ranks may hold fewer); ``size`` where it is whole.
        shares: Chunks that every rank holds, where that is not one.
    """

    size: int
    axis: int | None
    chunk: int
    shares: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """Units on the rank that holds most."""
        return self.chunk * max(self.shares, default=1)

    def start(self, coordinate: int) -> int:
        """First unit of the rank with this coordinate on the atom's axis."""
        if self.shares:
            return self.chunk * sum(self.shares[:coordinate])
        return 0 if self.axis is None else min(coordinate * self.chunk, self.size)

    def local(self, coordinate: int) -> int:
        """Units on the rank with this coordinate on the atom's axis."""
        if self.axis is None:
            return self.size
        if self.shares:
            return self.chunk * self.shares[coordinate]
        return min(self.chunk, max(0, self.size - coordinate * self.chunk))


def dim_atoms(size: int, splits: Sequence[tuple[int, Split]]) -> tuple[Atom, ...] | None:
    """The atoms of a dim of ``size`` under the splits (axis, split) on it, outermost first.

    None if the splits do not fit the size or each other.
    """
    if not splits:
        return (Atom(size, None, size),)
    ordered = sorted(splits, key=lambda item: item[1].outer)
    atoms: list[Atom] = []
    at = 1
    for position, (axis, split) in enumerate(ordered):
        following = ordered[position + 1][1].outer if position + 1 < len(ordered) else size
        if split.outer <= 0 or split.outer % at or size % split.outer or split.outer < at:
            return None
        if size % following or following % split.outer or following == split.outer != size:
            return None
        if split.outer > at:
            atoms.append(Atom(split.outer // at, None, split.outer // at))
        unit = size // following
        if split.block % unit:
            return None
        atoms.append(Atom(following // split.outer, axis, split.block // unit, split.shares))
        at = following
    return tuple(atoms)


def dim_splits(sharding: Sharding, dim: int) -> list[tuple[int, Split]]:
    """(axis, split) of every axis that splits ``dim``."""
    return [(a, s) for a, s in enumerate(sharding) if type(s) is Split and s.dim == dim]


def atoms(shape: Sequence[int], sharding: Sharding) -> tuple[tuple[Atom, ...], ...]:
    """The atoms of every dim; the sharding must be legal for the shape."""
    found = []
    for dim, size in enumerate(shape):
        pieces = dim_atoms(size, dim_splits(sharding, dim))
        assert pieces is not None, (shape, sharding)
        found.append(pieces)
    return tuple(found)


def is_legal(shape: Sequence[int], sharding: Sharding, mesh: Mesh, *, empty: bool = False) -> bool:
    """Whether the sharding fits the shape on the mesh.

    Every element must lie on some rank; ``empty`` allows ranks without elements. Chunks may be
    longer than the least that suffices: a merged dim of 5 samples of 8 tokens is split over 2 ranks
    by samples in chunks of 24.
    """
    return _is_legal(tuple(shape), sharding, mesh.sizes, empty)


@lru_cache(maxsize=1 << 18)
def _is_legal(
    shape: tuple[int, ...], sharding: Sharding, sizes: tuple[int, ...], empty: bool
) -> bool:
    dims = [axis.dim for axis in sharding if type(axis) is Split]
    if any(not 0 <= dim < len(shape) for dim in dims):
        return False
    for dim in set(dims):
        pieces = dim_atoms(shape[dim], dim_splits(sharding, dim))
        if pieces is None:
            return False
        for atom in pieces:
            if atom.axis is None:
                continue
            ranks = sizes[atom.axis]
            if atom.shares:
                if len(atom.shares) != ranks or atom.chunk * sum(atom.shares) != atom.size:
                    return False
                continue
            least = -(-atom.size // ranks)
            if not least <= atom.chunk <= atom.size:
                return False
            if (atom.chunk > least or not empty) and not atom.local(ranks - 1):
                return False
    return True


def local_shape(
    shape: Sequence[int], sharding: Sharding, coordinates: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the piece on the rank with these mesh coordinates."""
    if all(type(axis) is not Split for axis in sharding):
        return tuple(shape)
    found = list(shape)
    for dim in {axis.dim for axis in sharding if type(axis) is Split}:
        pieces = dim_atoms(shape[dim], dim_splits(sharding, dim))
        assert pieces is not None, (shape, sharding)
        found[dim] = math.prod(
            atom.local(0 if atom.axis is None else coordinates[atom.axis]) for atom in pieces
        )
    return tuple(found)


def local_indices(
    size: int, splits: Sequence[tuple[int, Split]], coordinates: Sequence[int]
) -> tuple[int, ...] | range:
    """Global indices along a dim that the rank holds, in local order."""
    pieces = dim_atoms(size, splits)
    assert pieces is not None
    found: Sequence[int] = range(1)
    for atom in pieces:
        coordinate = 0 if atom.axis is None else coordinates[atom.axis]
        start = atom.start(coordinate)
        own = range(start, start + atom.local(coordinate))
        found = own if found == range(1) else tuple(i * atom.size + j for i in found for j in own)
    return found if isinstance(found, range) else tuple(found)


def contiguous_start(
    size: int, splits: Sequence[tuple[int, Split]], coordinates: Sequence[int]
) -> int | None:
    """First global index of the rank's piece of a dim, None if its indices have gaps."""
    found = local_indices(size, splits, coordinates)
    if len(found) == 0:
        return size
    return found[0] if found[-1] - found[0] == len(found) - 1 else None


@dataclass(frozen=True, slots=True)
class Elements:
    """Which elements of a whole a piece holds, by their numbers in row-major order.

    Attributes:
        start: Number of the piece's first element in microbatch 0.
        per_microbatch: What each further microbatch adds to it.
        runs: (count, stride) of nested loops, outermost first; the piece's elements in its own
            order are at ``start + sum(i * stride)``. Empty for a single element.
    """

    start: int
    per_microbatch: int
    runs: tuple[tuple[int, int], ...]


def local_elements(
    shape: Sequence[int], sharding: Sharding, coordinates: Sequence[int], time: int | None
) -> Elements:
    """The elements on the rank with these mesh coordinates.

    Args:
        shape: Global shape.
        sharding: How it is split.
        coordinates: Of the rank; on the time axis, the microbatch whose sizes are meant.
        time: Index of the time axis, or None.
    """
    start = per_microbatch = 0
    stride = 1
    runs: list[tuple[int, int]] = []
    for pieces in reversed(atoms(shape, sharding)):
        for atom in reversed(pieces):
            count = atom.size if atom.axis is None else atom.local(coordinates[atom.axis])
            if atom.axis is not None and atom.axis == time:
                per_microbatch += atom.chunk * stride
            elif atom.axis is not None:
                start += atom.start(coordinates[atom.axis]) * stride
            if runs and runs[-1][0] * runs[-1][1] == stride:
                runs[-1] = (runs[-1][0] * count, runs[-1][1])
            elif count != 1:
                runs.append((count, stride))
            stride *= atom.size
    return Elements(start, per_microbatch, tuple(reversed(runs)))


def max_local_elements(shape: Sequence[int], sharding: Sharding) -> int:
    """Elements on the rank that holds most (the rank with all coordinates 0, if shares are equal).

    That rank holds a full chunk of every split, so each leaves ``outer * block`` of its dim.
    """
    whole_elements, kept, of = math.prod(shape), 1, 1
    for axis in sharding:
        if type(axis) is Split:
            kept *= axis.outer * axis.block * max(axis.shares, default=1)
            of *= shape[axis.dim]
    return whole_elements * kept // of if of else 0
