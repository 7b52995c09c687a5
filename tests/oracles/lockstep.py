"""Runs the programs of all ranks in one process, in lockstep, with collectives done by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.capture.ops import resolve, to_torch
from autopar.ir.graph import MICROBATCH_NUMBER, Arg, Ref
from autopar.ir.sharding import Mesh, Sharding, dim_splits, local_indices
from autopar.lower.program import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    COPIES,
    MICROBATCH,
    REDUCE_SCATTER,
    WAIT,
    Program,
)

_REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def piece(tensor: torch.Tensor, sharding: Sharding, coordinates: Sequence[int]) -> torch.Tensor:
    """The piece of a whole tensor on the rank with these coordinates (no partial axes)."""
    for dim, size in enumerate(tensor.shape):
        splits = dim_splits(sharding, dim)
        if splits:
            index = torch.tensor(list(local_indices(size, splits, coordinates)), dtype=torch.long)
            tensor = tensor.index_select(dim, index)
    return tensor


def join(
    pieces: Mapping[tuple[int, ...], torch.Tensor], shape: Sequence[int], sharding: Sharding
) -> torch.Tensor:
    """The whole tensor from the pieces of all ranks (no partial axes)."""
    whole = torch.full(tuple(shape), float("nan"), dtype=torch.float64)
    for coordinates, tensor in pieces.items():
        index = [
            torch.tensor(list(local_indices(size, dim_splits(sharding, dim), coordinates)))
            for dim, size in enumerate(shape)
        ]
        if not shape:
            whole = tensor.double()
        elif tensor.numel():
            whole[torch.meshgrid(*index, indexing="ij")] = tensor.double()
    return whole


Env = dict[Ref, torch.Tensor]
"""Values of one rank."""


def start(programs: Sequence[Program], tensors: Mapping[str, torch.Tensor]) -> list[Env]:
    """What enters every rank's program."""
    envs: list[Env] = []
    for program in programs:
        env: Env = {}
        for item in program.inputs:
            local = piece(tensors[item.name], item.sharding, program.coordinates)
            assert tuple(local.shape) == item.local_type.shape
            env[Ref(item.name)] = local
        envs.append(env)
    return envs


def run_lockstep(programs: Sequence[Program], tensors: Mapping[str, torch.Tensor]) -> list[Env]:
    """Values of every rank after its program.

    Args:
        programs: One a rank, in rank order.
        tensors: Whole tensor of every program input, by input name.
    """
    envs = start(programs, tensors)
    run_instructions(programs, envs)
    return envs


def run_instructions(programs: Sequence[Program], envs: list[Env]) -> None:
    """Run the instructions of every rank on its values."""
    mesh = programs[0].mesh
    at = [0] * len(programs)
    while True:
        for rank, program in enumerate(programs):
            while at[rank] < len(program.instructions):
                instruction = program.instructions[at[rank]]
                if instruction.op in COLLECTIVES:
                    break
                _local(program, at[rank], envs[rank])
                at[rank] += 1
        if all(a == len(p.instructions) for a, p in zip(at, programs, strict=True)):
            return
        _collective(programs, at, envs, mesh)
        at = [a + 1 for a in at]


def _local(program: Program, at: int, env: dict[Ref, torch.Tensor]) -> None:
    instruction = program.instructions[at]
    if instruction.op == MICROBATCH:
        rows, (chunk, own) = env[instruction.operands[0]], instruction.args[1:]
        assert isinstance(chunk, int) and isinstance(own, int)
        begin = int(env[Ref("#microbatch")]) * chunk
        env[Ref(instruction.name)] = rows[:, begin : begin + own].contiguous()
        return
    if instruction.op == ACCUMULATE:
        env[Ref(instruction.name)] = env[instruction.operands[0]]
        return
    if instruction.op in COPIES:
        env[Ref(instruction.name)] = env[instruction.operands[0]].clone()
        return
    if instruction.op == WAIT:
        env[Ref(instruction.name)] = env[instruction.operands[0]]
        return
    args = [_argument(arg, env) for arg in instruction.args]
    kwargs = {name: to_torch(arg, env, "cpu") for name, arg in instruction.kwargs}
    result = resolve(instruction.op)(*args, **kwargs)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            kind = instruction.outputs[index]
            assert tuple(output.shape) == kind.shape, (instruction, output.shape)
            env[Ref(instruction.name, index)] = output


def _argument(arg: Arg, env: Env) -> Any:
    if arg == MICROBATCH_NUMBER:
        return int(env[Ref("#microbatch")])
    return to_torch(arg, env, "cpu")


def _collective(
    programs: Sequence[Program], at: Sequence[int], envs: list[dict[Ref, torch.Tensor]], mesh: Mesh
) -> None:
    now = [p.instructions[a] for p, a in zip(programs, at, strict=True)]
    op, axis = now[0].op, now[0].args[1]
    assert all(i.op == op and i.args[1:] == now[0].args[1:] for i in now), [i.op for i in now]
    assert isinstance(axis, int)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_ranks):
        where = mesh.coordinates(rank)
        groups.setdefault(where[:axis] + where[axis + 1 :], []).append(rank)
    for ranks in groups.values():
        parts = [envs[r][now[r].operands[0]] for r in ranks]
        assert len({p.shape for p in parts}) == 1, (now[0], [p.shape for p in parts])
        for place, rank in enumerate(ranks):
            out = _result(op, now[rank].args, parts, place)
            assert tuple(out.shape) == now[rank].outputs[0].shape, (now[rank], out.shape)
            envs[rank][Ref(now[rank].name)] = out


def _result(
    op: str, args: tuple[object, ...], parts: list[torch.Tensor], place: int
) -> torch.Tensor:
    if op == ALL_GATHER:
        return torch.cat(parts)
    if op == ALL_TO_ALL:
        return torch.cat([part.chunk(len(parts))[place] for part in parts])
    total = _REDUCE[str(args[2])](torch.stack(parts), 0)
    if op == ALL_REDUCE:
        return total
    assert op == REDUCE_SCATTER
    return total.chunk(len(parts))[place]
