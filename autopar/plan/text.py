"""A plan as a table that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan.records import Plan


def plan_text(plan: Plan, width: int = 100) -> str:
    """The plan as plain text."""
    return f"{plan.model} {width}"
