"""The program of one rank: a list of instructions over local tensors.

The runtime turns it into an FX module, the simulator adds up its seconds and live bytes; both read
the same instructions. Collectives are ops of their own:

==========================  =======================  ============================================
op                          args                     result
==========================  =======================  ============================================
``autopar.all_reduce``      value, axis, reduce      same shape
``autopar.all_gather``      value, axis              dim 0 times the axis size, in rank order
``autopar.reduce_scatter``  value, axis, reduce      dim 0 divided by the axis size
``autopar.all_to_all``      value, axis              same shape; dim 0 is n equal pieces, piece j
                                                     goes to coordinate j, received in rank order
``autopar.wait``            value                    same; the result may be read from here on
``autopar.to_host``         value                    the same in host memory
``autopar.to_device``       value in host memory     the same in device memory
==========================  =======================  ============================================

A program of several microbatches, or of a pipeline, has sections (`Section`): the loop ones run
once a microbatch. A rank of a pipeline may hold several chunks of the model; each has sections of
its own, and the prologues and epilogues of all run together.
Two more ops join them: ``autopar.microbatch`` (value, chunk) reads rows ``m * chunk`` and on of dim
1 of a value of the prologue, m being the microbatch that runs; ``autopar.accumulate`` (value,
reduce), in the epilogue, joins what the loop made of the value in every microbatch. The argument
`MICROBATCH_NUMBER` of a random op is the number of the microbatch that runs.

``axis`` is the index of a mesh axis; sizes are equal on all ranks (lowering pads). The result of a
collective or a copy may be read only behind its ``autopar.wait``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from autopar.ir.graph import Arg, Phase, Ref, TensorType, read_by
from autopar.ir.sharding import Mesh, Sharding
from autopar.lower.pieces import Part

ALL_REDUCE = "autopar.all_reduce"
ALL_GATHER = "autopar.all_gather"
REDUCE_SCATTER = "autopar.reduce_scatter"
ALL_TO_ALL = "autopar.all_to_all"
WAIT = "autopar.wait"
MICROBATCH = "autopar.microbatch"
ACCUMULATE = "autopar.accumulate"
TO_HOST = "autopar.to_host"
TO_DEVICE = "autopar.to_device"
COLLECTIVES = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL})
COPIES = frozenset({TO_HOST, TO_DEVICE})


class Section(StrEnum):
    """When an instruction runs: once before the loop, in each microbatch, once behind it."""

    PROLOGUE = "prologue"
    FORWARD = "forward"
    BACKWARD = "backward"
    """All of the backward, or what earlier chunks wait for where it is split."""
    WEIGHT_GRADIENT = "weight_gradient"
    """The rest of a split backward."""
    EPILOGUE = "epilogue"


LOOP = (Section.FORWARD, Section.BACKWARD, Section.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One local op.

    Attributes:
        name: Its result; output i of several is ``Ref(name, i)``.
        op: ``aten.mm.default`` and the like, or one of the collective ops above.
        args: Positional arguments; values are `Ref` to other instructions or program inputs.
        kwargs: Keyword arguments.
        outputs: Local types.
        origin: Captured node it was lowered from.
        phase: Forward or backward.
        view: The result shares the storage of its first operand.
        flops: Floating-point operations on this rank.
        purpose: For collectives: ``parameters``, ``gradients`` or ``activations``.
        section: When it runs, in a program of several microbatches.
        chunk: Chunk of the model it is of, in a pipeline.
        operands: Every value it reads, in order.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorType, ...]
    origin: str
    phase: Phase = Phase.FORWARD
    view: bool = False
    flops: int = 0
    purpose: str = ""
    section: Section = Section.FORWARD
    chunk: int = 0
    operands: tuple[Ref, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", read_by(self.args, self.kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInput:
    """A tensor that enters the program.

    Attributes:
        name: Its value is ``Ref(name)``.
        kind: ``parameter``, ``buffer``, ``input``, ``constant`` or ``key``.
        target: Name of the parameter, buffer or constant, or path of the input.
        global_type: Type of the whole.
        sharding: How the whole lies on the mesh.
        local_type: Type of this rank's piece.
        on_host: Whether the piece is in host memory.
    """

    name: str
    kind: str
    target: str
    global_type: TensorType
    sharding: Sharding
    local_type: TensorType
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value that the rank sends to, or receives from, ranks that hold another chunk.

    Attributes:
        ref: The piece in this program.
        value: The captured value, as text: the same on both sides.
        chunk: The chunk here that makes or reads it; ``peer`` the other one.
        section: When it is sent (behind that section) or received (before it).
        local_type: Type of the piece.
        number: Of the transfer, the same on both sides.
        parts: Which elements of the piece go to, or come from, which rank; what comes from none is
            zero.
    """

    ref: Ref
    value: str
    chunk: int
    peer: int
    section: Section
    local_type: TensorType
    number: int
    parts: tuple[Part, ...]

    @property
    def copied_elements(self) -> int:
        """Elements that do not travel from, or to, where they lie, but in a buffer of their own."""
        return sum(part.num_elements for part in self.parts if not part.is_contiguous)


@dataclass(frozen=True, kw_only=True)
class Program:
    """All that one rank runs in a step (or in an evaluation).

    Attributes:
        mesh: The mesh of ranks; ``coordinates`` of the rank on it.
        inputs: What enters, in order.
        instructions: In order.
        loss: The loss, whole on every rank; None if there is none.
        aux: Further results by name, whole on every rank.
        gradients: Parameter name to the rank's piece of its gradient, in its stored sharding.
        mutations: Buffer name to its new value, whole on every rank.
        sends: Pieces for other ranks; ``receives`` pieces from them.
        microbatches: How often the loop sections run.
        microbatch: The microbatch whose sizes the loop sections have; others of the same size run
            the same instructions.
        copy_room_bytes: As of `StagePlan.copy_room_bytes`.
    """

    mesh: Mesh
    coordinates: tuple[int, ...]
    inputs: tuple[ProgramInput, ...]
    instructions: tuple[Instruction, ...]
    loss: Ref | None
    aux: tuple[tuple[str, Ref], ...] = ()
    gradients: Mapping[str, Ref] = field(default_factory=dict)
    mutations: Mapping[str, Ref] = field(default_factory=dict)
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    microbatches: int = 1
    microbatch: int = 0
    copy_room_bytes: int | None = None

    @property
    def results(self) -> tuple[Ref, ...]:
        """Loss, aux, gradients, mutations, in that order."""
        loss = () if self.loss is None else (self.loss,)
        aux = tuple(ref for _, ref in self.aux)
        return loss + aux + tuple(self.gradients.values()) + tuple(self.mutations.values())

    @cached_property
    def collectives(self) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if i.op in COLLECTIVES)

    @cached_property
    def copies(self) -> tuple[Instruction, ...]:
        """What goes to host memory and back, in order."""
        return tuple(i for i in self.instructions if i.op in COPIES)

    def action_hash(self) -> str:
        """Hash of the collectives in order; equal on all ranks or the step would hang.

        Shapes are left out: under uneven splits they are equal within a group only.
        """
        actions = [(i.op, i.args[1:], i.outputs[0].dtype) for i in self.collectives]
        return hashlib.sha256(repr(actions).encode()).hexdigest()[:16]
