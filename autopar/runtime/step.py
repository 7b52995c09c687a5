"""One compiled step on one rank: from a batch's tensors to results.

Everything that can be known before a step is worked out when the `Step` is made: which piece of
which input, which parameter, which result goes where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.capture.ops import torch_dtype
from autopar.errors import BatchError, RuntimeFailure
from autopar.ir.graph import KEY
from autopar.ir.sharding import Sharding, dim_splits, local_indices, whole
from autopar.lower.program import WAIT, Program, ProgramInput
from autopar.plan.records import Plan
from autopar.runtime.groups import MeshGroups
from autopar.runtime.host import TO_HOST, settle
from autopar.runtime.loop import Built, build
from autopar.runtime.params import ModelState, input_piece, local_of, local_piece
from autopar.runtime.pipeline import StageSource, build_stage
from autopar.runtime.results import Sharing, build_idle, shared


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """What a step is built from.

    Attributes:
        program: The rank's program, of its first microbatch if there are several.
        plan: The plan it was lowered from.
        constants: Real tensor of each of the program's constants, whole.
        returns_dict: Whether the loss function returns ``(loss, dict)``.
        batch_dims: Input path to the dim that counts samples.
        microbatches: The rank's program of every microbatch, if there are several.
        stage: How the rank's stage of a pipeline runs; None without a pipeline, and on idle ranks.
        sharing: Results that not all ranks make; None where all do.
        draws: Whether the step draws random numbers, on whatever rank.
    """

    program: Program
    plan: Plan
    constants: Mapping[str, Tensor]
    returns_dict: bool = False
    batch_dims: Mapping[str, int]
    microbatches: tuple[Program, ...] = ()
    stage: StageSource | None = None
    sharing: Sharing | None = None
    draws: bool = False

    @property
    def stage_number(self) -> int | None:
        """The rank's stage, None where it is idle."""
        return 0 if self.sharing is None else self.sharing.peers.stage


@dataclass(frozen=True, slots=True)
class Results:
    """What a program returned.

    Attributes:
        loss: The loss, or None.
        aux: Further results by name.
        gradients: Pieces of gradients, in the order of ``Step.targets``.
    """

    loss: Tensor | None
    aux: dict[str, Tensor]
    gradients: list[Tensor]


