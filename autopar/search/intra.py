"""The intra-op program: one strategy a class, one flow a need, memory as a constraint.

Variables: ``x[n, c]`` (class n picks choice c, binary), ``k[v, l]`` (value v is kept in layout l),
``f[d, a]`` (need d uses arc a, continuous), ``p[a]`` (arc a is paid), ``z[v, l]`` (a kept copy of a
persistent value that is not its own layout), ``r[q, c]`` (class q runs again under choice c),
``w[q, t]`` (it has by moment t), ``b[q, t]`` (bytes it then holds), ``a[v, l]`` (value v, kept in
layout l, is away), ``s[n, c]`` (the state of class n under choice c is away), ``e`` (seconds of
copies that nothing hides, one a phase). Parameters whose home is host memory
are choices among others: what they give is a layout there, and an arc leads from it to the device.

=====================================================================  =======================
(1) sum_c x[n, c] = 1                                                  ``_add_choices``
(2) sum_l k[v, l] + sum_c r[q, c] = 1 for values that cross into the   ``_add_keeps``
    backward, q being the class that makes v
(3) inflow - outflow + source[l] = demand[l] for every need, layout    ``_add_flow``
(4) f[d, a] <= p[a] for the needs that share an arc                    ``_add_flows``
(5) z[v, l] >= k[v, l] - sum of x that give l                          ``_add_keeps``
(6) resident + kept <= limit, resident + update <= limit               ``_add_memory``
(7) r[q, c] <= x[n, c] for the entry n of class q                      ``_add_reruns``
(8) w[q, t] >= w[u, t] - sum_l k[v, l] for u that reads v of q         ``_add_moment``
(9) b[q, t] >= sum_c bytes[c] r[q, c] - most * (1 - w[q, t])           ``_add_moment``
(10) resident + kept and gradients at t + sum_q b[q, t] <= limit       ``_add_moment``
(11) a[v, l] <= k[v, l]; what is away is not held                      ``_add_away``
(12) e >= seconds of copies one way + what those the other way add     ``_add_link``
     - hides * compute of the phase, for both ways
(13) bytes of what is away and at home there <= host limit             ``_add_link``
(14) s[n, c] <= x[n, c]; state that is away is not resident            ``_add_states``
=====================================================================  =======================

A class that runs again needs what it reads in the backward: (3) holds for it with r for x, and
with >= for =, since not all copies run again.

Choices and layouts of divisible classes are continuous: k of 32 layers may choose another way.
The objective is the seconds of the picked choices and of the paid arcs. The relaxation is integral
until memory binds. Solved by HiGHS through MathOpt with one thread, so every run gives one plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.search.branch import DIVE_GAP, GAP, SHARE, Columns, Way, search, taken
from autopar.search.linear import IntegerProgram, Outcome, run
from autopar.search.problem import Arc, Choices, Moment, Problem, Shares, Solution, Value


def solve(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = GAP, rough: bool = False
) -> Solution:
    """The least-seconds choice within memory, with its proven bound.

    Args:
        problem: What to choose.
        time_limit_s: Wall-clock limit of the solver.
        gap: Relative gap at which it may stop.
        rough: Whether what rounding finds is enough, however far from the bound.
    """
    start = time.perf_counter()
    program, columns = IntegerProgram(), Columns()
    _add_all(program, problem, columns)
    _add_memory(program, problem, columns)
    paid = _add_price(program, problem, columns)
    outcome = search(program, columns, start + time_limit_s, gap, rough=rough)
    if len(outcome.values):
        beside_s = sum(float(outcome.values[column]) * seconds for column, seconds in paid)
        outcome = replace(
            outcome, objective=outcome.objective - beside_s, bound=outcome.bound - beside_s
        )
    found = _solution(problem, columns, program, outcome, time.perf_counter() - start)
    away = len(outcome.values) and found.objective_s - found.bound_s > DIVE_GAP * found.objective_s
    return replace(found, is_rough=bool(rough and away))


def _add_all(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """Everything but memory."""
    _add_choices(program, problem, columns)
    _add_reruns(program, problem, columns)
    _add_keeps(program, problem, columns)
    _add_flows(program, problem, columns)
    _add_away(program, problem, columns)
    _add_states(program, problem, columns)
    _add_link(program, problem, columns)


def _add_choices(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(1)"""
    for node in problem.nodes:
        integer = len(node.seconds) > 1 and not node.divisible
        own = program.columns(list(node.seconds), integer=integer)
        program.row(1, 1, [(c, 1.0) for c in own])
        if node.least_host > 0:
            away = [(c, 1.0) for c, size in zip(own, node.host_bytes, strict=True) if size]
            program.row(node.least_host, 1, away)
        columns.pick.append(own)


