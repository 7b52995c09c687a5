"""Legal strategies of a node, cuts of a graph, pieces that come from the batch."""

from __future__ import annotations

from autopar.ir.graph import Graph, Node, Ref, TensorType
from autopar.ir.sharding import SUM, WHOLE, Mesh, Split
from autopar.rules.notation import Rule
from autopar.rules.strategies import (
    MAX_CUTS,
    Strategy,
    cut_sets,
    needs_expansion,
    split_factors,
    strategies,
    trace_factor,
)
from autopar.rules.table import rule_for

BATCH, SEQ, HIDDEN, HEADS = 4, 6, 8, 2


def _float(*shape: int) -> TensorType:
    return TensorType(shape, "float32")


def _node(name: str, op: str, args: tuple[object, ...], *outputs: TensorType) -> Node:
    return Node(name=name, op=op, args=args, outputs=outputs)  # type: ignore[arg-type]


def _mm(m: int, k: int, n: int) -> tuple[Node, tuple[TensorType, ...], Rule]:
    node = _node("mm", "aten.mm.default", (Ref("x"), Ref("w")), _float(m, n))
    types = (_float(m, k), _float(k, n))
    return node, types, rule_for(node, types)


def test_strategies_of_a_product_on_one_axis() -> None:
    node, types, rule = _mm(4, 6, 8)
    found = strategies(rule, types, node.outputs, Mesh(("a",), (2,)))
    whole = ((WHOLE,), (WHOLE,))
    assert found == (
        Strategy(whole, ((WHOLE,),)),
        Strategy(((SUM,), (WHOLE,)), ((SUM,),)),
        Strategy(((WHOLE,), (SUM,)), ((SUM,),)),
        Strategy(((Split(0, 1, 2),), (WHOLE,)), ((Split(0, 1, 2),),)),
        Strategy(((Split(1, 1, 3),), (Split(0, 1, 3),)), ((SUM,),)),
        Strategy(((WHOLE,), (Split(1, 1, 4),)), ((Split(1, 1, 4),),)),
    )


def test_an_axis_of_one_rank_splits_nothing() -> None:
    node, types, rule = _mm(4, 6, 8)
    found = strategies(rule, types, node.outputs, Mesh(("a",), (1,)))
    assert found == (Strategy(((WHOLE,), (WHOLE,)), ((WHOLE,),)),)


def test_two_axes_are_the_product_of_one() -> None:
    node, types, rule = _mm(4, 6, 8)
    found = strategies(rule, types, node.outputs, Mesh(("a", "b"), (2, 2)))
    nested = (Split(0, 1, 2), Split(0, 2, 1))
    assert Strategy((nested, (WHOLE, WHOLE)), (nested,)) in found
    assert len(found) == len(set(found)) == 35, "6 * 6 without k over 4 ranks"


def test_unequal_chunks_leave_no_rank_empty() -> None:
    node, types, rule = _mm(5, 3, 2)
    found = strategies(rule, types, node.outputs, Mesh(("a",), (4,)))
    assert not any(isinstance(s.outputs[0][0], Split) for s in found)
    found = strategies(rule, types, node.outputs, Mesh(("a",), (3,)))
    assert [s.outputs[0][0] for s in found if isinstance(s.outputs[0][0], Split)] == [
        Split(0, 1, 2)
    ]


def test_even_factors_are_split_evenly_only() -> None:
    rule = Rule(operands=((("m",),),), outputs=((("m",),),), sizes={"m": 5}, even=frozenset({"m"}))
    found = strategies(rule, (_float(5),), (_float(5),), Mesh(("a",), (2,)))
    assert len(found) == 1


def test_cuts_split_pieces() -> None:
    node, types, rule = _mm(24, 6, 8)
    cuts = {"m": frozenset({(1, 4), (4, 6), (1, 24)})}
    found = strategies(rule, types, node.outputs, Mesh(("a", "b"), (2, 3)), cuts)
    rows = {s.operands[0] for s in found if s.operands[1] == (WHOLE, WHOLE)}
    assert (Split(0, 4, 3), WHOLE) in rows
    assert (Split(0, 1, 12), Split(0, 4, 2)) in rows, "batch outside, sequence inside"
    assert (Split(0, 1, 12), Split(0, 2, 4)) in rows, "both on all rows"


