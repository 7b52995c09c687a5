"""The sharding problem as the solver sees it: nodes with choices, values with layout graphs.

Nothing here knows ops, tensors or a solver, so the same record is solved by the integer program
and by the brute force of the tests.

A *node* picks one of its choices. A *value* is made by a node in one layout per choice, and is
needed by nodes in one layout per choice; arcs of its layout graph change layouts at a price. An
arc is paid once a phase, however many needs use it. A value that crosses from the forward into
the backward is *kept* in one layout, which costs memory; the backward starts from there. A class
of forward nodes may *run again* in the backward instead, if what it reads is kept or runs again
too; its results start there in the layout its choice gives. What is kept may be *away*, in host
memory, between its two phases: it is copied there and back over the link. What memory holds is
counted at the end of the forward, at the update and at *moments* in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A class of nodes and what it may pick from.

    Attributes:
        name: For reports.
        count: Members of the class.
        seconds: Of each choice, for all members.
        resident_bytes: Held through the whole step by each choice, for all members.
        gradient_bytes: Held from the end of the backward to the update, for all members.
        update_bytes: Made for a moment by the update, for all members; empty for none.
        divisible: Members may choose differently, so a share of the class is a choice too.
        state_bytes: The part of what is resident that may be in host memory, for all members;
            empty for none.
        host_bytes: Of host memory that each choice takes, for all members; empty for none.
        least_host: Share of the members that must choose what takes host memory.
    """

    name: str
    count: int
    seconds: tuple[float, ...]
    resident_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    update_bytes: tuple[float, ...] = ()
    divisible: bool = False
    state_bytes: tuple[float, ...] = ()
    host_bytes: tuple[float, ...] = ()
    least_host: float = 0.0


