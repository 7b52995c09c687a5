"""Collects the instructions of one rank.

The builder is the `Emitter` that rules' expansions write to, and what resharding writes to; it
knows local types and names, nothing of strategies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Arg, Const, Phase, Ref, TensorType
from autopar.ir.sharding import Mesh
from autopar.lower.program import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    MICROBATCH,
    REDUCE_SCATTER,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    Instruction,
    Section,
)

VIEW_OPS = frozenset(
    {
        "aten.reshape.default",
        "aten.permute.default",
        "aten.transpose.int",
        "aten.t.default",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.expand.default",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.alias.default",
        "aten.detach.default",
        "aten.view_as_complex.default",
        "aten.view_as_real.default",
        "aten.diagonal.default",
        "aten.unfold.default",
        "aten.as_strided.default",
        MICROBATCH,
        WAIT,
    }
)
"""Local ops whose results share the storage of their first operand (a reshape may copy)."""


class Builder:
    """Instructions of one rank, in order.

    What a prologue makes has names of its own: they are the same in the programs of all
    microbatches, which read what one of them made, while the names inside their loops may differ.

    Attributes:
        mesh: The mesh; ``coordinates`` of the rank on it.
        types: Local type of every value so far.
        origin: Captured node that is being lowered; ``phase`` and ``purpose`` go with it.
        lasting: Whether what is made outlives the whole that it may be a piece of: a piece is then
            copied, so that it does not hold the whole.
        chunk: Chunk of the model that is being lowered; ``suffix`` ends the names of its values.
        flops: Operations of the rank's part of the node that is being lowered, by its op: what is
            emitted around that op only moves bytes.
    """

    def __init__(
        self, mesh: Mesh, coordinates: tuple[int, ...], chunk: int = 0, suffix: str = ""
    ) -> None:
        self.mesh = mesh
        self.coordinates = coordinates
        self.types: dict[Ref, TensorType] = {}
        self.chunk = chunk
        self.suffix = suffix
        self.origin = ""
        self.phase = Phase.FORWARD
        self.section = Section.FORWARD
        self.sections: dict[Ref, Section] = {}
        self.purpose = "activations"
        self.lasting = False
        self.flops: Mapping[str, int] = {}
        self._instructions: list[Instruction] = []
        self._results: dict[int, Ref] = {}
        self._taken: dict[str, int] = {}

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(self._instructions)

    def add_input(self, name: str, kind: TensorType) -> Ref:
        ref = Ref(self._name(name))
        self.types[ref] = kind
        self.sections[ref] = Section.PROLOGUE
        return ref

    def call(
        self,
        op: str,
        args: tuple[Arg, ...],
        out: TensorType,
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Ref:
        """Emit an op with one result."""
        return self.call_many(op, args, (out,), kwargs)[0]

    def call_many(
        self,
        op: str,
        args: tuple[Arg, ...],
        outs: Sequence[TensorType],
        kwargs: Mapping[str, Arg] | None = None,
        *,
        name: str = "",
    ) -> tuple[Ref, ...]:
        """Emit an op; its results in order."""
        once = self.section is Section.PROLOGUE and self.mesh.time_axis is not None
        wanted = (name or f"{self.origin}_{op.split('.')[1]}") + "_once" * once + self.suffix
        name = self._name(wanted)
        self._instructions.append(
            Instruction(
                name=name,
                op=op,
                args=args,
                kwargs=tuple(sorted((kwargs or {}).items())),
                outputs=tuple(outs),
                origin=self.origin,
                phase=self.phase,
                view=op in VIEW_OPS,
                flops=self.flops.get(op, 0),
                purpose=self.purpose,
                section=self.section,
                chunk=self.chunk,
            )
        )
        refs = tuple(Ref(name, index) for index in range(len(outs)))
        self.types.update(zip(refs, outs, strict=True))
        self.sections.update(dict.fromkeys(refs, self.section))
        return refs

    def all_reduce(self, value: Ref, axes: Sequence[int], reduce: str = "sum") -> Ref:
        """Join a value over mesh axes, one after the other."""
        for axis in axes:
            assert axis != self.mesh.time_axis
            if self.mesh.sizes[axis] > 1:
                value = self._started(ALL_REDUCE, (value, axis, reduce), self.types[value])
        return value

    def all_gather(self, value: Ref, axis: int) -> Ref:
        """Pieces of all ranks of the axis, concatenated along dim 0."""
        kind = self.types[value]
        shape = (kind.shape[0] * self.mesh.sizes[axis], *kind.shape[1:])
        return self._started(ALL_GATHER, (value, axis), TensorType(shape, kind.dtype))

    def reduce_scatter(self, value: Ref, axis: int, reduce: str = "sum") -> Ref:
        """The rank's piece of dim 0 of the joined value."""
        kind = self.types[value]
        shape = (kind.shape[0] // self.mesh.sizes[axis], *kind.shape[1:])
        return self._started(REDUCE_SCATTER, (value, axis, reduce), TensorType(shape, kind.dtype))

    def all_to_all(self, value: Ref, axis: int) -> Ref:
        """Piece j of dim 0 goes to coordinate j."""
        return self._started(ALL_TO_ALL, (value, axis), self.types[value])

    def to_host(self, value: Ref) -> Ref:
        """The value in host memory."""
        return self._started(TO_HOST, (value,), self.types[value])

    def to_device(self, value: Ref) -> Ref:
        """A value of host memory in device memory."""
        return self._started(TO_DEVICE, (value,), self.types[value])

    def microbatch(self, rows: Ref, chunk: int, own: int) -> Ref:
        """This microbatch's rows of dim 1, ``own`` of them, of a value of the prologue."""
        kind = self.types[rows]
        out = TensorType((kind.shape[0], own, *kind.shape[2:]), kind.dtype)
        return self.call(MICROBATCH, (rows, chunk, own), out)

    def accumulate(self, value: Ref, reduce: str) -> Ref:
        """What the loop made of a value, joined over the microbatches."""
        return self.call(ACCUMULATE, (value, reduce), self.types[value])

    def result(self, value: Ref, index: int = 0) -> None:
        """Say that ``value`` is output ``index`` of the node being lowered."""
        self._results[index] = value

    def take_results(self) -> dict[int, Ref]:
        """Results said since the last call."""
        found, self._results = self._results, {}
        return found

    def reshape(self, value: Ref, shape: Sequence[int]) -> Ref:
        kind = self.types[value]
        if kind.shape == tuple(shape):
            return value
        assert math.prod(shape) == kind.num_elements, (value, kind, shape)
        out = TensorType(tuple(shape), kind.dtype)
        return self.call("aten.reshape.default", (value, tuple(shape)), out)

    def permute(self, value: Ref, order: Sequence[int]) -> Ref:
        """The value with its dims reordered, laid out contiguously."""
        kind = self.types[value]
        if list(order) == sorted(order):
            return value
        out = TensorType(tuple(kind.shape[i] for i in order), kind.dtype)
        moved = self.call("aten.permute.default", (value, tuple(order)), out)
        return self._contiguous(moved, kind.shape, order)

    def _contiguous(self, value: Ref, shape: Sequence[int], order: Sequence[int]) -> Ref:
        """A copy, unless the reordered dims that are longer than one kept their order."""
        long = [i for i in order if shape[i] > 1]
        return value if long == sorted(long) else self.copy(value)

    def copy(self, value: Ref) -> Ref:
        """A contiguous copy; some kernels read their operands as if they were."""
        layout = {"memory_format": Const("memory_format", "contiguous_format")}
        return self.call("aten.clone.default", (value,), self.types[value], layout)

    def narrow(self, value: Ref, dim: int, start: int, length: int) -> Ref:
        """Entries ``start`` to ``start + length`` of a dim, laid out contiguously."""
        kind = self.types[value]
        if start == 0 and length == kind.shape[dim]:
            return value
        shape = (*kind.shape[:dim], length, *kind.shape[dim + 1 :])
        out = TensorType(shape, kind.dtype)
        cut = self.call("aten.slice.Tensor", (value, dim, start, start + length), out)
        plain = math.prod(kind.shape[:dim]) == 1 and not self.lasting
        return cut if plain else self.copy(cut)

    def concatenate(self, values: Sequence[Ref], dim: int) -> Ref:
        """The values one behind the other along a dim."""
        kinds = [self.types[value] for value in values]
        length = sum(kind.shape[dim] for kind in kinds)
        shape = (*kinds[0].shape[:dim], length, *kinds[0].shape[dim + 1 :])
        out = TensorType(shape, kinds[0].dtype)
        return self.call("aten.cat.default", (tuple(values), dim), out)

    def pad(self, value: Ref, dim: int, length: int) -> Ref:
        """The value with zeros behind it along ``dim``, ``length`` in all."""
        kind = self.types[value]
        missing = length - kind.shape[dim]
        if missing == 0:
            return value
        pads = (0, 0) * (len(kind.shape) - 1 - dim) + (0, missing)
        shape = (*kind.shape[:dim], length, *kind.shape[dim + 1 :])
        out = TensorType(shape, kind.dtype)
        return self.call("aten.constant_pad_nd.default", (value, pads, 0), out)

    def _started(self, op: str, args: tuple[Arg, ...], out: TensorType) -> Ref:
        started = self.call(op, args, out)
        return self.call(WAIT, (started,), out)

    def _name(self, wanted: str) -> str:
        seen = self._taken.get(wanted)
        self._taken[wanted] = 1 if seen is None else seen + 1
        return wanted if seen is None else self._name(f"{wanted}_{seen}")
