"""What a rule sees when its node is lowered for one rank.

`LocalOp` tells the rank's part of every operand and output; `Emitter` takes the local ops and the
collectives that make it. Expansions (a vocabulary-split embedding, a log-softmax over a split
dim) are written against these two, so they know nothing of FX graphs or process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.ir.graph import MICROBATCH_NUMBER, Arg, Node, Ref, TensorType, refs_in, replace_refs
from autopar.ir.sharding import (
    Mesh,
    Sharding,
    Split,
    contiguous_start,
    dim_splits,
    local_elements,
    local_shape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """One node on one rank.

    Attributes:
        node: The node, with global constants.
        operand_types: Global types of its operands.
        operands: Sharding of each operand.
        outputs: Sharding of each output.
        mesh: The mesh, and ``coordinates`` of the rank on it.
        values: The rank's operands, to be passed to `Emitter.call`.
    """

    node: Node
    operand_types: tuple[TensorType, ...]
    operands: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    mesh: Mesh
    coordinates: tuple[int, ...]
    values: tuple[Ref, ...]

    def operand_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        return local_shape(self.operand_types[index].shape, self.operands[index], self.coordinates)

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        return local_shape(self.node.outputs[index].shape, self.outputs[index], self.coordinates)

    def operand_type(self, index: int) -> TensorType:
        return TensorType(self.operand_shape(index), self.operand_types[index].dtype)

    def output_type(self, index: int = 0) -> TensorType:
        return TensorType(self.output_shape(index), self.node.outputs[index].dtype)

    def start(self, index: int, dim: int) -> int:
        """First global index of the rank's piece of an operand's dim (it has no gaps)."""
        return self._start(self.operand_types[index].shape, self.operands[index], dim)

    def output_start(self, index: int, dim: int) -> int:
        """First global index of the rank's piece of an output's dim (it has no gaps)."""
        return self._start(self.node.outputs[index].shape, self.outputs[index], dim)

    def _start(self, shape: Sequence[int], sharding: Sharding, dim: int) -> int:
        start = contiguous_start(shape[dim], dim_splits(sharding, dim), self.coordinates)
        assert start is not None, (self.node.name, dim, sharding)
        return start

    def place(self, shape: Sequence[int], sharding: Sharding) -> tuple[Arg, ...]:
        """What tells a random op which elements it makes: nothing where they are all of them.

        Args:
            shape: Global shape of what is drawn.
            sharding: How it is split.

        Returns:
            ``(start, per_microbatch, count, stride, ...)`` as `Elements`, and the number of the
            microbatch.
        """
        if not any(isinstance(axis, Split) for axis in sharding):
            return ()
        time = self.mesh.time_axis
        found = local_elements(shape, sharding, self.coordinates, time)
        runs = tuple(number for run in found.runs for number in run)
        number = MICROBATCH_NUMBER if found.per_microbatch else 0
        return (found.start, found.per_microbatch, *runs), number

    def axes_on(self, index: int, dim: int) -> tuple[int, ...]:
        """Mesh axes that split an operand's dim."""
        return tuple(a for a, s in enumerate(self.operands[index]) if _splits(s, dim))

    def is_first(self, axes: Sequence[int]) -> bool:
        """Whether the rank has coordinate 0 on all of these axes."""
        return all(self.coordinates[axis] == 0 for axis in axes)

    def args(self) -> tuple[Arg, ...]:
        """The node's arguments with its operands replaced by the rank's."""
        values = iter(self.values)
        return tuple(replace_refs(arg, values) for arg in self.node.args)

    def kwargs(self) -> dict[str, Arg]:
        """The node's keyword arguments with its operands replaced by the rank's."""
        used = sum(len(refs_in(arg)) for arg in self.node.args)
        values = iter(self.values[used:])
        return {name: replace_refs(arg, values) for name, arg in self.node.kwargs}


def _splits(axis: object, dim: int) -> bool:
    return isinstance(axis, Split) and axis.dim == dim


class Emitter(Protocol):
    """Takes the local program of a node, one op at a time."""

    def call(
        self,
        op: str,
        args: tuple[Arg, ...],
        out: TensorType,
        kwargs: Mapping[str, Arg] | None = ...,
    ) -> Ref:
        """Emit a local op with one result of this local type."""
        ...

    def call_many(
        self,
        op: str,
        args: tuple[Arg, ...],
        outs: Sequence[TensorType],
        kwargs: Mapping[str, Arg] | None = ...,
    ) -> tuple[Ref, ...]:
        """Emit a local op with several results of these local types."""
        ...

    def all_reduce(self, value: Ref, axes: Sequence[int], reduce: str = "sum") -> Ref:
        """Join a local value over mesh axes."""
        ...

    def result(self, value: Ref, index: int = 0) -> None:
        """Say that ``value`` is the rank's part of output ``index``."""
        ...
