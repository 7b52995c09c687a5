"""Why a module is laid out as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan.records import Plan


def explain(plan: Plan, module: str) -> str:
    """What is split over what in a module."""
    return f"{plan.model} {module}"