def test_contiguous_factors_have_no_gaps() -> None:
    node = _node("e", "aten.embedding.default", (Ref("w"), Ref("i")), _float(3, 4))
    types = (_float(12, 4), TensorType((3,), "int64"))
    rule = rule_for(node, types)
    cuts = {"v": frozenset({(1, 3), (3, 4)})}
    found = strategies(rule, types, node.outputs, Mesh(("a",), (2,)), cuts)
    assert Split(0, 3, 2) not in {s.operands[0][0] for s in found}
    split = next(s for s in found if s.operands[0] == (Split(0, 1, 6),))
    assert split.outputs == ((SUM,),)
    assert split_factors(rule, split, Mesh(("a",), (2,))) == {"v"}
    assert needs_expansion(rule, split, Mesh(("a",), (2,)))


def test_microbatches_join_nothing_inside_a_node() -> None:
    kind = _float(4, 8)
    node = _node("s", "aten._softmax.default", (Ref("x"), 0, False), kind)
    rule = rule_for(node, (kind,))
    found = strategies(rule, (kind,), node.outputs, Mesh(("a",), (2,)).with_time(2))
    assert (Split(0, 1, 2), WHOLE) in {s.operands[0] for s in found}
    assert (WHOLE, Split(0, 1, 2)) not in {s.operands[0] for s in found}
    assert (WHOLE, Split(1, 1, 4)) in {s.operands[0] for s in found}


def test_allow_restricts_axes_to_factors() -> None:
    node, types, rule = _mm(4, 6, 8)
    mesh = Mesh(("dp", "tp"), (2, 2))
    found = strategies(
        rule,
        types,
        node.outputs,
        mesh,
        allow=lambda axis, factor, outer, block: (axis == 0) == (factor == "m"),
    )
    for strategy in found:
        assert not isinstance(strategy.operands[1][0], Split)
        assert strategy.outputs[0][1] != Split(0, 1, 2)


def _attention_like(layers: int) -> tuple[Graph, dict[str, Rule]]:
    """Hidden to heads and back, with merged rows in every product."""
    rows, width = BATCH * SEQ, HIDDEN // HEADS
    nodes = [
        Node(name="x", op="input", outputs=(_float(BATCH, SEQ, HIDDEN),), target="x"),
        Node(name="w", op="parameter", outputs=(_float(HIDDEN, HIDDEN),), target="w"),
        Node(name="o", op="parameter", outputs=(_float(HIDDEN, HIDDEN),), target="o"),
    ]
    value = "x"
    for i in range(layers):
        heads, flat = (BATCH, SEQ, HEADS, width), (rows, HIDDEN)
        nodes += [
            _node(f"a{i}", "aten.view.default", (Ref(value), flat), _float(*flat)),
            _node(f"b{i}", "aten.mm.default", (Ref(f"a{i}"), Ref("w")), _float(*flat)),
            _node(f"c{i}", "aten.view.default", (Ref(f"b{i}"), heads), _float(*heads)),
            _node(f"d{i}", "aten.exp.default", (Ref(f"c{i}"),), _float(*heads)),
            _node(f"e{i}", "aten.view.default", (Ref(f"d{i}"), flat), _float(*flat)),
            _node(f"f{i}", "aten.mm.default", (Ref(f"e{i}"), Ref("o")), _float(*flat)),
        ]
        value = f"f{i}"
    graph = Graph(nodes=tuple(nodes), loss=None)
    rules = {
        node.name: rule_for(node, tuple(graph.type_of(ref) for ref in node.operands))
        for node in graph.nodes
        if node.op.startswith("aten")
    }
    return graph, rules


