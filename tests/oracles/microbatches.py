"""Runs programs of several microbatches and of pipelines, all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.capture.ops import torch_dtype
from autopar.ir.graph import Ref
from autopar.lower.pieces import Box
from autopar.lower.program import LOOP, Message, Program, Section
from autopar.lower.segments import Segment, segments
from autopar.lower.unroll import Row, Turn, lives, totals_of
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
        for program, other, env, total in zip(programs, first, local, totals, strict=True):
            for own, ref in zip(totals_of(program), totals_of(other), strict=True):
                total[ref] = total[ref] + env[own] if ref in total else env[own]
    for env, total in zip(envs, totals, strict=True):
        env.update(total)
    run_instructions([_section(p, Section.EPILOGUE) for p in first], envs)
    return envs


@dataclass
class Lane:
    """The ranks that run one row, and how far they are.

    Attributes:
        variants: For every microbatch, the program of every rank.
        row: Their turns.
        envs: What every rank holds outside the loop; ``local`` what it holds of a microbatch.
        most_live: Most microbatches of chunks between their forward and their last backward.
    """

    variants: Sequence[Sequence[Program]]
    row: Row
    envs: list[Env]
    at: int = 0
    most_live: int = 0

    def __post_init__(self) -> None:
        outside = [
            [segments(program, section) for program in self.variants[0]]
            for section in (Section.PROLOGUE, Section.EPILOGUE)
        ]
        before, behind = (list(zip(*ranks, strict=True)) for ranks in outside)
        loop = [(turn,) * len(self.envs) for turn in self.row]
        self.events: list[Sequence[Segment | Turn]] = [*before, *loop, *behind]
        ranks = range(len(self.envs))
        self.lives = [lives([v[r] for v in self.variants], self.row) for r in ranks]
        self.total_of = [
            [
                dict(zip(totals_of(p), totals_of(q), strict=True))
                for p, q in zip(v, self.variants[0], strict=True)
            ]
            for v in self.variants
        ]
        self.first_turn = len(before)
        self.totals: list[Env] = [{} for _ in self.envs]
        self.local: dict[int, list[Env]] = {}
        self.live: set[tuple[int, int]] = set()

    @property
    def ended(self) -> bool:
        return self.at == len(self.events)

    def advance(self, mail: Mail) -> bool:
        """Run the next event if its messages are there."""
        events = self.events[self.at]
        turn = events[0] if isinstance(events[0], Turn) else None
        number = 0 if turn is None else turn.microbatch
        programs = self.variants[min(number, len(self.variants) - 1)]
        envs = self.envs if turn is None else self._envs_of(turn)
        if any((m.number, number) not in mail for m in _arriving(programs[0], events[0])):
            return False
        for rank, (program, env) in enumerate(zip(programs, envs, strict=True)):
            for message in _arriving(program, events[rank]):
                env[message.ref] = _received(message, rank, mail[message.number, number])
        if turn is None and self.at >= self.first_turn:
            for env, total in zip(self.envs, self.totals, strict=True):
                env.update(total)
        run_instructions([_part(p, e) for p, e in zip(programs, events, strict=True)], envs)
        for rank, (program, env) in enumerate(zip(programs, envs, strict=True)):
            for message in _leaving(program, events[rank]):
                parts = mail.setdefault((message.number, number), {})
                piece = env[message.ref].contiguous()
                assert tuple(piece.shape) == message.local_type.shape
                for part in message.parts:
                    parts[rank, part.place] = torch.cat(
                        [_elements(piece, box).reshape(-1) for box in part.boxes]
                    )
        if turn is not None:
            self._end(turn, programs, envs)
        self.at += 1
        return True

    def _envs_of(self, turn: Turn) -> list[Env]:
        """What a turn sees: the values of its microbatch, and those outside the loop."""
        local = self.local.setdefault(turn.microbatch, [{} for _ in self.envs])
        return [
            {**env, **own, Ref("#microbatch"): torch.tensor(turn.microbatch)}
            for env, own in zip(self.envs, local, strict=True)
        ]

    def _end(self, turn: Turn, programs: Sequence[Program], envs: list[Env]) -> None:
        """Keep what later turns read, and no more; join what is added up."""
        position = self.at - self.first_turn
        backward = {i.section for i in programs[0].instructions if i.chunk == turn.chunk}
        last = max(backward & set(LOOP), key=LOOP.index, default=turn.section)
        if turn.section is Section.FORWARD:
            self.live.add((turn.chunk, turn.microbatch))
            self.most_live = max(self.most_live, len(self.live))
        if turn.section is last:
            self.live.discard((turn.chunk, turn.microbatch))
        m = turn.microbatch
        for rank, (env, total) in enumerate(zip(envs, self.totals, strict=True)):
            until = self.lives[rank].until
            for ref in self.lives[rank].joins[position]:
                first = self.total_of[min(m, len(self.variants) - 1)][rank][ref]
                total[first] = total[first] + env[ref] if first in total else env[ref]
            inner = {ref: value for ref, value in env.items() if ref not in self.envs[rank]}
            self.local[m][rank] = {
                r: v for r, v in inner.items() if until.get((r, m), -1) > position
            }
            if self.variants[0][0].microbatches == 1:  # the epilogue reads them as they are
                self.envs[rank].update({r: v for r, v in inner.items() if (r, m) not in until})


Mail = dict[tuple[int, int], dict[tuple[int, int], torch.Tensor]]
"""(transfer, microbatch) to what every (sender, receiver) has of it, flat."""


def _elements(piece: torch.Tensor, box: Box) -> torch.Tensor:
    return piece.as_strided(box.sizes, box.strides, piece.storage_offset() + box.start)


def _received(
    message: Message, rank: int, parts: dict[tuple[int, int], torch.Tensor]
) -> torch.Tensor:
    """A rank's piece of a value, from its parts."""
    kind = message.local_type
    found = torch.zeros(kind.shape, dtype=torch_dtype(kind.dtype))
    for part in message.parts:
        arrived = parts.pop((part.place, rank))
        assert arrived.dtype == found.dtype
        pieces = arrived.split([box.num_elements for box in part.boxes])
        for box, values in zip(part.boxes, pieces, strict=True):
            _elements(found, box).copy_(values.reshape(box.sizes))
    return found


