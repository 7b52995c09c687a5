"""Reading factor notation, binding it to shapes, and moving shardings through it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.sharding import SUM, WHOLE, Mesh, Partial, Sharding, Split, is_legal
from autopar.rules.local import LocalOp
from autopar.rules.notation import Rule, axis_effect, parse, rule
from autopar.rules.strategies import strategies
from autopar.rules.table import rule_for
from tests.autopar.rules.draws import Draw, Sample, case
from tests.autopar.rules.samples import reshaped
from tests.oracles.simulated import joined, pieces, run_op, type_of


def _float(*shape: int) -> TensorType:
    return TensorType(shape, "float32")


def test_text_becomes_dims() -> None:
    pattern = parse("(b s) h, 1 h -> b s h")
    assert pattern.operands == ((("b", "s"), ("h",)), ((), ("h",)))
    assert pattern.outputs == ((("b",), ("s",), ("h",)),)


def test_nothing_is_a_tensor_without_dims() -> None:
    assert parse("k, k ->").outputs == ((),)
    assert parse("-> n").operands == ()


@pytest.mark.parametrize("text", ["m k, k n", "m k -> m n -> n", "m % k -> m"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(RuleError, match="cannot read rule"):
        parse(text)


def test_sizes_of_merged_factors_are_computed() -> None:
    bound = parse("(b s) h -> b s h").bind([_float(12, 4)], [_float(3, 4, 4)])
    assert bound.sizes == {"b": 3, "s": 4, "h": 4}


def test_dims_of_one_are_broadcast() -> None:
    bound = parse("m n, m n -> m n").bind([_float(3, 1), _float(3, 4)], [_float(3, 4)])
    assert bound.operands == ((("m",), ()), (("m",), ("n",)))


def test_dots_align_from_the_right() -> None:
    bound = parse("..., ... -> ...").bind([_float(4), _float(3, 4)], [_float(3, 4)])
    assert bound.operands[0] == bound.outputs[0][1:]


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k, k n -> m n", [(2, 3), (4, 5), (2, 5)], "'k' is 3 in one place and 4 in another"),
        ("m -> m", [(2,), (2,), (2,)], "names 1 operands and 1 outputs, the op has 2 and 1"),
        ("m n -> m", [(2,), (2,)], "gives 2 dims to a tensor of shape"),
        ("(a b) -> a b", [(7,), (2, 3)], "do not make a dim of 7"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    text: str, shapes: list[tuple[int, ...]], message: str
) -> None:
    kinds = [_float(*shape) for shape in shapes]
    with pytest.raises(RuleError, match=message):
        parse(text).bind(kinds[:-1], kinds[-1:])


def test_a_split_reduced_factor_leaves_partial_outputs() -> None:
    bound = parse("m k, k n -> m n").bind([_float(4, 6), _float(6, 8)], [_float(4, 8)])
    assert axis_effect(bound, "k", 1, 3) == ((Split(1, 1, 3), Split(0, 1, 3)), (SUM,))
    assert axis_effect(bound, "n", 1, 4) == ((WHOLE, Split(1, 1, 4)), (Split(1, 1, 4),))


def test_other_reductions_and_unrelated_outputs() -> None:
    kinds = [_float(4, 6)], [_float(4), _float(4)]
    bound = parse("m k -> m, m").bind(*kinds)
    joined_by_max = Rule(
        operands=bound.operands,
        outputs=bound.outputs,
        sizes=bound.sizes,
        reduce={"k": "max"},
        unrelated=frozenset({("k", 1)}),
    )
    assert axis_effect(joined_by_max, "k", 1, 3)[1] == (Partial("max"), WHOLE)


def test_flops_and_linear_sets_of_an_entry() -> None:
    make = rule("m k, k n -> m n", linear="0 | 1", flops=lambda made: made.sizes["k"])
    node = Node(name="n", op="x", args=(Ref("a"), Ref("b")), outputs=(_float(2, 4),))
    made = make(node, (_float(2, 3), _float(3, 4)))
    assert made.linear == (frozenset({0}), frozenset({1}))
    assert made.flops == 3


def test_a_merged_dim_carries_its_pieces() -> None:
    node = Node(
        name="v", op="aten.view.default", args=(Ref("x"), (12, 4)), outputs=(_float(12, 4),)
    )
    made = rule_for(node, (_float(2, 6, 4),))
    by_sequence = (Split(1, 1, 3),)
    assert made.carry(by_sequence, (2,)) == (Split(0, 2, 3),)
    assert made.carry_back((Split(0, 2, 3),), (2,)) == by_sequence
    assert made.carry_back((Split(0, 1, 3),), (4,)) is None


def test_unequal_chunks_pass_where_no_rank_is_empty() -> None:
    node = Node(name="v", op="aten.view.default", args=(Ref("x"), (12,)), outputs=(_float(12),))
    made = rule_for(node, (_float(3, 4),))
    assert made.carry((Split(0, 1, 2),), (2,)) == (Split(0, 1, 8),)
    assert made.carry((Split(1, 1, 2),), (3,)) is None, "the third rank has nothing"
    node = Node(name="v", op="aten.view.default", args=(Ref("x"), (10,)), outputs=(_float(10),))
    made = rule_for(node, (_float(2, 5),))
    assert made.carry((Split(1, 1, 3),), (2,)) == (Split(0, 2, 3),)


# Chains of views.


def _step(draw: Draw, value: torch.Tensor) -> tuple[str, Sample]:
    rank = value.ndim
    kind = draw.choice(["view", "view", "permute", "unsqueeze"])
    if kind == "view":
        return "aten.view.default", Sample(value, list(reshaped(draw, value.shape)))
    if kind == "permute":
        order = torch.randperm(rank, generator=draw.generator).tolist()
        return "aten.permute.default", Sample(value, order)
    return "aten.unsqueeze.default", Sample(value, draw.integer(0, rank))


def _layouts(draw: Draw, value: torch.Tensor, mesh: Mesh) -> list[Sharding]:
    """Shardings of a value, by random pieces of its dims."""
    kind = type_of(value)
    names = tuple((f"d{i}",) for i in range(value.ndim))
    sizes = {f"d{i}": size for i, size in enumerate(value.shape)}
    free = Rule(operands=(), outputs=(names,), sizes=sizes)
    cuts = {name: draw.cuts(size) for name, size in sizes.items()}
    return [s.outputs[0] for s in strategies(free, (), (kind,), mesh, cuts)]


@settings(max_examples=40)
@given(data=st.data())
def test_shardings_pass_through_chains_of_views(data: st.DataObject) -> None:
    draw = Draw(data)
    first = draw.floats(*draw.shape(1, 4))
    mesh = Mesh(("a", "b"), draw.choice([(2, 2), (3, 2), (1, 4), (2, 3)]))
    examples, value = [], first
    for _ in range(draw.integer(1, 4)):
        op, sample = _step(draw, value)
        examples.append(case(op, sample))
        value = examples[-1].outputs[0]
    layouts = _layouts(draw, first, mesh)
    for sharding in [draw.choice(layouts) for _ in range(6)]:
        now: Sharding = sharding
        parts = pieces(first, now, mesh, draw.generator)
        dense = first
        for example in examples:
            made = rule_for(example.node, (type_of(dense),))
            after = made.carry(now, mesh.sizes)
            if after is None:
                break
            dense = example.outputs[0]
            assert is_legal(dense.shape, after, mesh)
            assert made.carry_back(after, mesh.sizes) == now
            parts = [
                _local(example.node, made, rank, (now, after), mesh, parts)
                for rank in range(mesh.num_ranks)
            ]
            now = after
        torch.testing.assert_close(joined(parts, now, mesh, type_of(dense)), dense)


def _local(
    node: Node,
    made: Rule,
    rank: int,
    shardings: tuple[Sharding, Sharding],
    mesh: Mesh,
    parts: list[torch.Tensor],
) -> torch.Tensor:
    """The view of one rank's piece."""
    op = LocalOp(
        node=node,
        operand_types=(TensorType(_whole_shape(made), "float64"),),
        operands=shardings[:1],
        outputs=shardings[1:],
        mesh=mesh,
        coordinates=mesh.coordinates(rank),
        values=(Ref("x0"),),
    )
    args, kwargs = made.local_args(op) if made.local_args else (op.args(), op.kwargs())
    result = run_op(node.op, args, kwargs, {Ref("x0"): parts[rank]})[0]
    assert result is not None
    return result


def _whole_shape(made: Rule) -> tuple[int, ...]:
    sizes = []
    for dim in made.operands[0]:
        size = 1
        for factor in dim:
            size *= made.sizes[factor]
        sizes.append(size)
    return tuple(sizes)
