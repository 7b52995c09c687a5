"""Cluster files: YAML to records and back, with a message for everything that can be wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from cost_models import units
from cost_models.devices import DEVICES, device_named
from cost_models.errors import ClusterSpecError, near_misses
from cost_models.records import Device, Devices, Efficiency, Level, Transport

Reader = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a cluster file says; None where it leaves the default."""

    name: str
    devices: tuple[Devices, ...]
    levels: tuple[Level, ...]
    usable_memory_fraction: float | None


def load(text: str) -> object:
    """The plain content of YAML text.

    Raises:
        ClusterSpecError: The text is not YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ClusterSpecError(f"cannot read the cluster: not YAML: {reason}") from error


def dump(content: Mapping[str, Any]) -> str:
    """YAML text of plain content, in the order it is given."""
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=100)


def parse(content: object) -> Parts:
    """The records that a cluster file describes.

    Raises:
        ClusterSpecError: A field is missing, unknown or not what its unit says.
    """
    fields = _mapping(content, "the cluster", _CLUSTER)
    _require(fields, "the cluster", ("devices", "levels"))
    fraction = fields.get("usable_memory_fraction")
    return Parts(
        name=_text(fields.get("name", "cluster"), "name"),
        devices=tuple(_devices(item, i) for i, item in enumerate(_list(fields, "devices"))),
        levels=tuple(_level(item, i) for i, item in enumerate(_list(fields, "levels"))),
        usable_memory_fraction=(
            None if fraction is None else _number(fraction, "usable_memory_fraction")
        ),
    )


def level_dict(level: Level) -> dict[str, Any]:
    """A level as a file writes it: fields that hold their default are left out."""
    return _written(level, {field.name: field.default for field in dataclasses.fields(Level)})


def devices_dict(run: Devices) -> dict[str, Any]:
    """A run of devices as a file writes it: its kind and what differs from the table."""
    written: dict[str, Any] = {"kind": run.device.kind, "count": run.count}
    if run.node_bandwidth_bytes_per_s is not None:
        written["node_bandwidth"] = units.exact_bandwidth(run.node_bandwidth_bytes_per_s)
    base = DEVICES.get(run.device.kind)
    known = {} if base is None else {name: getattr(base, name) for name in _names(Device)}
    return written | _written(run.device, known | {"kind": run.device.kind})


def _written(record: Level | Device, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that differ from known values, with names and units of a file."""
    written = {}
    for name in _names(type(record)):
        value = getattr(record, name)
        if name not in known or known[name] != value:
            written[_FILE_NAMES.get(name, name)] = _plain(name, value)
    return written


def _plain(name: str, value: Any) -> Any:
    """A field's value in the words of a file."""
    match value:
        case Efficiency():
            return {
                key: dict(part) if isinstance(part, Mapping) else part
                for key, part in ((key, getattr(value, key)) for key in _names(Efficiency))
            }
        case Mapping():
            return {rate: units.exact_flops(peak) for rate, peak in value.items()}
        case Transport():
            return value.value
        case float() | int() if not isinstance(value, bool):
            write = next((w for end, w in _WRITERS if name.endswith(end)), None)
            return value if write is None else write(value)
    return value


def _devices(content: object, index: int) -> Devices:
    where = f"devices[{index}]"
    fields = _mapping(content, where, _DEVICES)
    _require(fields, where, ("kind", "count"))
    bandwidth = fields.get("node_bandwidth")
    return Devices(
        device=_device(fields, where),
        count=_count(fields["count"], f"{where}.count"),
        node_bandwidth_bytes_per_s=(
            None if bandwidth is None else _positive_bandwidth(bandwidth, f"{where}.node_bandwidth")
        ),
    )


def _device(fields: Mapping[str, Any], where: str) -> Device:
    """The table's device with the file's own fields, or a new one with all of them."""
    kind = _text(fields["kind"], f"{where}.kind")
    own = {
        name: _DEVICES[key](fields[key], f"{where}.{key}")
        for key, name in _DEVICE_FIELDS.items()
        if key in fields
    }
    if "like" in fields:
        return replace(device_named(_text(fields["like"], f"{where}.like")), kind=kind, **own)
    if kind.lower() in {name.lower() for name in DEVICES}:
        return replace(device_named(kind), **own)
    missing = [
        _FILE_NAMES.get(field.name, field.name)
        for field in dataclasses.fields(Device)
        if field.default is dataclasses.MISSING and field.name not in own and field.name != "kind"
    ]
    if missing:
        raise ClusterSpecError(
            f"cannot find device '{kind}' of {where} in the device table: "
            f"{near_misses(kind, DEVICES)} a new one needs 'like: A100-80GB' and what differs, "
            f"or else {', '.join(missing)}"
        )
    return Device(kind=kind, **own)


def _level(content: object, index: int) -> Level:
    where = f"levels[{index}]"
    fields = _mapping(content, where, _LEVEL)
    _require(fields, where, ("name", "size", "latency", "bandwidth"))
    return Level(
        **{_LEVEL_FIELDS[key]: _LEVEL[key](fields[key], f"{where}.{key}") for key in fields}
    )


def _efficiency(content: object, where: str) -> Efficiency:
    readers: dict[str, Reader] = dict.fromkeys(_names(Efficiency), _number) | {
        "matmul_best_at": _fractions,
        "source": _text,
    }
    fields = _mapping(content, where, readers)
    _require(fields, where, tuple(readers))
    return Efficiency(**{key: readers[key](fields[key], f"{where}.{key}") for key in readers})


