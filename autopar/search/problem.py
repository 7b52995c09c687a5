"""The sharding problem as the solver sees it: nodes with choices, values with layout graphs.

Nothing here knows ops, tensors or a solver, so the same record is solved by the integer program
and by the brute force of the tests.

A *node* picks one of its choices. A *value* is made by a node in one layout per choice, and is
needed by nodes in one layout per choice; arcs of its layout graph change layouts at a price. An
arc is paid once a phase, however many needs use it. A value that crosses from the forward into
the backward is *kept* in one layout, which costs memory; the backward starts from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A class of nodes and what it may pick from.

    Attributes:
        name: For reports.
        count: Members of the class.
        seconds: Of each choice, for all members.
        resident_bytes: Held through the whole step by each choice, for all members.
        gradient_bytes: Held from the end of the backward to the update, for all members.
        divisible: Members may choose differently, so a share of the class is a choice too.
    """

    name: str
    count: int
    seconds: tuple[float, ...]
    resident_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    divisible: bool = False


@dataclass(frozen=True, slots=True)
class Arc:
    """A change of layout: from ``tail`` to ``head`` for ``seconds`` (all members)."""

    tail: int
    head: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Need:
    """A node reads the value: ``layouts[c]`` is the layout its choice c needs."""

    node: int
    layouts: tuple[int, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Minimize seconds within memory.

    Attributes:
        nodes: All classes.
        values: All classes of values that somebody needs.
        memory_limit_bytes: For resident + kept, and for resident + gradients; None for no limit.
        fixed_bytes: Memory used whatever is chosen.
    """

    nodes: tuple[Choices, ...]
    values: tuple[Value, ...]
    memory_limit_bytes: float | None = None
    fixed_bytes: float = 0.0


Shares = tuple[tuple[int, float], ...]
"""(choice or layout, share of the members), shares adding up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver found.

    Attributes:
        status: ``optimal``, ``feasible``, ``infeasible`` (proven) or ``time_limited`` (nothing
            found in time).
        choice: Choice of every node.
        kept: Layout kept of every value that crosses into the backward, else None.
        choice_shares: Of divisible nodes whose members choose differently, what they choose;
            ``choice`` then has the largest share.
        kept_shares: The same of layouts kept.
        objective_s: Seconds of the solution; ``bound_s`` the proven least.
        seconds: Time the solver took.
        num_variables: Size of the program.
        num_constraints: Size of the program.
        memory_bytes: Its two memory sums.
    """

    status: str
    choice: tuple[int, ...] = ()
    kept: tuple[int | None, ...] = ()
    choice_shares: Mapping[int, Shares] = field(default_factory=dict)
    kept_shares: Mapping[int, Shares] = field(default_factory=dict)
    objective_s: float = float("inf")
    bound_s: float = 0.0
    seconds: float = 0.0
    num_variables: int = 0
    num_constraints: int = 0
    memory_bytes: tuple[float, float] = field(default=(0.0, 0.0))
