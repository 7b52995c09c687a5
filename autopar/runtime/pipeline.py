"""Runs one stage of a pipeline: the row of its schedule, with messages to its peers.

Every section of every chunk is a module of its own. A row is followed action by action; the
receives of the next action are posted before this one computes, and sends run beside what follows
them. What one action makes for later ones is held by microbatch until the last of them has read
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.ir.graph import Ref
from autopar.lower.program import (
    ACCUMULATE,
    Instruction,
    Program,
    Section,
)
from autopar.lower.segments import Segment, segments
from autopar.lower.unroll import Turn, lives, of_turn, totals_of
from autopar.runtime.host import Copies
from autopar.runtime.loop import Built, arrived, as_alias, join, owned, part_of, reduce_of
from autopar.runtime.mail import Mail, Route
from autopar.runtime.module import AxisGroup, Part, begun_before, build_part
from autopar.runtime.results import Sharing


@dataclass(frozen=True, kw_only=True)
class StageSource:
    """What a stage runs besides its programs.

    Attributes:
        row: Its turns, in the order of the schedule.
        route: Where its messages go.
        stage: Number of the stage.
    """

    row: tuple[Turn, ...]
    route: Route
    stage: int


def build_stage(
    programs: Sequence[Program],
    source: StageSource,
    sharing: Sharing,
    groups: tuple[AxisGroup, ...],
    device: torch.device,
) -> Built:
    """What runs a stage in a step.

    Args:
        programs: This rank's program of every microbatch (one if there is one microbatch), with
            all its chunks.
        source: Row and peers.
        sharing: Results of one stage that every rank returns.
        groups: The group of each mesh axis, in mesh order.
        device: What device constants mean.
    """
    stage = _Stage(programs, source, sharing, groups, device)
    return Built(stage.run, stage.modules, stage.doing)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some instructions as a module.

    Attributes:
        call: The module's forward.
        part: What it runs, reads and returns.
    """

    call: Callable[..., tuple[Tensor, ...]]
    part: Part

    def __call__(self, box: list[Tensor], number: int) -> dict[Ref, Tensor]:
        """Run on the values it reads, which leave the box as they are used."""
        return dict(zip(self.part.outputs, self.call(number, box), strict=True))


Env = dict[Ref, Tensor]
"""Values by name."""