def _rates(content: object, where: str) -> dict[str, float]:
    if not isinstance(content, Mapping):
        raise ClusterSpecError(
            f"cannot read '{where}': {content!r} is not a mapping of rates; write bf16: 312 TFLOP/s"
        )
    return {str(key): units.parse_flops(value, f"{where}.{key}") for key, value in content.items()}


def _fractions(content: object, where: str) -> dict[str, float]:
    if not isinstance(content, Mapping):
        raise ClusterSpecError(
            f"cannot read '{where}': {content!r} is not a mapping of fractions; write fp8: 0.7"
        )
    return {str(key): _number(value, f"{where}.{key}") for key, value in content.items()}


def _mapping(content: object, where: str, known: Mapping[str, Reader]) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise ClusterSpecError(
            f"cannot read {where}: found {type(content).__name__}, not a mapping; "
            f"give the fields {', '.join(known)}"
        )
    for key in content:
        if key not in known:
            raise ClusterSpecError(
                f"cannot read {where}: unknown field '{key}'; {near_misses(str(key), known)}"
            )
    return dict(content)


def _require(fields: Mapping[str, Any], where: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ClusterSpecError(
            f"cannot read {where}: '{missing[0]}' is missing; it needs {', '.join(names)}"
        )


def _list(fields: Mapping[str, Any], name: str) -> list[object]:
    value = fields[name]
    if not isinstance(value, list) or not value:
        raise ClusterSpecError(
            f"cannot read '{name}': it is not a list of at least one entry; "
            f"give one entry for each {'run of equal devices' if name == 'devices' else 'level'}"
        )
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterSpecError(
            f"cannot read '{where}': {value!r} is not a count; give a whole number of at least 1"
        )
    return value


def _number(value: Any, where: str) -> float:
    """A number; YAML 1.1 reads one without a point, such as 5e-6, as text."""
    try:
        return value if type(value) in (int, float) else float(str(value))
    except ValueError:
        raise ClusterSpecError(
            f"cannot read '{where}': {value!r} is not a number; give one without a unit"
        ) from None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ClusterSpecError(f"cannot read '{where}': {value!r} is not text; put it in quotes")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ClusterSpecError(f"cannot read '{where}': {value!r} is neither true nor false")
    return value


def _positive_bandwidth(value: Any, where: str) -> float:
    bandwidth = units.parse_bandwidth(value, where)
    if not bandwidth > 0:
        raise ClusterSpecError(
            f"cannot read '{where}': {value!r} is not a bandwidth; give one above 0"
        )
    return bandwidth


def _names(record: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record))


_FILE_NAMES = {
    "peak_flops_per_s": "peak",
    "memory_bytes": "memory",
    "memory_bytes_per_s": "memory_bandwidth",
    "host_memory_bytes": "host_memory",
    "host_link_bytes_per_s": "host_link",
    "launch_s": "launch",
    "latency_s": "latency",
    "bandwidth_bytes_per_s": "bandwidth",
    "half_bandwidth_bytes": "half_bandwidth",
    "flow_bytes_per_s": "flow_bandwidth",
    "in_switch_bytes_per_s": "in_switch_bandwidth",
    "staging_bytes_per_s": "staging_bandwidth",
    "setup_s": "setup",
    "host_op_s": "host_op",
}
"""Names in a file, where the value carries its unit and the name need not."""

_WRITERS: tuple[tuple[str, Callable[[float], str | float]], ...] = (
    ("bytes_per_s", units.exact_bandwidth),
    ("_bytes", units.exact_size),
    ("_s", units.exact_seconds),
)
"""How a quantity is written, by the end of its name."""

_CLUSTER: dict[str, Reader] = {
    "name": _text,
    "usable_memory_fraction": _number,
    "devices": lambda value, where: value,
    "levels": lambda value, where: value,
}
_DEVICES: dict[str, Reader] = {
    "kind": _text,
    "like": _text,
    "count": _count,
    "node_bandwidth": _positive_bandwidth,
    "peak": _rates,
    "memory": units.parse_bytes,
    "memory_bandwidth": _positive_bandwidth,
    "host_memory": units.parse_bytes,
    "host_link": _positive_bandwidth,
    "launch": units.parse_seconds,
    "host_op": units.parse_seconds,
    "unified_memory": _flag,
    "efficiency": _efficiency,
    "source": _text,
}
_LEVEL: dict[str, Reader] = {
    "name": _text,
    "size": _count,
    "latency": units.parse_seconds,
    "setup": units.parse_seconds,
    "bandwidth": _positive_bandwidth,
    "ports": _count,
    "half_bandwidth": units.parse_size,
    "small_group_ranks": _number,
    "oversubscription": _number,
    "flow_bandwidth": _positive_bandwidth,
    "flows": _count,
    "in_switch_bandwidth": _positive_bandwidth,
    "staging_bandwidth": _positive_bandwidth,
    "transport": _text,
    "source": _text,
}
_RECORD_NAMES = {written: name for name, written in _FILE_NAMES.items()}
_DEVICE_FIELDS = {
    key: _RECORD_NAMES.get(key, key)
    for key in _DEVICES
    if key not in ("kind", "like", "count", "node_bandwidth")
}
_LEVEL_FIELDS = {key: _RECORD_NAMES.get(key, key) for key in _LEVEL}
