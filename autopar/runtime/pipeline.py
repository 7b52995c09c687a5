"""Runs one stage of a pipeline: the row of its schedule, with messages to its peers.

Every section of every chunk is a module of its own. A row is followed action by action; the
receives of the next action are posted before this one computes, and sends run beside what follows
them. What one action makes for later ones is held by microbatch until the last of them has read
it. Messages carry tags, so their order between two ranks does not matter where the backend knows
tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C._distributed_c10d import _resolve_process_group

from autopar.capture.ops import torch_dtype
from autopar.ir.graph import Ref, TensorType
from autopar.lower.program import (
    ACCUMULATE,
    Instruction,
    Message,
    Program,
    Section,
)
from autopar.lower.segments import Segment, segments
from autopar.lower.unroll import Turn, lives, totals_of
from autopar.runtime.groups import StagePeers
from autopar.runtime.loop import Built, as_alias, join, owned, part_of, reduce_of
from autopar.runtime.module import AxisGroup, Part, build_part


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResult:
    """A result that one stage makes and every rank returns: the loss, an entry of the dict.

    Attributes:
        index: Its place among the program's results.
        stage: Stage whose ranks make it.
        type: Type of the whole.
    """

    index: int
    stage: int
    type: TensorType


@dataclass(frozen=True, kw_only=True)
class StageSource:
    """What a stage runs besides its programs.

    Attributes:
        row: Its turns, in the order of the schedule.
        peers: Its peers.
        stages: Stage that holds each chunk of the model.
        shared: Results of one stage that every rank returns.
        num_transfers: Values that cross chunks, for tags.
    """

    row: tuple[Turn, ...]
    peers: StagePeers
    stages: tuple[int, ...]
    shared: tuple[SharedResult, ...]
    num_transfers: int


def build_stage(
    programs: Sequence[Program],
    source: StageSource,
    groups: tuple[AxisGroup, ...],
    device: torch.device,
) -> Built:
    """What runs a stage in a step.

    Args:
        programs: This rank's program of every microbatch (one if there is one microbatch), with
            all its chunks.
        source: Row, peers and shared results.
        groups: The group of each mesh axis, in mesh order.
        device: What device constants mean.
    """
    stage = _Stage(programs, source, groups, device)
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

_Posted = list[tuple[Message, Tensor, Any]]
"""Messages on their way: where they go, and what waits for them."""


class _Stage:
    """The parts of a stage and how they are strung together."""

    def __init__(
        self,
        programs: Sequence[Program],
        source: StageSource,
        groups: tuple[AxisGroup, ...],
        device: torch.device,
    ) -> None:
        self.first = programs[0]
        self.source = source
        self.device = device
        self.modules: tuple[fx.GraphModule, ...] = ()
        self._groups = groups
        self._rank = dist.get_rank()
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
        self._lives = lives(self.first, source.row)
        self._last_of_shared = self._last_reads()

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
        part = Part(tuple(instructions), tuple(read), outs)
        module = build_part(part, self._groups, self.device)
        self.modules += (module,)
        return _Part(module.forward, part)

    def _last_reads(self) -> Mapping[Ref, int]:
        """Position of the last turn that reads each value of the prologue; kept ones are absent."""
        made = {ref for _, part in self._prologue for ref in part.part.outputs}
        made |= {m.ref for m in self.first.receives if m.section is Section.PROLOGUE}
        kept = {ref for _, part in self._epilogue for ref in part.part.inputs}
        kept |= {m.ref for m in self.first.sends} | set(self.first.results)
        found = {}
        for position, turn in enumerate(self.source.row):
            for ref in self._bodies[turn].part.inputs:
                if ref in made and ref not in kept:
                    found[ref] = position
        return found

    def doing(self) -> str:
        """What the stage runs, in words; empty between steps."""
        now, stage = self._now, self.source.peers.stage
        if now is None:
            return ""
        if isinstance(now, Section):
            return f"the {now} of stage {stage}"
        chunk = f"chunk {now.chunk} on " if self.source.stages.count(stage) > 1 else ""
        words = now.section.replace("_", " ")
        return f"the {words} of {chunk}stage {stage} for microbatch {now.microbatch}"

    def run(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Results of the step, in the order of ``Program.results``."""
        shared: Env = dict(zip(self._given, values, strict=True))
        sends: list[Any] = []
        self._outside(Section.PROLOGUE, self._prologue, shared, sends)
        late = self._loop(shared, sends)
        shared |= late
        late.clear()
        self._outside(Section.EPILOGUE, self._epilogue, shared, sends)
        for work, _ in sends:
            work.wait()
        found = self._returned(shared)
        self._now = None
        return found

    def _outside(
        self,
        section: Section,
        steps: Sequence[tuple[Segment, _Part]],
        env: Env,
        sends: list[Any],
    ) -> None:
        """Run the prologue or the epilogue: all receives are posted first."""
        self._now = section
        posted = {m.number: self._post([m], 0) for segment, _ in steps for m in segment.takes}
        for segment, part in steps:
            for message in segment.takes:
                self._take(posted[message.number], env)
            env |= part([self._read_outside(ref, segment, env) for ref in part.part.inputs], 0)
            self._give(segment.gives, 0, env, sends)

    def _read_outside(self, ref: Ref, segment: Segment, env: Env) -> Tensor:
        """A value that is read outside the loop; the last segment of all takes it."""
        last = segment is self._epilogue[-1][0] and not self._wanted.leaves(ref)
        return env.pop(ref) if last else env[ref]

    def _loop(self, shared: Env, sends: list[Any]) -> Env:
        """Follow the row; what the loop made, joined over the microbatches."""
        held: dict[int, Env] = {}
        totals: Env = {}
        row = self.source.row
        posted = self._post(self._arriving(row[0]), row[0].microbatch)
        for position, turn in enumerate(row):
            arriving, number = posted, turn.microbatch
            if position + 1 < len(row):
                after = row[position + 1]
                posted = self._post(self._arriving(after), after.microbatch)
            self._now = turn
            own = held.setdefault(number, {})
            self._take(arriving, own)
            body = self._bodies[turn]
            box = [self._read(ref, position, number, own, shared) for ref in body.part.inputs]
            own |= body(box, number)
            gives = [m for m in self.first.sends if (m.section, m.chunk) == turn[:2]]
            self._give(gives, number, {**shared, **own} if gives else {}, sends)
            self._end(position, number, own, (totals, shared, sends))
        return totals | (held.get(0, {}) if self.first.microbatches == 1 else {})

    def _read(self, ref: Ref, position: int, number: int, own: Env, shared: Env) -> Tensor:
        """A value that a turn reads; its last reader takes it."""
        if ref in own:
            ends = self._lives.until.get((ref, number)) == position
            # What is sent or joined behind the turn stays for that.
            return own[ref] if not ends or self._wanted.behind_turn(ref) else own.pop(ref)
        return shared.pop(ref) if self._last_of_shared.get(ref) == position else shared[ref]

    def _end(
        self, position: int, number: int, own: Env, around: tuple[Env, Env, list[Any]]
    ) -> None:
        """Join what is added up, and drop what no later turn reads."""
        totals, shared, sends = around
        until = self._lives.until
        joined = {ref: own.pop(ref) for ref in self._lives.joins[position]}
        never = position if self.first.microbatches > 1 else len(self.source.row)
        for ref in [ref for ref in own if until.get((ref, number), never) <= position]:
            del own[ref]
        first = [ref for ref in joined if ref not in totals]
        if first:
            taken = [*shared.values(), *own.values(), *totals.values()]
            taken += [held for _, held in sends]
            totals.update(zip(first, owned([joined[ref] for ref in first], taken), strict=True))
        for ref, term in joined.items():
            if ref not in first:
                join(totals[ref], term, self._reduces[ref])

    def _arriving(self, turn: Turn) -> list[Message]:
        return [m for m in self.first.receives if (m.section, m.chunk) == turn[:2]]

    def _post(self, messages: Sequence[Message], number: int) -> _Posted:
        """Post the receives of an action."""
        posted: _Posted = []
        own = self._program(number).receives
        for message in messages:
            kind = next(m.local_type for m in own if m.number == message.number)
            buffer = torch.empty(kind.shape, dtype=torch_dtype(kind.dtype), device=self.device)
            if buffer.numel() == 0:
                posted.append((message, buffer, None))
                continue
            work = dist.irecv(
                _plain(buffer),
                src=self._peer(message),
                group=self._direction(message.peer, message.chunk),
                tag=number * self.source.num_transfers + message.number,
            )
            posted.append((message, buffer, work))
        return posted

    def _take(self, posted: _Posted, env: Env) -> None:
        while posted:
            message, buffer, work = posted.pop()
            if work is not None:
                work.wait()
            env[message.ref] = buffer

    def _give(
        self, messages: Sequence[Message], number: int, env: Mapping[Ref, Tensor], sends: list[Any]
    ) -> None:
        """Send what leaves behind an action; the buffers live until the sends are done."""
        sends[:] = [(work, held) for work, held in sends if not work.is_completed()]
        for message in messages:
            held = env[message.ref].contiguous()
            if held.numel() == 0:
                continue
            work = dist.isend(
                _plain(held),
                dst=self._peer(message),
                group=self._direction(message.chunk, message.peer),
                tag=number * self.source.num_transfers + message.number,
            )
            sends.append((work, held))

    def _peer(self, message: Message) -> int:
        """The rank at the other end of a message."""
        return self.source.peers.rank_of(self._rank, self.source.stages[message.peer])

    def _direction(self, source: int, target: int) -> Any:
        """Group of messages from one chunk to another."""
        peers = self.source.peers
        return group_named(peers.down if source < target else peers.up)

    def _returned(self, env: Mapping[Ref, Tensor]) -> tuple[Tensor, ...]:
        """Results in order; those of one stage are sent to all ranks."""
        shared = {item.index: item for item in self.source.shared}
        found = []
        for index, ref in enumerate(self.first.results):
            item = shared.get(index)
            if item is None:
                found.append(env[ref])
                continue
            mine = item.stage == self.source.peers.stage
            kind = item.type
            value = (
                env[ref].clone()
                if mine
                else torch.empty(kind.shape, dtype=torch_dtype(kind.dtype), device=self.device)
            )
            if value.numel():
                first = item.stage * self.source.peers.num_ranks
                dist.broadcast(_plain(value), src=first, group=group_named(self.source.peers.down))
            found.append(value)
        return tuple(found)


def group_named(name: Any) -> Any:
    """The open process group of a name."""
    return _resolve_process_group(name)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as backends carry it."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Wanted:
    """Which values leave the part that makes them."""

    def __init__(self, programs: Sequence[Program]) -> None:
        first = programs[0]
        self._readers: dict[Ref, set[str]] = {}
        for program in programs:
            for instruction in program.instructions:
                for ref in instruction.operands:
                    self._readers.setdefault(ref, set()).add(instruction.name)
        self._behind = {m.ref for m in first.sends} | set(totals_of(first))
        self._leaving = self._behind | set(first.results)

    def outside(self, ref: Ref, names: set[str]) -> bool:
        """Whether anything but the instructions of these names reads a value that they make."""
        return ref in self._leaving or not self._readers.get(ref, names) <= names

    def leaves(self, ref: Ref) -> bool:
        """Whether a value is sent, added up or a result."""
        return ref in self._leaving

    def behind_turn(self, ref: Ref) -> bool:
        """Whether a value is sent or joined behind the turn that reads it last."""
        return ref in self._behind
