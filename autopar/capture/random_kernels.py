"""Random numbers as a function of a key, a stream and an element's number.

A counter-based generator: no state, so any part of a tensor can be drawn anywhere, in any order
and again. It is made of int32 tensor ops that wrap, which give the same bits on every device.

The key is ``[seed, step]``, int64, in host memory. A stream is text that names a random op. Both
are hashed to four 32-bit words; an element's number is mixed with them by three rounds of multiply
and exclusive-or shift. On CUDA devices all of that is one Triton kernel where Triton is there
(`random_triton`).

A *place* says which elements of the whole a tensor holds: ``[start, per_microbatch, count,
stride, count, stride, ...]`` as `autopar.ir.sharding.Elements`, or nothing for a whole tensor.

Source:
    Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, for the idea. Shifts and
    multipliers are those of ``triple32`` of C. Wellons' hash prospector, which has no key.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

CPU_CHUNK = 1 << 15
"""Elements that a thread draws at once: both buffers stay in the second-level cache."""
GPU_CHUNK = 1 << 26
"""Elements drawn at once elsewhere: buffers of 256 MiB."""

_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14

_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


@lru_cache(maxsize=1 << 12)
def _words_of(seed: int, step: int, stream: str, word: int, high: int) -> tuple[int, ...]:
    """Four key words; ``high`` are the upper bits of the elements' numbers."""
    text = repr((seed, step, stream, word, high))
    return struct.unpack("<4i", hashlib.sha256(text.encode()).digest()[:16])


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Rows and columns of a piece seen as rows of its innermost run."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def size(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class _Place:
    """The elements of a piece as rows, each of which is one innermost run."""

    def __init__(self, numel: int, place: Sequence[int], microbatch: int) -> None:
        runs = list(zip(place[2::2], place[3::2], strict=True)) if place else [(numel, 1)]
        self.start = place[0] + microbatch * place[1] if place else 0
        self.width, self.stride = runs.pop() if runs else (1, 1)
        self.outer = tuple(runs)
        assert math.prod(count for count, _ in runs) * self.width == numel, (numel, place)

    def index(self, part: _Rectangle) -> int:
        """Where a part begins in the piece."""
        return part.rows[0] * self.width + part.columns[0]

    def first(self, row: int) -> int:
        """Number of a row's first element."""
        number = self.start
        for count, stride in reversed(self.outer):
            row, at = divmod(row, count)
            number += at * stride
        return number

    def firsts(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Numbers of some rows' first elements, as int32 that wrap, ``[rows, 1]``."""
        row = torch.arange(begin, end, device=device)
        number = torch.full_like(row, self.start)
        for count, stride in reversed(self.outer):
            number += (row % count) * stride
            row = row.div(count, rounding_mode="floor")
        return (number & 0xFFFFFFFF).to(torch.int32).unsqueeze(1)

    def described(self, part: _Rectangle) -> list[int]:
        """What `random_triton` wants to know of a part, as int32."""
        left, right = part.columns
        own = [part.rows[0], _signed(left), right - left, _signed(self.start), _signed(self.stride)]
        for count, stride in reversed(self.outer):
            own += [count, _signed(stride)]
        return own

    def high(self, rectangle: _Rectangle) -> int | None:
        """The upper bits of all its elements' numbers; None if they differ."""
        least = self.first(rectangle.rows[0]) + rectangle.columns[0] * self.stride
        most = self.first(rectangle.rows[1] - 1) + (rectangle.columns[1] - 1) * self.stride
        return least >> 32 if least >> 32 == most >> 32 else None

    def rectangles(self, chunk: int, begin: int, end: int) -> Iterator[tuple[_Rectangle, int]]:
        """Elements ``begin`` to ``end`` of the piece in order, in parts with equal upper bits.

        A part has at most ``chunk`` elements, and is some whole rows or a part of one.
        """
        while begin < end:
            row, column = divmod(begin, self.width)
            tall = min(chunk, end - begin) // self.width
            if column or not tall:
                stop = min(self.width, column + min(chunk, end - begin))
                part = _Rectangle((row, row + 1), (column, stop))
            else:
                part = _Rectangle((row, row + tall), (0, self.width))
            yield from self._even(part)
            begin += part.size

    def _even(self, rectangle: _Rectangle) -> Iterator[tuple[_Rectangle, int]]:
        high = self.high(rectangle)
        if high is not None:
            yield rectangle, high
            return
        (top, bottom), (left, right) = rectangle.rows, rectangle.columns
        if bottom - top > 1:
            middle = (top + bottom) // 2
            halves = [((top, middle), (left, right)), ((middle, bottom), (left, right))]
        else:
            middle = (left + right) // 2
            halves = [((top, bottom), (left, middle)), ((top, bottom), (middle, right))]
        for rows, columns in halves:
            yield from self._even(_Rectangle(rows, columns))


def words(
    key: Tensor,
    stream: str,
    numel: int,
    place: Sequence[int],
    microbatch: int,
    device: torch.device,
    word: int = 0,
    only: tuple[int, int] | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """(begin, end, int32 of 32 random bits for each of these elements), part by part.

    The tensor is a buffer that the next part overwrites.

    Args:
        key: Seed and step.
        stream: Name of the random op.
        numel: Elements of the piece.
        place: Where they are in the whole.
        microbatch: Number of the microbatch that runs.
        device: Where to draw.
        word: Which of the words of an element, where one is not enough.
        only: First and last but one of the elements to draw; None for all of the piece.
    """
    begin, end = only or (0, numel)
    if begin == end:
        return
    where, on_cpu = _Place(numel, place, microbatch), device.type == "cpu"
    chunk = min(end - begin, CPU_CHUNK * torch.get_num_threads() if on_cpu else GPU_CHUNK)
    triton = _triton(where, device)
    ops = None if triton else _Ops(where, chunk, device)
    buffer = torch.empty(chunk, dtype=torch.int32, device=device)
    for part, keys in _parts(key, stream, where, chunk, begin, end, word):
        bits, at = buffer[: part.size], where.index(part)
        if triton:
            triton.draw(bits, where.described(part), _mixing(keys))
        elif ops:
            ops.draw(bits, part, keys)
        yield at, at + part.size, bits


def _parts(
    key: Tensor, stream: str, where: _Place, chunk: int, begin: int, end: int, word: int = 0
) -> Iterator[tuple[_Rectangle, tuple[int, ...]]]:
    """Parts of a piece in order, each with its key words."""
    seed, step = key.tolist()
    for part, high in where.rectangles(chunk, begin, end):
        yield part, _words_of(seed, step, stream, word, high)


def _triton(where: _Place, device: torch.device) -> ModuleType | None:
    """The kernels that draw a piece on a device, or None where tensor ops do."""
    if device.type != "cuda" or math.prod(count for count, _ in where.outer) >= 1 << 31:
        return None
    return _triton_kernels()


@lru_cache(maxsize=1)
def _triton_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("autopar.capture.random_triton")


def _mixing(keys: Sequence[int]) -> list[int]:
    """Key words, shifts and factors in the order in which `random_triton` reads them."""
    mixing = [keys[0]]
    for (shift, factor), key in zip(_ROUNDS, keys[1:], strict=True):
        mixing += [shift, _signed(factor), key]
    return [*mixing, _LAST_SHIFT]


class _Ops:
    """Draws by tensor ops, with what they need beside the numbers."""

    def __init__(self, where: _Place, chunk: int, device: torch.device) -> None:
        self._where = where
        self._spare = torch.empty(chunk, dtype=torch.int32, device=device)
        self._column = torch.arange(min(where.width, chunk), dtype=torch.int32, device=device)
        if where.stride != 1:
            self._column *= _signed(where.stride)

    def draw(self, bits: Tensor, part: _Rectangle, keys: Sequence[int]) -> None:
        """Fill an int32 tensor with 32 random bits for each of a part's elements."""
        (top, bottom), (left, right) = part.rows, part.columns
        column = self._column[: right - left]
        if bottom - top == 1:
            first = self._where.first(top) + left * self._where.stride + keys[0]
            torch.add(column, _signed(first), out=bits)
        else:
            firsts = self._where.firsts(top, bottom, bits.device).add_(keys[0])
            torch.add(column, firsts, out=bits.view(bottom - top, right - left))
        _mix(bits, self._spare[: part.size], keys[1:])


def _mix(value: Tensor, spare: Tensor, keys: Sequence[int]) -> None:
    """Scramble int32 values in place; every bit of one depends on all of its bits and keys."""
    for (shift, factor), key in zip(_ROUNDS, keys, strict=True):
        _fold(value, spare, shift)
        added = torch.tensor(key, dtype=torch.int32)
        torch.add(added, value, alpha=_signed(factor), out=value)
    _fold(value, spare, _LAST_SHIFT)


def _fold(value: Tensor, spare: Tensor, shift: int) -> None:
    """``value ^= value >> shift``, zeros shifted in."""
    torch.bitwise_right_shift(value, shift, out=spare)
    spare.bitwise_and_((1 << (32 - shift)) - 1)
    value.bitwise_xor_(spare)


def dropout(
    value: Tensor,
    key: Tensor,
    stream: str,
    p: float,
    place: Sequence[int] = (),
    microbatch: int = 0,
) -> Tensor:
    """Each element times ``1 / (1 - p)``, or zero with probability p."""
    given = value.contiguous().view(-1)
    out = torch.empty_like(given)
    limit, scale = _kept_below(p), 1.0 / (1.0 - p) if p < 1.0 else 0.0
    where = _Place(given.numel(), place, microbatch)
    triton = _triton(where, given.device) if value.dtype in _MANTISSA_BITS else None
    if triton:
        for part, keys in _parts(key, stream, where, triton.LARGEST, 0, given.numel()):
            own = slice(at := where.index(part), at + part.size)
            about = where.described(part), _mixing(keys)
            triton.drop(out[own], given[own], limit, scale, *about)
        return out.view(value.shape)
    zero = torch.zeros((), dtype=value.dtype, device=value.device)
    for begin, end, bits in words(key, stream, given.numel(), place, microbatch, given.device):
        torch.where(bits < limit, given[begin:end], zero, out=out[begin:end])
        out[begin:end].mul_(scale)
    return out.view(value.shape)


def dropout_factors(
    numel: int,
    only: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    key: Tensor,
    stream: str,
    p: float,
    place: Sequence[int],
    microbatch: int,
) -> Tensor:
    """What a dropout multiplies elements ``only`` of a piece by: 0 or ``1 / (1 - p)``."""
    out = torch.empty(only[1] - only[0], dtype=dtype, device=device)
    limit, scale = _kept_below(p), 1.0 / (1.0 - p) if p < 1.0 else 0.0
    for begin, end, bits in words(key, stream, numel, place, microbatch, device, only=only):
        own = out[begin - only[0] : end - only[0]]
        own.copy_(bits < limit).mul_(scale)
    return out


def _kept_below(p: float) -> int:
    """Words below this are kept by a dropout of probability p; at p = 0 that is all but one."""
    return min(round((1.0 - p) * 2.0**32) - (1 << 31), (1 << 31) - 1)


def uniform(
    key: Tensor,
    stream: str,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    place: Sequence[int] = (),
    microbatch: int = 0,
) -> Tensor:
    """Numbers of ``[0, 1)``, with as many bits as the dtype has."""
    out = torch.empty(math.prod(size), dtype=dtype, device=device)
    if dtype == torch.float64:
        return _fraction(key, stream, out, place, microbatch).mul_(2.0**-53).view(tuple(size))
    kept = _MANTISSA_BITS[dtype]
    for begin, end, bits in words(key, stream, out.numel(), place, microbatch, device):
        bits.bitwise_right_shift_(32 - kept).bitwise_and_((1 << kept) - 1)
        out[begin:end].copy_(bits).mul_(2.0**-kept)
    return out.view(tuple(size))


def _fraction(
    key: Tensor, stream: str, out: Tensor, place: Sequence[int], microbatch: int
) -> Tensor:
    """A float64 tensor filled with whole numbers of 53 bits."""
    numel, device = out.numel(), out.device
    for begin, end, bits in words(key, stream, numel, place, microbatch, device):
        out[begin:end].copy_(bits).add_(2.0**31).mul_(2.0**21)
    for begin, end, bits in words(key, stream, numel, place, microbatch, device, word=1):
        out[begin:end].add_(bits.bitwise_right_shift_(11).bitwise_and_((1 << 21) - 1))
    return out


def normal(
    key: Tensor,
    stream: str,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    place: Sequence[int] = (),
    microbatch: int = 0,
) -> Tensor:
    """Standard normal numbers: the quantiles of uniform ones."""
    drawn = torch.empty(math.prod(size), dtype=torch.float64, device=device)
    _fraction(key, stream, drawn, place, microbatch).add_(0.5).mul_(2.0**-53)
    out = torch.empty_like(drawn, dtype=dtype)
    chunk = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
    for begin in range(0, len(drawn), chunk):
        out[begin : begin + chunk] = normal_quantile(drawn[begin : begin + chunk])
    return out.view(tuple(size))


def integers(
    key: Tensor,
    stream: str,
    size: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    device: torch.device,
    place: Sequence[int] = (),
    microbatch: int = 0,
) -> Tensor:
    """Whole numbers from ``low`` up to but not ``high``, by the remainder of 62 bits."""
    out = torch.empty(math.prod(size), dtype=torch.int64, device=device)
    numel = out.numel()
    for begin, end, bits in words(key, stream, numel, place, microbatch, device):
        out[begin:end].copy_(bits.bitwise_and_((1 << 31) - 1)).bitwise_left_shift_(31)
    for begin, end, bits in words(key, stream, numel, place, microbatch, device, word=1):
        out[begin:end].add_(bits.bitwise_and_((1 << 31) - 1))
    return out.remainder_(high - low).add_(low).to(dtype).view(tuple(size))


_CENTRE = (
    (
        2509.0809287301226727,
        33430.575583588128105,
        67265.770927008700853,
        45921.953931549871457,
        13731.693765509461125,
        1971.5909503065514427,
        133.14166789178437745,
        3.3871328727963666080,
    ),
    (
        5226.4952788528545610,
        28729.085735721942674,
        39307.895800092710610,
        21213.794301586595867,
        5394.1960214247511077,
        687.18700749205790830,
        42.313330701600911252,
        1.0,
    ),
)
_SHOULDER = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258,
        3.64784832476320460504,
        5.76949722146069140550,
        4.63033784615654529590,
        1.42343711074968357734,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940,
        2.05319162663775882187,
        1.0,
    ),
)
_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580,
        5.46378491116411436990,
        6.65790464350110377720,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)


