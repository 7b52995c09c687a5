"""Cuts of a pipeline that hints ask for: where stages begin, and what runs on which."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate

from autopar.errors import HintError
from autopar.hint import CutBefore, Stage
from autopar.search.analysis import Analysis
from autopar.search.stages import bounded_cuts, forward_order, least_firsts

CutHint = CutBefore | Stage


@dataclass(frozen=True, slots=True)
class Asked:
    """What cut hints ask for, in positions of `forward_order`.

    Attributes:
        cuts: Positions before which a chunk begins.
        stages: Position to the stage that must run it.
    """

    cuts: frozenset[int] = frozenset()
    stages: dict[int, int] = field(default_factory=dict)


def least_starts(
    analysis: Analysis, hints: Sequence[CutHint], lanes: Sequence[int]
) -> list[list[int]] | None:
    """For every chunk and end, the first position at which it may begin; None without hints.

    Args:
        analysis: The step.
        hints: All hints about cuts.
        lanes: Stage of every chunk.

    Raises:
        HintError: A hint matches nothing or asks for a stage that is not there, or hints cannot be
            met together.
    """
    if not hints:
        return None
    modules = [_prefixes(_module(analysis, name)) for name in forward_order(analysis)]
    for hint in hints:
        _check(hint, modules, max(lanes) + 1)
    if not _possible(hints, modules, lanes):
        blamed = list(hints)
        for hint in hints:
            rest = [other for other in blamed if other is not hint]
            if not _possible(rest, modules, lanes):
                blamed = rest
        said = " and ".join(_text(hint) for hint in blamed)
        raise HintError(
            f"cannot cut the model into {len(lanes)} pieces on stages {list(lanes)}, in the order "
            f"in which its modules run, as {said} {'ask' if len(blamed) > 1 else 'asks'}; drop "
            f"{'one' if len(blamed) > 1 else 'it'}, or use another number of stages"
        )
    asked = _asked(hints, modules)
    return least_firsts(len(modules), asked.cuts, asked.stages, lanes)


def _module(analysis: Analysis, name: str) -> str:
    return analysis.graph.by_name[name].source.module


def _prefixes(module: str) -> tuple[str, ...]:
    """A module's path and those of the modules around it, outermost first."""
    return tuple(accumulate(module.split("."), lambda a, b: f"{a}.{b}")) if module else ()


def _matched(pattern: str, prefixes: Sequence[str]) -> str | None:
    """The outermost module that a pattern matches, if any."""
    return next((path for path in prefixes if fnmatchcase(path, pattern)), None)


def _asked(hints: Sequence[CutHint], modules: Sequence[Sequence[str]]) -> Asked:
    cuts: set[int] = set()
    stages: dict[int, int] = {}
    for hint in hints:
        first: dict[str, int] = {}
        for position, prefixes in enumerate(modules):
            path = _matched(hint.pattern, prefixes)
            if path is None:
                continue
            first.setdefault(path, position)
            if isinstance(hint, Stage):
                stages[position] = hint.number
        if isinstance(hint, CutBefore):
            cuts.update(first.values())
    return Asked(frozenset(cuts), stages)


def _possible(
    hints: Sequence[CutHint], modules: Sequence[Sequence[str]], lanes: Sequence[int]
) -> bool:
    """Whether some cuts meet the hints."""
    numbers: dict[int, int] = {}
    for hint in hints:
        for position, number in _asked([hint], modules).stages.items():
            if numbers.setdefault(position, number) != number:
                return False
    asked = _asked(hints, modules)
    least = least_firsts(len(modules), asked.cuts, asked.stages, lanes)
    return bounded_cuts([[0.0] * len(modules)] * len(lanes), least) is not None


def _check(hint: CutHint, modules: Sequence[Sequence[str]], num_stages: int) -> None:
    """Refuse what no cut could meet."""
    asked = _asked([hint], modules)
    if not asked.cuts and not asked.stages:
        paths = list(dict.fromkeys(path for prefixes in modules for path in prefixes))
        bare = hint.pattern.strip("*.")
        near = difflib.get_close_matches(bare, paths, n=3, cutoff=0.3)
        near = near or [path for path in paths if bare.split(".")[-1] in path][:3] or paths[:3]
        raise HintError(
            f"cannot apply {_text(hint)}: no module that runs an op matches; did you mean "
            f"{', '.join(map(repr, near)) or 'another model'}?"
        )
    if 0 in asked.cuts:
        raise HintError(
            f"cannot apply {_text(hint)}: {_matched(hint.pattern, modules[0])!r} runs first, so "
            "that a stage begins there anyway; name a module behind it"
        )
    if isinstance(hint, Stage) and hint.number >= num_stages:
        raise HintError(
            f"cannot apply {_text(hint)}: there are {num_stages} stages; use 0 to {num_stages - 1}"
        )


def _text(hint: CutHint) -> str:
    if isinstance(hint, CutBefore):
        return f"hint.cut_before({hint.pattern!r})"
    return f"hint.stage({hint.pattern!r}, {hint.number})"
