"""Where two adjacent stages are best cut: between what balances seconds and what balances memory.

Of a chain let t1(c), t2(c) be the seconds of the stages left and right of a cut c, and e1(c), e2(c)
what each takes longer to fit its memory. An op more never makes either less, so t1, e1 rise with c
and t2, e2 fall. The *balanced* cut of two such measures is the lesser of the two between which the
left one overtakes the right one.

*The best cut for max(t1 + e1, t2 + e2) lies between the balanced cuts of t and of e.* Left of both,
t1 < t2 and e1 < e2; moved to the nearer one, the right stage gets no longer, and the left one takes
no more than t2 + e2 took: by balance neither of its parts is more than the right one's was.

DawnPiper's theorem is the case in which e is one function of the bytes a stage holds, the same for
both and never falling: then the balanced cut of the bytes will do. Without that it will not: what
runs again frees more bytes where more microbatches are held, so prices differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.chains import Op, TwoStages, by_excess, held_bytes, least_again_s

Curve = Callable[[int], float]

COUNTS = st.integers(0, 9)
OPS = st.lists(
    st.builds(
        Op,
        seconds=COUNTS.map(float),
        again_s=st.integers(0, 4).map(float),
        resident_bytes=st.integers(0, 3),
        saved_bytes=COUNTS,
    ),
    min_size=2,
    max_size=7,
)
IN_FLIGHT = st.sampled_from([(2, 1), (4, 3), (1, 1), (8, 1)])


def seconds(ops: list[Op], in_flight: int) -> float:
    return sum(op.seconds for op in ops)


def assert_between(chain: TwoStages, ends: tuple[int, int]) -> None:
    """No cut is better than the best one between two others."""
    found = [chain.longer_s(at) for at in range(len(chain.ops) + 1)]
    low, high = sorted(ends)
    assert min(found[low : high + 1]) == min(found)


@given(OPS, IN_FLIGHT, st.integers(0, 60))
@settings(deadline=None)
def test_the_best_cut_is_between_those_that_balance_seconds_and_what_fitting_costs(
    ops: list[Op], in_flight: tuple[int, int], limit: int
) -> None:
    chain = TwoStages(ops, in_flight, least_again_s(limit))
    assert_between(chain, (chain.balanced(seconds), chain.balanced(chain.price)))


@given(OPS, IN_FLIGHT, st.integers(0, 60), st.sampled_from([math.sqrt, float, lambda x: x**2]))
@settings(deadline=None)
def test_with_one_price_of_bytes_it_is_between_those_that_balance_seconds_and_memory(
    ops: list[Op], in_flight: tuple[int, int], limit: int, curve: Curve
) -> None:
    chain = TwoStages(ops, in_flight, by_excess(curve, limit))
    assert_between(chain, (chain.balanced(seconds), chain.balanced(held_bytes)))


def test_with_a_price_of_its_own_for_each_stage_it_need_not_be_between_seconds_and_memory() -> None:
    """Whole ops run again: both balances are at 1, and the cut at 2 is a fifth shorter."""
    sizes = ((12, 4, 1), (3, 1, 5), (12, 4, 5))
    ops = [
        Op(seconds=float(s), again_s=float(a), resident_bytes=0, saved_bytes=b) for s, a, b in sizes
    ]
    chain = TwoStages(ops, (2, 1), least_again_s(2))
    assert chain.balanced(seconds) == chain.balanced(held_bytes) == 1
    assert [chain.longer_s(at) for at in range(4)] == [32, 20, 16, 32]
    assert chain.balanced(chain.price) == 2
