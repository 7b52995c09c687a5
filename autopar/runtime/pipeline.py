"""Runs one stage of a pipeline: the row of its schedule, with messages to its peers.

Every section is a module of its own. A row is followed action by action; the receives of the next
action are posted before this one computes, and sends run beside what follows them. What a forward
saves is held by microbatch until its backward has read it. Messages carry tags, so their order
between two ranks does not matter where the backend knows tags.
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
    LOOP,
    Instruction,
    Message,
    Program,
    Section,
)
from autopar.lower.unroll import Turn
from autopar.runtime.groups import StagePeers
from autopar.runtime.loop import Built, as_alias, join, owned, part_of, reduce_of
from autopar.runtime.module import AxisGroup, Part, build_part


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResult:
    """A result that one stage makes and every rank returns: the loss, an entry of the dict.

    Attributes:
        index: Its place among the program's results.
        stage: Stage that makes it.
        type: Type of the whole.
    """

    index: int
    stage: int
    type: TensorType


@dataclass(frozen=True, kw_only=True)
class StageSource:
    """What a stage runs besides its programs.

    Attributes:
        row: Sections and microbatches in the order of the schedule.
        peers: Its peers.
        shared: Results of one stage that every rank returns.
        num_transfers: Values that cross stages, for tags.
    """

    row: tuple[Turn, ...]
    peers: StagePeers
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
        programs: This rank's program of every microbatch (one if there is one microbatch).
        source: Row, peers and shared results.
        groups: The group of each mesh axis, in mesh order.
        device: What device constants mean.
    """
    stage = _Stage(programs, source, groups, device)
    return Built(stage.run, stage.modules)


