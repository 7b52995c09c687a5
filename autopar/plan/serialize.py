"""Plans as JSON text and files; `autopar.plan.codec` tells the form."""

from __future__ import annotations

import os

from autopar.plan.codec import decode, encode
from autopar.plan.records import VERSION, Plan


def to_json(plan: Plan) -> str:
    """The plan as text that a person can read, compare and edit."""
    return encode(plan)


def from_json(text: str, where: str = "plan") -> Plan:
    """The plan that ``to_json`` wrote.

    Args:
        text: What ``to_json`` returned.
        where: What to call it in errors.

    Raises:
        PlanError: The text is no JSON, is of another version, or does not fit a plan.
    """
    return decode(text, Plan, version=VERSION, where=where)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan in one step: a reader sees the old file or the new one, never a part.

    Raises:
        PlanError: The file cannot be written.
    """
    plan.save(path)


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: The file is no plan, or one of another version.
    """
    return Plan.load(path)
