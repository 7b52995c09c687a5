"""What no choice can meet is found by the value at which it shows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from autopar.search.consistent import contradiction
from autopar.search.problem import Arc, Choices, Need, Problem, Value
from tests.autopar.search.test_intra import problems
from tests.oracles.brute import brute_force


@given(problems(), st.sets(st.integers(0, 5)))
def test_only_problems_without_a_solution_have_a_contradiction(
    whole: Problem, there: set[int]
) -> None:
    sparse = [
        replace(value, arcs=tuple(arc for at, arc in enumerate(value.arcs) if at in there))
        for value in whole.values
    ]
    problem = replace(whole, values=tuple(sparse))
    found = contradiction(problem)
    event(f"{found is not None}")
    if found is not None:
        assert brute_force(replace(problem, memory_limit_bytes=None)) is None


def test_the_value_is_named_at_which_choices_run_out() -> None:
    def node(name: str, options: int) -> Choices:
        costs = (1.0,) * options
        return Choices(
            name=name, count=1, seconds=costs, resident_bytes=costs, gradient_bytes=costs
        )

    def value(name: str, producer: int, *needs: Need, fixed: tuple[int, ...] = ()) -> Value:
        return Value(
            name=name,
            producer=producer,
            gives=(0, 1)[: len(nodes[producer].seconds)],
            num_layouts=3,
            arcs=(Arc(0, 2, 1.0),),
            forward=needs,
            backward=(),
            kept_bytes=(0.0,) * 3,
            fixed_needs=fixed,
        )

    nodes = (node("a", 2), node("b", 2), node("c", 1))
    first = value("first", 0, Need(1, (0, 1)))
    second = value("second", 1, Need(2, (1,)))
    possible = Problem(nodes=nodes, values=(first, second))
    assert contradiction(possible) is None
    # Only what is given as layout 0 becomes 2, and then nothing becomes 1.
    whole = replace(first, fixed_needs=(2,))
    assert contradiction(replace(possible, values=(whole, second))) == "second"
