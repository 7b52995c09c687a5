"""The text form of a graph: stable, complete, readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ir.graph import (
    Arg,
    Const,
    Graph,
    Node,
    Phase,
    Ref,
    Source,
    TensorType,
)
from autopar.ir.text import graph_text, parse_graph
from autopar.ir.verify import verify

TINY = """\
fwd %w = parameter mlp.up.weight : float32[64, 16]
fwd %x = input x : float32[8, 16]
fwd %t = aten.t.default(%w) : float32[16, 64] @ mlp.up model.py:12
fwd %mm = aten.mm.default(%x, %t) : float32[8, 64] @ mlp.up model.py:12
fwd %loss = aten.sum.default(%mm, dtype=#dtype.float32) : float32[] @ "" model.py:20
bwd %split = aten.split.Tensor(%mm, [4, -1.5, None], dim=0) : (float32[4, 64], float32[4, 64])
bwd %mm_1 = aten.mm.default(%split:1, %x, "a b") : float32[64, 16] @ mlp.up
loss %loss
aux logits %mm
gradient mlp.up.weight %mm_1
alias head.weight mlp.up.weight
batch_dim x 0
"""

names = st.text(min_size=1, max_size=8)
types = st.builds(
    TensorType,
    st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
    st.sampled_from(["float32", "int64", "bool", "float8_e4m3fn"]),
)
leaves = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=6),
    st.builds(Const, st.sampled_from(["dtype", "memory_format"]), names),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph whose values are made before they are read."""
    nodes = [
        Node(name=f"p{i}", op=op, outputs=(draw(types),), target=f"{i}.{draw(names)}")
        for i, op in enumerate(["parameter", "input", "buffer", "constant", "input"])
    ]
    for i in range(draw(st.integers(1, 6))):
        made = [Ref(n.name, k) for n in nodes for k in range(len(n.outputs))]
        values: st.SearchStrategy[Arg] = st.one_of(st.sampled_from(made), leaves)
        args = st.recursive(values, lambda a: st.lists(a, max_size=3).map(tuple), max_leaves=4)
        kwargs = draw(st.dictionaries(st.sampled_from(["dim", "dtype", "alpha"]), args, max_size=2))
        nodes.append(
            Node(
                name=f"n_{i}",
                op=draw(st.sampled_from(["aten.mm.default", "aten.add.Tensor", "mylib::op"])),
                args=tuple(draw(st.lists(args, max_size=3))),
                kwargs=tuple(sorted(kwargs.items())),
                outputs=tuple(draw(st.lists(types, max_size=3))),
                phase=draw(st.sampled_from(Phase)),
                source=Source(
                    draw(st.one_of(st.just(""), names)), draw(st.sampled_from(["", "a"]))
                ),
            )
        )
    results = st.sampled_from([Ref(n.name, k) for n in nodes for k in range(len(n.outputs))])
    return Graph(
        nodes=tuple(nodes),
        loss=draw(st.one_of(st.none(), results)),
        aux=tuple(draw(st.lists(st.tuples(names, results), max_size=2))),
        gradients=draw(st.dictionaries(names, results, max_size=2)),
        mutations=draw(st.dictionaries(names, results, max_size=2)),
        aliases=draw(st.dictionaries(names, names, max_size=2)),
        batch_dims=draw(st.dictionaries(names, st.integers(0, 3), max_size=2)),
    )


@given(graphs())
def test_parsing_the_text_gives_the_graph(graph: Graph) -> None:
    text = graph_text(graph)
    assert parse_graph(text) == graph
    lines = len(graph.nodes) + len(graph.results) + len(graph.aliases) + len(graph.batch_dims)
    assert text.count("\n") == lines


def test_text_is_stable() -> None:
    graph = parse_graph(TINY)
    verify(graph)
    assert graph_text(graph) == TINY


def test_source_lines_can_be_left_out() -> None:
    graph = parse_graph(TINY)
    moved = parse_graph(TINY.replace("model.py:12", "moved.py:99"))
    assert graph_text(graph) != graph_text(moved)
    assert graph_text(graph, lines=False) == graph_text(moved, lines=False)
    assert "model.py" not in graph_text(graph, lines=False)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("fwd %x", "found 'end of line' where '=' belongs"),
        ("fwd x = input x : float32[]", "found 'x' where a value belongs"),
        ("fwd %x = aten.mm.default(%a %b) : float32[]", "found '%b' where ',' or ')' belongs"),
        ("fwd %x = aten.mm.default(abc) : float32[]", "'abc' is no argument"),
        ("bwd %x = aten.mm.default() : float32[] @ a b c", "'c' follows its end"),
        ("whatever %x", "'whatever' begins no line of a graph"),
        ("loss ?", "is no token"),
    ],
)
def test_a_broken_line_is_named(line: str, what: str) -> None:
    with pytest.raises(AutoparError) as raised:
        parse_graph(f"\n{line}\n")
    assert str(raised.value).startswith("cannot read graph text at line 2: ")
    assert what in str(raised.value)