@dataclass(frozen=True, slots=True)
class Arc:
    """A change of layout: from ``tail`` to ``head`` for ``seconds`` (all members).

    Attributes:
        tail: From; ``head`` to.
        seconds: Of the change, where no compute hides it.
        held_bytes: What is added up over the microbatches holds so much through the loop.
        link_s: Seconds that a copy to or from host memory takes of the link, beside compute.
        adds_up: Whether terms of microbatches are added up behind it.
    """

    tail: int
    head: int
    seconds: float
    held_bytes: float = 0.0
    link_s: float = 0.0
    adds_up: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """A node reads the value: ``layouts[c]`` is the layout its choice c needs."""

    node: int
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A class of forward nodes that may run again in the backward.

    Attributes:
        name: For reports.
        node: Entry of ``Problem.nodes`` whose choice it runs under.
        count: Members of the class; they may decide differently.
        seconds: Of running again, for every choice of ``node``, all members.
        least: Share of the members that must run again if they are needed.
        most: Share of the members that may.
    """

    name: str
    node: int
    count: int
    seconds: tuple[float, ...]
    least: float = 0.0
    most: float = 1.0


@dataclass(frozen=True, slots=True)
class Again:
    """A class that may run again reads the value: ``layouts[c]`` under choice c of its entry."""

    rerun: int
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What memory holds at one place of the step.

    Attributes:
        name: For reports.
        kept: (value, share of what is kept of it that is still held).
        gradients: (node, share of its gradients that is made).
        needed: Reruns that have run by then, if they run at all.
        through: (rerun that makes it, rerun that reads it, value): has run if its reader has and
            the value is not kept.
        held: (rerun, bytes under every choice of its entry): what is held if it has run.
        passing: (node, bytes of every choice): what is made and read in the same phase.
        back: (value, share of what is kept of it that is held here even if it was away).
    """

    name: str
    kept: tuple[tuple[int, float], ...]
    gradients: tuple[tuple[int, float], ...]
    needed: frozenset[int]
    through: tuple[tuple[int, int, int], ...]
    held: tuple[tuple[int, tuple[float, ...]], ...]
    passing: tuple[tuple[int, tuple[float, ...]], ...] = ()
    back: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """How a value may be away.

    Attributes:
        seconds: Of copying each kept layout one way over the link, all members.
        lost_s: Seconds of the step that copying each kept layout there and back costs even where
            it hides: what it takes from compute and to issue it.
        least: Share of the members that must be away; ``most`` that may.
    """

    seconds: tuple[float, ...]
    lost_s: tuple[float, ...]
    least: float = 0.0
    most: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link to host memory, and what its copies hide behind.

    Attributes:
        early: (node, seconds of every choice) of compute in the forward.
        late: The same in the backward, beside what runs again.
        host_limit_bytes: What all that is away may take of host memory.
        hides: Part of that compute beside which there is something to copy.
        state_s_per_byte: Seconds that the update takes longer for a byte of state that is away.
        least_states: Share of the states that must be away.
        beside: Seconds that a second of copies to the host adds to those from it that it runs
            beside, and the other way round.
    """

    early: tuple[tuple[int, tuple[float, ...]], ...]
    late: tuple[tuple[int, tuple[float, ...]], ...]
    host_limit_bytes: float
    hides: float = 1.0
    state_s_per_byte: float = 0.0
    least_states: float = 0.0
    beside: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BytePrice:
    """Seconds that a byte costs, instead of a limit: what is fastest for its memory.

    Attributes:
        resident_s: Of what is held through the loop.
        saved_s: Of what the end of the forward keeps beside that.
    """

    resident_s: float
    saved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A class of values.

    Attributes:
        name: For reports.
        producer: Node that makes it; ``gives[c]`` the layout under its choice c.
        num_layouts: Size of its layout graph.
        arcs: Changes of layout.
        forward: Needs in the phase it is made in (for values of the backward: the backward).
        backward: Needs in the backward of a value made in the forward.
        kept_bytes: Memory of keeping each layout, all members.
        persistent: The producer's own layout is there in every phase and costs nothing to keep
            (parameters, inputs, constants).
        divisible: Members may be kept in different layouts.
        fixed_needs: Layouts needed whatever is chosen, in the phase it is made in.
        no_keep: Layouts that may not be kept (a gathered parameter under ZeRO-3).
        rerun: The entry of ``Problem.reruns`` that makes it again, if one may.
        again: Reads of classes that may run again.
        leave: How it may be away; None if it may not.
        late: Whether it is made in the backward: its copies go to the host, those of others come
            from there.
        homes: Layouts in host memory, from which it comes again where one of them is kept.
        least_home: Share of the members for which one of them must be.
    """

    name: str
    producer: int
    gives: tuple[int, ...]
    num_layouts: int
    arcs: tuple[Arc, ...]
    forward: tuple[Need, ...]
    backward: tuple[Need, ...]
    kept_bytes: tuple[float, ...]
    persistent: bool = False
    divisible: bool = False
    fixed_needs: tuple[int, ...] = ()
    no_keep: frozenset[int] = frozenset()
    rerun: int | None = None
    again: tuple[Again, ...] = ()
    leave: Leave | None = None
    late: bool = False
    homes: tuple[int, ...] = ()
    least_home: float = 0.0

    @property
    def crosses(self) -> bool:
        """Whether the backward may need it."""
        return bool(self.backward or self.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Minimize seconds within memory.

    Attributes:
        nodes: All classes.
        values: All classes of values that somebody needs.
        memory_limit_bytes: For resident + kept, and for resident + gradients; None for no limit.
        fixed_bytes: Memory used whatever is chosen.
        reruns: What may run again.
        moments: Where else memory is counted.
        link: Over which values leave; None if none may.
        price: Of bytes at the end of the forward, for which the seconds that the solution says do
            not count; None for none. What is proven then holds within that memory.
    """

    nodes: tuple[Choices, ...]
    values: tuple[Value, ...]
    memory_limit_bytes: float | None = None
    fixed_bytes: float = 0.0
    reruns: tuple[Rerun, ...] = ()
    moments: tuple[Moment, ...] = ()
    link: Link | None = None
    price: BytePrice | None = None


def alike(problem: Problem) -> Problem:
    """The problem in which all members of a class run again, or none.

    Then its memory sums hold for every copy of a block, and not for their average.
    """
    fixed = [rerun.least == rerun.most for rerun in problem.reruns]
    return replace(
        problem,
        reruns=tuple(r if r.least == r.most else replace(r, count=1) for r in problem.reruns),
        values=tuple(
            value if value.rerun is None or fixed[value.rerun] else replace(value, divisible=False)
            for value in problem.values
        ),
    )


Shares = tuple[tuple[int, float], ...]
"""(choice or layout, share of the members), shares adding up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver found.

    Attributes:
        status: ``optimal``, ``feasible``, ``infeasible`` (proven) or ``time_limited`` (the
            clock ended it, with or without a choice).
        is_rough: Whether it was only rounded, and branching might find a better one.
        choice: Choice of every node.
        kept: Layout kept of every value that crosses into the backward, else None.
        choice_shares: Of divisible nodes whose members choose differently, what they choose;
            ``choice`` then has the largest share.
        kept_shares: The same of layouts kept.
        rerun_shares: Share of the members of every rerun that run again.
        added_shares: Of values that microbatches add up, the layouts in which they do.
        away_shares: Of values that are away, the layouts and the share of all members in each.
        state_shares: The same of nodes whose state is away, by choice.
        objective_s: Seconds of the solution; ``bound_s`` the proven least.
        seconds: Time the solver took.
        num_variables: Size of the program.
        num_constraints: Size of the program.
        memory_bytes: Its memory sums: at the end of the forward, at the update, at the moments.
    """

    status: str
    is_rough: bool = False
    choice: tuple[int, ...] = ()
    kept: tuple[int | None, ...] = ()
    choice_shares: Mapping[int, Shares] = field(default_factory=dict)
    kept_shares: Mapping[int, Shares] = field(default_factory=dict)
    rerun_shares: tuple[float, ...] = ()
    added_shares: Mapping[int, Shares] = field(default_factory=dict)
    away_shares: Mapping[int, Shares] = field(default_factory=dict)
    state_shares: Mapping[int, Shares] = field(default_factory=dict)
    objective_s: float = float("inf")
    bound_s: float = 0.0
    seconds: float = 0.0
    num_variables: int = 0
    num_constraints: int = 0
    memory_bytes: tuple[float, ...] = (0.0, 0.0)
