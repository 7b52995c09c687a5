"""The plan: a frozen record of every decision and prediction.

Nodes, parameters and inputs are named by strings, so a plan can be saved, read, edited, compared
and lowered without the objects it was made from. A plan without a pipeline has one entry in
``stages``; a pipelined one has more, each with its own mesh of any shape and number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.graph import TensorType
from autopar.ir.sharding import Mesh, Sharding
from autopar.plan import codec, explain, text

VERSION = 1
"""Of the file. It grows when files of before cannot be read any more: a field that is added has a
default, which files without it take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter (its tied names are one).

    Attributes:
        name: Its first name in the model.
        type: Global type.
        stored: Sharding of the parameter, its gradient and its optimizer state between steps.
        used: Shardings in which nodes read it, in the forward then the backward.
        trainable: Whether it gets a gradient.
        state_on_host: Whether its optimizer state lies in host memory.
        on_host: Whether its home is host memory: this rank's piece, its gradient and its state are
            there. It is copied to the device before it is used, dropped behind its last use in the
            phase and copied again for the next one, unless ``StagePlan.kept`` says that it stays.
    """

    name: str
    type: TensorType
    stored: Sharding
    used: tuple[Sharding, ...] = ()
    trainable: bool = True
    state_on_host: bool = False
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """Sharding of every operand and output of one captured node."""

    name: str
    operands: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """Collectives of one kind, over one axis, for one purpose, summed over a step.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``.
        axis: Mesh axis name.
        purpose: ``parameters``, ``gradients`` or ``activations``.
        module: Path of the module they serve, ``""`` where that is not told.
        count: Calls a step on one rank.
        tensor_bytes: Bytes of the full tensors, summed over the calls.
        predicted_s: Predicted seconds a step, before overlap.
    """

    kind: str
    axis: str
    purpose: str
    count: int
    tensor_bytes: int
    predicted_s: float
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Copies between device and host memory of one direction, summed over a step on one rank.

    Attributes:
        kind: ``to_host`` or ``to_device``.
        purpose: ``activations``, ``parameters`` or ``gradients``.
        count: Copies a step.
        num_bytes: Of all of them.
        predicted_s: Predicted seconds on the link, before overlap.
    """

    kind: str
    purpose: str
    count: int
    num_bytes: int
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What recomputing a node, or offloading a value, saves and costs on one rank.

    Attributes:
        name: Node, or value as text.
        saved_bytes: What the device does not hold between forward and backward, of one microbatch.
        seconds: Of running the node again, or of the copies out and back, a step; before overlap.
    """

    name: str
    saved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the rank that holds most, at the peak of the step, by kind.

    Attributes:
        host_bytes: Most bytes in host memory at once, no part of ``total_bytes``.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    inputs_bytes: int = 0
    buffers_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.saved_bytes
            + self.transient_bytes
            + self.inputs_bytes
            + self.buffers_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of the lowered programs.

    Attributes:
        step_s: Seconds of a training step.
        compute_s: Seconds of compute on one rank.
        communication_s: Seconds of collectives on one rank, hidden ones included.
        exposed_s: Seconds of collectives and copies that nothing hides.
        copy_exposed_s: The part of it that copies to host memory and back cause.
        optimizer_s: Seconds of the optimizer update.
        memory: Bytes by kind at the peak.
        collectives: What is communicated.
        copies: What is copied between device and host memory.
        savings: Of every node that runs again and every value that is offloaded.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    optimizer_s: float
    memory: Memory
    collectives: tuple[CollectivePlan, ...] = ()
    copies: tuple[CopyPlan, ...] = ()
    copy_exposed_s: float = 0.0
    savings: tuple[Saving, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWays:
    """What is proven of all ways to plan a step, those that were not looked at too.

    A way is a number of microbatches, a schedule, and stages on meshes.

    Attributes:
        bound_s: Seconds that no plan takes less than, as simulated; 0 where nothing is proven.
        gap: (step - bound) / step: the plan is that far from it, at most.
        tried: Ways that were solved.
        excluded: Ways that were left out because their bound is not under the step.
        estimated: Ways that were left out by an estimate, or by the clock.
    """

    bound_s: float = 0.0
    gap: float = 1.0
    tried: int = 0
    excluded: int = 0
    estimated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What the search did.

    Attributes:
        status: Of what was tried: ``optimal``, ``feasible`` (stopped within the stated gap) or
            ``time_limited``.
        objective_s: Modelled seconds of the step it minimized.
        bound_s: Proven lower bound of the objective over all meshes tried.
        gap: (objective - bound) / objective.
        all_ways: What is proven of those that were not tried too.
        capture_s: Seconds of capture.
        seconds: Seconds of the search.
        meshes: (mesh as text, objective in seconds or None where it was skipped or infeasible).
        num_nodes: Nodes of the captured step.
        num_classes: Classes after folding repeated blocks.
        num_strategies: Strategies over all classes of the chosen mesh.
        num_variables: Variables of the chosen mesh's program.
    """

    status: str
    objective_s: float
    bound_s: float
    gap: float
    seconds: float
    capture_s: float = 0.0
    meshes: tuple[tuple[str, float | None], ...] = ()
    num_nodes: int = 0
    num_classes: int = 0
    num_strategies: int = 0
    num_variables: int = 0
    all_ways: AllWays = field(default_factory=AllWays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that one chunk makes and another reads.

    Attributes:
        value: The value, as text.
        source: Chunk that makes it; ``target`` the one that reads it.
        sharding: How it lies on the source's mesh when it leaves.
        arrives: How it lies on the target's mesh, where that is another: every rank gets the
            pieces that it holds from ranks that hold them. None: as it leaves, every rank's piece
            going to the rank at the same place.
    """

    value: str
    source: int
    target: int
    sharding: Sharding
    arrives: Sharding | None = None

    @property
    def arrival(self) -> Sharding:
        """How it lies on the target's mesh."""
        return self.sharding if self.arrives is None else self.arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One chunk of the model: its mesh, the ranks on it and the sharding of everything it runs.

    Attributes:
        mesh: Mesh of the ranks that hold it.
        first_rank: Global number of the first of them; the others follow in mesh order.
        inputs: Input path to the sharding in which a rank's program takes it.
        parameters: Parameters it owns.
        nodes: Captured nodes it runs, in order.
        kept: Value (as text) to the shardings in which it is kept from forward to backward.
        recomputed: Forward nodes that run again in the backward instead of having their results
            kept.
        forgotten: Backward node to the recomputed nodes whose results are dropped before it: what
            reads them from there on makes them once more.
        offloaded: Of what is kept, the values (as text) that wait for the backward in host memory;
            casts of parameters at home there wait in it from phase to phase.
        copy_room_bytes: Bytes by which copies on their way to host memory and back may raise the
            most that a program holds when none is. None: as many as twice the largest of each
            direction takes.
        added_up: Value (as text) to the sharding in which the terms of microbatches are added up;
            what is not here is added up as it is made, and joined over ranks once.
    """

    mesh: Mesh
    first_rank: int = 0
    inputs: Mapping[str, Sharding]
    parameters: tuple[ParameterPlan, ...]
    nodes: tuple[NodePlan, ...]
    kept: Mapping[str, tuple[Sharding, ...]]
    recomputed: tuple[str, ...] = ()
    forgotten: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    offloaded: tuple[str, ...] = ()
    copy_room_bytes: int | None = None
    added_up: Mapping[str, Sharding] = field(default_factory=dict)

    @property
    def copies(self) -> bool:
        """Whether anything goes to host memory or comes from there in a step."""
        return bool(self.offloaded) or any(parameter.on_host for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every decision for one model, batch and cluster.

    Attributes:
        model: Class name of the model.
        fingerprint: Hash of the captured step it was made for.
        cluster: Name of the cluster; ``cluster_ranks`` its number of devices.
        batch: Input path to global type.
        hints: Hints it was made under, as text that `autopar.hint.hint_of` reads.
        stages: One entry a chunk of the model, in its order. A pipeline stage is a group of ranks:
            it holds one chunk, or several under some schedules.
        microbatches: Number of microbatches.
        per_microbatch: Paths of the modules that are computed from each microbatch alone, so that
            the results depend on their number.
        schedule: Order in which the stages run them, a name of ``autopar.schedules``.
        transfers: Values that cross stages.
        notes: What a user should know: dims kept whole, idle ranks, ops with the rule ``whole``.
        memory_limit_bytes: Bytes a rank may use.
        modules: Node name to module path, for tables by module.
    """

    model: str
    fingerprint: str
    cluster: str
    cluster_ranks: int
    batch: Mapping[str, TensorType]
    hints: tuple[str, ...] = ()
    stages: tuple[StagePlan, ...]
    microbatches: int = 1
    per_microbatch: tuple[str, ...] = ()
    schedule: str = "1f1b"
    transfers: tuple[Transfer, ...] = ()
    notes: tuple[str, ...] = ()
    memory_limit_bytes: int
    prediction: Prediction
    search: SearchReport
    modules: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def stage(self) -> StagePlan:
        """The only stage of a plan without a pipeline."""
        assert len(self.stages) == 1
        return self.stages[0]

    @property
    def mesh(self) -> Mesh:
        """Mesh of the first stage; its last axis is the time axis if there are microbatches."""
        return self.stages[0].mesh

    @cached_property
    def ranks_of_stages(self) -> tuple[range, ...]:
        """Global numbers of the ranks of every pipeline stage, in the order of their ranks."""
        found = {chunk.first_rank: chunk.mesh.num_ranks for chunk in self.stages}
        return tuple(range(first, first + count) for first, count in sorted(found.items()))

    @cached_property
    def stage_of_chunks(self) -> tuple[int, ...]:
        """Pipeline stage of every entry of ``stages``."""
        order = {ranks.start: stage for stage, ranks in enumerate(self.ranks_of_stages)}
        return tuple(order[chunk.first_rank] for chunk in self.stages)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: groups of ranks."""
        return len(self.ranks_of_stages)

    def speaks(self, rank: int) -> bool:
        """Whether it is the first rank of its stage, whose parameters no other need tell."""
        return any(rank == ranks.start for ranks in self.ranks_of_stages)

    def stage_of_rank(self, rank: int) -> int | None:
        """Pipeline stage of a rank; None where the rank is idle."""
        return next((s for s, ranks in enumerate(self.ranks_of_stages) if rank in ranks), None)

    @cached_property
    def idle_ranks(self) -> tuple[int, ...]:
        """Global numbers of the ranks that are on no stage."""
        return tuple(r for r in range(self.cluster_ranks) if self.stage_of_rank(r) is None)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Mesh of every pipeline stage."""
        own = dict(zip(self.stage_of_chunks, self.stages, strict=True))
        return tuple(own[stage].mesh for stage in range(self.num_stages))

    def chunks_of(self, stage: int) -> Mapping[int, StagePlan]:
        """Number and shardings of the chunks that a pipeline stage holds."""
        held = zip(self.stages, self.stage_of_chunks, strict=True)
        return {number: chunk for number, (chunk, s) in enumerate(held) if s == stage}

    @cached_property
    def parameters(self) -> Mapping[str, ParameterPlan]:
        return {p.name: p for stage in self.stages for p in stage.parameters}

    def __str__(self) -> str:
        """The plan as a table."""
        return text.plan_text(self)

    def explain(self, module: str = "") -> str:
        """What is split over what in a module, and what is communicated for it."""
        return explain.explain(self, module)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, in one step.

        Raises:
            PlanError: The file cannot be written.
        """
        codec.write_file(codec.encode(self), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that was saved; nothing in the file is ever executed.

        Raises:
            PlanError: The file is no plan, or one of another version.
        """
        where = f"plan '{os.fspath(path)}'"
        return codec.decode(codec.read_file(path), Plan, version=VERSION, where=where)