class Step:
    """A program bound to a rank's parameters, buffers and constants.

    Attributes:
        source: What it was built from.
        targets: The parameters that get a gradient.
        modules: The program as FX modules.
        doing: What it runs now, in words; empty without a pipeline.
        has_run: Whether it has run to its end.
    """

    def __init__(
        self,
        source: StepSource,
        state: ModelState,
        groups: MeshGroups,
        device: torch.device,
        paths: Sequence[str],
    ) -> None:
        program = source.program
        self.source = source
        self.targets = tuple(state.parameters[name] for name in program.gradients)
        self.has_run = False
        built = self._built(groups, device)
        self.modules = built.modules
        self._call = built.run
        self.doing = built.doing
        self._device = device
        self._paths = tuple(paths)
        self._inputs = {path: program_input(program, path) for path in paths}
        self._parameters = [
            (i, cast(DTensor, state.parameters[e.target]))
            for i, e in enumerate(program.inputs)
            if e.kind == "parameter"
        ]
        # Buffers and constants enter whole; where the program takes a piece, it is cut here.
        self._buffers = [
            (i, state.buffers[e.target], e)
            for i, e in enumerate(program.inputs)
            if e.kind == "buffer"
        ]
        self._mutated = [state.buffers[name] for name in program.mutations]
        self._frame: list[Any] = [None] * len(program.inputs)
        for index, entry in enumerate(program.inputs):
            if entry.kind == "constant":
                full = source.constants[entry.target]
                self._frame[index] = local_piece(full, entry.sharding, self.coordinates).to(device)
        self._slots = [
            (i, paths.index(e.target), e) for i, e in enumerate(program.inputs) if e.kind == "input"
        ]
        self._keys = [i for i, e in enumerate(program.inputs) if e.kind == KEY]
        self._num_head = (program.loss is not None) + len(program.aux)
        home = {e.target for e in program.inputs if e.on_host}
        # Places of gradients in host memory among the results.
        self._delivered = {
            self._num_head + n for n, name in enumerate(program.gradients) if name in home
        }
        self._copied: tuple[int, ...] | None = None

    def _built(self, groups: MeshGroups, device: torch.device) -> Built:
        """What runs the step on this rank."""
        source = self.source
        programs = source.microbatches or (source.program,)
        if source.sharing is None:
            return build(programs, groups.axes, device)
        if source.stage is not None:
            return build_stage(programs, source.stage, source.sharing, groups.axes, device)
        if source.stage_number is not None:
            return shared(build(programs, groups.axes, device), source.sharing, device)
        pieces = [local_of(cast(DTensor, parameter)) for parameter in self.targets]
        return build_idle(source.program, pieces, source.sharing, device)

    def check_sound(self) -> None:
        """Refuse to run where messages of a step that was interrupted may be under way.

        Raises:
            RuntimeFailure: They may.
        """
        sharing = self.source.sharing
        if sharing is not None and sharing.peers.mail.spoiled:
            raise RuntimeFailure(
                "cannot run a step: an earlier one was interrupted on this rank, and its messages "
                "may be under way still; call autopar.compile again on all ranks, or start the "
                "processes again"
            )

    @property
    def coordinates(self) -> tuple[int, ...]:
        return self.source.program.coordinates

    @torch.no_grad()
    def run(self, tensors: Sequence[Tensor], sharded: bool, key: Tensor) -> Results:
        """Run the program; buffers are updated, parameters and the batch are not.

        Args:
            tensors: The batch's tensors, in the order of its paths.
            sharded: Whether they hold this rank's samples only.
            key: Seed and step of random ops, in host memory.
        """
        values = list(self._frame)
        for index in self._keys:
            values[index] = key
        for index, position, entry in self._slots:
            batch_dim = self.source.batch_dims.get(entry.target) if sharded else None
            piece = input_piece(tensors[position], entry, self.coordinates, batch_dim)
            values[index] = piece.to(self._device, non_blocking=True)
        for index, parameter in self._parameters:
            values[index] = local_of(parameter)
        for index, buffer, entry in self._buffers:
            values[index] = input_piece(buffer, entry, self.coordinates, None)
        results = list(self._run(values))
        if self._copied is None:
            self._copied = _aliased(results, values)
        del values
        if self._delivered:
            settle(self._device)
        for index in self._copied:
            own = results[index]
            results[index] = (
                TO_HOST(own, dense=True)
                if index in self._delivered
                else own.clone(memory_format=torch.contiguous_format)
            )
        self.has_run = True
        return self._sorted(results)

    def _run(self, values: list[Any]) -> tuple[Tensor, ...]:
        if torch.is_autocast_enabled(self._device.type):
            with torch.autocast(self._device.type, enabled=False):
                return self._call(*values)
        return self._call(*values)

    def _sorted(self, results: list[Tensor]) -> Results:
        program = self.source.program
        last = self._num_head + len(self.targets)
        for buffer, value in zip(self._mutated, results[last:], strict=True):
            buffer.copy_(value)
        has_loss = program.loss is not None
        names = (name for name, _ in program.aux)
        aux = dict(zip(names, results[has_loss : self._num_head], strict=True))
        return Results(results[0] if has_loss else None, aux, results[self._num_head : last])

    def action_of(self, error: BaseException) -> str:
        """What the program was doing when it failed, in the model's words."""
        wanted = self._instruction_of(error)
        programs = self.source.microbatches or (self.source.program,)
        by_name = {i.name: i for program in programs for i in program.instructions}
        turn = self.doing()
        if wanted not in by_name:
            return turn or "a step"
        instruction = by_name[wanted]
        if instruction.op == WAIT:
            instruction = by_name[instruction.operands[0].node]
        module = self.source.plan.modules.get(instruction.origin, "")
        where = f" of module {module!r}" if module else ""
        op = f"{instruction.op} {instruction.name!r}{where}"
        return f"{op} in {turn}" if turn else op

    def _instruction_of(self, error: BaseException) -> str | None:
        """Name of the instruction whose line of generated code raised."""
        by_code = {module.forward.__code__: module for module in self.modules}
        trace, found = error.__traceback__, None
        while trace is not None:
            module = by_code.get(trace.tb_frame.f_code)
            if module is not None:
                line = module.code.split("\n")[trace.tb_lineno - 1]
                name = line.split("=")[0].split(":")[0].strip()
                named = (n for n in module.graph.nodes if n.name == name)
                found = next((n.meta.get("instruction") for n in named), found)
            trace = trace.tb_next
        return found

    def problem_of_part(self, tensors: Sequence[Tensor]) -> str:
        """Why this rank's part of a batch does not fit; empty if it does."""
        for path, tensor in zip(self._paths, tensors, strict=True):
            entry = self._inputs[path]
            if entry is None:
                continue
            expected = self.part_shape(entry)
            if tuple(tensor.shape) != expected:
                return f"{path!r} is {list(tensor.shape)} where the plan expects {list(expected)}"
        return ""

    def problem_without_part(self) -> str:
        """Why this rank cannot do without data; empty if it can."""
        for path, entry in self._inputs.items():
            if entry is not None and 0 not in self.part_shape(entry):
                return f"it is None, and the plan reads {path!r} there"
        return ""

    def no_samples(self) -> tuple[Tensor, ...]:
        """What a rank that reads no sample takes for its part of a batch."""
        batch = self.source.plan.batch
        entries = [self._inputs[path] for path in self._paths]
        return tuple(
            torch.empty(
                (0,) if entry is None else self.part_shape(entry),
                dtype=torch_dtype(batch[path].dtype),
            )
            for path, entry in zip(self._paths, entries, strict=True)
        )

    def part_shape(self, entry: ProgramInput) -> tuple[int, ...]:
        """Shape of this rank's part of an input: its samples, all else whole."""
        shape = list(entry.global_type.shape)
        dim = self.source.batch_dims.get(entry.target)
        if dim is not None:
            shape[dim] = len(_samples(entry.sharding, shape[dim], dim, self.coordinates))
        return tuple(shape)

    def batch_slices(self, rank: int) -> dict[str, slice]:
        """Input path to the samples that ``rank`` reads.

        Raises:
            BatchError: They are not contiguous.
        """
        plan = self.source.plan
        stage = plan.stage_of_rank(rank)
        if stage is None:
            ends = {
                path: plan.batch[path].shape[dim] for path, dim in self.source.batch_dims.items()
            }
            return {path: slice(end, end) for path, end in ends.items()}
        mesh = plan.meshes[stage].space
        coordinates = mesh.coordinates(rank - plan.ranks_of_stages[stage].start)
        inputs = {p: s for chunk in plan.chunks_of(stage).values() for p, s in chunk.inputs.items()}
        found = {}
        for path, dim in self.source.batch_dims.items():
            sharding = inputs.get(path, whole(mesh))[: len(mesh.sizes)]
            kind = plan.batch[path]
            indices = _samples(sharding, kind.shape[dim], dim, coordinates)
            if len(indices) and indices[-1] - indices[0] != len(indices) - 1:
                raise BatchError(
                    f"cannot give rank {rank} a slice of input {path!r}: the plan deals its "
                    "samples out in turns; pass the global batch to every rank"
                )
            start = indices[0] if len(indices) else kind.shape[dim]
            found[path] = slice(start, start + len(indices))
        return found

    def num_samples(self) -> int:
        """Samples in a global batch.

        Raises:
            BatchError: No input counts samples.
        """
        for path, dim in self.source.batch_dims.items():
            return self.source.plan.batch[path].shape[dim]
        raise BatchError(
            "cannot deal out samples: no input of the batch has a dim that counts them"
        )


def program_input(program: Program, path: str) -> ProgramInput | None:
    """The program's input of that path, None if it reads none."""
    for entry in program.inputs:
        if entry.kind == "input" and entry.target == path:
            return entry
    return None


def _samples(sharding: Sharding, size: int, dim: int, coordinates: Sequence[int]) -> Sequence[int]:
    splits = dim_splits(sharding, dim)
    return local_indices(size, splits, coordinates) if splits else range(size)


def _aliased(results: Sequence[Tensor], values: Sequence[Any]) -> tuple[int, ...]:
    """Results that need memory of their own.

    A result may be an input, share storage with an earlier result, or be an expanded view. Which
    ones do depends on the program alone, so this is worked out once.
    """
    taken = {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor) and v.numel()}
    found = []
    for index, result in enumerate(results):
        pointer = result.untyped_storage().data_ptr()
        if result.numel() and (pointer in taken or not result.is_contiguous()):
            found.append(index)
        taken.add(pointer)
    return tuple(found)
