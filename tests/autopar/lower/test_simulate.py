"""Clocks of the simulator, on programs written by hand and lowered ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture_step
from autopar.cost.node import NodeCost, axis_seconds
from autopar.ir.graph import PARAMETER, SOURCE_OPS, Ref, TensorType
from autopar.ir.sharding import WHOLE, Mesh, Split
from autopar.lower.live import storages
from autopar.lower.program import (
    ALL_REDUCE,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    Instruction,
    Program,
    ProgramInput,
)
from autopar.lower.ranks import distinct_coordinates
from autopar.lower.simulate import Prices, prices, simulate
from autopar.lower.spmd import lower
from autopar.plan.records import NodePlan, ParameterPlan, StagePlan
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster
from cost_models.overlap import Slowdown, together_s
from tests.autopar.capture import models

MESH = Mesh(("a", "b"), (2, 2))
KIND = TensorType((4, 4), "float32")
ALONE = Slowdown(first=1.0, second=1.0, source="a device for each")
SHARED = Slowdown(first=1.3, second=1.1, source="one device for both")


def cost(
    kernel_s: float = 1.0, collective_s: float = 3.0, host_op_s: float = 0.0, slow: Slowdown = ALONE
) -> Prices:
    return Prices(
        kernel_s=lambda *_: kernel_s,
        collective_s=lambda kind, size, axis: collective_s,
        slowdown=slow,
        host_op_s=host_op_s,
    )


COPY = {"o": TO_HOST, "i": TO_DEVICE}


def program(text: str) -> Program:
    """``k`` a kernel, ``c0`` a collective over axis 0, ``w0`` the wait for the oldest of them.

    ``o`` and ``i`` copies to and from the host, with ``wo`` and ``wi``.
    """
    made: list[Instruction] = []
    open_: dict[str, list[str]] = {}
    for at, word in enumerate(text.split()):
        op, args = "aten.relu.default", (Ref("x"),)
        if word[0] == "c":
            op, args = ALL_REDUCE, (Ref("x"), int(word[1]), "sum")  # type: ignore[assignment]
            open_.setdefault(word[1], []).append(f"i{at}")
        elif word in COPY:
            op = COPY[word]
            open_.setdefault(word, []).append(f"i{at}")
        elif word[0] == "w":
            op, args = WAIT, (Ref(open_[word[1]].pop(0)),)
        made.append(
            Instruction(
                name=f"i{at}", op=op, args=args, outputs=(KIND,), origin="n", view=op == WAIT
            )
        )
    entry = ProgramInput(
        name="x",
        kind="input",
        target="x",
        global_type=KIND,
        sharding=(WHOLE, WHOLE),
        local_type=KIND,
    )
    return Program(
        mesh=MESH, coordinates=(0, 0), inputs=(entry,), instructions=tuple(made), loss=None
    )


@pytest.mark.parametrize(
    "text", ["o i wo wi", "o i k wo wi", "o o i wo wi wo", "i o o o wi k wo wo wo"]
)
def test_copies_of_both_directions_slow_each_other(text: str) -> None:
    """Each takes a second alone."""
    both = Slowdown(first=1.5, second=1.25, source="in and out")
    priced = replace(cost(0.1), host_link_bytes_per_s=64.0, both_copies=both)
    ins, outs = (text.split().count(word) for word in "io")
    found = simulate(program(text), priced)
    assert found.seconds == pytest.approx(together_s(ins, outs, both))
    assert found.copy_s == ins + outs
    assert found.seconds == pytest.approx(
        found.compute_s + found.slowed_s + found.exposed_s + found.host_s
    )
    assert found.copy_exposed_s == found.exposed_s


@pytest.mark.parametrize(
    ("text", "seconds", "exposed"),
    [
        ("k k k", 3, 0),
        ("c0 w0 k", 4, 3),  # waited for at once
        ("c0 k k k w0 k", 4, 0),  # hidden
        ("c0 k w0 k", 4, 2),  # partly hidden
        ("c0 c0 k w0 w0 k", 7, 5),  # one axis carries one at a time
        ("c0 c1 k w0 w1 k", 4, 2),  # two axes at once
        ("k c0", 4, 3),  # nobody waits, but the step does
        ("k c0 k k k k c0 w0 k w0", 8, 2),
    ],
)
def test_compute_and_axes_have_clocks_of_their_own(
    text: str, seconds: float, exposed: float
) -> None:
    found = simulate(program(text), cost())
    assert found.seconds == pytest.approx(seconds)
    assert found.exposed_s == pytest.approx(exposed)


@pytest.mark.parametrize("kernels", range(6))
def test_sharing_the_device_slows_both_as_the_closed_form_says(kernels: int) -> None:
    text = "c0 " + "k " * kernels + "w0"
    found = simulate(program(text), cost(slow=SHARED))
    assert found.seconds == pytest.approx(together_s(kernels, 3.0, SHARED))


def test_a_step_takes_at_least_the_host_for_every_launch() -> None:
    found = simulate(program("k " * 10), cost(kernel_s=0.1, host_op_s=1.0))
    assert found.seconds == pytest.approx(10.1)
    assert found.host_s == pytest.approx(1.0 + 9 * 0.9)


def test_the_host_works_ahead_of_long_kernels() -> None:
    quick_then_slow = program("k " * 10)
    found = simulate(quick_then_slow, cost(kernel_s=2.0, host_op_s=1.0))
    assert found.seconds == pytest.approx(1.0 + 20.0)


@pytest.mark.parametrize("slow", [ALONE, SHARED])
@pytest.mark.parametrize("host_op_s", [0.0, 0.7, 2.0])
def test_every_second_has_a_name(slow: Slowdown, host_op_s: float) -> None:
    text = "k c0 k c1 k k w1 k c0 w0 k k c1 k w0 k"
    found = simulate(program(text), cost(slow=slow, host_op_s=host_op_s))
    named = found.compute_s + found.exposed_s + found.slowed_s + found.host_s
    assert found.seconds == pytest.approx(named)
    assert found.seconds >= host_op_s * found.num_launched


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyse(capture_step(models.llama(), models.tokens(), None, grad=True).graph)


def whole_stage(analysis: Analysis, mesh: Mesh) -> StagePlan:
    everything = (WHOLE,) * len(mesh.sizes)
    graph = analysis.graph
    nodes = [n for n in graph.nodes if n.op not in SOURCE_OPS]
    return StagePlan(
        mesh=mesh,
        inputs={},
        parameters=tuple(
            ParameterPlan(name=n.target, type=n.outputs[0], stored=everything)
            for n in graph.sources(PARAMETER)
        ),
        nodes=tuple(
            NodePlan(
                name=node.name,
                operands=(everything,) * len(node.operands),
                outputs=(everything,) * len(node.outputs),
            )
            for node in nodes
            if Ref(node.name) not in analysis.aliases
        ),
        kept={
            str(Ref(node.name, index)): (everything,)
            for node in nodes
            for index in range(len(node.outputs))
        },
    )


def test_search_and_simulator_price_the_same_kernels(analysis: Analysis) -> None:
    """What is left between them are the reshapes that turn out to copy."""
    cluster = Cluster.preset("h100")
    mesh = Mesh(("a",), (1,))
    node_cost = NodeCost(cluster.device(0), mesh, axis_seconds(cluster, mesh))
    stage = whole_stage(analysis, mesh)
    lowered = lower(analysis.graph, analysis.rules, stage, (0,), node_cost.collective_s)
    priced = prices(cluster.device(0), node_cost.collective_s)
    found = simulate(lowered, priced)
    copies = storages(lowered).copies
    types = {Ref(i.name): i.local_type for i in lowered.inputs}
    for instruction in lowered.instructions:
        for index, kind in enumerate(instruction.outputs):
            types[Ref(instruction.name, index)] = kind
    copied_s = sum(
        priced.kernel_s(i.op, tuple(types[ref] for ref in i.operands), i.outputs, False, 0)
        for i in lowered.instructions
        if i.name in copies
    )
    plans = {plan.name: plan for plan in stage.nodes}
    searched_s = sum(
        node_cost.seconds(
            node,
            analysis.rules[node.name],
            analysis.operand_types(node),
            plans[node.name].operands,
            plans[node.name].outputs,
        )
        for node in analysis.graph.nodes
        if node.name in plans
    )
    assert found.compute_s == pytest.approx(searched_s + copied_s, rel=1e-9)
    assert found.slowed_s == found.exposed_s == 0.0


def linear_stage(features: int) -> tuple[Analysis, StagePlan]:
    """A linear layer of so many output features over two ranks, its rows split."""
    graph = capture_step(
        nn.Linear(8, features), torch.randn(6, 8), lambda m, b: m(b).sum(), grad=True
    ).graph
    analysed = analyse(graph)
    stage = whole_stage(analysed, Mesh(("a",), (2,)))
    rows = (Split(0, 1, -(-features // 2)),)
    parameters = tuple(replace(p, stored=rows) for p in stage.parameters)
    return analysed, replace(stage, parameters=parameters)


def test_ranks_of_even_splits_are_simulated_once() -> None:
    analysed, stage = linear_stage(8)
    assert distinct_coordinates(analysed.graph, stage) == ((0,),)


def test_ranks_with_other_sizes_are_told_apart() -> None:
    analysed, stage = linear_stage(7)
    assert distinct_coordinates(analysed.graph, stage) == ((0,), (1,))
