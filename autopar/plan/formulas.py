"""The closed forms behind a plan's predictions, with the letters that the plan knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cost_models.formulas import formula_named

if TYPE_CHECKING:
    from autopar.plan.records import Plan

_OF_COLLECTIVE: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("ring all-reduce", "tree all-reduce"),
    "all_gather": ("ring all-gather",),
    "reduce_scatter": ("ring all-gather",),
}
_OF_SCHEDULE: Mapping[str, tuple[str, ...]] = {
    "1f1b": ("1F1B step, equal stages", "saved by a 1F1B stage"),
    "interleaved": (
        "interleaved step",
        "bubble fraction, interleaved",
        "live chunks, interleaved",
    ),
    "zb-h1": ("bubble, ZB-H1",),
    "zb-h2": ("bubble, ZB-H2",),
}
_ALWAYS = ("matmul", *(f"model states, ZeRO {stage}" for stage in range(4)))


def formulas_text(plan: Plan) -> str:
    """Formulas of the plan's collectives, schedule and memory as text.

    They are the plain case of what the simulator computes: one level of links, equal stages. A line
    ``here`` gives the letters that the plan settles.
    """
    found: dict[str, list[str]] = {}
    for name, here in _used(plan):
        lines = found.setdefault(name, [])
        if here and here not in lines:
            lines.append(here)
    return "\n".join(
        "\n".join([formula_named(name).text(), *(f"    here: {line}" for line in lines)])
        for name, lines in found.items()
    )


def _used(plan: Plan) -> Iterator[tuple[str, str]]:
    """Names of formulas, with letters and their values as text."""
    sizes = {
        name: size
        for stage in plan.stages
        for name, size in zip(stage.mesh.names, stage.mesh.sizes, strict=True)
    }
    for use in plan.prediction.collectives:
        for name in _OF_COLLECTIVE.get(use.kind, ()):
            mean = use.tensor_bytes / max(use.count, 1)
            n = sizes[use.axis]
            yield name, f"n = {n}, B = {mean:.4g} on average ({use.kind} of {use.purpose})"
    if plan.num_stages > 1:
        chunks = len(plan.stages) // plan.num_stages
        for name in _OF_SCHEDULE.get(plan.schedule, ()):
            known = {"p": plan.num_stages, "G": plan.microbatches, "v": chunks}
            letters = formula_named(name).letters
            yield name, ", ".join(f"{k} = {v}" for k, v in known.items() if k in letters)
    for name in _ALWAYS:
        yield name, ""