@dataclass(frozen=True, slots=True)
class _Part:
    """One section as a module.

    Attributes:
        call: The module's forward.
        part: What it runs, reads and returns.
    """

    call: Callable[..., tuple[Tensor, ...]]
    part: Part

    def __call__(self, env: Mapping[Ref, Tensor], number: int) -> dict[Ref, Tensor]:
        made = self.call(number, [env[ref] for ref in self.part.inputs])
        return dict(zip(self.part.outputs, made, strict=True))


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
        self._given = [Ref(entry.name) for entry in self.first.inputs]
        epilogue = part_of(self.first, Section.EPILOGUE)
        joins = [i for i in epilogue if i.op == ACCUMULATE]
        self.totals = list(dict.fromkeys(i.operands[0] for i in joins))
        self._reduces = {ref: reduce_of(joins, ref) for ref in self.totals}
        self._results = [ref for ref in self.first.results if not ref.node.startswith("#")]
        self._programs = list(programs)
        prologue = part_of(self.first, Section.PROLOGUE)
        everything = [i for p in programs for i in p.instructions]
        self._prologue = self._part(prologue, everything, Section.PROLOGUE)
        built: dict[tuple[Section, tuple[Instruction, ...]], _Part] = {}
        self._bodies: dict[Turn, _Part] = {}
        for number, program in enumerate(programs):
            for section in LOOP:
                body = part_of(program, section)
                key = (section, body)
                if key not in built:
                    built[key] = self._part(body, everything, section)
                self._bodies[section, number] = built[key]
        rest = [as_alias(i) if i.op == ACCUMULATE else i for i in epilogue]
        self._epilogue = self._part(rest, everything, Section.EPILOGUE)

    def _part(
        self,
        instructions: Sequence[Instruction],
        everything: Sequence[Instruction],
        section: Section,
    ) -> _Part:
        """A section: it reads what others made, and returns what others, sends and results read."""
        made = {Ref(i.name, n) for i in instructions for n in range(len(i.outputs))}
        wanted = {ref for i in everything if i.section is not section for ref in i.operands}
        wanted |= {m.ref for m in self.first.sends} | set(self._results) | set(self.totals)
        outs = tuple(ref for ref in sorted(made) if ref in wanted)
        read = dict.fromkeys(ref for i in instructions for ref in i.operands if ref not in made)
        part = Part(tuple(instructions), tuple(read), outs)
        module = build_part(part, self._groups, self.device)
        self.modules += (module,)
        return _Part(module.forward, part)

    def run(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Results of the step, in the order of ``Program.results``."""
        shared: dict[Ref, Tensor] = dict(zip(self._given, values, strict=True))
        sends: list[Any] = []
        self._take(self._post(Section.PROLOGUE, 0), shared)
        shared |= self._prologue(shared, 0)
        self._give(Section.PROLOGUE, 0, shared, sends)
        totals = self._loop(shared, sends)
        late = {**shared, **totals}
        self._take(self._post(Section.EPILOGUE, 0), late)
        late |= self._epilogue(late, 0)
        self._give(Section.EPILOGUE, 0, late, sends)
        for work, _ in sends:
            work.wait()
        return self._returned(late)

    def _loop(self, shared: dict[Ref, Tensor], sends: list[Any]) -> dict[Ref, Tensor]:
        """Follow the row; what the loop made, joined over the microbatches."""
        saved: dict[int, dict[Ref, Tensor]] = {}
        totals: dict[Ref, Tensor] = {}
        row = self.source.row
        posted = self._post(*row[0])
        for position, (section, number) in enumerate(row):
            arriving = posted
            posted = self._post(*row[position + 1]) if position + 1 < len(row) else []
            own = saved.setdefault(number, {})
            self._take(arriving, own)
            body = self._bodies[section, min(number, len(self._programs) - 1)]
            made = body({**shared, **own}, number)
            self._give(section, number, {**shared, **own, **made}, sends)
            own |= made
            if section is Section.BACKWARD:
                self._join(totals, own, shared)
                if self.first.microbatches > 1:
                    del saved[number]
        return totals | (saved.get(0, {}) if self.first.microbatches == 1 else {})

    def _join(
        self, totals: dict[Ref, Tensor], own: Mapping[Ref, Tensor], shared: Mapping[Ref, Tensor]
    ) -> None:
        """Add what one microbatch made to the totals."""
        terms = [own[ref] if ref in own else shared[ref] for ref in self.totals]
        if not totals:
            totals.update(zip(self.totals, owned(terms, list(shared.values())), strict=True))
            return
        for ref, term in zip(self.totals, terms, strict=True):
            join(totals[ref], term, self._reduces[ref])

    def _post(self, section: Section, number: int) -> list[tuple[Message, Tensor, Any]]:
        """Post the receives of an action."""
        posted: list[tuple[Message, Tensor, Any]] = []
        for place, message in enumerate(self.first.receives):
            if message.section is not section:
                continue
            kind = self._programs[min(number, len(self._programs) - 1)].receives[place].local_type
            buffer = torch.empty(kind.shape, dtype=torch_dtype(kind.dtype), device=self.device)
            if buffer.numel() == 0:
                posted.append((message, buffer, None))
                continue
            work = dist.irecv(
                _plain(buffer),
                src=self.source.peers.rank_of(self._rank, message.stage),
                group=self._direction(message.stage, self.source.peers.stage),
                tag=number * self.source.num_transfers + message.number,
            )
            posted.append((message, buffer, work))
        return posted

    def _take(self, posted: list[tuple[Message, Tensor, Any]], env: dict[Ref, Tensor]) -> None:
        for message, buffer, work in posted:
            if work is not None:
                work.wait()
            env[message.ref] = buffer

    def _give(
        self, section: Section, number: int, env: Mapping[Ref, Tensor], sends: list[Any]
    ) -> None:
        """Send what leaves behind an action; the buffers live until the sends are done."""
        sends[:] = [(work, held) for work, held in sends if not work.is_completed()]
        for message in self.first.sends:
            if message.section is not section:
                continue
            held = env[message.ref].contiguous()
            if held.numel() == 0:
                continue
            work = dist.isend(
                _plain(held),
                dst=self.source.peers.rank_of(self._rank, message.stage),
                group=self._direction(self.source.peers.stage, message.stage),
                tag=number * self.source.num_transfers + message.number,
            )
            sends.append((work, held))

    def _direction(self, source: int, target: int) -> Any:
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
