"""Every plan that does not fit gets its own message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar import hint
from autopar.capture import capture_step
from autopar.errors import PlanError
from autopar.ir.graph import Graph, TensorType
from autopar.ir.sharding import SUM, WHOLE, Mesh, Sharding, Split
from autopar.ir.text import parse_graph
from autopar.plan.check import check
from autopar.plan.records import NodePlan, ParameterPlan, Plan, StagePlan, Transfer
from autopar.planner.driver import make_plan
from autopar.planner.request import Request
from autopar.search.analysis import analyse
from cost_models.cluster import Cluster
from tests.autopar.plan.samples import llama
from tests.oracles.models import gpt2

STEP = """\
fwd %w = parameter w : float32[64, 16]
fwd %x = input x : float32[8, 16]
fwd %t = aten.t.default(%w) : float32[16, 64]
fwd %mm = aten.mm.default(%x, %t) : float32[8, 64] @ up model.py:12
fwd %sum = aten.sum.default(%mm) : float32[]
bwd %ones = aten.expand.default(%sum, [64, 8]) : float32[64, 8]
bwd %grad = aten.mm.default(%ones, %x) : float32[64, 16]
loss %sum
gradient w %grad
batch_dim x 0
"""
GRAPH = parse_graph(STEP)
ROWS: Sharding = (Split(0, 1, 4), WHOLE)
COLUMNS: Sharding = (Split(1, 1, 4), WHOLE)
ALL: Sharding = (WHOLE, WHOLE)
STORED: Sharding = (Split(0, 1, 32), Split(0, 2, 16))
STAGE = StagePlan(
    mesh=Mesh(("dp", "tp"), (2, 2)),
    inputs={"x": ROWS},
    parameters=(
        ParameterPlan(name="w", type=TensorType((64, 16), "float32"), stored=STORED, used=(ALL,)),
    ),
    nodes=(
        NodePlan(name="mm", operands=(ROWS, ALL), outputs=(ROWS,)),
        NodePlan(name="sum", operands=(ROWS,), outputs=((SUM, WHOLE),)),
        NodePlan(name="ones", operands=((SUM, WHOLE),), outputs=(COLUMNS,)),
        NodePlan(name="grad", operands=(COLUMNS, ROWS), outputs=((SUM, WHOLE),)),
    ),
    kept={"x": (ROWS,)},
)
PLAN = replace(
    llama(layers=1),
    model="Up",
    cluster="local x 4",
    cluster_ranks=4,
    fingerprint="f",
    batch={"x": TensorType((8, 16), "float32")},
    stages=(STAGE,),
)


def run(plan: Plan, graph: Graph = GRAPH, ranks: int = 4, fingerprint: str = "f") -> None:
    check(plan, graph, ranks, fingerprint=fingerprint, views={"t"})


def message(plan: Plan, graph: Graph = GRAPH, ranks: int = 4, fingerprint: str = "f") -> str:
    with pytest.raises(PlanError) as raised:
        run(plan, graph, ranks, fingerprint)
    text = str(raised.value)
    assert text.startswith("cannot use this plan: ")
    assert "\n" not in text
    return text


def test_a_legal_plan_passes() -> None:
    run(PLAN)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            "[8, 16]",
            "[6, 16]",
            "another batch: input 'x' is float32[8, 16] in it and float32[6, 16]",
        ),
        ("input x", "input y", "another batch: input 'x' of the plan is not here"),
        (
            "%w = parameter w",
            "%w = parameter v",
            "another model, a Up: parameter 'w' of the plan is",
        ),
        ("[64, 16]", "[32, 16]", "parameter 'w' is float32[64, 16] in it and float32[32, 16] here"),
        (
            "fwd %x =",
            "fwd %v = parameter v : float32[]\nfwd %x =",
            "another model, a Up: parameter 'v' is not in it",
        ),
    ],
)
def test_another_model_or_batch_is_told_apart(old: str, new: str, what: str) -> None:
    assert what in message(PLAN, parse_graph(STEP.replace(old, new)))


def test_the_same_shapes_with_another_step_are_refused() -> None:
    assert "the captured step is another" in message(PLAN, fingerprint="g")


def test_other_ranks_are_refused() -> None:
    found = message(PLAN, ranks=2)
    assert "it is for 4 ranks of 'local x 4', here are 2; start 4 processes" in found


def test_a_parameter_frozen_since_is_refused() -> None:
    graph = parse_graph(
        STEP.replace("%x = input", "%v = parameter v : float32[]\nfwd %x = input").replace(
            "gradient w", "gradient v"
        )
    )
    other = ParameterPlan(name="v", type=TensorType((), "float32"), stored=ALL)
    plan = replace(PLAN, stages=(replace(STAGE, parameters=(*STAGE.parameters, other)),))
    assert "parameter 'w' is trainable in it and frozen here" in message(plan, graph)


def _stored(sharding: Sharding) -> Callable[[StagePlan], StagePlan]:
    return lambda s: replace(s, parameters=(replace(s.parameters[0], stored=sharding),))


def _node(entry: NodePlan) -> Callable[[StagePlan], StagePlan]:
    return lambda s: replace(s, nodes=(entry, *s.nodes[1:]))


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (_stored((WHOLE,)), "parameter 'w' is stored with 1 entries, the mesh has 2 axes (dp, tp)"),
        (
            _stored((Split(2, 1, 8), WHOLE)),
            "'w' is stored split along dim 2, its type is float32[64",
        ),
        (
            _stored((Split(0, 1, 16), WHOLE)),
            "'w' is stored S0(dp) in blocks of 16, which does not fit float32[64, 16] on mesh axis "
            "'dp' of size 2",
        ),
        (_stored((SUM, WHOLE)), "'w' is stored as terms of a sum, no rank would hold it"),
        (_stored((Split(0, 2, 16), WHOLE)), "'w' is stored S0/2(dp), which is not contiguous"),
        (
            _stored((Split(0, 2, 16), Split(0, 1, 32))),
            "'w' is stored S0(tp,dp), which is not contiguous pieces in the order of the mesh axes",
        ),
        (lambda s: replace(s, inputs={"y": ALL}), "it splits input 'y', which is not here"),
        (lambda s: replace(s, inputs={"x": (WHOLE,)}), "input 'x' is taken with 1 entries"),
        (
            _node(NodePlan(name="mul", operands=(), outputs=())),
            "it places node 'mul', which is not in the captured step",
        ),
        (_node(STAGE.nodes[1]), "it places node 'sum' twice"),
        (
            lambda s: replace(s, recomputed=("mul",)),
            "it recomputes node 'mul', which does not run there",
        ),
        (
            lambda s: replace(s, recomputed=("grad",)),
            "it recomputes node 'grad', which runs in the backward",
        ),
        (_node(NodePlan(name="t", operands=(ALL,), outputs=(ALL,))), "'t', a view, which follows"),
        (
            _node(NodePlan(name="mm", operands=(ROWS,), outputs=(ROWS,))),
            "node 'mm' has 2 operands, it gives 1",
        ),
        (
            _node(NodePlan(name="mm", operands=(ROWS, ALL), outputs=(ROWS, ROWS))),
            "node 'mm' has 1 outputs, it gives 2",
        ),
        (
            _node(NodePlan(name="mm", operands=(ROWS, ALL), outputs=((Split(0, 1, 3), WHOLE),))),
            "output 0 of 'mm' is S0(dp) in blocks of 3, which does not fit float32[8, 64]",
        ),
        (lambda s: replace(s, kept={"y": (ALL,)}), "it keeps value 'y', which is not in the capt"),
        (lambda s: replace(s, kept={"mm:1": (ALL,)}), "it keeps value 'mm:1', which is not"),
        (lambda s: replace(s, kept={"x": ((WHOLE,),)}), "value 'x' is kept with 1 entries"),
        (
            lambda s: replace(s, nodes=s.nodes[1:]),
            "it does not place node 'mm', 'aten.mm.default' of module 'up' (model.py:12)",
        ),
        (
            lambda s: replace(s, copy_room_bytes=4096),
            "it leaves 4,096 bytes for copies on their way, of which there are none",
        ),
        (lambda s: replace(s, first_rank=2), "stage 0 has ranks 2 to 5 of 4"),
        (
            lambda s: replace(s, parameters=s.parameters * 2),
            "parameter 'w' is owned twice",
        ),
    ],
)
def test_each_edit_that_breaks_a_plan_is_named(
    edit: Callable[[StagePlan], StagePlan], what: str
) -> None:
    found = message(replace(PLAN, stages=(edit(STAGE),)))
    assert what in found
    assert found.endswith("; undo the edit or plan again")


def test_a_node_that_breaks_its_rule_is_named() -> None:
    with pytest.raises(PlanError) as raised:
        check(PLAN, GRAPH, 4, views={"t"}, follows=lambda node, *_: node.name != "mm")
    what = "'aten.mm.default' of module 'up' (model.py:12) cannot make S0(dp) from S0(dp), whole"
    assert what in str(raised.value)


ONE: Sharding = (WHOLE,)
LAST = StagePlan(
    mesh=Mesh(("tp",), (2,)),
    first_rank=4,
    inputs={},
    parameters=(),
    nodes=(NodePlan(name="sum", operands=(ONE,), outputs=(ONE,)),),
    kept={},
)
HEAD = replace(STAGE, nodes=tuple(node for node in STAGE.nodes if node.name != "sum"))
CROSSING = Transfer(value="mm", source=0, target=1, sharding=ROWS, arrives=ONE)
BACK = Transfer(value="sum", source=1, target=0, sharding=ONE, arrives=ALL)
UNLIKE = replace(
    PLAN, stages=(HEAD, LAST), transfers=(CROSSING, BACK), cluster_ranks=6, schedule="gpipe"
)


def test_stages_may_have_unlike_meshes() -> None:
    run(UNLIKE, ranks=6)
    assert UNLIKE.stage_of_chunks == (0, 1)
    assert UNLIKE.ranks_of_stages == (range(4), range(4, 6))
    assert [UNLIKE.stage_of_rank(rank) for rank in range(6)] == [0, 0, 0, 0, 1, 1]
    assert UNLIKE.meshes == (STAGE.mesh, LAST.mesh)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"value": "relu"}, "it sends value 'relu', which is not in the captured step"),
        ({"target": 2}, "it sends value 'mm' over chunk 2 of 2"),
        ({"arrives": None}, "value 'mm' reaches chunk 1 with 2 entries, the mesh has 1 axes (tp)"),
        (
            {"sharding": (SUM, WHOLE)},
            "value 'mm' goes from chunk 0 to 1 between unlike meshes as P(dp), terms of a sum that "
            "must be added up before they leave",
        ),
        ({"arrives": (Split(1, 1, 3),)}, "value 'mm' reaches chunk 1 S1(tp) in blocks of 3"),
    ],
)
def test_what_crosses_must_lie_on_both_meshes(changes: dict[str, object], what: str) -> None:
    plan = replace(UNLIKE, transfers=(replace(CROSSING, **changes),))  # type: ignore[arg-type]
    assert what in message(plan, ranks=6)


def test_what_a_chunk_reads_must_cross_to_it() -> None:
    said = message(replace(UNLIKE, transfers=(BACK,)), ranks=6)
    assert "'aten.sum.default' of the model reads value 'mm' on chunk 1 (stage 1)" in said
    assert "no transfer brings it there from chunk 0 (stage 0), which makes it; add a" in said


def test_what_crosses_is_sent_by_a_chunk_that_makes_it() -> None:
    back = replace(CROSSING, source=1, target=0, sharding=ONE, arrives=ROWS)
    plan = replace(UNLIKE, transfers=(CROSSING, back))
    assert "it sends value 'mm' from chunk 1, which does not make it" in message(plan, ranks=6)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_no_transfer_of_a_pipeline_can_be_left_out(schedule: str) -> None:
    model, batch, loss = gpt2(layers=4, batch=8)
    analysis = analyse(capture_step(model, batch, loss, grad=True).graph)
    hints = (hint.degrees(pp=2), hint.schedule(schedule), hint.microbatches(2))
    plan = make_plan(
        analysis,
        Request(model="m", fingerprint="f", cluster=Cluster.local(4), hints=hints),
    )
    views = {ref.node for ref in analysis.aliases}
    check(plan, analysis.graph, 4, views=views)
    for left_out in plan.transfers:
        rest = tuple(transfer for transfer in plan.transfers if transfer != left_out)
        with pytest.raises(PlanError, match=f"reads value '{left_out.value}' on chunk"):
            check(replace(plan, transfers=rest), analysis.graph, 4, views=views)


def test_ranks_on_no_stage_are_idle() -> None:
    apart = replace(UNLIKE, stages=(HEAD, replace(LAST, first_rank=5)), cluster_ranks=8)
    run(apart, ranks=8)
    assert apart.idle_ranks == (4, 7)
    assert [apart.stage_of_rank(rank) for rank in range(8)] == [0, 0, 0, 0, None, 1, 1, None]
    assert "8 ranks of which 2 idle" in str(apart)
    assert "ranks 4, 7" in str(apart)


def test_values_arrive_in_the_microbatch_in_which_they_leave() -> None:
    def in_time(stage: StagePlan) -> StagePlan:
        mesh = stage.mesh.with_time(2)
        bare = replace(stage, inputs={}, nodes=(), kept={}, mesh=mesh)
        owned = tuple(
            replace(p, stored=(*p.stored, WHOLE), used=tuple((*s, WHOLE) for s in p.used))
            for p in stage.parameters
        )
        return replace(bare, parameters=owned)

    crossing = replace(CROSSING, sharding=(*ROWS, Split(0, 2, 2)), arrives=(WHOLE, WHOLE))
    stages = (
        in_time(HEAD),
        replace(
            in_time(LAST),
            nodes=tuple(
                NodePlan(
                    name=node.name,
                    operands=tuple((WHOLE, WHOLE) for _ in node.operands),
                    outputs=tuple((WHOLE, WHOLE) for _ in node.outputs),
                )
                for node in STAGE.nodes
            ),
        ),
    )
    plan = replace(UNLIKE, stages=stages, transfers=(crossing,), microbatches=2)
    assert "but arrives as whole: other microbatches" in message(plan, ranks=6)


def test_stages_share_all_ranks_or_none() -> None:
    beside = replace(UNLIKE, stages=(HEAD, replace(LAST, first_rank=3)))
    assert "stage 0 has ranks 0 to 3, stage 1 begins at 3" in message(beside, ranks=6)
    upon = replace(UNLIKE, stages=(HEAD, replace(LAST, first_rank=0)))
    said = "chunks 0 and 1 both begin at rank 0, on different meshes"
    assert said in message(upon, ranks=6)
