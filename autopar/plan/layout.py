"""JSON laid out for people: rows of tables on one line each, lists of names filled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Json = Any
_WIDTH = 100


def layout(value: Json) -> str:
    """JSON text of a value, with a line feed at its end."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(value: Json, indent: str) -> Iterator[str]:
    """Lines of a value; the first without its indent, so that a key can precede it."""
    if not isinstance(value, dict | list) or _fits(value, indent):
        yield json.dumps(value)
        return
    inner = f"{indent}  "
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield "["
        yield from _filled([json.dumps(item) for item in value], inner)
        yield f"{indent}]"
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield opening
    keys = (
        [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    )
    items = list(value.values()) if isinstance(value, dict) else value
    for at, (key, item) in enumerate(zip(keys, items, strict=True)):
        comma = "," if at + 1 < len(items) else ""
        lines = list(_lines(item, inner))
        lines[0] = f"{inner}{key}{lines[0]}"
        lines[-1] += comma
        yield from lines
    yield f"{indent}{closing}"


def _fits(value: Json, indent: str) -> bool:
    items = value.values() if isinstance(value, dict) else value
    if not value or (isinstance(value, list) and not any(isinstance(i, str) for i in items)):
        return not any(isinstance(item, dict | list) for item in items)
    if any(isinstance(item, dict) for item in items) or len(value) > 12:
        return False
    is_row = isinstance(value, list) and not all(isinstance(item, str) for item in items)
    return is_row or len(indent) + len(json.dumps(value)) + 24 <= _WIDTH


def _filled(texts: list[str], indent: str) -> Iterator[str]:
    line = indent
    for at, text in enumerate(texts):
        piece = f"{text}," if at + 1 < len(texts) else text
        if line != indent and len(line) + len(piece) + 1 > _WIDTH:
            yield line
            line = indent
        line += piece if line == indent else f" {piece}"
    yield line
