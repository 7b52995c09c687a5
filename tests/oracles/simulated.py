"""Ranks as list entries: dense tensors split by a sharding, local programs run, results joined.

`pieces` gives every rank its part of a tensor; partial sums are random terms of mixed sign.
`run_strategy` runs the local program of a node on all ranks in lockstep, collectives included.
`joined` puts the ranks' results together and fails where ranks that must agree do not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Arg, Const, Node, Ref, TensorType
from autopar.ir.sharding import Mesh, Partial, Sharding, Whole, dim_splits, local_indices
from autopar.rules.local import LocalOp
from autopar.rules.notation import Rule
from autopar.rules.strategies import Strategy, needs_expansion

_COMBINE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def type_of(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def own_indices(
    shape: Sequence[int], sharding: Sharding, coordinates: Sequence[int]
) -> list[list[int]]:
    """Global indices that a rank holds along every dim."""
    return [
        list(local_indices(size, dim_splits(sharding, dim), coordinates))
        for dim, size in enumerate(shape)
    ]


def take(value: Tensor, indices: Sequence[Sequence[int]]) -> Tensor:
    for dim, own in enumerate(indices):
        if len(own) != value.shape[dim]:
            value = value.index_select(dim, torch.tensor(own, dtype=torch.int64))
    return value.clone()


def pieces(
    value: Tensor, sharding: Sharding, mesh: Mesh, generator: torch.Generator
) -> list[Tensor]:
    """The part of every rank, in the order of ranks."""
    axes = [axis for axis, s in enumerate(sharding) if isinstance(s, Partial)]
    assert all(sharding[axis] == Partial("sum") for axis in axes)
    places = itertools.product(*(range(mesh.sizes[axis]) for axis in axes))
    count = math.prod(mesh.sizes[axis] for axis in axes)
    terms = dict(zip(places, _terms(value, count, generator), strict=True))
    found = []
    for rank in range(mesh.num_ranks):
        at = mesh.coordinates(rank)
        term = terms[tuple(at[axis] for axis in axes)]
        found.append(take(term, own_indices(value.shape, sharding, at)))
    return found


def _terms(value: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Random terms of mixed sign that sum to a value."""
    if count == 1:
        return [value]
    if value.dtype in (torch.bfloat16, torch.float16):
        drawn = [
            torch.randint(-2, 3, value.shape, generator=generator).to(value.dtype)
            for _ in range(count - 1)
        ]
    elif value.is_floating_point() or value.is_complex():
        drawn = [
            torch.randn(value.shape, dtype=value.dtype, generator=generator)
            for _ in range(count - 1)
        ]
    else:
        assert value.dtype is not torch.bool, "booleans have no partial sums"
        drawn = [
            torch.randint(-9, 9, value.shape, generator=generator).to(value.dtype)
            for _ in range(count - 1)
        ]
    return [*drawn, value - sum(drawn)]


def joined(parts: Sequence[Tensor], sharding: Sharding, mesh: Mesh, kind: TensorType) -> Tensor:
    """The whole tensor that the ranks' parts make."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_ranks):
        at = mesh.coordinates(rank)
        kept = tuple(0 if isinstance(s, Partial) else c for c, s in zip(at, sharding, strict=True))
        groups.setdefault(kept, []).append(rank)
    reduces = {s.reduce for s in sharding if isinstance(s, Partial)}
    assert len(reduces) <= 1, sharding
    result = torch.zeros(kind.num_elements, dtype=getattr(torch, kind.dtype))
    written = torch.zeros(kind.num_elements, dtype=torch.bool)
    for at, ranks in groups.items():
        total = parts[ranks[0]]
        for rank in ranks[1:]:
            total = _COMBINE[reduces.copy().pop()](total, parts[rank])
        own = own_indices(kind.shape, sharding, at)
        assert total.shape == tuple(len(o) for o in own), (total.shape, kind, sharding, at)
        place = _places(own, kind.shape)
        if any(isinstance(s, Whole) and c for c, s in zip(at, sharding, strict=True)):
            _same(result[place], total.reshape(-1), sharding)
        result[place], written[place] = total.reshape(-1), True
    assert written.all(), sharding
    return result.reshape(kind.shape)


def _places(indices: Sequence[Sequence[int]], shape: Sequence[int]) -> Tensor:
    """Positions of these indices in the flattened tensor."""
    places = torch.zeros((1,), dtype=torch.int64)
    for own, size in zip(indices, shape, strict=True):
        places = (places[:, None] * size + torch.tensor(own, dtype=torch.int64)).reshape(-1)
    return places


def _same(first: Tensor, second: Tensor, sharding: Sharding) -> None:
    close = torch.allclose(first, second, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert close, f"ranks that hold the same under {sharding} differ"


# Ops by name.


_REFERENCES: Mapping[str, Callable[..., Any]] = {
    "aten.view.default": torch.reshape,
    # no kernel on CPU
    "aten._fused_rms_norm_backward.default": torch._decomp.decomposition_table[
        torch.ops.aten._fused_rms_norm_backward.default
    ],
}


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The torch op of a name; views are reshapes."""
    if op in _REFERENCES:
        return _REFERENCES[op]
    space, name, overload = op.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), overload)
    return found


def to_torch(arg: Arg, values: Mapping[Ref, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg]
    if isinstance(arg, tuple):
        return [to_torch(item, values) for item in arg]
    if isinstance(arg, Const):
        return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.value)
    return arg


def run_op(
    op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg], values: Mapping[Ref, Any]
) -> tuple[Tensor | None, ...]:
    found = resolve(op)(
        *(to_torch(arg, values) for arg in args),
        **{name: to_torch(arg, values) for name, arg in kwargs.items()},
    )
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


