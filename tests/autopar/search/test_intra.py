"""The integer program against exhaustion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import linear
from autopar.search.intra import least_bytes, solve
from autopar.search.problem import (
    Again,
    Arc,
    BytePrice,
    Choices,
    Leave,
    Link,
    Moment,
    Need,
    Problem,
    Rerun,
    Value,
)
from tests.oracles.brute import brute_force


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_nodes = draw(st.integers(2, 4))
    cost = st.integers(0, 20).map(float)
    size = st.integers(0, 9).map(lambda g: g * 2.0**28)
    nodes = []
    for number in range(num_nodes):
        options = draw(st.integers(1, 3))
        nodes.append(
            Choices(
                name=f"n{number}",
                count=1,
                seconds=tuple(draw(cost) for _ in range(options)),
                resident_bytes=tuple(draw(size) for _ in range(options)),
                gradient_bytes=tuple(draw(size) for _ in range(options)),
                update_bytes=tuple(draw(size) for _ in range(options * draw(st.integers(0, 1)))),
            )
        )
    values = []
    for number in range(draw(st.integers(1, 2))):
        layouts = draw(st.integers(1, 3))
        numbers = st.integers(0, layouts - 1)
        producer = draw(st.integers(0, num_nodes - 1))
        pairs = [(a, b) for a in range(layouts) for b in range(layouts) if a != b]
        arcs = tuple(Arc(a, b, draw(cost)) for a, b in pairs if draw(st.integers(0, 3)))

        def need(draw_from: st.SearchStrategy[int] = numbers) -> Need:
            node = draw(st.integers(0, num_nodes - 1))
            return Need(node, tuple(draw(draw_from) for _ in nodes[node].seconds))

        values.append(
            Value(
                name=f"v{number}",
                producer=producer,
                gives=tuple(draw(numbers) for _ in nodes[producer].seconds),
                num_layouts=layouts,
                arcs=arcs,
                forward=tuple(need() for _ in range(draw(st.integers(0, 2)))),
                backward=tuple(need() for _ in range(draw(st.integers(0, 2)))),
                kept_bytes=tuple(draw(size) for _ in range(layouts)),
                persistent=draw(st.booleans()),
                fixed_needs=(0,) if draw(st.booleans()) else (),
            )
        )
    limit = draw(st.none() | st.integers(1, 30).map(lambda g: g * 2.0**28))
    return Problem(nodes=tuple(nodes), values=tuple(values), memory_limit_bytes=limit)


@st.composite
def recomputing_problems(draw: st.DrawFn) -> Problem:
    """Problems in which some nodes may run again, with moments of the backward."""
    plain = draw(problems())
    cost = st.integers(0, 20).map(float)
    size = st.integers(0, 9).map(lambda g: g * 2.0**28)
    chosen = [n for n in range(len(plain.nodes)) if draw(st.booleans())]
    reruns = tuple(
        Rerun(
            name=f"r{n}",
            node=n,
            count=1,
            seconds=tuple(draw(cost) for _ in plain.nodes[n].seconds),
            least=draw(st.sampled_from((0.0, 0.0, 0.0, 1.0))),
        )
        for n in chosen
    )
    of = {rerun.node: number for number, rerun in enumerate(reruns)}
    values = []
    for value in plain.values:
        again: tuple[Again, ...] = ()
        # A node that runs again reads only what is made before it.
        later = [r for r in range(len(reruns)) if reruns[r].node > value.producer]
        if later and draw(st.booleans()):
            layouts = st.integers(0, value.num_layouts - 1)
            readers = draw(st.lists(st.sampled_from(later), min_size=1, max_size=2, unique=True))
            again = tuple(
                Again(r, tuple(draw(layouts) for _ in plain.nodes[reruns[r].node].seconds))
                for r in readers
            )
        rerun = None if value.persistent else of.get(value.producer)
        values.append(replace(value, rerun=rerun, again=again))
    moments = tuple(
        Moment(
            name=f"m{number}",
            kept=tuple((n, 1.0) for n in range(len(values)) if draw(st.booleans())),
            gradients=tuple((n, 1.0) for n in range(len(plain.nodes)) if draw(st.booleans())),
            needed=(needed := frozenset(n for n in range(len(reruns)) if draw(st.booleans()))),
            through=tuple(
                (value.rerun, a.rerun, n)
                for n, value in enumerate(values)
                for a in value.again
                if value.rerun is not None and value.rerun not in needed
            ),
            held=tuple(
                (n, tuple(draw(size) for _ in reruns[n].seconds)) for n in range(len(reruns))
            ),
            passing=tuple(
                (n, tuple(draw(size) for _ in node.seconds))
                for n, node in enumerate(plain.nodes)
                if draw(st.booleans())
            ),
        )
        for number in range(draw(st.integers(0, 2)))
    )
    return replace(plain, values=tuple(values), reruns=reruns, moments=moments)


@st.composite
def offloading_problems(draw: st.DrawFn) -> Problem:
    """Problems in which some values may also be away, in host memory of some size."""
    plain = draw(recomputing_problems())
    cost = st.integers(0, 20).map(float)
    values = []
    for value in plain.values:
        leave = None
        if not value.persistent and draw(st.booleans()):
            leave = Leave(
                seconds=tuple(draw(cost) for _ in value.kept_bytes),
                lost_s=tuple(1e-3 + draw(st.integers(0, 2)) for _ in value.kept_bytes),
                least=draw(st.sampled_from((0.0, 0.0, 0.0, 1.0))),
            )
        values.append(replace(value, leave=leave))
    phases = [
        tuple((n, node.seconds) for n, node in enumerate(plain.nodes) if draw(st.booleans()))
        for _ in range(2)
    ]
    link = Link(
        early=phases[0],
        late=phases[1],
        host_limit_bytes=draw(st.integers(0, 20)) * 2.0**28,
        hides=draw(st.sampled_from((0.0, 0.5, 1.0))),
        state_s_per_byte=2.0 ** -draw(st.integers(26, 30)),
        least_states=draw(st.sampled_from((0.0, 0.0, 1.0))),
        beside=draw(st.sampled_from(((0.0, 0.0), (0.5, 0.25)))),
    )
    part = st.sampled_from((0.5, 1.0))
    nodes = tuple(
        replace(
            node,
            state_bytes=tuple(draw(part) * size for size in node.resident_bytes),
            update_bytes=(),
        )
        if draw(st.booleans())
        else node
        for node in plain.nodes
    )
    moments = tuple(
        replace(m, back=tuple(kept for kept in m.kept if draw(st.booleans())))
        for m in plain.moments
    )
    return replace(plain, nodes=nodes, values=tuple(values), link=link, moments=moments)


@st.composite
def homed_problems(draw: st.DrawFn) -> Problem:
    """Problems in which what a node holds may be at home in host memory, and what it reads too."""
    plain = draw(offloading_problems())
    number = draw(st.integers(0, len(plain.values) - 1))
    node = plain.values[number].producer
    found = doubled(plain, node)
    sizes = plain.nodes[node].resident_bytes
    none = (0.0,) * len(sizes)
    nodes, values = list(found.nodes), list(found.values)
    nodes[node] = replace(
        nodes[node],
        resident_bytes=sizes + none,
        gradient_bytes=plain.nodes[node].gradient_bytes + none,
        update_bytes=plain.nodes[node].update_bytes and plain.nodes[node].update_bytes + none,
        state_bytes=plain.nodes[node].state_bytes and plain.nodes[node].state_bytes + none,
        host_bytes=none + sizes,
        least_host=draw(st.sampled_from((0.0, 0.0, 1.0))) if any(sizes) else 0.0,
    )
    cost = st.integers(0, 20).map(float)
    own = values[number]
    given = tuple(dict.fromkeys(plain.values[number].gives))
    homes = {layout: own.num_layouts + at for at, layout in enumerate(given)}
    values[number] = replace(
        own,
        gives=plain.values[number].gives + tuple(homes[g] for g in plain.values[number].gives),
        num_layouts=own.num_layouts + len(homes),
        arcs=own.arcs + tuple(Arc(h, g, draw(cost), link_s=draw(cost)) for g, h in homes.items()),
        kept_bytes=own.kept_bytes + (0.0,) * len(homes),
        persistent=True,
        rerun=None,
        leave=None,
        homes=tuple(homes.values()),
    )
    for at, value in enumerate(values):
        if at != number and value.forward and not value.crosses and not value.persistent:
            first = value.forward[0]
            layouts = list(first.layouts)
            if first.node == node:
                layouts[len(sizes) :] = [value.num_layouts] * len(sizes)
            into = Arc(0, value.num_layouts, draw(cost), link_s=draw(cost))
            values[at] = replace(
                value,
                num_layouts=value.num_layouts + 1,
                arcs=(*value.arcs, into),
                forward=(Need(first.node, tuple(layouts)), *value.forward[1:]),
                kept_bytes=(*value.kept_bytes, 0.0),
                late=True,
            )
    return replace(found, nodes=tuple(nodes), values=tuple(values))


def doubled(problem: Problem, node: int) -> Problem:
    """The problem in which every choice of a node is there twice."""

    def own(number: int, each: tuple[Any, ...]) -> tuple[Any, ...]:
        return each + each if number == node else each

    reruns = problem.reruns
    link = problem.link
    assert link is not None
    return replace(
        problem,
        nodes=tuple(replace(n, seconds=own(at, n.seconds)) for at, n in enumerate(problem.nodes)),
        values=tuple(
            replace(
                value,
                gives=own(value.producer, value.gives),
                forward=tuple(Need(n.node, own(n.node, n.layouts)) for n in value.forward),
                backward=tuple(Need(n.node, own(n.node, n.layouts)) for n in value.backward),
                again=tuple(
                    Again(a.rerun, own(reruns[a.rerun].node, a.layouts)) for a in value.again
                ),
            )
            for value in problem.values
        ),
        reruns=tuple(replace(r, seconds=own(r.node, r.seconds)) for r in reruns),
        moments=tuple(
            replace(
                m,
                held=tuple((r, own(reruns[r].node, held)) for r, held in m.held),
                passing=tuple((n, own(n, sizes)) for n, sizes in m.passing),
            )
            for m in problem.moments
        ),
        link=replace(
            link,
            early=tuple((n, own(n, seconds)) for n, seconds in link.early),
            late=tuple((n, own(n, seconds)) for n, seconds in link.late),
        ),
    )


@settings(max_examples=100, deadline=None)
@given(homed_problems())
def test_homes_in_host_memory_equal_brute_force(problem: Problem) -> None:
    test_program_equals_brute_force.hypothesis.inner_test(problem)  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None)
@given(offloading_problems())
def test_offload_and_recompute_equal_brute_force(problem: Problem) -> None:
    test_program_equals_brute_force.hypothesis.inner_test(problem)  # type: ignore[attr-defined]


@settings(max_examples=200, deadline=None)
@given(recomputing_problems())
def test_recompute_equals_brute_force(problem: Problem) -> None:
    test_program_equals_brute_force.hypothesis.inner_test(problem)  # type: ignore[attr-defined]


def test_what_runs_again_may_be_read_in_two_layouts() -> None:
    def node(name: str) -> Choices:
        none = (0.0,)
        return Choices(name=name, count=1, seconds=(1.0,), resident_bytes=none, gradient_bytes=none)

    def value(producer: int, readers: dict[int, int]) -> Value:
        """Read again by some nodes, each in a layout; by the last node in the backward if none."""
        return Value(
            name=f"v{producer}",
            producer=producer,
            gives=(0,),
            num_layouts=2,
            arcs=(Arc(0, 1, 2.0),),
            forward=tuple(Need(n, (layout,)) for n, layout in readers.items()),
            backward=() if readers else (Need(3, (0,)),),
            kept_bytes=(2.0**30,) * 2,
            rerun=producer,
            again=tuple(Again(n, (layout,)) for n, layout in readers.items()),
        )

    problem = Problem(
        nodes=tuple(node(name) for name in "abcd"),
        values=(value(0, {1: 0, 2: 1}), value(1, {}), value(2, {})),
        reruns=tuple(
            Rerun(name=f"r{n}", node=n, count=1, seconds=(1.0,), least=1.0) for n in range(3)
        ),
    )
    found = solve(problem, gap=0.0)
    assert found.objective_s == brute_force(problem) == 4 + 2 + 3 + 2


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 40))
def test_what_is_best_at_a_price_is_fastest_within_its_memory(problem: Problem, price: int) -> None:
    nodes = tuple(
        replace(n, gradient_bytes=(0.0,) * len(n.seconds), update_bytes=()) for n in problem.nodes
    )
    each_s = price * 2.0**-30
    open_ = replace(problem, nodes=nodes, memory_limit_bytes=None)
    found = solve(replace(open_, price=BytePrice(each_s, each_s)), gap=0.0)
    if not found.choice:
        assert brute_force(open_) is None
        return
    limit = (1 + 1e-9) * found.memory_bytes[0] + 1
    expected = brute_force(replace(open_, memory_limit_bytes=limit))
    assert found.objective_s == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(offloading_problems())
def test_memory_sums_are_those_of_the_limit(problem: Problem) -> None:
    found = solve(problem, gap=0.0)
    if found.choice and problem.memory_limit_bytes is not None:
        assert max(found.memory_bytes) <= problem.memory_limit_bytes * (1 + 1e-6) + 1


@settings(max_examples=150, deadline=None)
@given(problems())
def test_program_equals_brute_force(problem: Problem) -> None:
    expected = brute_force(problem)
    found = solve(problem, gap=0.0)
    if expected is None:
        assert found.status == "infeasible"
    else:
        assert found.status == "optimal"
        assert found.objective_s == pytest.approx(expected, abs=1e-6)
        assert found.bound_s == pytest.approx(expected, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(problems())
def test_every_run_gives_the_same_solution(problem: Problem) -> None:
    first, second = solve(problem), solve(problem)
    assert (first.choice, first.kept) == (second.choice, second.kept)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_no_solution_needs_less_than_the_least_bytes(problem: Problem) -> None:
    least = least_bytes(problem).num_bytes
    found = solve(replace(problem, memory_limit_bytes=None), gap=0.0)
    if found.choice:
        assert max(found.memory_bytes) >= least - 1.0
        below = replace(problem, memory_limit_bytes=0.99 * least - 1e4)
        if least > 1e6:
            assert solve(below, gap=0.0).status == "infeasible"


def scaled(problem: Problem, factor: float) -> Problem:
    """The problem with all bytes times a factor."""

    def times(sizes: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(size * factor for size in sizes)

    def each(items: tuple[tuple[int, tuple[float, ...]], ...]) -> Any:
        return tuple((number, times(sizes)) for number, sizes in items)

    limit = problem.memory_limit_bytes
    return replace(
        problem,
        nodes=tuple(
            replace(
                n,
                resident_bytes=times(n.resident_bytes),
                gradient_bytes=times(n.gradient_bytes),
                update_bytes=times(n.update_bytes),
            )
            for n in problem.nodes
        ),
        values=tuple(replace(v, kept_bytes=times(v.kept_bytes)) for v in problem.values),
        moments=tuple(
            replace(m, held=each(m.held), passing=each(m.passing)) for m in problem.moments
        ),
        memory_limit_bytes=None if limit is None else limit * factor,
    )


@settings(max_examples=40, deadline=None)
@given(recomputing_problems(), st.sampled_from((2.0**-24, 2.0**10)))
def test_small_and_large_models_are_solved_alike(problem: Problem, factor: float) -> None:
    first, second = solve(problem, gap=0.0), solve(scaled(problem, factor), gap=0.0)
    assert first.status == second.status
    if first.choice:
        assert second.objective_s == pytest.approx(first.objective_s, abs=1e-6)


@given(problem=problems())
@settings(max_examples=20, deadline=None)
def test_presolving_finds_the_same_optimum(problem: Problem) -> None:
    found = solve(problem)
    with mock.patch.object(linear, "MANY_COLUMNS", 0):
        presolved = solve(problem)
    assert presolved.status == found.status
    assert presolved.objective_s == pytest.approx(found.objective_s)
