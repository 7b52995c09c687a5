"""Numbers, names and shardings as a person reads them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.ir.sharding import Mesh, Partial, Sharding, Split

_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def bytes_unit(size: float) -> tuple[float, str]:
    """The unit in which bytes of this size are written: how many bytes it is, and its name."""
    return next((one for one in _SIZES if abs(size) >= 0.9995 * one[0]), (1.0, "B"))


def seconds_unit(seconds: float) -> tuple[float, str]:
    """The unit in which seconds of this size are written: how many it is, and its name."""
    return next((one for one in _TIMES if abs(seconds) >= 0.9995 * one[0]), _TIMES[-1])


def bytes_text(size: float) -> str:
    """Bytes with three digits; GB is 1e9."""
    unit, name = bytes_unit(size)
    return f"{size:.0f} B" if name == "B" else f"{_digits(size / unit)} {name}"


def seconds_text(seconds: float) -> str:
    """Seconds with three digits."""
    if seconds == 0:
        return "0 s"
    unit, name = seconds_unit(seconds)
    return f"{_digits(seconds / unit)} {name}"


def _digits(number: float) -> str:
    """Three significant digits, whole from 100 on."""
    size = abs(number)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{number:,.{decimals}f}"


def percent_text(share: float) -> str:
    """A share as per cent; small ones keep a digit that is not 0."""
    percent = 100 * share
    if percent == 0 or abs(percent) >= 10:
        return f"{percent:.0f} %"
    if abs(percent) >= 0.1:
        return f"{percent:.1f} %"
    return f"{percent:.1g} %" if abs(percent) >= 1e-4 else "under 0.0001 %"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 2 to 7``, ``ranks 0, 2 to 3``: numbers that rise, at least one."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


def sharding_text(sharding: Sharding, mesh: Mesh) -> str:
    """``S0(tp) S1(dp)``: dims and the axes that split them, outermost first; ``P`` is partial.

    ``S0/16(tp)`` cuts each of 16 equal rows of dim 0: the inner part of a merged dim.
    """
    axes = list(zip(mesh.names, mesh.sizes, sharding, strict=True))
    splits = [(s.dim, s.outer, size, name) for name, size, s in axes if isinstance(s, Split)]
    groups: list[tuple[str, list[str]]] = []
    follows = (-1, 0)
    for dim, outer, size, name in sorted(splits):
        if (dim, outer) == follows:
            groups[-1][1].append(name)
        else:
            groups.append((f"S{dim}" if outer == 1 else f"S{dim}/{outer}", [name]))
        follows = (dim, outer * size)
    partial = [(str(s), name) for name, _, s in axes if isinstance(s, Partial)]
    for reduce in sorted({reduce for reduce, _ in partial}):
        groups.append((reduce, [name for own, name in partial if own == reduce]))
    return " ".join(f"{what}({','.join(names)})" for what, names in groups) or "whole"


def dims_text(shape: Sequence[int]) -> str:
    """``[14336, 4096]``."""
    return f"[{', '.join(map(str, shape))}]"


M = TypeVar("M", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Folded(Generic[M]):
    """Dotted names that differ in numbers only and mean the same.

    Attributes:
        parts: Parts of the name; a folded one is like ``0-31``.
        count: How many names it stands for.
        meaning: What they mean.
    """

    parts: tuple[str, ...]
    count: int
    meaning: M

    @property
    def name(self) -> str:
        return ".".join(self.parts)


def fold_names(items: Iterable[tuple[str, M]]) -> list[Folded[M]]:
    """Names with what they mean, those of repeated layers as one: ``layers.0-31.mlp``.

    The order is that of first appearance.
    """
    entries = [Folded(tuple(name.split(".")), 1, meaning) for name, meaning in items]
    for at in reversed(range(max((len(entry.parts) for entry in entries), default=0))):
        entries = _fold_part(entries, at)
    return entries


def _fold_part(entries: Sequence[Folded[M]], at: int) -> list[Folded[M]]:
    """Entries that differ in part ``at`` only, a number, joined."""
    groups: dict[Hashable, list[Folded[M]]] = {}
    for entry in entries:
        parts = entry.parts
        numbered = len(parts) > at and parts[at].isdecimal()
        around = (parts[:at], parts[at + 1 :], entry.count, entry.meaning)
        groups.setdefault(around if numbered else entry, []).append(entry)
    return [_join(group, at) for group in groups.values()]


def _join(group: Sequence[Folded[M]], at: int) -> Folded[M]:
    first = group[0]
    if len(group) == 1:
        return first
    numbers = ranges_text(int(entry.parts[at]) for entry in group)
    parts = (*first.parts[:at], numbers, *first.parts[at + 1 :])
    return Folded(parts, sum(entry.count for entry in group), first.meaning)


def ranges_text(numbers: Iterable[int]) -> str:
    """``0-3,7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
