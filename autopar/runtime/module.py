"""From a rank's program to an FX module on local tensors.

Every instruction becomes one call; collectives become functional ones over the rank's groups.
FX's generated code drops every value after its last use, so live bytes are those of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.ops import constant_to_torch, resolve, torch_dtype
from autopar.ir.graph import MICROBATCH_NUMBER, Arg, Const, Ref
from autopar.lower.program import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    COPIES,
    MICROBATCH,
    REDUCE_SCATTER,
    TO_HOST,
    WAIT,
    Instruction,
    Program,
)
from autopar.runtime.host import Copies

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The process group of one mesh axis.

    Attributes:
        name: Name the functional collectives know it by; empty for an axis of one rank.
        size: Number of ranks.
    """

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Payload:
    """How a dtype travels where backends refuse it or reduce it in another sense.

    Attributes:
        before: What is sent, from the tensor.
        after: The tensor, from what was received.
        reduces: Reduction to use for one that is asked for, where it differs.
    """

    before: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor]
    reduces: Mapping[str, str] = field(default_factory=dict)


def _bool_as_bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8)


def _bytes_as_bool(value: Tensor) -> Tensor:
    return value.view(torch.bool)


def _complex_as_real(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj().contiguous())


def _as_bytes(value: Tensor) -> Tensor:
    return value.unsqueeze(-1).contiguous().view(torch.uint8)


def _as_int32(value: Tensor) -> Tensor:
    return value.to(torch.int32)


def _as_int16(value: Tensor) -> Tensor:
    return value.to(torch.int16)


def _bytes_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def bytes_as(value: Tensor) -> Tensor:
        return value.view(dtype).squeeze(-1)

    return bytes_as


def _take(box: list[Any], position: int) -> Any:
    value, box[position] = box[position], None
    return value


def _room_for(value: Tensor, size: int) -> Tensor:
    return value.new_empty((value.shape[0] * size, *value.shape[1:]))


def _rows_of_microbatch(value: Tensor, number: int, chunk: int, own: int) -> Tensor:
    return value.narrow(1, min(number * chunk, value.shape[1]), own)


_MOVES = (ALL_GATHER, ALL_TO_ALL)
_SUMS = (ALL_REDUCE, REDUCE_SCATTER)
_BOOL = Payload(_bool_as_bytes, _bytes_as_bool, {"sum": "max"})
_COMPLEX = Payload(_complex_as_real, torch.view_as_complex)

_PAYLOADS: Mapping[tuple[str, str], Payload] = {
    **{(op, "bool"): _BOOL for op in _MOVES + _SUMS},
    **{(op, kind): _COMPLEX for op in _MOVES + _SUMS for kind in ("complex64", "complex128")},
    **{(op, "int16"): Payload(_as_int32, _as_int16) for op in _SUMS},
    **{
        (op, kind): Payload(_as_bytes, _bytes_as(torch_dtype(kind)))
        for op in _MOVES
        for kind in ("int16", "float8_e4m3fn", "float8_e5m2")
    },
}
"""What gloo of torch 2.11 to 2.13 refuses (int16, float8, complex all-to-all and max) and what
would add differently (bool, which sums as "any"). Everything else travels as it is: both backends
have all five collectives."""


def _payload(collective: Instruction) -> Payload | None:
    return _PAYLOADS.get((collective.op, collective.outputs[0].dtype))


def build_module(
    program: Program, groups: tuple[AxisGroup, ...], device: torch.device
) -> fx.GraphModule:
    """The module that runs a program of one microbatch.

    Its forward takes one tensor for each of the program's inputs, in order, and returns the tuple
    of `Program.results`. Every node's ``meta["instruction"]`` is the instruction it was made for.

    Args:
        program: What to run.
        groups: The group of each mesh axis, in mesh order.
        device: What device constants mean.
    """
    build = _Build(groups=groups, device=device, copies=Copies(device))
    for position, entry in enumerate(program.inputs):
        # Not by their own names: FX lets one that shadows a builtin clobber another.
        build.values[Ref(entry.name)] = build.graph.placeholder(f"input_{position}")
    return build.finish(program.instructions, program.results)


