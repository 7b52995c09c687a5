"""Records as JSON that a person can read, compare and edit, and back.

How a field is written follows from its type, so a new field of a record needs no code here:

======================================  ====================================================
type                                    JSON
======================================  ====================================================
``Sharding``                            ``"S0:512 R"``: for each mesh axis ``R`` (whole), ``P``
                                        (partial; ``Pmax``, ``Pmin``) or ``S<dim>/<outer>:<block>``
                                        (split; ``/1`` is left out), with ``*5+2+1`` behind it
                                        where ranks hold 5, 2 and 1 blocks
``Sharding | None``                     the same, empty for None
``tuple[Sharding, ...]``                ``"S0:512 R, R R"``; ``-`` where the mesh has no axis
``TensorType``                          ``"float32[8, 512]"``
tuple of records of the above and of    ``{"columns": [...], "rows": [[...], ...]}``, or
numbers and text                        ``"rows": {name: [...]}`` if they have a ``name``
``Mapping[str, str]``                   ``{value: [keys]}``
numbers, text, other tuples, mappings   as they are; numbers JSON lacks as ``"inf"``, ``"nan"``
other records                           an object
======================================  ====================================================

Reading builds records of the stated types from numbers and text; nothing is ever executed.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from autopar.errors import PlanError
from autopar.ir.graph import DTYPE_BYTES, TensorType
from autopar.ir.sharding import WHOLE, AxisSharding, Partial, Sharding, Split, Whole
from autopar.plan.layout import layout

T = TypeVar("T")
Json = Any
"""What ``json`` reads and writes."""


class _Bad(Exception):
    """Something is wrong at a path inside the document."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.path = path

    def under(self, part: str) -> _Bad:
        joint = "" if self.path.startswith("[") or not self.path else "."
        return _Bad(self.what, part + joint + self.path)


def encode(record: object) -> str:
    """A record as JSON text."""
    return layout(_write(type(record), record))


def decode(text: str, kind: type[T], *, version: int, where: str) -> T:
    """The record of type ``kind`` that ``encode`` wrote.

    Args:
        text: JSON with a field ``version``.
        kind: A frozen dataclass.
        version: The version this code reads.
        where: What to call the document in errors.

    Raises:
        PlanError: The text is no JSON, has another version, or does not fit the record.
    """
    document = _parse(text, where)
    if not isinstance(document, dict):
        raise PlanError(f"cannot read {where}: it holds no object; is it a plan at all?")
    found = document.get("version")
    if found != version or isinstance(found, bool):
        says = "has no version" if "version" not in document else f"has version {found!r}"
        raise PlanError(
            f"cannot read {where}: it {says}, this autopar reads version {version}; "
            "make the plan again with this one"
        )
    try:
        return typing.cast(T, _read(kind, document))
    except _Bad as bad:
        at = f" at {bad.path}" if bad.path else ""
        raise PlanError(f"cannot read {where}{at}: {bad.what}") from None


