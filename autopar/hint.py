"""Hints: small records by which a user restricts the plan.

Patterns are globs over module paths or parameter names. A hint that matches nothing is an error
that names near misses. The text of a hint is the call that makes it, ``hint.degrees(dp=2)``; plans
keep it, and `hint_of` reads it.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autopar.errors import HintError

Degree = int | tuple[int, ...] | None
"""Of all stages, or one for every stage of a pipeline; None leaves it free."""


class _Record:
    """What hints have in common: their text."""

    __slots__ = ()

    def __str__(self) -> str:
        """The call that makes it; what it leaves out is left out."""
        name, positional, named = self._call()
        given = [*map(repr, positional), *(f"{key}={value!r}" for key, value in named.items())]
        return f"hint.{name}({', '.join(given)})"

    def _call(self) -> tuple[str, Sequence[object], dict[str, object]]:
        """Name of the function and its arguments: first fields without a default by position."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()
        own = fields(self)  # type: ignore[arg-type]
        given = {item.name: getattr(self, item.name) for item in own}
        first = own[0].name
        by_name = {k: v for k, v in given.items() if k != first}
        defaults = {item.name: item.default for item in own}
        return name, (given[first],), {k: v for k, v in by_name.items() if v != defaults[k]}


@dataclass(frozen=True, slots=True)
class Degrees(_Record):
    """Named degrees of parallelism; None leaves one free."""

    dp: Degree = None
    tp: Degree = None
    pp: int | None = None
    cp: Degree = None
    ep: int | None = None
    zero: int | None = None

    @property
    def is_unlike(self) -> bool:
        """Whether stages have degrees of their own."""
        return any(isinstance(degree, tuple) for degree in (self.dp, self.tp, self.cp))

    def of_stage(self, stage: int) -> Degrees:
        """The degrees of one of several stages that have their own; those left out are 1."""

        def own(degree: Degree) -> int:
            return degree[stage] if isinstance(degree, tuple) else degree or 1

        return replace(self, dp=own(self.dp), tp=own(self.tp), cp=own(self.cp))

    def _call(self) -> tuple[str, Sequence[object], dict[str, object]]:
        degrees = {item.name: getattr(self, item.name) for item in fields(self)}
        return "degrees", (), {name: n for name, n in degrees.items() if n is not None}


@dataclass(frozen=True, slots=True)
class Shard(_Record):
    """Parameters that match ``pattern`` are used split along ``dim`` over the axis."""

    pattern: str
    dim: int
    axis: str


@dataclass(frozen=True, slots=True)
class Replicate(_Record):
    """Parameters that match ``pattern`` are stored and used whole on every rank."""

    pattern: str


@dataclass(frozen=True, slots=True)
class MemoryLimit(_Record):
    """Bytes each rank may use."""

    limit_bytes: int

    def _call(self) -> tuple[str, Sequence[object], dict[str, object]]:
        number, unit = min(
            ((self.limit_bytes / size, unit) for unit, size in _UNITS.items()),
            key=lambda own: (not own[0].is_integer(), own[0]),
        )
        limit = self.limit_bytes if unit == "B" else f"{number:.0f}{unit}"
        return "memory_limit", (limit,), {}


@dataclass(frozen=True, slots=True)
class Microbatches(_Record):
    """Number of microbatches the batch is cut into."""

    count: int


@dataclass(frozen=True, slots=True)
class Schedule(_Record):
    """Order in which pipeline stages run their microbatches, and chunks of the model a stage."""

    name: str
    chunks: int | None = None


@dataclass(frozen=True, slots=True)
class Shares(_Record):
    """Parts of the batch that the data parallel ranks take, in proportion."""

    parts: tuple[int, ...]

    def _call(self) -> tuple[str, Sequence[object], dict[str, object]]:
        return "shares", self.parts, {}


@dataclass(frozen=True, slots=True)
class Ranks(_Record):
    """Ranks that take part, ``count`` of them from rank ``first`` on; the others are idle."""

    count: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Recompute(_Record):
    """Activations of the modules that match are made again in the backward."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Keep(_Record):
    """Activations of the modules that match are kept for the backward."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Offload(_Record):
    """What the modules that match hold waits in host memory.

    Attributes:
        pattern: Over module paths.
        what: ``"activations"``, from the forward to the backward, or ``"parameters"``, with their
            gradients and their optimizer state, but while they are used.
    """

    pattern: str
    what: str = "activations"


@dataclass(frozen=True, slots=True)
class OffloadStates(_Record):
    """The optimizer's state lies in host memory."""

    def _call(self) -> tuple[str, Sequence[object], dict[str, object]]:
        return "offload", ("optimizer",), {}


