"""What is asked of the planner, and what became of a choice of meshes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.cost.node import NodeCost
from autopar.hint import Hint
from autopar.ir.sharding import Mesh
from autopar.lower.simulate import Simulation
from autopar.options import ADAMW, OptimizerSpec
from autopar.plan.records import Memory, Plan, StagePlan
from autopar.search.build import Built
from autopar.search.interproblem import Point
from autopar.search.problem import Solution
from autopar.search.stages import Pipeline
from cost_models.cluster import Cluster


@dataclass(frozen=True, eq=False)
class Way:
    """One solution of the step on the mesh of a stage.

    Attributes:
        built: The problem.
        solution: It.
        plan: Of the whole step.
        points: Of every kind of unit, what it is under the plan.
    """

    built: Built
    solution: Solution
    plan: StagePlan
    points: tuple[Point, ...]


@dataclass(slots=True, eq=False)
class Unlimited:
    """The problem of a mesh, which no memory limit enters.

    Attributes:
        built: The problem.
        solution: Its best one, if memory did not bind; None until it is asked for.
        ways: Ways to run stages on the mesh that were lowered, by what they were made for.
    """

    built: Built
    solution: Solution | None = None
    ways: dict[Hashable, tuple[Way, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to plan.

    Attributes:
        model: Name of the model.
        fingerprint: Of the captured step.
        cluster: Where.
        hints: Restrictions of the user.
        optimizer: What its state takes.
        time_limit_s: For the whole search.
        memory_fraction: Usable part of a device's memory; None for the cluster's own.
        capture_s: Seconds the capture took, for the report.
        settled_plan: Plan whose mesh, stages and stored shardings must be taken over: the
            parameters exist already, and another batch or mode is planned.
        known: Problems that earlier plans of this step built: plans within another memory limit
            start from the same ones.
    """

    model: str
    fingerprint: str
    cluster: Cluster
    hints: tuple[Hint, ...] = ()
    optimizer: OptimizerSpec = ADAMW
    time_limit_s: float = 120.0
    memory_fraction: float | None = None
    capture_s: float = 0.0
    settled_plan: Plan | None = None
    known: dict[Hashable, Unlimited] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One solved and simulated choice of meshes.

    Attributes:
        mesh: Of the slowest stage.
        built: The problem of that mesh; ``solution`` what the solver found.
        pipeline: The stages, and what crosses them; ``costs`` prices each.
        schedule: Order of their microbatches.
        simulation: Of the slowest rank; its seconds are those of the step without the update.
        memory: Of the rank that holds most of what it may; ``limit_bytes`` is that.
        update_s: By how much the optimizer's update makes the step longer.
        objective_s: Seconds as the search models them: of the whole model, shared by the stages as
            they are fast; ``bound_s`` the proven least of them on these meshes.
        host_bytes: Of host memory, a rank on average, on the node where most is used.
        fullest_node: Captured node at which that rank holds most; empty where that is the update,
            or was not asked.
        limited: Whether memory kept it from being faster.
        crowded_bytes: Room that copies on their way would take if there were so much; 0 where the
            step is not slower for having less.
    """

    mesh: Mesh
    built: Built
    solution: Solution
    pipeline: Pipeline
    costs: tuple[NodeCost, ...]
    schedule: str
    simulation: Simulation
    memory: Memory
    limit_bytes: int
    update_s: float
    objective_s: float
    bound_s: float
    host_bytes: float = 0.0
    fullest_node: str = ""
    limited: bool = False
    crowded_bytes: int = 0

    @property
    def step_s(self) -> float:
        return self.simulation.seconds + self.update_s

    @property
    def num_ranks(self) -> int:
        """Ranks that have a stage."""
        return sum({s.first_rank: s.mesh.num_ranks for s in self.pipeline.stages}.values())

    @property
    def num_stages(self) -> int:
        return len({stage.first_rank for stage in self.pipeline.stages})


@dataclass(frozen=True, slots=True)
class Failure:
    """A mesh without a plan.

    Attributes:
        mesh: The mesh.
        proven: Whether there is none for certain.
        least_bytes: The least that was seen; ``moment`` where it is held.
        host_bytes: Of host memory, what hints ask for, where that is why.
        too_slow: Whether it was given up for its seconds.
        contradicts: Value that cannot be brought to where it is read, where no memory were enough;
            empty if none is known, None where memory or time is why.
    """

    mesh: Mesh
    proven: bool
    least_bytes: float
    moment: str = ""
    host_bytes: float = 0.0
    too_slow: bool = False
    contradicts: str | None = None