def write_file(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file in one step: whoever reads it sees the old text or the new, never a part.

    Raises:
        PlanError: The file cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PlanError(f"cannot write '{target}': {_reason(error)}") from None


def read_file(path: str | os.PathLike[str]) -> str:
    """Text of a file.

    Raises:
        PlanError: It cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read plan '{path}': {_reason(error)}") from None
    except UnicodeDecodeError:
        raise PlanError(
            f"cannot read plan '{path}': it is not text; is it a plan at all?"
        ) from None


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _parse(text: str, where: str) -> Json:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"cannot read {where}: line {error.lineno} column {error.colno} is not JSON "
            f"({error.msg.lower()}); undo the edit or save the plan again"
        ) from None
    except RecursionError:
        raise PlanError(f"cannot read {where}: it nests too deep to be a plan") from None
    except ValueError as error:
        raise PlanError(f"cannot read {where}: {error}") from None


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice; keep one of them")
    return found


# Text of the small records.


def sharding_text(sharding: Sharding) -> str:
    """``S0:512 R`` and the like; ``-`` for a mesh without axes."""
    return " ".join(_axis_text(axis) for axis in sharding) or "-"


def _axis_text(axis: AxisSharding) -> str:
    if not isinstance(axis, Split):
        return str(axis)
    shares = f"*{'+'.join(map(str, axis.shares))}" if axis.shares else ""
    return f"{axis}:{axis.block}{shares}"


_AXIS = re.compile(
    r"S(?P<dim>\d+)(?:/(?P<outer>\d+))?:(?P<block>\d+)(?:\*(?P<shares>\d+(?:\+\d+)*))?"
    r"|P(?P<reduce>max|min)?|R"
)


@lru_cache(maxsize=1 << 16)
def _sharding(text: str) -> Sharding:
    if text == "-":
        return ()
    found: list[AxisSharding] = []
    for part in text.split():
        axis = _AXIS.fullmatch(part)
        if axis is None:
            raise _Bad(
                f"{part!r} is not a sharding; write R, P, Pmax, Pmin or S<dim>:<block> "
                "for each mesh axis, separated by spaces"
            )
        if part[0] == "S":
            shares = tuple(map(int, axis["shares"].split("+"))) if axis["shares"] else ()
            outer = int(axis["outer"] or 1)
            found.append(Split(int(axis["dim"]), outer, int(axis["block"]), shares))
        else:
            found.append(WHOLE if part == "R" else Partial(axis["reduce"] or "sum"))
    if not found:
        raise _Bad("an empty text is not a sharding; write R for each mesh axis it is whole on")
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _shardings(text: str) -> tuple[Sharding, ...]:
    return tuple(_sharding(part.strip()) for part in text.split(",")) if text else ()


_TYPE = re.compile(r"(?P<dtype>\w+)\[(?P<shape>(?:\d+(?:, *\d+)*)?)\]")


def _tensor_type(text: str) -> TensorType:
    found = _TYPE.fullmatch(text)
    if found is None or found["dtype"] not in DTYPE_BYTES:
        raise _Bad(f"{text!r} is not a tensor type; write one like 'float32[8, 512]'")
    sizes = found["shape"].split(",") if found["shape"] else []
    return TensorType(tuple(int(size) for size in sizes), found["dtype"])


_TEXTS: Mapping[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    Sharding: (sharding_text, _sharding),
    Sharding | None: (
        lambda one: "" if one is None else sharding_text(one),
        lambda text: _sharding(text) if text else None,
    ),
    tuple[Sharding, ...]: (lambda many: ", ".join(map(sharding_text, many)), _shardings),
    TensorType: (str, _tensor_type),
}
"""Types with a text of their own: how to write it and how to read it."""

assert set(typing.get_args(AxisSharding)) == {Split, Partial, Whole}


# Writing.


def _write(hint: Any, value: Any) -> Json:
    if hint in _TEXTS:
        return _TEXTS[hint][0](value)
    if _is_record(hint):
        return {name: _write(of, getattr(value, name)) for name, of in _hints(hint).items()}
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and given[-1] is ...:
        return _write_table(given[0], value) if _flat(given[0]) else _write_all(given[0], value)
    if origin is tuple:
        return [_write(of, item) for of, item in zip(given, value, strict=True)]
    if hint == Mapping[str, str]:
        return _group(value)
    if origin is Mapping:
        return {key: _write(given[1], item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    assert isinstance(value, str | int | float | NoneType), f"no JSON for {hint}"
    return value


def _write_all(hint: Any, values: tuple[Any, ...]) -> Json:
    return [_write(hint, value) for value in values]


def _write_table(record: Any, values: tuple[Any, ...]) -> Json:
    columns = _columns(record)
    rows: Json = [[_write(of, getattr(v, name)) for name, of in columns.items()] for v in values]
    if _named(record):
        rows = {value.name: row for value, row in zip(values, rows, strict=True)}
        assert len(rows) == len(values), f"two {record.__name__} share a name"
    return {"columns": list(columns), "rows": rows}


def _group(pairs: Mapping[str, str]) -> Json:
    grouped: dict[str, list[str]] = {}
    for key, value in pairs.items():
        grouped.setdefault(value, []).append(key)
    return grouped


# Reading.


def _read(hint: Any, data: Json) -> Any:
    if hint in _TEXTS:
        return _TEXTS[hint][1](_expect(str, data))
    if _is_record(hint):
        return _read_record(hint, data)
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        assert given[1:] == (NoneType,), f"no JSON for {hint}"
        return None if data is None else _read(given[0], data)
    if origin is tuple and given[-1] is ...:
        return _read_table(given[0], data) if _flat(given[0]) else _read_all(given[0], data)
    if origin is tuple:
        items = _expect(list, data)
        if len(items) != len(given):
            raise _Bad(f"found {len(items)} entries, {len(given)} belong here")
        return tuple(_at(f"[{i}]", of, items[i]) for i, of in enumerate(given))
    if hint == Mapping[str, str]:
        return _ungroup(data)
    if origin is Mapping:
        items = _expect(dict, data)
        return {key: _at(f"[{key!r}]", given[1], item) for key, item in items.items()}
    return _expect(hint, data)


def _at(part: str, hint: Any, data: Json) -> Any:
    try:
        return _read(hint, data)
    except _Bad as bad:
        raise bad.under(part) from None


_SAY = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_SAY |= {list: "a list", dict: "an object"}


def _expect(kind: Any, data: Json) -> Any:
    if kind is float and not isinstance(data, bool):
        if isinstance(data, int | float):
            return float(data)
        if data in ("inf", "-inf", "nan"):
            return float(data)
    elif isinstance(data, kind) and isinstance(data, bool) == (kind is bool):
        return data
    shown = json.dumps(data)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    raise _Bad(f"found {shown} where {_SAY[kind]} belongs")


def _read_all(hint: Any, data: Json) -> tuple[Any, ...]:
    return tuple(_at(f"[{i}]", hint, item) for i, item in enumerate(_expect(list, data)))


def _read_record(record: Any, data: Json) -> Any:
    hints = _hints(record)
    _expect(dict, data)
    _only(data, list(hints))
    _complete(data, record)
    return _make(record, {name: _at(name, hints[name], data[name]) for name in data})


def _read_table(record: Any, data: Json) -> tuple[Any, ...]:
    _expect(dict, data)
    _only(data, ["columns", "rows"])
    columns = _at("columns", tuple[str, ...], data.get("columns"))
    _only(columns, list(_columns(record)))
    _complete((*columns, "name") if _named(record) else columns, record)
    rows = data.get("rows")
    if not _named(record):
        rows = _expect(list, rows)
        return tuple(_read_row(record, columns, row, f"[{i}]", {}) for i, row in enumerate(rows))
    return tuple(
        _read_row(record, columns, row, f"[{name!r}]", {"name": name})
        for name, row in _expect(dict, rows).items()
    )


def _read_row(
    record: Any, columns: Sequence[str], row: Json, part: str, given: dict[str, Any]
) -> Any:
    if not isinstance(row, list) or len(row) != len(columns):
        raise _Bad(f"the row does not have one entry for each of {', '.join(columns)}", part)
    hints = _hints(record)
    for column, item in zip(columns, row, strict=True):
        try:
            given[column] = _read(hints[column], item)
        except _Bad as bad:
            raise bad.under(f"{part}.{column}") from None
    return _make(record, given)


def _make(record: Any, given: Mapping[str, Any]) -> Any:
    try:
        return record(**given)
    except (AssertionError, ValueError) as error:
        what = f"the fields of this {record.__name__} contradict each other"
        raise _Bad(f"{what}: {error}" if str(error) else what) from None


def _only(given: typing.Collection[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [n for n in known if n not in given], 1)
            there = f"there are {', '.join(known)} (a newer autopar may have more)"
            ask = f"did you mean {near[0]!r}?" if near else there
            raise _Bad(f"field {name!r} is unknown; {ask}")


def _complete(given: typing.Container[str], record: Any) -> None:
    for item in fields(record):
        required = item.default is MISSING and item.default_factory is MISSING
        if required and item.name not in given:
            raise _Bad(f"field {item.name!r} is missing")


def _ungroup(data: Json) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for value, keys in _expect(dict, data).items():
        for key in _at(f"[{value!r}]", tuple[str, ...], keys):
            if key in found:
                raise _Bad(f"{key!r} is listed under {found[key]!r} and under {value!r}")
            found[key] = value
    return found


@cache
def _hints(record: Any) -> Mapping[str, Any]:
    """Field name to type, in the order of the record."""
    hints = typing.get_type_hints(record)
    return {item.name: hints[item.name] for item in fields(record)}


@cache
def _columns(record: Any) -> Mapping[str, Any]:
    """Fields that are columns of a table: all but the name, which is the row's key."""
    return {name: hint for name, hint in _hints(record).items() if name != "name"}


@cache
def _flat(hint: Any) -> bool:
    """Whether a record is one row of a table: nothing in it has parts of its own."""
    return _is_record(hint) and all(
        of in _TEXTS or of in (str, int, float, bool) for of in _hints(hint).values()
    )


@cache
def _named(record: Any) -> bool:
    return "name" in _hints(record)


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint)
