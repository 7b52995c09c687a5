"""Layouts of one value: the shardings that it may have, and those that lie between."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import (
    TensorType,
)
from autopar.ir.sharding import (
    WHOLE,
    AxisSharding,
    Mesh,
    Partial,
    Sharding,
    Split,
)
from autopar.rules.strategies import Strategy
from autopar.search.problem import (
    Arc,
)


@dataclass(frozen=True, slots=True)
class Home:
    """A layout in host memory, where the value is split so.

    Attributes:
        sharding: How.
        again: Of a cast, whether it is what it is cast of that lies there.
    """

    sharding: Sharding
    again: bool = False


@dataclass(slots=True)
class Layouts:
    """Numbered shardings of one value; behind them those in host memory, ``homes``."""

    kind: TensorType
    index: dict[Sharding, int] = field(default_factory=dict)
    homes: dict[Home, int] = field(default_factory=dict)

    def number(self, sharding: Sharding) -> int:
        assert not self.homes
        return self.index.setdefault(sharding, len(self.index))

    def home(self, home: Home) -> int:
        """Number of a layout in host memory, once all others have theirs."""
        return self.homes.setdefault(home, len(self.index) + len(self.homes))

    @property
    def all(self) -> tuple[Sharding | Home, ...]:
        """By number."""
        return (*self.index, *self.homes)


def leading(
    layouts: Layouts, arcs: Sequence[Arc], needed: frozenset[int], known: int
) -> tuple[tuple[Sharding, ...], tuple[Arc, ...]]:
    """The layouts that were known or lead to one that is needed, and the arcs between them."""
    into: dict[int, list[int]] = {}
    for arc in arcs:
        into.setdefault(arc.head, []).append(arc.tail)
    leading, waiting = set(needed), list(needed)
    while waiting:
        for tail in into.get(waiting.pop(), ()):
            if tail not in leading:
                leading.add(tail)
                waiting.append(tail)
    kept = [
        (sharding, number)
        for sharding, number in layouts.index.items()
        if number < known or number in leading
    ]
    now = {number: place for place, (_, number) in enumerate(kept)}
    left = (arc for arc in arcs if arc.head in leading)
    return (
        tuple(sharding for sharding, _ in kept),
        tuple(replace(arc, tail=now[arc.tail], head=now[arc.head]) for arc in left),
    )


def reads_terms(strategy: Strategy, port: int) -> bool:
    return any(isinstance(axis, Partial) for axis in strategy.operands[port])


def axis_order(axis: AxisSharding) -> tuple[int, ...]:
    if isinstance(axis, Split):
        return (1, axis.dim, axis.outer, axis.block, *axis.shares)
    return (0,) if axis == WHOLE else (2,)


def plain_shardings(
    shape: Sequence[int],
    mesh: Mesh,
    *,
    dims: Iterable[int],
    axes: Sequence[bool] | None = None,
    shares: bool = False,
    turns: int = 1,
) -> tuple[Sharding, ...]:
    """Shardings that torch's plain ``Shard`` can express: contiguous, nested in mesh order.

    Args:
        shape: Of the value.
        mesh: The mesh.
        dims: Which dims may be split.
        axes: Which axes may split them; None for all.
        shares: Whether ranks take their shares of the mesh instead of equal parts.
        turns: Equal parts of a dim that follow each other, each of which is split.
    """
    dims = tuple(dims)
    found: list[Sharding] = []
    options = [
        (None,) if axis == mesh.time_axis else (None, *dims) for axis in range(len(mesh.sizes))
    ]
    for chosen in itertools.product(*options):
        if axes is not None and any(
            dim is not None and not allowed for dim, allowed in zip(chosen, axes, strict=True)
        ):
            continue
        sharding: list[AxisSharding] = []
        rows: dict[int, tuple[int, int]] = {}
        fits = True
        for axis, (dim, ranks) in enumerate(zip(chosen, mesh.sizes, strict=True)):
            if dim is None or ranks == 1:
                sharding.append(WHOLE)
                fits = fits and dim is None
                continue
            own = mesh.shares_of(axis) if shares else ()
            parts = sum(own) or ranks
            outer, length = rows.get(dim, (turns, shape[dim] // turns))
            nested = bool(own) or dim in rows or turns > 1
            fits = fits and length > 0 and (not nested or length % parts == 0)
            block = -(-length // parts)
            sharding.append(Split(dim, outer, block, own))
            rows[dim] = (outer * parts, 0 if length % parts else block)
        if fits:
            found.append(tuple(sharding))
    return tuple(dict.fromkeys(found))
