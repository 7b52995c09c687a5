"""Every module of `torch.nn` on two ranks equals one process, or is refused in one sentence."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from autopar import hint
from autopar.capture import capture_step
from autopar.cost.node import axis_seconds
from autopar.errors import AutoparError
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.oracles.layers import LOSSES, MODULES, NO_LAYERS, REFUSED, WAYS, built
from tests.oracles.pipeline import assert_exact, programs_of

CASES = {**MODULES, **WAYS}
FEW = {*LOSSES, *WAYS, "EmbeddingBag", "MaxUnpool2d", "FractionalMaxPool2d", "AdaptiveMaxPool3d"}
"""Those of every run; they cover each rule and function that no other test does."""
LAYOUTS = {"dp2": hint.degrees(dp=2, tp=1), "tp2": hint.degrees(dp=1, tp=2)}


def test_every_module_is_named() -> None:
    classes = (name for name, kind in vars(nn).items() if isinstance(kind, type))
    layers = {name for name in classes if issubclass(getattr(nn, name), nn.Module)}
    named = {*MODULES, *REFUSED, *NO_LAYERS.split()}
    assert layers <= named
    assert not [name for name in MODULES if name in REFUSED]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*case, marks=() if case[0] in FEW and case[1] == "dp2" else pytest.mark.large)
        for case in itertools.product(CASES, LAYOUTS)
    ],
)
def test_layers_on_two_ranks_equal_one_process(name: str, layout: str) -> None:
    model, batch, loss = built(CASES[name])
    captured = capture_step(model, batch, loss, grad=True)
    analysis, cluster = analyse(captured.graph), Cluster.local(2)
    asked = Request(model="m", fingerprint="f", cluster=cluster, hints=(LAYOUTS[layout],))
    plan = make_plan(analysis, asked)
    programs = programs_of(analysis, plan.stage, axis_seconds(cluster, plan.mesh))
    assert_exact(model, batch, loss, analysis, programs, captured, tolerance=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_a_fixed_graph_are_refused(name: str) -> None:
    case, why = REFUSED[name]
    model, batch, loss = built(case)
    with pytest.raises(AutoparError, match=why) as caught:
        analyse(capture_step(model, batch, loss, grad=True).graph)
    assert "in module 'layer" in str(caught.value)
