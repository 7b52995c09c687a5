"""Graphs run as they say, and records of ops stay apart from how they were found."""

from __future__ import annotations

import pytest
import torch

from autopar.capture.interpret import run_graph, source_values
from autopar.capture.ops import overload, resolve, to_torch
from autopar.capture.shapes import Shapes
from autopar.errors import CaptureError
from autopar.ir.graph import Const, Graph, Node, Ref, TensorType

KIND = TensorType((2, 3), "float32")


def test_arguments_become_torch_arguments() -> None:
    value = torch.zeros(2)
    env = {Ref("x"): value}
    assert to_torch(Ref("x"), env, "cpu") is value
    assert to_torch((1, (None, True)), env, "cpu") == [1, [None, True]]
    assert to_torch(Const("dtype", "bfloat16"), env, "cpu") is torch.bfloat16
    assert to_torch(Const("device", "cpu"), env, "meta") == torch.device("meta")
    assert to_torch(Const("memory_format", "contiguous_format"), env, "cpu") is (
        torch.contiguous_format
    )
    assert to_torch(Const("complex", "(1+2j)"), env, "cpu") == 1 + 2j


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(CaptureError, match=r"nowhere\.nothing\.default"):
        overload("nowhere.nothing.default")


def test_a_view_runs_on_any_strides() -> None:
    turned = torch.arange(6).view(2, 3).t()
    assert resolve("aten.view.default")(turned, [6]).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_graph_runs_from_its_text_alone() -> None:
    x, w, c = Ref("x"), Ref("w"), Ref("c")
    graph = Graph(
        nodes=(
            Node(name="w", op="parameter", outputs=(KIND,), target="layer.weight"),
            Node(name="x", op="input", outputs=(KIND,), target="ids"),
            Node(name="c", op="constant", outputs=(KIND,), target="constant_0"),
            Node(name="add", op="aten.add.Tensor", args=(x, w), outputs=(KIND,)),
            Node(
                name="max",
                op="aten.max.dim",
                args=(Ref("add"), 1),
                outputs=(TensorType((2,), "float32"), TensorType((2,), "int64")),
            ),
            Node(name="mul", op="aten.mul.Tensor", args=(c, Ref("add")), outputs=(KIND,)),
        ),
        loss=None,
    )
    one = torch.ones(2, 3)
    values = source_values(graph, {"layer.weight": one}, {}, {"ids": one * 2})
    env = run_graph(graph, values, {"constant_0": one * 5})
    assert torch.equal(env[Ref("mul")], one * 15)
    assert env[Ref("max", 1)].tolist() == [0, 0]


OPS = {
    "view": lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3),
    "views": lambda x: torch.ops.aten.split.Tensor(x, 2, 1),
    "product": lambda x: torch.ops.aten.mm.default(x, x.t()),
    "pair": lambda x: torch.ops.aten.topk.default(x, 2),
    "cast": lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.float16),
}


@pytest.mark.parametrize("name", OPS)
def test_remembered_results_are_those_of_fake_mode(name: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Through(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            key = [func, *(shapes.layout(a) if isinstance(a, torch.Tensor) else a for a in args)]
            return shapes.run(func, args, kwargs or {}, [*key, str(kwargs)])

    shapes = Shapes()
    with shapes.fake_mode:
        operands = [torch.randn(4, 5) for _ in range(2)]
        wanted = OPS[name](operands[0])
        with Through():
            first, second = (OPS[name](x) for x in operands)
    for made in (first, second):
        results = made if isinstance(made, (tuple, list)) else (made,)
        expected = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
        for a, b in zip(results, expected, strict=True):
            assert type(a) is type(b) and a.device == b.device
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert a.storage_offset() == b.storage_offset()
    shared = (second if isinstance(second, torch.Tensor) else second[0]).untyped_storage()
    is_view = name in ("view", "views")
    assert (shared._cdata == operands[1].untyped_storage()._cdata) == is_view
