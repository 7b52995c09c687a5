"""The captured training step: a functional graph of named nodes over global shapes.

No torch objects live here: ops, dtypes and devices are strings, so a graph can be analysed,
compared, saved and planned without a tensor in sight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Phase(StrEnum):
    """Part of the step a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and dtype of a value; ``dtype`` without the ``torch.`` prefix."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """A value: output ``index`` of the node called ``node``."""

    node: str
    index: int = 0

    def __str__(self) -> str:
        return self.node if self.index == 0 else f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class Const:
    """A named constant argument that is not a number: a dtype, device, layout or memory format.

    Attributes:
        kind: ``dtype``, ``device``, ``layout`` or ``memory_format``; or `STREAM`, whose value tells
            two random ops apart and has no part in shapes, shardings or costs.
        value: Its name, without the ``torch.`` prefix.
    """

    kind: str
    value: str


STREAM = "stream"
"""Kind of the constant that names what a random op draws."""

MICROBATCH_NUMBER = Const("microbatch", "number")
"""In programs: the number of the microbatch that runs, known when it does."""

Arg = Ref | Const | int | float | bool | str | None | tuple["Arg", ...]
"""An argument: a value, a constant, or a tuple of arguments (lists become tuples)."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a node comes from in the user's program.

    Attributes:
        module: Dotted path of the module whose ``forward`` ran, ``""`` for the root.
        line: ``file.py:123`` of the innermost line outside torch.
    """

    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = f"module {self.module!r}" if self.module else "the model"
        return f"{where} ({self.line})" if self.line else where


PARAMETER = "parameter"
BUFFER = "buffer"
INPUT = "input"
CONSTANT = "constant"
KEY = "key"
SOURCE_OPS = frozenset({PARAMETER, BUFFER, INPUT, CONSTANT, KEY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One op of the step.

    Attributes:
        name: Unique in its graph, an identifier.
        op: ``aten.mm.default`` and the like, or one of ``SOURCE_OPS`` for what enters the graph.
        args: Positional arguments.
        kwargs: Keyword arguments, sorted by name.
        outputs: Global type of every output.
        phase: Forward or backward.
        source: Where it comes from.
        target: For ``SOURCE_OPS``: the parameter's or buffer's name, the input's path, the
            constant's name, ``key`` for the key of random ops. Empty otherwise.
        operands: Every value it reads, in the order of args then kwargs, nested tuples flattened.
    """

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorType, ...]
    phase: Phase = Phase.FORWARD
    source: Source = Source()
    target: str = ""
    operands: tuple[Ref, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", read_by(self.args, self.kwargs))

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        for key, value in self.kwargs:
            if key == name:
                return value
        return default

    def arg(self, position: int, default: Arg = None) -> Arg:
        return self.args[position] if position < len(self.args) else default


def read_by(args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> tuple[Ref, ...]:
    """Every value in arguments, in order, nested tuples flattened."""
    found: list[Ref] = []
    for arg in (*args, *(arg for _, arg in kwargs)):
        if isinstance(arg, Ref):
            found.append(arg)
        elif isinstance(arg, tuple):
            found += refs_in(arg)
    return tuple(found)


def refs_in(arg: Arg) -> tuple[Ref, ...]:
    """Every value in an argument, in order."""
    if isinstance(arg, Ref):
        return (arg,)
    if isinstance(arg, tuple):
        return tuple(ref for item in arg for ref in refs_in(item))
    return ()


def replace_refs(arg: Arg, values: Iterator[Ref]) -> Arg:
    """The argument with its values, in order, replaced by the next ones of ``values``."""
    if isinstance(arg, Ref):
        return next(values)
    if isinstance(arg, tuple):
        return tuple(replace_refs(item, values) for item in arg)
    return arg


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The training step (or the forward alone) over the global batch.

    Attributes:
        nodes: In an order in which every value is made before it is read; sources first.
        loss: The 0-d loss, or None for a forward without one.
        aux: Further results by name, in order (the dict a loss function returns beside the loss).
        gradients: Parameter name to its gradient; parameters without a gradient are absent.
        mutations: Buffer name to its value after the step.
        aliases: Second names of tied parameters and buffers to the name that owns the storage.
        batch_dims: Input path to the dim that counts samples; absent if it has none.
        summed: Parameter name to the narrowest dtype in which terms of its gradient may be summed;
            absent where they come in no narrower one.
        alone: Paths of the modules that are computed from each microbatch alone; ``microbatches``
            how many there are, which is then part of what the step computes.
    """

    nodes: tuple[Node, ...]
    loss: Ref | None
    aux: tuple[tuple[str, Ref], ...] = ()
    gradients: Mapping[str, Ref] = field(default_factory=dict)
    mutations: Mapping[str, Ref] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    summed: Mapping[str, str] = field(default_factory=dict)
    alone: tuple[str, ...] = ()
    microbatches: int = 1

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    def type_of(self, ref: Ref) -> TensorType:
        return self.by_name[ref.node].outputs[ref.index]

    def sources(self, op: str) -> Iterator[Node]:
        """Nodes of one of ``SOURCE_OPS``."""
        return iter(self._sources[op])

    @cached_property
    def _sources(self) -> Mapping[str, tuple[Node, ...]]:
        """Sources of every kind."""
        found: dict[str, list[Node]] = {op: [] for op in SOURCE_OPS}
        for node in self.nodes:
            if node.op in found:
                found[node.op].append(node)
        return {op: tuple(nodes) for op, nodes in found.items()}

    @property
    def results(self) -> tuple[Ref, ...]:
        """Every value that leaves the graph: loss, aux, gradients, mutations, in that order."""
        loss = () if self.loss is None else (self.loss,)
        aux = tuple(ref for _, ref in self.aux)
        return loss + aux + tuple(self.gradients.values()) + tuple(self.mutations.values())
