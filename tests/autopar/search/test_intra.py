"""The integer program against exhaustion."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.intra import least_bytes, solve
from autopar.search.problem import Arc, Choices, Need, Problem, Value
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
    least = least_bytes(problem)
    found = solve(replace(problem, memory_limit_bytes=None), gap=0.0)
    if found.choice:
        assert max(found.memory_bytes) >= least - 1.0
        below = replace(problem, memory_limit_bytes=0.99 * least - 1e4)
        if least > 1e6:
            assert solve(below, gap=0.0).status == "infeasible"
