"""The generator of `random_kernels` as Triton kernels, which keep an element's words in registers.

The same bits as its tensor ops make: all arithmetic is on 32-bit words that wrap. Imported where a
CUDA device draws; torch's CUDA builds bring Triton.

What a launch is about reaches it as one row of int32: the rectangle ``row, left, width``, the piece
``start, stride`` and ``count, stride`` of each outer run from the inside out, then the first key
word, ``shift, factor, key`` of each round, and the last shift.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 1 << 30
"""Elements of one launch, whose indices are int32."""
_BLOCK = 1024
_OPTIONS = {"enable_fp_fusion": False}
_PLACE = tl.constexpr(5)


@triton.jit
def _word(pointer):  # type: ignore[no-untyped-def]
    return tl.load(pointer).to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _bits(about, index, runs: tl.constexpr, rounds: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 of 32 random bits for each of the rectangle's elements."""
    left, start, stride = tl.load(about + 1), tl.load(about + 3), tl.load(about + 4)
    if runs == 0:
        number = start + (left + index) * stride
    else:
        width = tl.load(about + 2)
        number = start + (left + index % width) * stride
        row = tl.load(about) + index // width
        for run in tl.static_range(runs):
            count = tl.load(about + _PLACE + 2 * run)
            number += row % count * tl.load(about + _PLACE + 2 * run + 1)
            row = row // count
    keys = about + _PLACE + 2 * runs
    word = number.to(tl.uint32, bitcast=True) + _word(keys)
    for at in tl.static_range(rounds):
        word = (word ^ (word >> _word(keys + 3 * at + 1))) * _word(keys + 3 * at + 2)
        word += _word(keys + 3 * at + 3)
    return (word ^ (word >> _word(keys + 3 * rounds + 1))).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    out, about, numel, runs: tl.constexpr, rounds: tl.constexpr, block: tl.constexpr
):
    index = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + index, _bits(about, index, runs, rounds), mask=index < numel)


@triton.jit(do_not_specialize=["limit"])  # type: ignore[untyped-decorator]
def _drop(  # type: ignore[no-untyped-def]
    out,
    given,
    limit,
    scale,
    about,
    numel,
    runs: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
):
    index = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(given + index, mask=index < numel, other=0.0).to(tl.float32)
    kept = _bits(about, index, runs, rounds) < limit
    tl.store(out + index, tl.where(kept, value * scale, 0.0), mask=index < numel)


def draw(out: Tensor, place: Sequence[int], mixing: Sequence[int]) -> None:
    """Fill an int32 tensor with 32 random bits an element.

    Args:
        out: The elements of one rectangle, contiguous.
        place: ``row, left, width, start, stride`` and ``count, stride`` of each outer run, int32.
        mixing: Key words, shifts and factors, int32.
    """
    _draw[_grid(out)](out, *_launch(out, place, mixing), **_OPTIONS)


def drop(
    out: Tensor,
    given: Tensor,
    limit: int,
    scale: float,
    place: Sequence[int],
    mixing: Sequence[int],
) -> None:
    """Write ``scale`` times the given elements whose bits are below the limit, and zeros.

    A product is rounded once from float32, as torch's of float16, bfloat16 and float32 is.
    """
    _drop[_grid(out)](out, given, limit, scale, *_launch(out, place, mixing), **_OPTIONS)


def _grid(out: Tensor) -> tuple[int]:
    return (triton.cdiv(out.numel(), _BLOCK),)


def _launch(out: Tensor, place: Sequence[int], mixing: Sequence[int]) -> tuple[object, ...]:
    about = torch.tensor([*place, *mixing], dtype=torch.int32).to(out.device, non_blocking=True)
    runs, rounds = (len(place) - _PLACE.value) // 2, (len(mixing) - 2) // 3
    return about, out.numel(), runs, rounds, _BLOCK
