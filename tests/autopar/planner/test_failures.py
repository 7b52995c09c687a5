"""What is said where nothing fits: a proof only where there is one."""

from __future__ import annotations

import math

import pytest

from autopar.capture import capture_step
from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.ir.sharding import Mesh
from autopar.planner.failures import nothing_fits
from autopar.planner.hints import settle
from autopar.planner.request import Failure
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.oracles.models import mlp

MESH, CLUSTER = Mesh(("dp",), (2,)), Cluster.local(2)
PROVEN, NOT = "which is proven; the least", "which is no proof; the least"
BIG = 10**15


@pytest.mark.parametrize(
    ("failures", "kind", "words"),
    [
        ([Failure(MESH, True, BIG)], InfeasibleError, f"1 mesh tried, {PROVEN}"),
        ([Failure(MESH, True, BIG), Failure(MESH, False, BIG)], InfeasibleError, NOT),
        ([Failure(MESH, False, BIG)], InfeasibleError, "found needs 1.00 PB"),
        ([Failure(MESH, False, 1e3)], InfeasibleError, "found needs more than 1"),
        ([Failure(MESH, False, math.inf)], SearchTimeoutError, "within the time limit"),
    ],
)
def test_a_proof_is_claimed_where_there_is_one(
    failures: list[Failure], kind: type[Exception], words: str
) -> None:
    analysis = analyse(capture_step(*mlp(), grad=True).graph)
    settled = settle(analysis, CLUSTER, (), None)
    error = nothing_fits(analysis, settled, failures, CLUSTER)
    assert type(error) is kind
    assert words in str(error)