def normal_quantile(p: Tensor) -> Tensor:
    """Standard normal quantiles of float64 probabilities, to about 1e-15 of their size.

    Only additions, products, quotients and square roots, each an op of its own: the same bits
    wherever an element lies in a tensor, and on every device.

    Source:
        Wichura, Algorithm AS 241, Appl. Statist. 37(3), 1988.
    """
    away = p - 0.5
    found = away * _ratio(_CENTRE, 0.180625 - away * away)
    outside = away.abs() > 0.425
    found[outside] = _outer_quantile(p[outside])
    return found


def _outer_quantile(p: Tensor) -> Tensor:
    """Quantiles of probabilities near 0 and 1."""
    low = p < 0.5
    far = (-_log(torch.where(low, p, 1.0 - p))).sqrt_()
    found = _ratio(_SHOULDER, far - 1.6)
    beyond = far > 5.0
    found[beyond] = _ratio(_TAIL, far[beyond] - 5.0)
    return torch.where(low, -found, found)


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Tensor) -> Tensor:
    above, below = (_polynomial(own, x) for own in coefficients)
    return above / below


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """By Horner's scheme, the highest power first."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value.mul_(x).add_(coefficient)
    return value


def _log(x: Tensor) -> Tensor:
    """Logarithm of positive float64 numbers, by the series of its inverse hyperbolic tangent."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = exponent.to(x.dtype) - low.to(x.dtype)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = _polynomial([1.0 / n for n in range(23, 0, -2)], square)
    return exponent * math.log(2.0) + ratio * series * 2.0
