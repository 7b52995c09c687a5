"""Random ops of captured graphs: pure functions of a key, a stream and elements' numbers.

``autopar::dropout``, ``random_uniform``, ``random_normal`` and ``random_integers`` draw what
`random_kernels` says, so a number depends on (seed, step, op, place in the whole tensor) alone: not
on how many ranks or microbatches there are, nor on how often it is drawn.

The last two arguments say which elements of the whole the op makes (`random_kernels`, *place*) and
in which microbatch; captured graphs leave them out, lowering writes them for one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.capture import random_kernels as kernels
from autopar.capture.library import LIBRARY, define, give_shapes, implement

_PLACE = "int[] place=[], int microbatch=0"

define(f"dropout(Tensor x, Tensor key, str stream, float p, {_PLACE}) -> Tensor")
define(
    f"random_uniform(Tensor key, str stream, int[] size, ScalarType dtype, Device device, {_PLACE})"
    " -> Tensor"
)
define(
    f"random_normal(Tensor key, str stream, int[] size, ScalarType dtype, Device device, {_PLACE})"
    " -> Tensor"
)
define(
    "random_integers(Tensor key, str stream, int[] size, int low, int high, ScalarType dtype,"
    f" Device device, {_PLACE}) -> Tensor"
)


def make_key(seed: int, step: int) -> Tensor:
    """The key of a step, int64 ``[2]`` in host memory."""
    wrapped = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return torch.tensor([wrapped, step], dtype=torch.int64)


def _like(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _made(key: Tensor, stream: str, size: Sequence[int], dtype: torch.dtype, *rest: Any) -> Tensor:
    return key.new_empty(tuple(size), dtype=dtype)


def _made_between(
    key: Tensor,
    stream: str,
    size: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    *rest: Any,
) -> Tensor:
    return key.new_empty(tuple(size), dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, key, *ctx.rest = inputs
    ctx.save_for_backward(key)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same op: the mask is drawn again rather than kept."""
    (key,) = ctx.saved_tensors
    return (torch.ops.autopar.dropout(grad, key, *ctx.rest), *[None] * (1 + len(ctx.rest)))


implement("dropout", kernels.dropout, "CPU")
implement("dropout", kernels.dropout, "CUDA")
# The key is in host memory wherever the numbers are wanted.
implement("random_uniform", kernels.uniform, "CPU")
implement("random_normal", kernels.normal, "CPU")
implement("random_integers", kernels.integers, "CPU")
give_shapes("dropout", _like)
give_shapes("random_uniform", _made)
give_shapes("random_normal", _made)
give_shapes("random_integers", _made_between)
torch.library.register_autograd("autopar::dropout", _gradient, setup_context=_setup, lib=LIBRARY)