class _Stage:
    """The parts of a stage and how they are strung together."""

    def __init__(
        self,
        programs: Sequence[Program],
        source: StageSource,
        sharing: Sharing,
        groups: tuple[AxisGroup, ...],
        device: torch.device,
    ) -> None:
        self.first = programs[0]
        self.source = source
        self.sharing = sharing
        self.device = device
        self.modules: tuple[fx.GraphModule, ...] = ()
        self._groups = groups
        self._copies = Copies(device)
        self._mail = Mail(programs, source.route, device)
        self._now: Turn | Section | None = None
        self._given = [Ref(entry.name) for entry in self.first.inputs]
        self._totals = totals_of(self.first)
        joins = [i for i in part_of(self.first, Section.EPILOGUE) if i.op == ACCUMULATE]
        self._reduces = {ref: reduce_of(joins, ref) for ref in self._totals}
        self._programs = list(programs)
        self._wanted = _Wanted(programs)
        self._prologue = self._steps(Section.PROLOGUE)
        built: dict[tuple[Instruction, ...], _Part] = {}
        self._bodies: dict[Turn, _Part] = {}
        for turn in source.row:
            program = self._program(turn.microbatch)
            body = tuple(i for i in program.instructions if (i.section, i.chunk) == turn[:2])
            if body not in built:
                built[body] = self._part(body)
            self._bodies[turn] = built[body]
        self._epilogue = self._steps(Section.EPILOGUE)
        self._lives = lives(programs, source.row)
        self._behind = [
            {m.ref for m in of_turn(turn, self._program(turn.microbatch).sends)} | set(joined)
            for turn, joined in zip(source.row, self._lives.joins, strict=True)
        ]
        self._total_of = [dict(zip(totals_of(p), self._totals, strict=True)) for p in programs]
        self._last_of_shared = self._last_reads()
        self._spent = self._spent_before()

    def _program(self, number: int) -> Program:
        return self._programs[min(number, len(self._programs) - 1)]

    def _steps(self, section: Section) -> list[tuple[Segment, _Part]]:
        """What runs before or behind the loop, between messages."""
        found = []
        for segment in segments(self.first, section):
            body = [as_alias(i) if i.op == ACCUMULATE else i for i in segment.instructions]
            found.append((segment, self._part(body)))
        return found

    def _part(self, instructions: Sequence[Instruction]) -> _Part:
        """Instructions as a module that returns what others, messages and results read."""
        names = {i.name for i in instructions}
        made = [Ref(i.name, n) for i in instructions for n in range(len(i.outputs))]
        outs = tuple(ref for ref in made if self._wanted.outside(ref, names))
        read = dict.fromkeys(r for i in instructions for r in i.operands if r.node not in names)
        begun = begun_before(instructions, self.first.instructions)
        part = Part(tuple(instructions), tuple(read), outs, begun)
        module = build_part(part, self._groups, self.device, self._copies)
        self.modules += (module,)
        return _Part(module.forward, part)

    def _last_reads(self) -> Mapping[Ref, int]:
        """Position of the last turn that reads each value of the prologue; kept ones are absent."""
        made = {ref for _, part in self._prologue for ref in part.part.outputs}
        made |= {m.ref for m in self.first.receives if m.section is Section.PROLOGUE}
        kept, found = self._read_behind(), {}
        for position, turn in enumerate(self.source.row):
            for ref in self._bodies[turn].part.inputs:
                if ref in made and ref not in kept:
                    found[ref] = position
        return found

    def _read_behind(self) -> set[Ref]:
        """What is read behind the loop, or sent behind the prologue."""
        found = {ref for _, part in self._epilogue for ref in part.part.inputs}
        found |= {m.ref for m in self.first.sends if m.section is not Section.PROLOGUE}
        return found | set(self.first.results)

    def _spent_before(self) -> list[set[Ref]]:
        """For every part of the prologue, what it leaves there and nothing reads any more."""
        later = self._read_behind().union(*(body.part.inputs for body in self._bodies.values()))
        later |= set(self._given)
        found = []
        for segment, part in reversed(self._prologue):
            there = {*part.part.inputs, *part.part.outputs}
            there |= {m.ref for m in (*segment.takes, *segment.gives)}
            found.append(there - later)
            later |= there
        return found[::-1]

    def doing(self) -> str:
        """What the stage runs, in words; empty between steps."""
        now, stage, stages = self._now, self.source.stage, self.source.route.stages
        if now is None:
            return ""
        if isinstance(now, Section):
            said = f"the {now} of stage {stage}"
        else:
            chunk = f"chunk {now.chunk} on " if stages.count(stage) > 1 else ""
            words = now.section.replace("_", " ")
            said = f"the {words} of {chunk}stage {stage} for microbatch {now.microbatch}"
        if (waits := self._mail.waits) is None:
            return said
        rank, other = waits
        return f"{said}, which waits for rank {rank} of stage {other},"

    def run(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Results of the step, in the order of ``Program.results``."""
        self._mail.waits = None
        try:
            with self.sharing.peers.mail.sound():
                found = self._run(dict(zip(self._given, values, strict=True)))
        except BaseException:
            self._mail.drop()
            raise
        self._now = None
        return found

    def _run(self, env: Env) -> tuple[Tensor, ...]:
        self._outside(Section.PROLOGUE, self._prologue, env)
        env |= self._loop(env)
        self._outside(Section.EPILOGUE, self._epilogue, env)
        self._mail.finish()
        return self.sharing.share([env.get(ref) for ref in self.first.results], self.device)

    def _outside(self, section: Section, steps: Sequence[tuple[Segment, _Part]], env: Env) -> None:
        """Run the prologue or the epilogue: all receives are posted first."""
        self._now = section
        for segment, _ in steps:
            self._mail.post(segment.takes, 0)
        before = section is Section.PROLOGUE
        for number, (segment, part) in enumerate(steps):
            self._mail.take(segment.takes, 0, env)
            env |= part([self._read_outside(ref, segment, env) for ref in part.part.inputs], 0)
            self._mail.give(segment.gives, 0, env)
            for ref in self._spent[number] if before else ():
                del env[ref]

    def _read_outside(self, ref: Ref, segment: Segment, env: Env) -> Tensor:
        """A value that is read outside the loop; the last segment of all takes it."""
        last = segment is self._epilogue[-1][0] and not self._wanted.leaves(ref)
        return env.pop(ref) if last else env[ref]

    def _loop(self, shared: Env) -> Env:
        """Follow the row; what the loop made, joined over the microbatches."""
        held: dict[int, Env] = {}
        totals: Env = {}
        row, mail = self.source.row, self._mail
        mail.post(of_turn(row[0], self.first.receives), row[0].microbatch)
        for position, turn in enumerate(row):
            number = turn.microbatch
            mail.let_go()
            for after in row[position + 1 : position + 2]:
                mail.post(of_turn(after, self.first.receives), after.microbatch)
            self._now = turn
            own = held.setdefault(number, {})
            mail.take(of_turn(turn, self.first.receives), number, own)
            body = self._bodies[turn]
            box = [self._read(ref, position, number, own, shared) for ref in body.part.inputs]
            own |= body(box, number)
            gives = of_turn(turn, self._program(number).sends)
            mail.give(gives, number, {**shared, **own} if gives else {})
            self._end(position, number, own, totals, shared)
        return totals | (held.get(0, {}) if self.first.microbatches == 1 else {})

    def _read(self, ref: Ref, position: int, number: int, own: Env, shared: Env) -> Tensor:
        """A value that a turn reads; its last reader takes it."""
        if ref in own:
            ends = self._lives.until.get((ref, number)) == position
            return own.pop(ref) if ends and ref not in self._behind[position] else own[ref]
        return shared.pop(ref) if self._last_of_shared.get(ref) == position else shared[ref]

    def _end(self, position: int, number: int, own: Env, totals: Env, shared: Env) -> None:
        """Join what is added up, and drop what no later turn reads."""
        until = self._lives.until
        total_of = self._total_of[min(number, len(self._programs) - 1)]
        joined = {total_of[ref]: own.pop(ref) for ref in self._lives.joins[position]}
        arrived(joined.values(), self.device)
        never = position if self.first.microbatches > 1 else len(self.source.row)
        for ref in [ref for ref in own if until.get((ref, number), never) <= position]:
            del own[ref]
        first = [ref for ref in joined if ref not in totals]
        if first:
            taken = [*shared.values(), *own.values(), *totals.values(), *self._mail.leaving]
            totals.update(zip(first, owned([joined[ref] for ref in first], taken), strict=True))
        for ref, term in joined.items():
            if ref not in first:
                join(totals[ref], term, self._reduces[ref])


class _Wanted:
    """Which values leave the part that makes them."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._readers: dict[Ref, set[str]] = {}
        for program in programs:
            for instruction in program.instructions:
                for ref in instruction.operands:
                    self._readers.setdefault(ref, set()).add(instruction.name)
        self._leaving = {m.ref for p in programs for m in p.sends}
        self._leaving |= {ref for p in programs for ref in (*totals_of(p), *p.results)}

    def outside(self, ref: Ref, names: set[str]) -> bool:
        """Whether anything but the instructions of these names reads a value that they make."""
        return ref in self._leaving or not self._readers.get(ref, names) <= names

    def leaves(self, ref: Ref) -> bool:
        """Whether a value is sent, added up or a result."""
        return ref in self._leaving
