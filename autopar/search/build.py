"""From an analysed step and a mesh to the problem of the intra-op program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.node import NodeCost
from autopar.ir.graph import Ref
from autopar.ir.sharding import Mesh, Sharding
from autopar.search.analysis import Analysis
from autopar.search.layouts import Home
from autopar.search.moments import Moments
from autopar.search.offers import Class
from autopar.search.prices import Prices
from autopar.search.problem import Problem, Solution
from autopar.search.regions import Entry
from autopar.search.restrict import Restrictions
from autopar.search.space import Pending, Space, Updates
from autopar.search.values import Values


@dataclass(frozen=True, slots=True)
class Built:
    """A problem and what its numbers stand for.

    Attributes:
        problem: For the solver.
        classes: Classes of nodes, in the order of the folding.
        entries: Classes behind every entry of ``problem.nodes``.
        layouts: Shardings of every entry of ``problem.values``, by number.
        roots: Members of every entry of ``problem.values``.
        mesh: The mesh it was built for.
        reruns: Members of every entry of ``problem.reruns``, those that run again first in front.
        space: What made it, for `with_reruns`.
    """

    problem: Problem
    classes: tuple[Class, ...]
    entries: tuple[Entry, ...]
    layouts: tuple[tuple[Sharding | Home, ...], ...]
    roots: tuple[tuple[Ref, ...], ...]
    mesh: Mesh
    space: Space = field(repr=False, compare=False)
    reruns: tuple[tuple[str, ...], ...] = ()

    @property
    def cost(self) -> NodeCost:
        """What its nodes were priced with."""
        return self.space.cost

    @property
    def num_strategies(self) -> int:
        return sum(len(entry.choices) for entry in self.entries)


def build_problem(
    analysis: Analysis,
    mesh: Mesh,
    cost: NodeCost,
    updates: Updates,
    restrictions: Restrictions,
    *,
    memory_limit_bytes: float | None = None,
    fixed_bytes: float = 0.0,
    num_stages: int = 1,
) -> Built:
    """The problem of sharding a step over a mesh.

    Args:
        analysis: The step.
        mesh: The mesh.
        cost: Prices nodes on it.
        updates: Optimizer state and update.
        restrictions: What hints leave.
        memory_limit_bytes: Bytes a rank may use; None for no limit.
        fixed_bytes: Bytes used whatever is chosen.
        num_stages: Stages of the pipeline that the step will be cut into. Memory is counted over
            all of them, so ``memory_limit_bytes`` is that of as many ranks; of what is kept, the
            first stage holds as many microbatches as there are stages.

    Raises:
        HintError: The hints leave a node or parameter without a choice.
    """
    space = Space(analysis, mesh, cost, updates, restrictions, num_stages)
    prices = Prices(space)
    values, roots, layouts = Values(space, prices).all()
    problem = Problem(
        nodes=prices.choices(),
        values=values,
        memory_limit_bytes=memory_limit_bytes,
        fixed_bytes=fixed_bytes,
        moments=Moments(space).all(roots),
    )
    return Built(
        problem,
        space.classes,
        space.entries,
        tuple(tuple(table.index) for table in layouts),
        tuple(roots),
        mesh,
        space,
    )


def with_reruns(
    built: Built,
    solutions: Sequence[Solution] = (),
    *,
    every: int = 1,
    pending: Pending | None = None,
) -> Built:
    """The problem in which forward nodes may run again, and what is kept may leave the device.

    Args:
        built: The problem without.
        solutions: Solutions of that problem, or of one of its kind: every node may choose what one
            of them chooses. With none, every node has all its choices.
        every: Of how many copies of a block one keeps what it hands to the next.
        pending: What waits for weight gradients, if the backward is split.
    """
    space = built.space.apart(pending or Pending())
    near: list[list[int]] = [list(range(len(e.choices))) for e in space.all_entries]
    if solutions:
        near = [
            sorted({n for s in solutions for n in _chosen(s, index)}) for index in range(len(near))
        ]
    space.allow_reruns(near, every)
    prices = Prices(space)
    values, roots, layouts = Values(space, prices).all()
    reruns, members = prices.reruns()
    problem = replace(
        built.problem,
        nodes=prices.choices(),
        values=values,
        reruns=reruns,
        moments=Moments(space).all(roots),
        link=prices.link(),
    )
    return replace(
        built,
        problem=problem,
        entries=space.entries,
        classes=space.classes,
        layouts=tuple(table.all for table in layouts),
        roots=tuple(roots),
        space=space,
        reruns=members,
    )


def with_moment(built: Built, node: str) -> Built:
    """The problem in which memory is counted at one more node, or the same if it is already."""
    space = built.space
    if any(moment.name == node for moment in built.problem.moments):
        return built
    space.more_moments.add(space.recompute.reads.position[node])
    return replace(built, problem=replace(built.problem, moments=Moments(space).all(built.roots)))


def _chosen(solution: Solution, index: int) -> list[int]:
    """What the members of a node choose."""
    shares = solution.choice_shares.get(index, ((solution.choice[index], 1.0),))
    return [choice for choice, _ in shares]
