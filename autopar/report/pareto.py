"""Step time against memory: plans of one model within less and less of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType

from autopar import hint
from autopar.errors import AutoparError, InfeasibleError, SearchTimeoutError
from autopar.hint import Hint
from autopar.plan.records import Plan
from autopar.plan.text import add_row, bar, section, table
from autopar.plan.wording import bytes_text, percent_text, seconds_text

STEPS = 10
"""Parts of what the fastest plan takes by which memory falls from plan to plan."""

Search = Callable[[Sequence[Hint]], Plan]
"""Plans with hints beside those that the user gave."""

Told = Callable[[str], None]
"""Is told in a line what became of each limit, as soon as it is known."""


def pareto(search: Search, steps: int = STEPS, told: Told = lambda line: None) -> tuple[Plan, ...]:
    """Plans that are fastest within their memory, the fastest first; none is slower and larger.

    The memory of the fastest plan without a limit of its own is cut by a step at a time, until
    nothing is found that fits or time is up. A limit that ends in another error is passed over, and
    an interrupt ends the search: what was planned by then is returned.

    Args:
        search: Makes a plan.
        steps: Parts into which that memory is cut.
        told: Is told how far it is.

    Raises:
        InfeasibleError: Nothing fits the devices at all.
    """
    found = [search(())]
    total = found[0].prediction.memory.total_bytes
    told(f"the fastest plan: {_line(found[0])}")
    try:
        for part in range(steps - 1, 0, -1):
            limit = max(1, total * part // steps)
            where = f"within {bytes_text(limit)} ({percent_text(part / steps)})"
            try:
                found.append(search((hint.memory_limit(limit),)))
                told(f"{where}: {_line(found[-1])}")
            except (InfeasibleError, SearchTimeoutError) as error:
                told(f"{where}, and no further: {error}")
                break
            except AutoparError as error:
                told(f"{where}, passed over: {error}")
    except KeyboardInterrupt:
        told("stopped; what was planned is kept")
    found.sort(key=lambda plan: (plan.prediction.step_s, plan.prediction.memory.total_bytes))
    front: list[Plan] = []
    for plan in found:
        least = front[-1].prediction.memory.total_bytes if front else None
        if least is None or plan.prediction.memory.total_bytes < least:
            front.append(plan)
    return tuple(front)


def _line(plan: Plan) -> str:
    """Memory and step time of a plan."""
    memory = bytes_text(plan.prediction.memory.total_bytes)
    return f"{memory} a rank, {seconds_text(plan.prediction.step_s)} a step"


COLUMNS = ("memory a rank", "host memory", "step", "slower by", "runs again", "offloaded")


def pareto_rows(plans: Sequence[Plan]) -> Iterator[tuple[str, ...]]:
    """What is said of each plan, in the order of `COLUMNS`; the first plan is the fastest."""
    fastest = plans[0].prediction.step_s
    for plan in plans:
        memory = plan.prediction.memory
        away = sum(len(stage.offloaded) for stage in plan.stages)
        parameters = [p for stage in plan.stages for p in stage.parameters]
        counts = {
            "values": away,
            "states": sum(p.state_on_host for p in parameters),
            "parameters": sum(p.on_host for p in parameters),
        }
        yield (
            bytes_text(memory.total_bytes),
            bytes_text(memory.host_bytes),
            seconds_text(plan.prediction.step_s),
            percent_text(plan.prediction.step_s / fastest - 1),
            f"{sum(len(stage.recomputed) for stage in plan.stages)} ops",
            ", ".join(f"{n} {what}" for what, n in counts.items() if n or what == "values"),
        )


def pareto_view(plans: Sequence[Plan]) -> RenderableType:
    """The plans as a table that rich can print."""
    made = table(*COLUMNS, "", right=COLUMNS)
    most = plans[0].prediction.memory.total_bytes
    for plan, row in zip(plans, pareto_rows(plans), strict=True):
        add_row(made, *row, bar(plan.prediction.memory.total_bytes, most))
    return section("step time against memory (predicted)", [made])
