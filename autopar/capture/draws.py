"""Random ops of a program as keyed ones, each under a name of its own.

The name is the path of the module that runs, the kind of op, and how many of that kind the module
has drawn before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_CPU = torch.device("cpu")
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_FROM = "from"
"""Name of an overload that Python takes for a keyword."""

Table = Mapping[Any, Callable[..., Any]]


class Draws:
    """The random ops of one run of a program.

    Args:
        key: Seed and step.
        path: Gives the path of the module that runs.
    """

    def __init__(self, key: Tensor, path: Callable[[], str]) -> None:
        self.key = key
        self._path = path
        self._counts: dict[tuple[str, str], int] = {}

    def stream(self, kind: str) -> str:
        """Name of the next op of a kind that draws."""
        path = self._path()
        number = self._counts.get((path, kind), 0)
        self._counts[path, kind] = number + 1
        return f"{path}/{kind}/{number}"

    def dropout(
        self,
        input: Tensor,  # noqa: A002  (torch's name)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """In place of ``torch.nn.functional.dropout``."""
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0.0 or not input.numel():
            return input
        stream = self.stream("dropout")
        dropped: Tensor = torch.ops.autopar.dropout(input, self.key, stream, float(p))
        return input.copy_(dropped) if inplace else dropped

    def table(self) -> Table:
        """What to run in place of ATen's random ops."""
        return {
            aten.rand.default: self._rand,
            aten.rand.generator: self._rand,
            aten.rand_like.default: self._rand_like,
            aten.randn.default: self._randn,
            aten.randn.generator: self._randn,
            aten.randn_like.default: self._randn_like,
            aten.randint.default: self._randint,
            aten.randint.generator: self._randint,
            aten.randint.low: self._randint_from,
            aten.randint.low_generator: self._randint_from,
            aten.randint_like.default: self._randint_like,
            aten.randint_like.low_dtype: self._randint_like_from,
            aten.random_.to: self._random_to,
            getattr(aten.random_, _FROM): self._random_from,
            aten.bernoulli.default: self._bernoulli,
            aten.bernoulli.p: self._bernoulli_p,
            aten.bernoulli_.float: self._bernoulli_fill,
            aten.bernoulli_.Tensor: self._bernoulli_fill,
            aten.native_dropout.default: self._native_dropout,
            aten.uniform_.default: self._uniform_fill,
            aten.normal_.default: self._normal_fill,
            aten.log_normal_.default: self._log_normal_fill,
            aten.exponential_.default: self._exponential_fill,
            aten.geometric_.default: self._geometric_fill,
            aten.cauchy_.default: self._cauchy_fill,
            aten.normal.Tensor_float: self._normal_tensors,
            aten.normal.float_Tensor: self._normal_tensors,
            aten.normal.Tensor_Tensor: self._normal_tensors,
            aten.normal.float_float: self._normal_sized,
        }

    def _uniform(self, kind: str, size: Sequence[int], dtype: torch.dtype, device: Any) -> Any:
        if dtype not in _FLOATING:
            return NotImplemented
        return torch.ops.autopar.random_uniform(
            self.key, self.stream(kind), size, dtype, device or _CPU
        )

    def _normal(self, kind: str, size: Sequence[int], dtype: torch.dtype, device: Any) -> Any:
        if dtype not in _FLOATING:
            return NotImplemented
        return torch.ops.autopar.random_normal(
            self.key, self.stream(kind), size, dtype, device or _CPU
        )

    def _integers(
        self, size: Sequence[int], low: int, high: int, dtype: torch.dtype, device: Any
    ) -> Any:
        return torch.ops.autopar.random_integers(
            self.key, self.stream("randint"), size, low, high, dtype, device or _CPU
        )

    def _below(self, like: Tensor, p: Any) -> Any:
        """True with probability p, a number or a tensor of them."""
        wide = torch.float64 if getattr(p, "dtype", None) == torch.float64 else torch.float32
        return self._uniform("bernoulli", like.shape, wide, like.device) < p

    def _rand(self, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return self._uniform("rand", size, dtype or torch.get_default_dtype(), device)

    def _rand_like(self, like: Tensor, *, dtype: Any = None, **_: Any) -> Any:
        return self._uniform("rand", like.shape, dtype or like.dtype, like.device)

    def _randn(self, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return self._normal("randn", size, dtype or torch.get_default_dtype(), device)

    def _randn_like(self, like: Tensor, *, dtype: Any = None, **_: Any) -> Any:
        return self._normal("randn", like.shape, dtype or like.dtype, like.device)

    def _randint(self, high: int, size: Any, **options: Any) -> Any:
        return self._randint_from(0, high, size, **options)

    def _randint_from(
        self, low: int, high: int, size: Any, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Any:
        return self._integers(size, low, high, dtype or torch.int64, device)

    def _randint_like(self, like: Tensor, high: int, **options: Any) -> Any:
        return self._randint_like_from(like, 0, high, **options)

    def _randint_like_from(
        self, like: Tensor, low: int, high: int, *, dtype: Any = None, **_: Any
    ) -> Any:
        return self._integers(like.shape, low, high, dtype or like.dtype, like.device)

    def _random_to(self, filled: Tensor, high: int, **_: Any) -> Any:
        return self._random_from(filled, 0, high)

    def _random_from(self, filled: Tensor, low: int, high: int | None, **_: Any) -> Any:
        if high is None:
            return NotImplemented
        return filled.copy_(self._integers(filled.shape, low, high, torch.int64, filled.device))

    def _bernoulli(self, p: Tensor, **_: Any) -> Any:
        return self._below(p, p).to(p.dtype)

    def _bernoulli_p(self, like: Tensor, p: float, **_: Any) -> Any:
        return self._below(like, p).to(like.dtype)

    def _bernoulli_fill(self, filled: Tensor, p: Any = 0.5, **_: Any) -> Any:
        return filled.copy_(self._below(filled, p))

    def _native_dropout(self, given: Tensor, p: float, train: bool | None) -> Any:
        if train is False or p == 0.0:
            return given.clone(), torch.ones_like(given, dtype=torch.bool)
        kept = self._below(given, 1.0 - p)
        return given * kept * (1.0 / (1.0 - p) if p < 1.0 else 0.0), kept

    def _uniform_fill(self, filled: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
        drawn = self._uniform("rand", filled.shape, filled.dtype, filled.device)
        return drawn if drawn is NotImplemented else filled.copy_(drawn * (high - low) + low)

    def _normal_fill(self, filled: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
        drawn = self._normal("randn", filled.shape, filled.dtype, filled.device)
        return drawn if drawn is NotImplemented else filled.copy_(drawn * std + mean)

    def _log_normal_fill(
        self, filled: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any
    ) -> Any:
        drawn = self._normal("randn", filled.shape, filled.dtype, filled.device)
        return drawn if drawn is NotImplemented else filled.copy_((drawn * std + mean).exp())

    def _exponential_fill(self, filled: Tensor, lambd: float = 1.0, **_: Any) -> Any:
        if filled.dtype not in _FLOATING:
            return NotImplemented
        # Never zero, so that its logarithm is finite; as torch's own.
        least = torch.finfo(filled.dtype).eps / 2
        return filled.copy_(self._waited(filled).clamp_min(least) / lambd)

    def _geometric_fill(self, filled: Tensor, p: float, **_: Any) -> Any:
        if not 0.0 < p < 1.0:
            raise ValueError(f"geometric_ expects p to be in (0, 1), but got p={p}")
        waited = self._waited(filled)
        return filled.copy_((waited / -math.log1p(-p)).ceil().clamp_min(1.0))

    def _cauchy_fill(
        self, filled: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any
    ) -> Any:
        if filled.dtype not in _FLOATING:
            return NotImplemented
        drawn = self._uniform("rand", filled.shape, torch.float64, filled.device)
        return filled.copy_(((drawn - 0.5) * math.pi).tan() * sigma + median)

    def _waited(self, like: Tensor) -> Tensor:
        """Exponential numbers of rate one, in float64: they do not depend on where they lie."""
        drawn = self._uniform("rand", like.shape, torch.float64, like.device)
        return -torch.log1p(-drawn)

    def _normal_tensors(self, mean: Any = 0.0, std: Any = 1.0, **_: Any) -> Any:
        like = mean + std  # for its shape and dtype
        drawn = self._normal("randn", like.shape, like.dtype, like.device)
        return drawn if drawn is NotImplemented else drawn * std + mean

    def _normal_sized(self, mean: float, std: float, size: Any, **options: Any) -> Any:
        drawn = self._randn(size, **options)
        return drawn if drawn is NotImplemented else drawn * std + mean
