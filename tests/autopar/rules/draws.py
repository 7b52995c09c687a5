"""Random sizes and tensors for samples of ops, and the nodes that samples become."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.graph import Arg, Const, Node, Ref, TensorType
from tests.oracles.simulated import resolve, run_op, type_of

T = TypeVar("T")

SIZES = (1, 2, 3, 4, 5, 6, 8, 12)


class Draw:
    """Draws from hypothesis; tensors come from a generator seeded by it."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))

    def choice(self, options: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(list(options)))

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def chance(self) -> bool:
        return self.data.draw(st.booleans())

    def size(self, *options: int) -> int:
        return self.choice(options or SIZES)

    def shape(self, low: int = 0, high: int = 3, most: int = 200) -> tuple[int, ...]:
        """A shape of low to high dims, of at most so many elements."""
        found: list[int] = []
        for _ in range(self.integer(low, high)):
            room = most // max(1, math.prod(found))
            found.append(self.size(*(s for s in SIZES if s <= max(room, 1))))
        return tuple(found)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=self.generator)

    def integers(self, *shape: int, low: int = 0, high: int = 9) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def booleans(self, *shape: int) -> Tensor:
        return self.integers(*shape, high=2).bool()

    def stretched(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        first = self.integer(0, len(shape)) if self.integer(0, 3) == 0 else 0
        return tuple(1 if self.integer(0, 4) == 0 else size for size in shape[first:])

    def cuts(self, size: int) -> frozenset[tuple[int, int]]:
        """Random places (outer, size) where a factor may be cut."""
        found = set()
        for _ in range(2):
            outer = self.choice([d for d in range(1, size + 1) if size % d == 0])
            rest = size // outer
            found.add((outer, self.choice([d for d in range(1, rest + 1) if rest % d == 0])))
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of one call, tensors among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)


@dataclass(frozen=True, slots=True)
class Case:
    """A node, its operands and its outputs on one rank."""

    node: Node
    operands: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(type_of(value) for value in self.operands)


def case(op: str, sample: Sample) -> Case:
    """The node of a call, and what the dense op gives."""
    operands: list[Tensor] = []
    args = tuple(_arg(arg, operands) for arg in sample.args)
    kwargs = tuple((name, _arg(arg, operands)) for name, arg in sorted(sample.kwargs.items()))
    values = {Ref(f"x{index}"): value for index, value in enumerate(operands)}
    outputs = run_op(op, args, dict(kwargs), values)
    given = next(type_of(value) for value in outputs if value is not None)
    absent = TensorType((0,), given.dtype)
    types = tuple(absent if value is None else type_of(value) for value in outputs)
    node = Node(name="n", op=op, args=args, kwargs=kwargs, outputs=types)
    return Case(node, tuple(operands), outputs)


def _arg(arg: Any, operands: list[Tensor]) -> Arg:
    if isinstance(arg, Tensor):
        operands.append(arg)
        return Ref(f"x{len(operands) - 1}")
    if isinstance(arg, (list, tuple)):
        return tuple(_arg(item, operands) for item in arg)
    if isinstance(arg, torch.dtype):
        return Const("dtype", str(arg).removeprefix("torch."))
    if isinstance(arg, torch.device):
        return Const("device", str(arg))
    return arg  # type: ignore[no-any-return]


# Samples of pointwise ops come from their schemas.

_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "exponent": (2, 3),
    "dim": (0,),
    "p": (1,),
    "decimals": (1,),
    "n": (1,),
}
_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


def pointwise_sample(op: str, draw: Draw) -> Sample:
    """A call of a pointwise op: stretched shapes and some dtype where it takes them."""
    shape = draw.shape(0, 3)
    tried = draw.choice([0, 1]), draw.chance()
    order = [_DTYPES[tried[0]], *(d for d in _DTYPES if d is not _DTYPES[tried[0]])]
    stretch = [True, False] if tried[1] else [False, True]
    for dtype in order:
        for wide in stretch:
            sample = _from_schema(op, draw, shape, dtype, stretched=wide)
            if sample is not None:
                return sample
    raise AssertionError(f"no sample of {op}")


def _from_schema(
    op: str, draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, *, stretched: bool
) -> Sample | None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in resolve(op)._schema.arguments:  # type: ignore[attr-defined]
        kind = str(argument.type)
        if kind == "Tensor" or (kind == "Optional[Tensor]" and draw.chance()):
            own = draw.stretched(shape) if stretched and args else shape
            wanted = torch.bool if argument.name in ("mask", "condition") else dtype
            value: Any = _random(draw, own, wanted)
        elif argument.has_default_value():
            continue
        else:
            value = _constant(draw, argument.name, kind, dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    sample = Sample(*args, **kwargs)
    try:
        case(op, sample)
    except (RuntimeError, NotImplementedError, IndexError):
        return None
    return sample


def _random(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return draw.booleans(*shape)
    if dtype is torch.int64:
        return draw.integers(*shape, low=-5, high=9)
    return draw.floats(*shape, dtype=dtype)


def _constant(draw: Draw, name: str, kind: str, dtype: torch.dtype) -> Any:
    if name in _NUMBERS:
        return draw.choice(_NUMBERS[name])
    if "bool" in kind:
        return draw.chance()
    if "str" in kind:
        return "none"
    if "Optional" in kind:
        return None
    whole = kind == "int" or dtype in (torch.int64, torch.bool)
    return draw.choice([0, 1, 2] if whole else [0, 0.5, 1, 2])