@dataclass(frozen=True, slots=True)
class CutBefore(_Record):
    """A pipeline stage begins at the module."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Stage(_Record):
    """The modules that match run on the pipeline stage ``number``."""

    pattern: str
    number: int


@dataclass(frozen=True, slots=True)
class PerMicrobatch(_Record):
    """The modules that match are computed from each microbatch alone."""

    pattern: str


Hint = (
    Degrees
    | Shard
    | Replicate
    | MemoryLimit
    | Microbatches
    | Schedule
    | Shares
    | Ranks
    | CutBefore
    | Stage
    | Recompute
    | Keep
    | Offload
    | OffloadStates
    | PerMicrobatch
)


def degrees(
    *,
    dp: int | Sequence[int] | None = None,
    tp: int | Sequence[int] | None = None,
    pp: int | None = None,
    cp: int | Sequence[int] | None = None,
    ep: int | None = None,
    zero: int | None = None,
) -> Degrees:
    """Fix degrees by the names people call them; what is left out stays free.

    ``dp``, ``tp`` and ``cp`` may have one degree for every stage of a pipeline, as in
    ``degrees(dp=(4, 2, 1, 1))`` for stages of 4, 2, 1 and 1 ranks; degrees left out are 1 then.

    Args:
        dp: Ranks that split the batch.
        tp: Ranks that split hidden, head and vocabulary factors.
        pp: Pipeline stages.
        cp: Ranks that split the attention sequence.
        ep: Ranks that split experts.
        zero: Storage over the data-parallel ranks: 0 replicated, 1 and 2 parameters and state
            split, gathered once a step; 3 gathered again in the backward.

    Raises:
        HintError: A degree is not a positive integer, there is not one for every stage, or zero is
            not 0 to 3.
    """
    given = {"dp": dp, "tp": tp, "cp": cp}
    named = {name: _degree(name, value) for name, value in given.items()}
    _degree("pp", pp)
    _degree("ep", ep)
    counts = {name: len(value) for name, value in named.items() if isinstance(value, tuple)}
    if counts:
        stages = next(iter(counts.values())) if pp is None else pp
        for name, count in counts.items():
            if count != stages:
                raise HintError(
                    f"cannot use {name}={named[name]} for {stages} stages: it has {count} degrees; "
                    "give one for every stage, or one number for all"
                )
        pp = stages
    if zero is not None and zero not in (0, 1, 2, 3):
        raise HintError(f"cannot use zero={zero!r}: the ZeRO stages are 0, 1, 2 and 3")
    return Degrees(dp=named["dp"], tp=named["tp"], pp=pp, cp=named["cp"], ep=ep, zero=zero)


def _degree(name: str, value: int | Sequence[int] | None) -> Degree:
    """A degree, or one for every stage, checked."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = tuple(value) if several else (1 if value is None else value,)  # type: ignore[arg-type]
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers):
        raise HintError(f"cannot use degree {name}={value!r}: it is a number of ranks, 1 or more")
    return numbers if several else value  # type: ignore[return-value]


def _pattern(pattern: str) -> str:
    """A pattern, checked: a text that can match."""
    if not isinstance(pattern, str) or not pattern:
        raise HintError(
            f"cannot use {pattern!r} as the pattern of a hint: it is a glob over names, a text "
            "such as 'layers.*'"
        )
    return pattern


def shard(pattern: str, dim: int, axis: str) -> Shard:
    """Use the parameters that match split along ``dim`` over the mesh axis or role ``axis``."""
    return Shard(_pattern(pattern), dim, axis)


def replicate(pattern: str) -> Replicate:
    """Store and use the parameters that match whole on every rank."""
    return Replicate(_pattern(pattern))


_UNITS = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def memory_limit(limit: str | int) -> MemoryLimit:
    """Let no rank use more than ``limit``: bytes, or text such as ``"60GiB"``.

    Raises:
        HintError: The text is not a number of bytes with a unit.
    """
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return MemoryLimit(limit)
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*", str(limit))
    limit_bytes = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if limit_bytes < 1:
        raise HintError(
            f"cannot use memory limit {limit!r}: it is not a size; write bytes or text like '60GiB'"
        )
    return MemoryLimit(limit_bytes)


def microbatches(count: int) -> Microbatches:
    """Cut the batch into ``count`` microbatches.

    Raises:
        HintError: The count is not a positive integer.
    """
    if not isinstance(count, int) or count < 1:
        raise HintError(f"cannot use {count!r} microbatches: it is a count, 1 or more")
    return Microbatches(count)


def schedule(name: str, chunks: int | None = None) -> Schedule:
    """Run a pipeline in this order: ``"gpipe"``, ``"1f1b"`` ... (see docs/schedules.md).

    Args:
        name: Of the schedule.
        chunks: Chunks of the model that each stage holds; left out, the fewest the schedule has.

    Raises:
        HintError: The chunks are no count.
    """
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise HintError(f"cannot use {chunks!r} chunks a stage: it is a count, 1 or more")
    return Schedule(name, chunks)


def shares(*parts: int) -> Shares:
    """Have the ranks of ``dp`` take parts of the batch in this proportion, none at 0.

    ``shares(5, 2, 1, 0)`` gives them 5, 2, 1 and no samples of a batch of 8. Left out, they take
    equal parts where their devices are equally fast, else parts in proportion to their speed.

    Args:
        parts: One for every rank of ``dp``, which ``degrees`` must fix; the batch must divide by
            their sum.

    Raises:
        HintError: A part is no count, or all are 0.
    """
    if not all(isinstance(n, int) and n >= 0 for n in parts) or not any(parts):
        raise HintError(
            f"cannot share the batch as {parts}: give a count of parts, 0 or more, for every rank"
        )
    return Shares(parts)