@dataclass(frozen=True, slots=True)
class Part:
    """Some instructions of a program.

    Attributes:
        instructions: In order.
        inputs: Values that enter.
        outputs: Values that leave.
        begun: Collectives and copies that it waits for, begun by an earlier part.
    """

    instructions: tuple[Instruction, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    begun: tuple[Instruction, ...] = ()


def begun_before(
    instructions: Sequence[Instruction], everything: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    """What instructions of a program wait for without beginning it themselves."""
    waited = {i.operands[0].node for i in instructions if i.op == WAIT}
    waited -= {i.name for i in instructions}
    return tuple(i for i in everything if i.name in waited)


def build_part(
    part: Part,
    groups: tuple[AxisGroup, ...],
    device: torch.device,
    copies: Copies | None = None,
) -> fx.GraphModule:
    """The module that runs a part of a program.

    Its forward takes the number of the microbatch and a list of the inputs, which it empties, so
    that each one is freed after its last use; it returns the tuple of the outputs.

    Args:
        part: What to run.
        groups: The group of each mesh axis, in mesh order.
        device: What device constants mean.
        copies: Of all parts among which one waits for what another begins; None for its own.
    """
    build = _Build(groups=groups, device=device, copies=copies or Copies(device))
    build.number = build.graph.placeholder("microbatch_number")
    box = build.graph.placeholder("box")
    for position, ref in enumerate(part.inputs):
        build.values[ref] = build.graph.call_function(_take, (box, position))
    build.begun.update((Ref(i.name), i) for i in part.begun)
    return build.finish(part.instructions, part.outputs)


@dataclass(kw_only=True)
class _Build:
    """Working state of `build_part`."""

    groups: tuple[AxisGroup, ...]
    device: torch.device
    copies: Copies
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[Ref, fx.Node] = field(default_factory=dict)
    begun: dict[Ref, Instruction] = field(default_factory=dict)
    number: fx.Node | None = None
    current: str = ""

    def finish(self, instructions: Sequence[Instruction], outputs: Sequence[Ref]) -> fx.GraphModule:
        """The module, after the inputs were declared."""
        for instruction in instructions:
            self.add(instruction)
        self.graph.output(tuple(self.values[ref] for ref in outputs))
        module = fx.GraphModule(torch.nn.Module(), self.graph, "Program")
        module.graph.lint()
        return module

    def add(self, instruction: Instruction) -> None:
        self.current = instruction.name
        if instruction.op == WAIT:
            self._wait(instruction)
        elif instruction.op in COPIES:
            self.begun[Ref(instruction.name)] = instruction
            self._copy(instruction)
        elif instruction.op in COLLECTIVES:
            self.begun[Ref(instruction.name)] = instruction
            self._collective(instruction)
        elif instruction.op == MICROBATCH:
            self._microbatch(instruction)
        else:
            self._op(instruction)

    def _op(self, instruction: Instruction) -> None:
        target = resolve(instruction.op)
        args = tuple(self._arg(arg) for arg in instruction.args)
        kwargs = {name: self._arg(arg) for name, arg in instruction.kwargs}
        node = self._call(target, args, kwargs, instruction.name)
        if not _returns_several(target, len(instruction.outputs)):
            self.values[Ref(instruction.name)] = node
            return
        for index in range(len(instruction.outputs)):
            item = self._call(operator.getitem, (node, index))
            self.values[Ref(instruction.name, index)] = item

    def _collective(self, instruction: Instruction) -> None:
        source, _, *rest = instruction.args
        assert isinstance(source, Ref)
        result, group, value = Ref(instruction.name), self._group(instruction), self.values[source]
        if group.size == 1:
            self.values[result] = value
            return
        payload = _payload(instruction)
        reduce = str(rest[0]) if rest else ""
        if payload is not None:
            value = self._call(payload.before, (value,))
            reduce = payload.reduces.get(reduce, reduce)
        target, args = _functional(instruction, value, reduce, group)
        kwargs = {}
        if instruction.op == ALL_GATHER:
            kwargs["out"] = self._call(_room_for, (value, group.size))
        self.values[result] = self._call(target, args, kwargs, instruction.name)

    def _copy(self, instruction: Instruction) -> None:
        (source,) = instruction.operands
        start: Callable[[Tensor], Tensor] = self.copies.to_device
        if instruction.op == TO_HOST:
            gradient = instruction.purpose == "gradients"
            start = self.copies.gradient_to_host if gradient else self.copies.to_host
        result = Ref(instruction.name)
        self.values[result] = self._call(start, (self.values[source],), {}, instruction.name)

    def _wait(self, instruction: Instruction) -> None:
        (source,) = instruction.operands
        begun, value = self.begun[source], self.values[source]
        if begun.op in COPIES:
            value = self._call(self.copies.wait, (value,), {}, instruction.name)
        elif self._group(begun).size > 1:
            value = self._call(_c10d.wait_tensor.default, (value,), {}, instruction.name)
            payload = _payload(begun)
            value = value if payload is None else self._call(payload.after, (value,))
        self.values[Ref(instruction.name)] = value

    def _group(self, collective: Instruction) -> AxisGroup:
        axis = collective.args[1]
        assert isinstance(axis, int)
        return self.groups[axis]

    def _microbatch(self, instruction: Instruction) -> None:
        source, chunk, own = instruction.args
        assert isinstance(source, Ref) and self.number is not None
        args = (self.values[source], self.number, chunk, own)
        ref = Ref(instruction.name)
        self.values[ref] = self._call(_rows_of_microbatch, args, {}, instruction.name)

    def _arg(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.values[arg]
        if arg == MICROBATCH_NUMBER:
            assert self.number is not None
            return self.number
        if isinstance(arg, tuple):
            return [self._arg(item) for item in arg]
        if isinstance(arg, Const):
            return constant_to_torch(arg, self.device)
        return arg

    def _call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        node.meta["instruction"] = self.current
        return node


def _functional(
    instruction: Instruction, value: fx.Node, reduce: str, group: AxisGroup
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The functional collective of an instruction, and its arguments.

    An all-gather writes to a tensor that is there: where torch makes it, gloo of torch 2.13 spoils
    the heap as soon as two gathers are in flight.
    """
    if instruction.op == ALL_REDUCE:
        return _c10d.all_reduce.default, (value, reduce, group.name)
    if instruction.op == ALL_GATHER:
        return _c10d.all_gather_into_tensor_out.default, (value, group.size, group.name)
    if instruction.op == REDUCE_SCATTER:
        return _c10d.reduce_scatter_tensor.default, (value, reduce, group.size, group.name)
    rows = instruction.outputs[0].shape[0] // group.size
    return _c10d.all_to_all_single.default, (
        value,
        [rows] * group.size,
        [rows] * group.size,
        group.name,
    )


def _returns_several(target: Callable[..., Any], num_outputs: int) -> bool:
    """Whether a call returns a tuple or list of tensors rather than one."""
    schema = getattr(target, "_schema", None)
    if num_outputs != 1 or schema is None:
        return num_outputs != 1
    returns = schema.returns
    return len(returns) > 1 or not isinstance(returns[0].type, torch.TensorType)
