"""Runs programs of several microbatches, section by section, all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopar.ir.graph import Ref
from autopar.lower.program import ACCUMULATE, LOOP, Program, Section
from tests.oracles.lockstep import Env, run_instructions, start


def run_microbatches(
    variants: Sequence[Sequence[Program]], tensors: Mapping[str, torch.Tensor]
) -> list[Env]:
    """Values of every rank behind the loop.

    Args:
        variants: For every microbatch, the program of every rank.
        tensors: Whole tensor of every program input, by input name.
    """
    first = variants[0]
    envs = start(first, tensors)
    run_instructions([_section(p, Section.PROLOGUE) for p in first], envs)
    totals: list[dict[Ref, torch.Tensor]] = [{} for _ in first]
    for number, programs in enumerate(variants):
        local = [dict(env) for env in envs]
        for section in LOOP:
            parts = [_section(p, section) for p in programs]
            for env in local:
                env[Ref("#microbatch")] = torch.tensor(number)
            run_instructions(parts, local)
        for program, env, total in zip(programs, local, totals, strict=True):
            _add_up(program, env, total)
    for env, total in zip(envs, totals, strict=True):
        env.update(total)
    run_instructions([_section(p, Section.EPILOGUE) for p in first], envs)
    return envs


def run_pipeline(
    variants: Sequence[Sequence[Sequence[Program]]], tensors: Mapping[str, torch.Tensor]
) -> list[list[Env]]:
    """Values of every rank of every stage, microbatches one after the other.

    Args:
        variants: For every stage and microbatch, the program of every rank.
        tensors: Whole tensor of every program input, by input name.
    """
    stages = range(len(variants))
    first = [stage[0] for stage in variants]
    envs = [start(programs, tensors) for programs in first]
    for s in stages:
        run_instructions([_section(p, Section.PROLOGUE) for p in first[s]], envs[s])
        _pass_on(first, envs, s, Section.PROLOGUE)
    totals: list[list[dict[Ref, torch.Tensor]]] = [[{} for _ in p] for p in first]
    several = len(variants[0]) > 1
    for number in range(len(variants[0])):
        local = [[dict(env) for env in own] for own in envs] if several else envs
        programs = [stage[number] for stage in variants]
        for section, order in zip(LOOP, (stages, reversed(stages)), strict=True):
            for s in order:
                for env in local[s]:
                    env[Ref("#microbatch")] = torch.tensor(number)
                run_instructions([_section(p, section) for p in programs[s]], local[s])
                _pass_on(programs, local, s, section)
        for s in stages:
            for program, env, total in zip(programs[s], local[s], totals[s], strict=True):
                _add_up(program, env, total)
    for s in reversed(stages):
        for env, total in zip(envs[s], totals[s], strict=True):
            env.update(total)
        run_instructions([_section(p, Section.EPILOGUE) for p in first[s]], envs[s])
        _pass_on(first, envs, s, Section.EPILOGUE)
    return envs


def _add_up(program: Program, env: Env, total: dict[Ref, torch.Tensor]) -> None:
    for instruction in program.instructions:
        if instruction.op == ACCUMULATE:
            ref = instruction.operands[0]
            seen = total.get(ref)
            total[ref] = env[ref] if seen is None else seen + env[ref]


def _pass_on(
    programs: Sequence[Sequence[Program]], envs: list[list[Env]], stage: int, section: Section
) -> None:
    """Deliver what a stage sends behind a section to its peers on other stages."""
    for rank, program in enumerate(programs[stage]):
        for message in program.sends:
            if message.section is not section:
                continue
            peer = programs[message.stage][rank]
            taken = next(r for r in peer.receives if r.value == message.value and r.stage == stage)
            piece = envs[stage][rank][message.ref]
            assert tuple(piece.shape) == taken.local_type.shape
            envs[message.stage][rank][taken.ref] = piece


def _section(program: Program, section: Section) -> Program:
    chosen = tuple(i for i in program.instructions if i.section is section)
    return replace(program, instructions=chosen)
