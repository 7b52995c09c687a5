"""Step time against memory as a picture: an SVG, alone or in a page with the table.

What stands where is worked out here; `pareto.svg.jinja` and `pareto.html.jinja` draw it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from autopar.errors import AutoparError
from autopar.plan.records import Plan
from autopar.plan.wording import bytes_text, bytes_unit, seconds_text, seconds_unit
from autopar.report.pareto import COLUMNS, pareto_rows

FORMATS = (".svg", ".html")
"""Endings of files that can hold a picture."""

WIDTH, HEIGHT = 820, 500
LEFT, TOP, RIGHT, BOTTOM = 84, 64, 796, 440
"""Of the picture, and of what the axes enclose, in pixels."""

FAR = 2.0
"""A limit that is so many times what the plans take is said, not drawn."""

TICKS = 8
"""About so many on each axis."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on an axis, in pixels, and what is written there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A plan in the picture; ``text`` is shown where the mouse points at it."""

    x: float
    y: float
    text: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """All that the picture shows, in pixels.

    Attributes:
        title: What is planned where; ``subtitle`` what is shown.
        x_ticks: Memory; ``y_ticks`` seconds, ``x_label`` and ``y_label`` with their units.
        limit: Memory that a rank may use; ``limit_drawn`` whether it is within the picture.
        points: The plans, the chosen one first; ``chosen`` says which that is.
        stairs: Path of the least seconds over memory.
    """

    title: str
    subtitle: str
    x_label: str
    y_label: str
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    limit: Mark
    limit_drawn: bool
    points: tuple[Dot, ...]
    chosen: str
    stairs: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from ``low`` to ``high`` on pixels from ``first`` to ``last``."""

    low: float
    high: float
    first: int
    last: int

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.first + share * (self.last - self.first), 1)

    def marks(self, unit: float) -> tuple[Mark, ...]:
        """Round numbers of a unit."""
        step = round_step((self.high - self.low) / unit / TICKS)
        first = math.ceil(self.low / unit / step - 1e-9)
        last = math.floor(self.high / unit / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple(
            Mark(self.at(number * step * unit), f"{number * step:.{decimals}f}")
            for number in range(first, last + 1)
        )


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 ... and their tenths that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))


def chart_of(plans: Sequence[Plan]) -> Chart:
    """The picture of plans that are fastest within their memory, the fastest first."""
    chosen = plans[0]
    bytes_of = [plan.prediction.memory.total_bytes for plan in plans]
    seconds_of = [plan.prediction.step_s for plan in plans]
    limit, most = chosen.memory_limit_bytes, max(bytes_of)
    drawn = limit <= FAR * most
    x = _Axis(0.0, 1.06 * (max(limit, most) if drawn else most), LEFT, RIGHT)
    spread = (max(seconds_of) - min(seconds_of)) or 0.1 * max(seconds_of)
    low_s = max(0.0, min(seconds_of) - 0.25 * spread)
    y = _Axis(low_s, max(seconds_of) + 0.1 * spread, BOTTOM, TOP)
    bytes_unit_, bytes_name = bytes_unit(x.high)
    seconds_unit_, seconds_name = seconds_unit(y.high)
    places = [(x.at(b), y.at(s)) for b, s in zip(bytes_of, seconds_of, strict=True)]
    ranks = f"{chosen.cluster_ranks} rank{'s' * (chosen.cluster_ranks != 1)}"
    return Chart(
        title=f"{chosen.model} on {chosen.cluster}, {ranks}",
        subtitle="predicted step time of the fastest plan within a memory limit",
        x_label=f"memory a rank ({bytes_name})",
        y_label=f"step time ({seconds_name})",
        x_ticks=x.marks(bytes_unit_),
        y_ticks=y.marks(seconds_unit_),
        limit=Mark(
            x.at(limit) if drawn else RIGHT,
            f"usable: {bytes_text(limit)}{'' if drawn else ', beyond this edge'}",
        ),
        limit_drawn=drawn,
        points=tuple(
            Dot(at_x, at_y, _said(plan), plan is chosen)
            for plan, (at_x, at_y) in zip(plans, places, strict=True)
        ),
        chosen=f"chosen: {seconds_text(seconds_of[0])}, {bytes_text(bytes_of[0])}",
        stairs=_stairs(places, x.at(limit) if drawn else RIGHT),
    )


def _said(plan: Plan) -> str:
    seconds, memory = plan.prediction.step_s, plan.prediction.memory.total_bytes
    return (
        f"{seconds_text(seconds)} a step, {bytes_text(memory)} a rank; stages: {plan.num_stages}, "
        f"microbatches: {plan.microbatches}"
    )


def _stairs(places: Sequence[tuple[float, float]], until: float) -> str:
    """From the least memory up to `until`: a plan is the fastest until the next one fits."""
    rising = sorted(places)
    path = f"M{rising[0][0]} {rising[0][1]}"
    for at_x, at_y in rising[1:]:
        path += f"H{at_x}V{at_y}"
    return f"{path}H{max(until, rising[-1][0])}"


def write_plot(plans: Sequence[Plan], path: Path) -> None:
    """Write the picture as SVG, or as a page with the table, as the file's name ends.

    Raises:
        AutoparError: The name ends otherwise, or the file cannot be written.
    """
    check_format(path)
    loader = jinja2.PackageLoader("autopar", "report")
    environment = jinja2.Environment(loader=loader, autoescape=True)
    template = environment.get_template(f"pareto{path.suffix}.jinja")
    rows = tuple(pareto_rows(plans))
    text = template.render(c=chart_of(plans), columns=COLUMNS, rows=rows)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutoparError(f"cannot write plot '{path}': {error.strerror}") from None


def check_format(path: Path) -> None:
    """Refuse a file that cannot hold a picture.

    Raises:
        AutoparError: Its name does not end as one of `FORMATS`.
    """
    if path.suffix not in FORMATS:
        raise AutoparError(
            f"cannot plot into '{path}': the name ends in none of {', '.join(FORMATS)}; give such "
            "a file, or one that ends in .json for the plan"
        )