def ranks(count: int, first: int = 0) -> Ranks:
    """Plan on ``count`` ranks and leave the others idle; ``hint.degrees`` multiply to ``count``.

    Idle ranks get the loss, hold no part of a parameter and need no data. Left out, a plan leaves
    nodes, sites or the slower devices idle where that is at least as fast.

    Args:
        count: Ranks that take part.
        first: The first of them.

    Raises:
        HintError: They are no ranks.
    """
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (count, first))
    if not whole or count < 1 or first < 0:
        raise HintError(
            f"cannot plan on {count!r} ranks from rank {first!r} on: give a count, 1 or more, and "
            "a rank, 0 or more"
        )
    return Ranks(count, first)


def recompute(pattern: str) -> Recompute:
    """Make activations inside the modules that match again in the backward.

    What a repeated block hands to the next one is kept all the same: it is where the block starts
    again.

    Args:
        pattern: Glob over module paths; everything inside a module that matches belongs to it.
    """
    return Recompute(_pattern(pattern))


def keep(pattern: str) -> Keep:
    """Keep activations of the modules that match for the backward, whatever memory says.

    Args:
        pattern: Glob over module paths; everything inside a module that matches belongs to it.
    """
    return Keep(_pattern(pattern))


def offload(pattern: str, what: str | None = None) -> Offload | OffloadStates:
    """Keep activations or parameters of the modules that match, or optimizer state, in host memory.

    Args:
        pattern: Glob over module paths (or parameter names, for parameters); everything inside a
            module that matches belongs to it. Or ``"optimizer"``, for the state of all parameters,
            or ``"parameters"``, for all parameters with their gradients and state.
        what: ``"activations"`` or ``"parameters"``; left out, what the pattern says.

    Raises:
        HintError: It is something else that is to be offloaded.
    """
    if what is None and pattern == "optimizer":
        return OffloadStates()
    if what is None and pattern == "parameters":
        return Offload("*", "parameters")
    what = what or "activations"
    if what not in ("activations", "parameters"):
        raise HintError(
            f"cannot offload {what!r} of modules {pattern!r}: activations and parameters are what "
            "modules can put into host memory"
        )
    return Offload(_pattern(pattern), what)


def cut_before(pattern: str) -> CutBefore:
    """Begin a pipeline stage, or a chunk of one, before every module that matches."""
    return CutBefore(_pattern(pattern))


def stage(pattern: str, number: int) -> Stage:
    """Run the modules that match on the pipeline stage ``number``, counted from 0.

    Raises:
        HintError: It is no number of a stage.
    """
    if not isinstance(number, int) or number < 0:
        raise HintError(f"cannot use {number!r} as a pipeline stage: it is a number, 0 or more")
    return Stage(_pattern(pattern), number)


def per_microbatch(pattern: str) -> PerMicrobatch:
    """Compute the modules that match from each microbatch alone, as if it were the whole batch.

    Statistics over the batch in the middle of a model (batch norm, the balance of experts) then
    allow several microbatches, on whose number the result depends: of B samples in M microbatches
    the first B / M are one, whatever ranks split them. What a module returns for every sample is
    unchanged otherwise, a number that it returns is averaged over the microbatches, and running
    statistics of batch norms are updated once a microbatch.

    Args:
        pattern: Glob over module paths; everything inside a module that matches belongs to it. A
            function that a module's forward calls by its name has the module's path and that name:
            ``"load_balancing_loss_func"`` is what a Mixtral of transformers calls itself.
    """
    return PerMicrobatch(_pattern(pattern))


def hint_of(text: str) -> Hint | None:
    """The hint of a text, as plans keep it; None if it is none that this version knows.

    Nothing is executed. Plans of before keep the record, ``Degrees(dp=2, tp=None)``.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or any(k.arg is None for k in call.keywords):
            return None
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        maker = _maker(call.func)
        return None if maker is None else maker(*arguments, **named)
    except (SyntaxError, ValueError, TypeError, HintError):
        return None


_FUNCTIONS: dict[str, typing.Callable[..., Hint]] = {
    made.__name__: made
    for made in (
        *(degrees, shard, replicate, memory_limit, microbatches, schedule, shares, ranks),
        *(recompute, keep, offload, cut_before, stage, per_microbatch),
    )
}
"""The functions that make hints, by name."""

_RECORDS: dict[str, typing.Callable[..., Hint]] = {
    record.__name__: record for record in typing.get_args(Hint)
}


def _maker(called: ast.expr) -> typing.Callable[..., Hint] | None:
    """What a text calls: a function of this module, or a record."""
    if isinstance(called, ast.Attribute) and ast.unparse(called.value) == "hint":
        return _FUNCTIONS.get(called.attr)
    return _RECORDS.get(called.id) if isinstance(called, ast.Name) else None
