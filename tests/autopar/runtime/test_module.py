"""Instructions as FX modules: every collective for every dtype, and values that are dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.ir.graph import Const, Ref, TensorType
from autopar.ir.sharding import Mesh
from autopar.lower.builder import Builder
from autopar.lower.program import WAIT, Program, ProgramInput
from autopar.runtime.groups import open_session
from autopar.runtime.measure import LiveBytes
from autopar.runtime.module import AxisGroup, Part, begun_before, build_module, build_part

DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64", "complex128", "bool"]
DTYPES += ["uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2"]
NO_SUMS = ("float8_e4m3fn", "float8_e5m2")


def program_of(build: Builder, kinds: dict[str, TensorType], results: list[Ref]) -> Program:
    inputs = tuple(
        ProgramInput(
            name=name,
            kind="input",
            target=name,
            global_type=kind,
            sharding=(),
            local_type=kind,
        )
        for name, kind in kinds.items()
    )
    return Program(
        mesh=build.mesh,
        coordinates=build.coordinates,
        inputs=inputs,
        instructions=build.instructions,
        loss=None,
        aux=tuple((f"r{i}", ref) for i, ref in enumerate(results)),
    )


def collectives(dtype: str) -> list[torch.Tensor]:
    session = open_session("cpu", 2)
    mesh = Mesh(("a", "b"), (1, 2))
    groups = session.groups(mesh)
    build = Builder(mesh, mesh.coordinates(session.rank))
    build.origin = "made"
    kind = TensorType((4, 3), dtype)
    x = build.add_input("input", kind)
    results = [build.all_gather(x, 1), build.all_to_all(x, 1), build.all_gather(x, 0)]
    if dtype not in NO_SUMS:
        results += [build.all_reduce(x, (0, 1)), build.reduce_scatter(x, 1)]
        if not dtype.startswith("complex"):
            results += [build.all_reduce(x, (1,), "max"), build.reduce_scatter(x, 1, "min")]
    module = build_module(program_of(build, {"input": kind}, results), groups.axes, session.device)
    values = torch.arange(12).reshape(4, 3) % 5 + session.rank
    return list(module((values > 2) if dtype == "bool" else values.to(getattr(torch, dtype))))


def in_two_parts(dtype: str) -> list[torch.Tensor]:
    session = open_session("cpu", 2)
    mesh = Mesh(("a",), (2,))
    groups = session.groups(mesh)
    build = Builder(mesh, mesh.coordinates(session.rank))
    build.origin = "made"
    x = build.add_input("input", TensorType((4, 3), dtype))
    results = [build.all_gather(x, 0), build.all_reduce(x, (0,)), build.all_to_all(x, 0)]
    late = tuple(i for i in build.instructions if i.op == WAIT)
    early = tuple(i for i in build.instructions if i.op != WAIT)
    going = tuple(Ref(i.operands[0].node) for i in late)
    begins = Part(early, (x,), going)
    ends = Part(late, going, tuple(results), begun_before(late, build.instructions))
    values = torch.arange(12).reshape(4, 3) % 5 + session.rank
    piece = (values > 2) if dtype == "bool" else values.to(getattr(torch, dtype))
    first, second = (build_part(part, groups.axes, session.device) for part in (begins, ends))
    return list(second(0, list(first(0, [piece]))))


@pytest.mark.parametrize("dtype", ["float32", "bool", "int16", "complex64"])
def test_what_one_part_begins_another_waits_for(pool: Any, dtype: str) -> None:
    found = pool(2).run(in_two_parts, dtype)
    expected = pool(2).run(collectives, dtype)
    for mine, wanted in zip(found, expected, strict=True):
        for value, place in zip(mine, (0, 3, 1), strict=True):
            assert value.dtype == wanted[place].dtype
            assert torch.equal(value, wanted[place])


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_take_every_dtype(pool: Any, dtype: str) -> None:
    found = pool(2).run(collectives, dtype)
    both = [torch.arange(12).reshape(4, 3) % 5 + rank for rank in range(2)]
    if dtype == "bool":
        both = [(values > 2).to(torch.int64) for values in both]
    for rank in range(2):
        own = slice(2 * rank, 2 * rank + 2)
        expected = [
            torch.cat(both),
            torch.cat([values[own] for values in both]),
            both[rank],
            both[0] + both[1],
            (both[0] + both[1])[own],
            torch.maximum(*both),
            torch.minimum(*both)[own],
        ]
        for mine, wanted in zip(found[rank], expected, strict=False):
            cast = wanted.bool() if dtype == "bool" else wanted.to(getattr(torch, dtype))
            assert mine.dtype == getattr(torch, dtype)
            assert torch.equal(mine.to(torch.complex128), cast.to(torch.complex128))


def gathers_in_flight(rounds: int) -> bool:
    session = open_session("cpu", 2)
    mesh = Mesh(("a",), (2,))
    groups = session.groups(mesh)
    build = Builder(mesh, mesh.coordinates(session.rank))
    build.origin = "made"
    kind = TensorType((16, 16), "float32")
    x = build.add_input("input", kind)
    results = [build.all_gather(x, 0) for _ in range(4)]
    program = program_of(build, {"input": kind}, results)
    late = tuple(sorted(program.instructions, key=lambda i: i.op == WAIT))
    module = build_module(replace(program, instructions=late), groups.axes, session.device)
    sums = [sum(float(whole.sum()) for whole in module(torch.ones(16, 16))) for _ in range(rounds)]
    return sums == [4 * 512.0] * rounds


def test_many_gathers_in_flight(pool: Any) -> None:
    assert pool(2).run(gathers_in_flight, 1500) == [True, True]


def single(build: Builder, kinds: dict[str, TensorType], results: list[Ref]) -> Any:
    program = program_of(build, kinds, results)
    return build_module(program, (AxisGroup("", 1),), torch.device("cpu"))


def test_values_are_dropped_after_their_last_use() -> None:
    kind = TensorType((1000,), "float32")
    build = Builder(Mesh(("a",), (1,)), (0,))
    build.origin = "made"
    x = build.add_input("x", kind)
    for _ in range(6):
        x = build.call("aten.add.Tensor", (x, 1.0), kind)
    module = single(build, {"x": kind}, [x])
    given = torch.zeros(1000)
    with LiveBytes() as measured:
        (result,) = module(given)
    assert measured.peak_bytes == 2 * kind.num_bytes
    assert result.eq(6).all()


def test_constants_tuples_and_lists_of_results() -> None:
    kind, half = TensorType((4, 3), "float32"), TensorType((4, 3), "float64")
    build = Builder(Mesh(("a",), (1,)), (0,))
    build.origin = "made"
    x = build.add_input("x", kind)
    options = {"dtype": Const("dtype", "float64"), "device": Const("device", "cpu")}
    cast = build.call("aten._to_copy.default", (x,), half, options)
    parts = [TensorType((2, 3), "float32")] * 2
    split = build.call_many("aten.split.Tensor", (x, 2), parts)
    whole = build.call_many("aten.split.Tensor", (x, 4), [kind])
    joined = build.call("aten.cat.default", ((split[1], split[0]),), kind)
    norm = build.call_many(
        "aten.native_layer_norm.default",
        (x, (3,), None, None, 1e-5),
        [kind, TensorType((4, 1), "float32"), TensorType((4, 1), "float32")],
    )
    module = single(build, {"x": kind}, [cast, *whole, joined, norm[0], norm[1]])
    given = torch.randn(4, 3)
    found = module(given)
    assert torch.equal(found[0], given.double())
    assert torch.equal(found[1], given)
    assert torch.equal(found[2], torch.cat([given[2:], given[:2]]))
    torch.testing.assert_close(found[3], torch.nn.functional.layer_norm(given, (3,)))
    torch.testing.assert_close(found[4], given.mean(1, keepdim=True))
    named = {node.meta["instruction"] for node in module.graph.nodes if node.op == "call_function"}
    assert named == {"made__to_copy", "made_split", "made_split_1", "made_cat"} | {
        "made_native_layer_norm"
    }