# Local programs.


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded local op or, with axes, a collective."""

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outs: tuple[TensorType, ...]
    name: str
    axes: tuple[int, ...] = ()
    reduce: str = "sum"


@dataclass(slots=True)
class Recorder:
    """An `Emitter` that writes down the local program of one rank."""

    calls: list[Call] = field(default_factory=list)
    results: dict[int, Ref] = field(default_factory=dict)
    types: dict[Ref, TensorType] = field(default_factory=dict)

    def call(
        self,
        op: str,
        args: tuple[Arg, ...],
        out: TensorType,
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Ref:
        return self.call_many(op, args, (out,), kwargs)[0]

    def call_many(
        self,
        op: str,
        args: tuple[Arg, ...],
        outs: Sequence[TensorType],
        kwargs: Mapping[str, Arg] | None = None,
    ) -> tuple[Ref, ...]:
        name = f"t{len(self.calls)}"
        self.calls.append(Call(op, args, kwargs or {}, tuple(outs), name))
        refs = tuple(Ref(name, index) for index in range(len(outs)))
        self.types.update(zip(refs, outs, strict=True))
        return refs

    def all_reduce(self, value: Ref, axes: Sequence[int], reduce: str = "sum") -> Ref:
        name = f"t{len(self.calls)}"
        kind = (self.types[value],)
        self.calls.append(Call("all_reduce", (value,), {}, kind, name, tuple(axes), reduce))
        self.types[Ref(name)] = kind[0]
        return Ref(name)

    def result(self, value: Ref, index: int = 0) -> None:
        self.results[index] = value


def record(op: LocalOp, rule: Rule, strategy: Strategy) -> Recorder:
    """The local program of one rank, as lowering makes it."""
    recorder = Recorder()
    if needs_expansion(rule, strategy, op.mesh):
        assert rule.expand is not None
        rule.expand(recorder, op)
        return recorder
    args, kwargs = rule.local_args(op) if rule.local_args else (op.args(), op.kwargs())
    outs = tuple(op.output_type(index) for index in range(len(op.node.outputs)))
    for index, ref in enumerate(recorder.call_many(op.node.op, tuple(args), outs, kwargs)):
        recorder.results[index] = ref
    return recorder


def run_strategy(
    node: Node,
    rule: Rule,
    strategy: Strategy,
    mesh: Mesh,
    operands: Sequence[Tensor],
    generator: torch.Generator,
) -> list[Tensor | None]:
    """The outputs of a node, computed on all ranks under a strategy and joined."""
    types = tuple(type_of(value) for value in operands)
    refs = tuple(Ref(f"x{index}") for index in range(len(operands)))
    split = [
        pieces(value, sharding, mesh, generator)
        for value, sharding in zip(operands, strategy.operands, strict=True)
    ]
    programs, memories = [], []
    for rank in range(mesh.num_ranks):
        op = LocalOp(
            node=node,
            operand_types=types,
            operands=strategy.operands,
            outputs=strategy.outputs,
            mesh=mesh,
            coordinates=mesh.coordinates(rank),
            values=refs,
        )
        memory = {ref: parts[rank] for ref, parts in zip(refs, split, strict=True)}
        for index, ref in enumerate(refs):
            assert op.operand_type(index) == type_of(memory[ref]), (op.operand_type(index), index)
        programs.append(record(op, rule, strategy))
        memories.append(memory)
    _run_all(programs, memories, mesh)
    outputs: list[Tensor | None] = []
    for index, kind in enumerate(node.outputs):
        parts = [memory[p.results[index]] for p, memory in zip(programs, memories, strict=True)]
        absent = any(part is None for part in parts)
        sharding = strategy.outputs[index]
        outputs.append(None if absent else joined(parts, sharding, mesh, kind))
    return outputs


def _run_all(programs: Sequence[Recorder], memories: Sequence[dict[Ref, Any]], mesh: Mesh) -> None:
    """Run every rank up to its next collective, then the collective, until all have ended."""
    running = [_run(p.calls, m) for p, m in zip(programs, memories, strict=True)]
    while True:
        waiting = [next(program, None) for program in running]
        if all(call is None for call in waiting):
            return
        first = waiting[0]
        assert first is not None, "ranks do not run the same collectives"
        for call in waiting:
            assert call is not None, "ranks do not run the same collectives"
            assert (call.axes, call.reduce) == (first.axes, first.reduce)
        _all_reduce([call for call in waiting if call], memories, mesh)


def _run(calls: Sequence[Call], memory: dict[Ref, Any]) -> Iterator[Call]:
    for call in calls:
        if call.op == "all_reduce":
            yield call
            continue
        results = run_op(call.op, call.args, call.kwargs, memory)
        assert len(results) == len(call.outs), call
        for index, (value, kind) in enumerate(zip(results, call.outs, strict=True)):
            if value is not None:
                assert type_of(value) == kind, f"{call.op} gives {type_of(value)}, not {kind}"
            memory[Ref(call.name, index)] = value


def _all_reduce(calls: Sequence[Call], memories: Sequence[dict[Ref, Any]], mesh: Mesh) -> None:
    axes = calls[0].axes
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_ranks):
        at = mesh.coordinates(rank)
        key = tuple(-1 if axis in axes else c for axis, c in enumerate(at))
        groups.setdefault(key, []).append(rank)
    for ranks in groups.values():
        values = [memories[rank][calls[rank].args[0]] for rank in ranks]
        total = values[0]
        for value in values[1:]:
            assert value.shape == total.shape, "ranks reduce different shapes"
            total = _COMBINE[calls[0].reduce](total, value)
        for rank in ranks:
            memories[rank][Ref(calls[rank].name)] = total.clone()
