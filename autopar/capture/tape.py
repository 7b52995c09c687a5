"""What a recording consists of: steps on a tape, and which tensor is which value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.capture.ops import dtype_name
from autopar.ir.graph import (
    BUFFER,
    CONSTANT,
    INPUT,
    KEY,
    PARAMETER,
    Arg,
    Phase,
    Ref,
    Source,
    TensorType,
    refs_in,
)

LIFT = torch.ops.aten.lift_fresh.default
"""What ``torch.tensor(...)`` calls on its literal."""


@dataclass(slots=True)
class Step:
    """One recorded op, or a source.

    Attributes:
        op: Name, ``aten.mm.default`` or one of ``SOURCE_OPS``.
        args: Positional arguments; values are named ``Ref(number of their step, output)``.
        kwargs: Keyword arguments.
        results: The value of every output; an in-place op returns the value it was given.
        outputs: Type of every output; None where the op gives no tensor.
        phase: Forward or backward.
        source: Where it comes from.
        target: Name of a source.
        func: The op itself, None for sources.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    results: tuple[Ref | None, ...]
    outputs: tuple[TensorType | None, ...]
    phase: Phase
    source: Source
    target: str = ""
    func: Any = None


def storage_id(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def same_steps(one: Tape, other: Tape) -> bool:
    """Whether two recordings compute the same, of equal constants."""

    def said(step: Step) -> object:
        return step.op, step.args, step.kwargs, step.outputs, step.target

    return (
        one.constants.keys() == other.constants.keys()
        and all(torch.equal(value, other.constants[n]) for n, value in one.constants.items())
        and len(one.steps) == len(other.steps)
        and all(said(a) == said(b) for a, b in zip(one.steps, other.steps, strict=True))
    )


class Tape:
    """The steps of one recording, the tensors they made, and the constants they read.

    Attributes:
        steps: Sources and ops in order; a value's step is at the number it is named by.
        constants: Real tensor of each CONSTANT step, by its target.
        written: Storages that ops wrote to.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.constants: dict[str, Tensor] = {}
        self.written: set[int] = set()
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []
        self._tensors: dict[Ref, Tensor] = {}
        self._types: dict[Any, TensorType] = {}

    @property
    def mutated(self) -> bool:
        """Whether an op wrote to an operand."""
        return bool(self.written)

    def add_source(self, op: str, target: str, tensor: Tensor) -> Ref:
        """Record what enters the graph; ops that read ``tensor`` then read this value."""
        ref = Ref(str(len(self.steps)))
        self.bind(tensor, ref)
        kind = self.type_of(tensor)
        self.steps.append(Step(op, (), {}, (ref,), (kind,), Phase.FORWARD, Source(), target))
        return ref

    def bind(self, tensor: Tensor, ref: Ref) -> None:
        self._refs[id(tensor)] = ref
        self._alive.append(tensor)
        self._tensors[ref] = tensor

    def ref(self, tensor: Tensor) -> Ref | None:
        """The value a tensor is, None if it was not recorded."""
        return self._refs.get(id(tensor))

    def tensor(self, ref: Ref) -> Tensor:
        return self._tensors[ref]

    def step_of(self, ref: Ref) -> Step:
        """The step that made a value."""
        return self.steps[int(ref.node)]

    def is_literal(self, constant: str) -> bool:
        """Whether a constant is a ``torch.tensor(...)`` of the program, made anew in each run."""
        return all(step.func is LIFT for step in self._readers(constant))

    def first_use(self, constant: str) -> Source:
        """Where a constant is first read."""
        return self._readers(constant)[0].source

    def _readers(self, constant: str) -> list[Step]:
        (ref,) = (
            Ref(str(n))
            for n, step in enumerate(self.steps)
            if step.op == CONSTANT and step.target == constant
        )
        return [
            step
            for step in self.steps
            if any(ref in refs_in(arg) for arg in (*step.args, *step.kwargs.values()))
        ]

    def constant_steps(self, value: Ref) -> list[Step] | None:
        """The steps that make a value; None if state or data of the program may be in it."""
        needed, found = {value.node}, []
        for number in range(int(value.node), -1, -1):
            if str(number) not in needed:
                continue
            step = self.steps[number]
            storages = (storage_id(self._tensors[r]) for r in step.results if r is not None)
            if step.op in (PARAMETER, BUFFER, INPUT, KEY) or not self.written.isdisjoint(storages):
                return None
            found.append(step)
            for arg in (*step.args, *step.kwargs.values()):
                needed.update(ref.node for ref in refs_in(arg))
        return found[::-1]

    def type_of(self, tensor: Tensor) -> TensorType:
        key = (tensor.shape, tensor.dtype)
        found = self._types.get(key)
        if found is None:
            found = TensorType(tuple(tensor.shape), dtype_name(tensor.dtype))
            self._types[key] = found
        return found

    def append(
        self, func: Any, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg], outputs: Any
    ) -> Step:
        """Record an op and what it returned."""
        number = str(len(self.steps))
        results: list[Ref | None] = []
        types: list[TensorType | None] = []
        for index, output in enumerate(outputs):
            if output is None:
                results.append(None)
                types.append(None)
                continue
            ref = self._refs.get(id(output))
            if ref is None:
                ref = Ref(number, index)
                self.bind(output, ref)
            results.append(ref)
            types.append(self.type_of(output))
        step = Step(
            op, args, kwargs, tuple(results), tuple(types), Phase.FORWARD, Source(), "", func
        )
        self.steps.append(step)
        return step
