"""Runs programs of several microbatches, section by section, all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopar.ir.graph import Ref
from autopar.lower.program import ACCUMULATE, LOOP, MICROBATCH, Program, Section
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
            for part, env in zip(parts, local, strict=True):
                env[Ref("#microbatch")] = torch.tensor(number)
            run_instructions(parts, local)
        for program, env, total in zip(programs, local, totals, strict=True):
            for instruction in program.instructions:
                if instruction.op == ACCUMULATE:
                    ref = instruction.operands[0]
                    seen = total.get(ref)
                    total[ref] = env[ref] if seen is None else seen + env[ref]
    for env, total in zip(envs, totals, strict=True):
        env.update(total)
    run_instructions([_section(p, Section.EPILOGUE) for p in first], envs)
    return envs


def _section(program: Program, section: Section) -> Program:
    chosen = tuple(i for i in program.instructions if i.section is section)
    return replace(program, instructions=chosen)


__all__ = ["MICROBATCH", "run_microbatches"]