def run_pipeline(
    lanes: Sequence[tuple[Sequence[Sequence[Program]], Row]], tensors: Mapping[str, torch.Tensor]
) -> list[Lane]:
    """Every lane behind its last action: each runs its row as soon as its messages are there.

    Args:
        lanes: For every lane: for every microbatch, the program of every rank; and its row.
        tensors: Whole tensor of every program input, by input name.
    """
    found = [Lane(variants, row, start(variants[0], tensors)) for variants, row in lanes]
    mail: Mail = {}
    while not all(lane.ended for lane in found):
        moved = [lane.advance(mail) for lane in found if not lane.ended]
        assert any(moved), [str(lane.events[lane.at])[:200] for lane in found if not lane.ended]
    assert not any(mail.values()), "messages nobody took"
    return found


def _arriving(program: Program, event: Segment | Turn) -> Sequence[Message]:
    if isinstance(event, Segment):
        wanted = {m.number for m in event.takes}
        return [m for m in program.receives if m.number in wanted]
    return [m for m in program.receives if (m.section, m.chunk) == event[:2]]


def _leaving(program: Program, event: Segment | Turn) -> Sequence[Message]:
    if isinstance(event, Segment):
        wanted = {m.number for m in event.gives}
        return [m for m in program.sends if m.number in wanted]
    return [m for m in program.sends if (m.section, m.chunk) == event[:2]]


def _part(program: Program, event: Segment | Turn) -> Program:
    if isinstance(event, Segment):
        wanted = {i.name for i in event.instructions}
        chosen = tuple(i for i in program.instructions if i.name in wanted)
    else:
        chosen = tuple(i for i in program.instructions if (i.section, i.chunk) == event[:2])
    return replace(program, instructions=chosen)


def _section(program: Program, section: Section) -> Program:
    chosen = tuple(i for i in program.instructions if i.section is section)
    return replace(program, instructions=chosen)