def _add_reruns(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(7)"""
    for rerun in problem.reruns:
        own = program.columns(list(rerun.seconds), integer=rerun.count == 1)
        for again, chosen in zip(own, columns.pick[rerun.node], strict=True):
            program.row(-np.inf, 0, [(again, 1.0), (chosen, -1.0)])
        if rerun.most < 1:
            program.row(-np.inf, rerun.most, [(column, 1.0) for column in own])
        columns.again.append(own)


def _add_keeps(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(2) and (5)"""
    for value in problem.values:
        again = None if value.rerun is None else columns.again[value.rerun]
        columns.remade.append(again)
        if not value.crosses:
            columns.keep.append(None)
            columns.extra.append(None)
            continue
        # What only runs again reads is kept as far as that does, which may be a part of a class.
        integer = bool(value.backward) and not value.divisible
        keep = program.columns([0.0] * value.num_layouts, integer=integer)
        for layout in value.no_keep:
            program.upper[keep[layout]] = 0.0
        kept = [(c, 1.0) for c in keep]
        remade = [(c, 1.0) for c in again or ()]
        if value.rerun is not None and (least := problem.reruns[value.rerun].least):
            program.row(-np.inf, 1 - least, kept)
        if value.backward:
            program.row(1, 1, kept + remade)
        else:
            program.row(-np.inf, 1, kept)
        if value.least_home > 0:
            program.row(value.least_home, 1, [(keep[layout], 1.0) for layout in value.homes])
        columns.keep.append(keep)
        if not value.persistent:
            columns.extra.append(None)
            continue
        extra = program.columns([0.0] * value.num_layouts)
        for layout in range(value.num_layouts):
            own = [(c, 1.0) for c in _giving(value, columns, layout)]
            program.row(0, np.inf, [(extra[layout], 1.0), (keep[layout], -1.0), *own])
        columns.extra.append(extra)


def _add_away(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(11)"""
    for value, keep in zip(problem.values, columns.keep, strict=True):
        leave = value.leave
        if problem.link is None or leave is None or keep is None:
            columns.away.append(None)
            continue
        integer = program.integer[keep.start]
        own = program.columns(list(leave.lost_s), integer=integer)
        for away, kept in zip(own, keep, strict=True):
            program.row(-np.inf, 0, [(away, 1.0), (kept, -1.0)])
        if leave.least > 0 or leave.most < 1:
            program.row(leave.least, leave.most, [(column, 1.0) for column in own])
        columns.away.append(own)


def _add_states(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(14)"""
    for node, pick in zip(problem.nodes, columns.pick, strict=True):
        if problem.link is None or not any(node.state_bytes):
            columns.states.append(None)
            continue
        costs = [size * problem.link.state_s_per_byte for size in node.state_bytes]
        own = program.columns(costs, integer=not node.divisible)
        for away, chosen in zip(own, pick, strict=True):
            program.row(-np.inf, 0, [(away, 1.0), (chosen, -1.0)])
        if problem.link.least_states > 0:
            program.row(problem.link.least_states, 1.0, [(column, 1.0) for column in own])
        columns.states.append(own)


def _add_link(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(12) and (13)"""
    leaving = [
        (value, value.leave, own)
        for value, own in zip(problem.values, columns.away, strict=True)
        if own is not None and value.leave is not None
    ]
    states = [
        (column, size)
        for node, own in zip(problem.nodes, columns.states, strict=True)
        if own is not None
        for column, size in zip(own, node.state_bytes, strict=True)
    ]
    if problem.link is None:
        return
    # In milliseconds, and in parts of the host's memory, as the solver's tolerances ask for.
    copied = [
        (column, 1e3 * seconds)
        for _, leave, own in leaving
        for column, seconds in zip(own, leave.seconds, strict=True)
    ]
    arcs = columns.over_link
    hides = 1e3 * problem.link.hides
    again = [
        (column, -hides * seconds)
        for rerun, own in zip(problem.reruns, columns.again, strict=True)
        for column, seconds in zip(own, rerun.seconds, strict=True)
    ]
    early, late = (
        [
            (column, -hides * own)
            for node, seconds in hiding
            for column, own in zip(columns.pick[node], seconds, strict=True)
        ]
        for hiding in (problem.link.early, problem.link.late)
    )
    to_first, to_second = problem.link.beside
    for ins, outs, beside in (
        (arcs[Way.IN_EARLY], copied, early),
        ([*copied, *arcs[Way.IN_LATE]], arcs[Way.OUT_LATE], [*late, *again]),
    ):
        if not ins and not outs:
            continue
        (exposed,) = program.columns([1e-3], upper=np.inf)
        for longer, other, adds in ((ins, outs, to_first), (outs, ins, to_second)):
            if longer:
                slows = [(column, adds * seconds) for column, seconds in other if adds]
                program.row(-np.inf, 0, [*longer, *slows, *beside, (exposed, -1.0)])
    limit = max(problem.link.host_limit_bytes, 1.0)
    held = [
        (column, size / limit)
        for value, _, own in leaving
        for column, size in zip(own, value.kept_bytes, strict=True)
    ]
    held += [(column, size / limit) for column, size in states]
    held += [
        (column, size / limit)
        for node, pick in zip(problem.nodes, columns.pick, strict=True)
        for column, size in zip(pick, node.host_bytes, strict=False)
        if size
    ]
    if held:
        program.row(-np.inf, 1.0, held)


def _giving(value: Value, columns: Columns, layout: int) -> list[int]:
    pick = columns.pick[value.producer]
    return [pick[c] for c, given in enumerate(value.gives) if given == layout]


def _add_flows(program: IntegerProgram, problem: Problem, columns: Columns) -> None:
    """(3) and (4)"""
    for number, (value, keep) in enumerate(zip(problem.values, columns.keep, strict=True)):
        added_up = columns.added_up.setdefault(number, [])
        made = [[(c, 1.0) for c in _giving(value, columns, n)] for n in range(value.num_layouts)]
        exact = [_demand(value, columns.pick[need.node], need.layouts) for need in value.forward]
        for layout in value.fixed_needs:
            exact.append([[] for _ in range(value.num_layouts)])
            exact[-1][layout] = [(-1, 1.0)]
        copied = columns.over_link[Way.OUT_LATE if value.late else Way.IN_EARLY]
        if keep is None:
            _add_phase(program, value, made, exact, [], added_up, copied)
            continue
        kept: _Terms = [[(keep[n], 1.0)] for n in range(value.num_layouts)]
        if value.backward and value.rerun is None:
            _add_phase(program, value, made, [*exact, kept], [], added_up, copied)
        else:
            _add_phase(program, value, made, exact, [kept], added_up, copied)
        there = [list(terms) for terms in kept]
        if value.rerun is not None:
            for layout, column in zip(value.gives, columns.again[value.rerun], strict=True):
                there[layout].append((column, 1.0))
        exact = [_demand(value, columns.pick[need.node], need.layouts) for need in value.backward]
        least = _again(value, columns)
        copied = columns.over_link[Way.IN_LATE]
        _add_phase(program, value, there, exact, least, added_up, copied)


def _again(value: Value, columns: Columns) -> list[_Terms]:
    """What each class that reads the value needs of it when it runs again."""
    return [_demand(value, columns.again[own.rerun], own.layouts) for own in value.again]


_Terms = list[list[tuple[int, float]]]
"""For every layout, (column, coefficient); column -1 stands for the constant 1."""


def _demand(value: Value, pick: range, layouts: Sequence[int]) -> _Terms:
    found: _Terms = [[] for _ in range(value.num_layouts)]
    for choice, layout in enumerate(layouts):
        found[layout].append((pick[choice], 1.0))
    return found


def _add_phase(
    program: IntegerProgram,
    value: Value,
    made: _Terms,
    exact: list[_Terms],
    least: list[_Terms],
    added_up: list[tuple[int, Arc]],
    copied: list[tuple[int, float]],
) -> None:
    """The flows of one phase.

    Args:
        program: Where they are added.
        value: The value.
        made: What is there at the start, by layout.
        exact: Demands that add up to what is there.
        least: Demands that may leave something of it over.
        added_up: Is told the columns and arcs of what is added up in the loop.
        copied: Is told the columns of copies over the host link, and their milliseconds.
    """
    shared = len(exact) + len(least) > 1
    upper = np.inf if least else 1.0
    costs = [arc.seconds for arc in value.arcs]
    paid = program.columns(costs, upper=upper) if shared else None
    for number, demand in enumerate([*exact, *least]):
        flow = program.columns([0.0] * len(costs) if shared else costs, upper=upper)
        _add_flow(program, value, made, demand, flow, np.inf if number >= len(exact) else 0.0)
        if shared and paid is not None:
            for index, cost in enumerate(costs):
                if cost > 0:
                    program.row(-np.inf, 0, [(flow[index], 1.0), (paid[index], -1.0)])
        if number == 0:
            added_up += [
                (c, arc)
                for c, arc in zip(flow, value.arcs, strict=True)
                if arc.held_bytes or arc.adds_up
            ]
        if paid is None:
            paid = flow
    copied += [
        (column, 1e3 * arc.link_s)
        for column, arc in zip(paid or (), value.arcs, strict=False)
        if arc.link_s
    ]


def _add_flow(
    program: IntegerProgram, value: Value, made: _Terms, demand: _Terms, flow: range, spare: float
) -> None:
    terms: list[list[tuple[int, float]]] = [[] for _ in range(value.num_layouts)]
    for arc, column in zip(value.arcs, flow, strict=True):
        terms[arc.tail].append((column, -1.0))
        terms[arc.head].append((column, 1.0))
    for layout in range(value.num_layouts):
        row: dict[int, float] = {}
        constant = 0.0
        for sign, side in ((1.0, terms[layout]), (1.0, made[layout]), (-1.0, demand[layout])):
            for column, coefficient in side:
                if column < 0:
                    constant -= sign * coefficient
                else:
                    row[column] = row.get(column, 0.0) + sign * coefficient
        if row or constant:
            program.row(constant, constant + spare, list(row.items()))


@dataclass(frozen=True, slots=True)
class Least:
    """The least memory that any choice needs.

    Attributes:
        num_bytes: Infinite if the time ran out.
        moment: Name of the moment that needs it, or what `moment_of` says.
    """

    num_bytes: float
    moment: str = ""


def moment_of(problem: Problem, memory_bytes: Sequence[float]) -> str:
    """Where most is held, of the memory sums of a solution."""
    names = ("the end of the forward", "the update", *(moment.name for moment in problem.moments))
    return names[int(np.argmax(np.asarray(memory_bytes)))]


def least_bytes(problem: Problem, *, time_limit_s: float = 60.0) -> Least:
    """Least of the largest memory sum that any choice needs, by the relaxation: none needs less."""
    program, columns = IntegerProgram(), Columns()
    _add_all(program, problem, columns)
    program.cost = [0.0] * len(program.cost)
    (most,) = program.columns([1.0], upper=float("inf"))
    none = replace(problem, memory_limit_bytes=problem.fixed_bytes)
    _add_memory(program, none, columns, most)
    outcome = run(program, time.perf_counter() + time_limit_s, GAP, relaxed=True)
    if not len(outcome.values):
        return Least(float("inf"))
    sums = _memory(none, columns, outcome.values)
    least = outcome.objective * _unit(none) + problem.fixed_bytes
    return Least(least, moment_of(problem, sums))


def away_bytes(problem: Problem, solution: Solution) -> float:
    """Bytes of host memory that a solution takes."""
    values = (
        share * problem.values[index].kept_bytes[layout]
        for index, shares in solution.away_shares.items()
        for layout, share in shares
    )
    states = (
        share * problem.nodes[index].state_bytes[choice]
        for index, shares in solution.state_shares.items()
        for choice, share in shares
    )
    homes = (
        share * node.host_bytes[choice]
        for number, node in enumerate(problem.nodes)
        if node.host_bytes
        for choice, share in _shared(solution.choice_shares, number, solution.choice[number])
    )
    return sum(values) + sum(states) + sum(homes)


def fits(problem: Problem, solution: Solution) -> bool:
    """Whether a solution of a problem with other bytes is within this one's limit, moments apart.

    If it is optimal there, and all but bytes is the same, it is optimal here too.
    """
    if problem.memory_limit_bytes is None:
        return True
    resident = problem.fixed_bytes
    update = saved = 0.0
    for number, node in enumerate(problem.nodes):
        for choice, share in _shared(solution.choice_shares, number, solution.choice[number]):
            resident += share * node.resident_bytes[choice]
            update += share * _update_bytes(node)[choice]
    for number, value in enumerate(problem.values):
        own: dict[int, float] = {}
        if value.persistent:
            maker = value.producer
            for choice, share in _shared(solution.choice_shares, maker, solution.choice[maker]):
                own[value.gives[choice]] = own.get(value.gives[choice], 0.0) + share
        for layout, share in _shared(solution.kept_shares, number, solution.kept[number]):
            saved += max(0.0, share - own.get(layout, 0.0)) * value.kept_bytes[layout]
    return resident + max(saved, update) <= problem.memory_limit_bytes


def _shared(shares: Mapping[int, Shares], number: int, only: int | None) -> Shares:
    return shares.get(number, () if only is None else ((only, 1.0),))


def _unit(problem: Problem) -> float:
    """Bytes that count as one: those there are, or about as many where there are none."""
    room = (problem.memory_limit_bytes or 0.0) - problem.fixed_bytes
    if room > 0:
        return room
    sizes = (max(value.kept_bytes, default=0.0) for value in problem.values)
    held = (max(node.resident_bytes, default=0.0) for node in problem.nodes)
    return max(1.0, max(sizes, default=0.0), max(held, default=0.0))


def _add_memory(
    program: IntegerProgram, problem: Problem, columns: Columns, most: int | None = None
) -> None:
    """(6), in parts of the limit so that the solver's tolerances fit.

    ``most`` is a column that is added to the limit.
    """
    if problem.memory_limit_bytes is None:
        return
    unit = _unit(problem)
    limit = (problem.memory_limit_bytes - problem.fixed_bytes) / unit
    room = [] if most is None else [(most, -1.0)]
    resident, update, added_up, kept = (
        [(column, size / unit) for column, size in own] for own in _held(problem, columns)
    )
    program.row(-np.inf, limit, resident + added_up + kept + room)
    program.row(-np.inf, limit, _joined([*resident, *update, *room]))
    for moment in problem.moments:
        here = _add_moment(program, problem, columns, moment)
        program.row(-np.inf, limit, _joined([*resident, *added_up, *here, *room]))


_Sizes = list[tuple[int, float]]
"""(column, bytes)."""


def _joined(terms: _Sizes) -> _Sizes:
    """Terms with one of every column."""
    total: dict[int, float] = {}
    for column, size in terms:
        total[column] = total.get(column, 0.0) + size
    return list(total.items())


def _held(problem: Problem, columns: Columns) -> tuple[_Sizes, _Sizes, _Sizes, _Sizes]:
    """What is resident, what the update holds beside, what the loop adds up, what is kept."""
    resident: _Sizes = []
    update: _Sizes = []
    kept: _Sizes = []
    for node, pick in zip(problem.nodes, columns.pick, strict=True):
        resident += [(c, size) for c, size in zip(pick, node.resident_bytes, strict=True) if size]
        update += [(c, size) for c, size in zip(pick, _update_bytes(node), strict=True) if size]
    for node, states in zip(problem.nodes, columns.states, strict=True):
        if states is not None:
            resident += [(c, -size) for c, size in zip(states, node.state_bytes, strict=True)]
            # What is updated in pieces makes nothing of all at once.
            update += [
                (c, -size) for c, size in zip(states, _made_bytes(node), strict=True) if size
            ]
    held_by = zip(problem.values, columns.keep, columns.extra, columns.away, strict=True)
    for value, keep, extra, away in held_by:
        sizes = [(n, size) for n, size in enumerate(value.kept_bytes) if size]
        if keep is not None:
            counted = keep if extra is None else extra
            kept += [(counted[n], size) for n, size in sizes]
        if away is not None:
            kept += [(away[n], -size) for n, size in sizes]
    return resident, update, list(_added_up(columns)), kept


def _update_bytes(node: Choices) -> tuple[float, ...]:
    """What each choice holds during the update, beside what is resident."""
    pairs = zip(node.gradient_bytes, _made_bytes(node), strict=True)
    return tuple(gradient + made for gradient, made in pairs)


def _made_bytes(node: Choices) -> tuple[float, ...]:
    """What the update makes for a moment under each choice."""
    return node.update_bytes or (0.0,) * len(node.gradient_bytes)


def _add_price(program: IntegerProgram, problem: Problem, columns: Columns) -> _Sizes:
    """Let bytes cost seconds; what each column then costs beside its own."""
    if problem.price is None:
        return []
    resident, _, added_up, kept = _held(problem, columns)
    paid = [(column, problem.price.resident_s * size) for column, size in resident + added_up]
    paid += [(column, problem.price.saved_s * size) for column, size in kept]
    for column, seconds in paid:
        program.cost[column] += seconds
    return paid


def _add_moment(
    program: IntegerProgram, problem: Problem, columns: Columns, moment: Moment
) -> list[tuple[int, float]]:
    """(8) to (10): what is held at a moment beside what is resident, in the same unit."""
    unit = _unit(problem)
    terms: list[tuple[int, float]] = []
    back = dict(moment.back)
    for number, share in moment.kept:
        keep, extra, away = columns.keep[number], columns.extra[number], columns.away[number]
        counted = keep if extra is None else extra
        size = problem.values[number].kept_bytes
        if counted is not None:
            terms += [(counted[n], share * s / unit) for n, s in enumerate(size) if s]
        if away is not None:
            gone = share - back.get(number, 0.0)
            terms += [(away[n], -gone * s / unit) for n, s in enumerate(size) if s]
    for number, share in moment.gradients:
        size = problem.nodes[number].gradient_bytes
        terms += [(c, share * s / unit) for c, s in zip(columns.pick[number], size, strict=True)]
    for number, size in moment.passing:
        terms += [(c, s / unit) for c, s in zip(columns.pick[number], size, strict=True) if s]
    ran = {
        maker: program.columns([0.0])[0]
        for maker in dict.fromkeys(m for m, _, _ in moment.through)
        if maker not in moment.needed
    }
    for maker, reader, number in moment.through:
        keep = columns.keep[number]
        read: list[tuple[int, float]] = []
        if reader in ran:
            read = [(ran[reader], -1.0)]
        elif reader in moment.needed:
            read = [(c, -1.0) for c in columns.again[reader]]
        if maker in ran and read and keep is not None:
            program.row(0, np.inf, [(ran[maker], 1.0), *read, *((c, 1.0) for c in keep)])
    for rerun, held in moment.held:
        again = columns.again[rerun]
        own = [(c, size / unit) for c, size in zip(again, held, strict=True) if size]
        if rerun in moment.needed:
            terms += own
        elif rerun in ran and own:
            (bytes_,) = program.columns([0.0], upper=np.inf)
            most = max(held) / unit
            less = [(c, -size) for c, size in own]
            program.row(-most, np.inf, [(bytes_, 1.0), (ran[rerun], -most), *less])
            terms.append((bytes_, 1.0))
    return terms


def _solution(
    problem: Problem,
    columns: Columns,
    program: IntegerProgram,
    outcome: Outcome,
    seconds: float,
) -> Solution:
    num_variables, num_constraints = len(program.cost), len(program.low)
    found = outcome.values
    if not len(found):
        return Solution(
            status=outcome.status,
            seconds=seconds,
            num_variables=num_variables,
            num_constraints=num_constraints,
        )
    choice = tuple(int(np.argmax(found[pick.start : pick.stop])) for pick in columns.pick)
    kept = tuple(_kept(found, keep) for keep in columns.keep)
    return Solution(
        status=outcome.status,
        choice=choice,
        kept=kept,
        choice_shares=_shares(found, columns.pick),
        kept_shares=_shares(found, columns.keep),
        rerun_shares=tuple(float(found[a.start : a.stop].sum()) for a in columns.again),
        away_shares=_away_shares(found, columns.away),
        state_shares=_away_shares(found, columns.states),
        added_shares=_added_shares(found, columns),
        objective_s=outcome.objective,
        bound_s=outcome.bound,
        seconds=seconds,
        memory_bytes=_memory(problem, columns, found),
        num_variables=num_variables,
        num_constraints=num_constraints,
    )


def _shares(found: NDArray[np.float64], groups: Sequence[range | None]) -> dict[int, Shares]:
    """What the members of a group choose, where they choose differently."""
    shares: dict[int, Shares] = {}
    for index, group in enumerate(groups):
        if group is None:
            continue
        amounts = found[group.start : group.stop]
        (used,) = np.nonzero(amounts > SHARE)
        if len(used) > 1:
            total = float(amounts[used].sum())
            shares[index] = tuple((int(n), float(amounts[n]) / total) for n in used)
    return shares


def _added_up(columns: Columns) -> Iterator[tuple[int, float]]:
    """Columns of what is added up in the loop, and the bytes that each holds."""
    for own in columns.added_up.values():
        yield from ((column, arc.held_bytes) for column, arc in own)


def _added_shares(found: NDArray[np.float64], columns: Columns) -> dict[int, Shares]:
    shares: dict[int, Shares] = {}
    for index, own in columns.added_up.items():
        used = [(arc.head, float(found[column])) for column, arc in own if found[column] > SHARE]
        total = sum(amount for _, amount in used)
        if used:
            shares[index] = tuple((layout, amount / total) for layout, amount in used)
    return shares


def _away_shares(found: NDArray[np.float64], groups: Sequence[range | None]) -> dict[int, Shares]:
    shares: dict[int, Shares] = {}
    for index, own in enumerate(groups):
        if own is None:
            continue
        amounts = taken(found, own)
        if amounts.sum() > SHARE:
            (used,) = np.nonzero(amounts > SHARE)
            shares[index] = tuple((int(n), float(amounts[n])) for n in used)
    return shares


def _kept(found: NDArray[np.float64], keep: range | None) -> int | None:
    """The layout in which most of a value is kept; None if nothing is."""
    if keep is None or found[keep.start : keep.stop].sum() <= SHARE:
        return None
    return int(np.argmax(found[keep.start : keep.stop]))


def _memory(problem: Problem, columns: Columns, found: NDArray[np.float64]) -> tuple[float, ...]:
    """The memory sums, in bytes."""
    resident = problem.fixed_bytes
    gradients = []
    made = 0.0
    for node, pick, away in zip(problem.nodes, columns.pick, columns.states, strict=True):
        amounts = found[pick.start : pick.stop]
        resident += float(amounts @ np.asarray(node.resident_bytes))
        if away is not None:
            resident -= float(taken(found, away) @ np.asarray(node.state_bytes))
        if node.update_bytes:
            gone_too = 0.0 if away is None else taken(found, away)
            made += float((amounts - gone_too) @ np.asarray(node.update_bytes))
        gradients.append(float(amounts @ np.asarray(node.gradient_bytes)))
    saved, gone = [], []
    for value, keep, away in zip(problem.values, columns.keep, columns.away, strict=True):
        sizes = np.asarray(value.kept_bytes)
        gone.append(0.0 if away is None else float(taken(found, away) @ sizes))
        amounts = np.zeros(value.num_layouts)
        if keep is not None:
            amounts = found[keep.start : keep.stop]
        if keep is not None and value.persistent:
            own = np.zeros(value.num_layouts)
            pick = columns.pick[value.producer]
            np.add.at(own, np.asarray(value.gives), found[pick.start : pick.stop])
            amounts = np.maximum(0.0, amounts - own)
        saved.append(float(amounts @ sizes))
    moments = (
        sum(share * (saved[number] - gone[number]) for number, share in moment.kept)
        + sum(share * gone[number] for number, share in moment.back)
        + sum(share * gradients[number] for number, share in moment.gradients)
        + sum(float(taken(found, columns.pick[n]) @ np.asarray(s)) for n, s in moment.passing)
        + _remade_bytes(problem, columns, found, moment)
        for moment in problem.moments
    )
    loop = resident + sum(float(found[column]) * size for column, size in _added_up(columns))
    update = resident + sum(gradients) + made
    return (loop + sum(saved) - sum(gone), update, *(loop + m for m in moments))


def _remade_bytes(
    problem: Problem, columns: Columns, found: NDArray[np.float64], moment: Moment
) -> float:
    """What is held of what ran again by a moment."""
    again = [found[a.start : a.stop] for a in columns.again]
    ran = [float(a.sum()) if n in moment.needed else 0.0 for n, a in enumerate(again)]
    changed = True
    while changed:
        changed = False
        for maker, reader, number in moment.through:
            keep = columns.keep[number]
            kept = 0.0 if keep is None else float(found[keep.start : keep.stop].sum())
            if ran[reader] - kept > ran[maker] + SHARE:
                ran[maker], changed = ran[reader] - kept, True
    return sum(
        max(0.0, float(again[n] @ np.asarray(held)) - max(held) * (1 - ran[n]))
        if n not in moment.needed
        else float(again[n] @ np.asarray(held))
        for n, held in moment.held
    )
