"""Unit constants, and the words people write for quantities.

Internal numbers are bytes, seconds, FLOPs and their quotients. Decimal and binary prefixes are
never mixed: ``GB`` is 1e9 bytes and ``GiB`` is 2**30 (IEC 80000-13); a network's ``Gb/s`` is 1e9
bits a second, an eighth of that in bytes.
"""

from __future__ import annotations

import math
import re

from cost_models.errors import ClusterSpecError

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
GB_BYTES = 10**9
"""One gigabyte as a whole number of bytes, for sizes."""
GBIT = 1e9 / 8
"""One gigabit, in bytes."""
TFLOPS = 1e12
"""One teraFLOP/s, in FLOP/s."""

_BYTES = {
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_BITS = {"b": 1 / 8, "Kb": 125.0, "Mb": 125e3, "Gb": 125e6, "Tb": 125e9}
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_FLOPS = {"FLOP": 1.0, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")


def parse_bytes(text: str | float, where: str) -> int:
    """Bytes of ``80GiB``, ``16 GB`` or a bare number of bytes, as a whole number.

    Raises:
        ClusterSpecError: The unit is not one of bytes.
    """
    return round(parse_size(text, where))


def parse_size(text: str | float, where: str) -> float:
    """Bytes of ``80GiB``, ``16 GB`` or a bare number of bytes.

    Args:
        text: What the user wrote.
        where: Name of the field, for the message.

    Raises:
        ClusterSpecError: The unit is not one of bytes.
    """
    number, unit = _split(text, where, "bytes such as 80GiB or 16 GB")
    factor = 1.0 if not unit else _BYTES.get(_byte_unit(unit))
    if factor is None:
        raise _unit_error(text, where, unit, "bytes such as 80GiB or 16 GB")
    return number * factor


def parse_bandwidth(text: str | float, where: str) -> float:
    """Bytes a second of ``25 GB/s``, ``400 Gb/s`` (bits), ``400 Gbps`` or a bare number.

    Raises:
        ClusterSpecError: The unit is neither bytes nor bits a second.
    """
    expected = "bytes or bits a second such as 25 GB/s or 200 Gb/s"
    number, unit = _split(text, where, expected)
    if not unit:
        return number
    if unit.endswith("bps"):
        amount = unit[:-2]
    elif unit.endswith("/s"):
        amount = unit[:-2].strip()
    else:
        raise _unit_error(text, where, unit, expected)
    factor = _BITS.get(amount, _BITS.get(amount.removesuffix("it")))
    if factor is None:
        factor = _BYTES.get(_byte_unit(amount))
    if factor is None:
        raise _unit_error(text, where, unit, expected)
    return number * factor


def parse_seconds(text: str | float, where: str) -> float:
    """Seconds of ``5us``, ``0.3 ms`` or a bare number of seconds.

    Raises:
        ClusterSpecError: The unit is not one of time.
    """
    expected = "a time such as 5us or 0.3 ms"
    number, unit = _split(text, where, expected)
    per_second = 1.0 if not unit else _PER_SECOND.get(unit)
    if per_second is None:
        raise _unit_error(text, where, unit, expected)
    return number / per_second


def parse_flops(text: str | float, where: str) -> float:
    """FLOP a second of ``312 TFLOP/s``, ``312 TFLOPS`` or a bare number.

    Raises:
        ClusterSpecError: The unit is not a rate of floating-point operations.
    """
    expected = "a rate such as 312 TFLOP/s"
    number, unit = _split(text, where, expected)
    if not unit:
        return number
    factor = _FLOPS.get(unit.upper().removesuffix("S").removesuffix("/"))
    if factor is None:
        raise _unit_error(text, where, unit, expected)
    return number * factor


def exact_size(num_bytes: float) -> str | float:
    """Text that `parse_size` reads back to the same number, or the number where there is none."""
    tried = [f"{num_bytes / GIB:g} GiB", f"{num_bytes / GB:g} GB", f"{num_bytes / MB:g} MB"]
    return next((text for text in tried if parse_size(text, "") == num_bytes), num_bytes)


def exact_bandwidth(bytes_per_s: float) -> str | float:
    """Text that `parse_bandwidth` reads back to the same number, or the number."""
    text = f"{bytes_per_s / GB:g} GB/s"
    return text if parse_bandwidth(text, "") == bytes_per_s else bytes_per_s


def exact_seconds(seconds: float) -> str | float:
    """Text that `parse_seconds` reads back to the same number, or the number."""
    text = f"{seconds * 1e6:g} us"
    return text if parse_seconds(text, "") == seconds else seconds


def exact_flops(flops_per_s: float) -> str | float:
    """Text that `parse_flops` reads back to the same number, or the number."""
    text = f"{flops_per_s / TFLOPS:g} TFLOP/s"
    return text if parse_flops(text, "") == flops_per_s else flops_per_s


def bytes_text(num_bytes: float) -> str:
    """``num_bytes`` for a person, in binary units: ``79.2 GiB``."""
    if not math.isfinite(num_bytes):
        return f"{num_bytes} B"
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:g} B"


def seconds_text(seconds: float) -> str:
    """``seconds`` for a person: ``3.2 ms``."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def _byte_unit(unit: str) -> str:
    """The key of `_BYTES`: prefixes in either case, but a lower-case ``b`` would mean bits."""
    return unit.upper() if unit.endswith("B") else ""


def _split(text: str | float, where: str, expected: str) -> tuple[float, str]:
    """The number and the unit of what the user wrote."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ClusterSpecError(
            f"cannot read '{where}': {text!r} is not a quantity; write {expected}"
        )
    if not isinstance(text, str):
        return float(text), ""
    match = _NUMBER.match(text)
    if match is None:
        raise ClusterSpecError(f"cannot read '{where}': '{text}' has no number; write {expected}")
    return float(match.group(1)), match.group(2)


def _unit_error(text: str | float, where: str, unit: str, expected: str) -> ClusterSpecError:
    return ClusterSpecError(
        f"cannot read '{where}': '{text}' has the unit '{unit}', which is not known here; "
        f"write {expected}"
    )