def test_products_learn_batch_sequence_and_heads() -> None:
    graph, rules = _attention_like(1)
    cuts = cut_sets(graph, rules)
    rows = frozenset({(1, BATCH * SEQ), (1, BATCH), (BATCH, SEQ)})
    heads = frozenset({(1, HIDDEN), (1, HEADS), (HEADS, HIDDEN // HEADS)})
    assert cuts["b0"] == {"m": rows, "k": frozenset({(1, HIDDEN)}), "n": heads}
    assert cuts["f0"]["k"] == heads
    assert cuts["f0"]["n"] == frozenset({(1, HIDDEN)}), "nothing behind it has heads"


def test_cuts_are_bounded() -> None:
    kind = _float(2**12)
    nodes = [Node(name="x", op="input", outputs=(kind,), target="x")]
    for i in range(1, 12):
        shape = (2**i, 2 ** (12 - i))
        nodes.append(_node(f"v{i}", "aten.view.default", (Ref("x"), shape), _float(*shape)))
    nodes.append(_node("y", "aten.exp.default", (Ref("x"),), kind))
    graph = Graph(nodes=tuple(nodes), loss=None)
    rules = {n.name: rule_for(n, (kind,)) for n in nodes[1:]}
    cuts = cut_sets(graph, rules)["y"]["d0"]
    assert len(cuts) == MAX_CUTS
    assert (1, 2**12) in cuts


def test_batch_is_followed_forward_and_into_new_values() -> None:
    graph, rules = _attention_like(1)
    grad = _node("g", "aten.full.default", ((BATCH * SEQ, HIDDEN), 1.0), _float(24, HIDDEN))
    used = _node("u", "aten.mul.Tensor", (Ref("g"), Ref("f0")), _float(24, HIDDEN))
    graph = Graph(nodes=(*graph.nodes, grad, used), loss=None)
    rules |= {"g": rule_for(grad, ()), "u": rule_for(used, (grad.outputs[0],) * 2)}
    found = trace_factor(graph, rules, {Ref("x"): (0, 1, BATCH)})
    assert found["f0"] == {"m": frozenset({(1, BATCH)})}
    assert found["g"] == {"d0": frozenset({(1, BATCH)})}
    sequence = trace_factor(graph, rules, {Ref("x"): (1, 1, SEQ)})
    assert sequence["f0"] == {"m": frozenset({(BATCH, SEQ)})}


def test_what_is_made_of_nothing_joins_none_of_its_readers() -> None:
    kind = _float(BATCH, BATCH)
    nodes = (
        Node(name="x", op="input", outputs=(kind,), target="x"),
        Node(name="w", op="parameter", outputs=(kind,), target="w"),
        _node("zeros", "aten.full.default", ((BATCH, BATCH), 0.0), kind),
        _node("u", "aten.exp.default", (Ref("zeros"),), kind),
        _node("a", "aten.add.Tensor", (Ref("u"), Ref("x")), kind),
        _node("b", "aten.add.Tensor", (Ref("u"), Ref("w")), kind),
    )
    graph = Graph(nodes=nodes, loss=None)
    rules = {n.name: rule_for(n, tuple(map(graph.type_of, n.operands))) for n in nodes[2:]}
    own = {"d0": frozenset({(1, BATCH)})}
    found = trace_factor(graph, rules, {Ref("x"): (0, 1, BATCH)})
    assert found == {"zeros": own, "u": own, "a": own, "b": {}}


def test_a_piece_that_a_view_cuts_across_is_dropped() -> None:
    kind, other = _float(6, 4), _float(4, 6)
    nodes = (
        Node(name="x", op="input", outputs=(kind,), target="x"),
        _node("v", "aten.view.default", (Ref("x"), (4, 6)), other),
        _node("y", "aten.exp.default", (Ref("v"),), other),
    )
    rules = {"v": rule_for(nodes[1], (kind,)), "y": rule_for(nodes[2], (other,))}
    found = trace_factor(Graph(nodes=nodes, loss=None), rules, {Ref("x"): (0, 1, 6)})
    assert found["y"] == {}
