"""Runs the stages of a pipeline as processes would, each in a thread, over a wire of our own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.lower.program import Program
from autopar.lower.unroll import Row, Turn
from autopar.runtime import mail, pipeline, results
from autopar.runtime.groups import MailGroups, StagePeers
from autopar.runtime.mail import Route
from autopar.runtime.measure import LiveBytes
from autopar.runtime.module import AxisGroup
from autopar.runtime.pipeline import StageSource
from autopar.runtime.results import Sharing
from tests.oracles.lockstep import piece

WAIT_S = 60.0


@dataclass
class Wire:
    """Sends that end at once, and receives that wait for them.

    Attributes:
        events: What every rank did, in order: ``(what, ...)``.
    """

    num_ranks: int
    arrived: dict[Any, Tensor] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    place: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.events: list[list[tuple[Any, ...]]] = [[] for _ in range(self.num_ranks)]

    def get_rank(self) -> int:
        return int(self.place.rank)

    def note(self, *event: Any) -> None:
        self.events[self.get_rank()].append(event)

    def isend(self, tensor: Tensor, dst: int, group: str, tag: int) -> _Done:
        self.note("send", tag)
        with _disable_current_modes():
            self._put((self.get_rank(), dst, group, tag), tensor.clone())
        return _Done()

    def irecv(self, buffer: Tensor, src: int, group: str, tag: int) -> _Coming:
        self.note("receive", tag)
        return _Coming(self, buffer, (src, self.get_rank(), group, tag))

    def broadcast(self, tensor: Tensor, src: int, group: str) -> None:
        rank = self.get_rank()
        with _disable_current_modes():
            for other in range(self.num_ranks) if rank == src else ():
                self._put(("result", other, tuple(tensor.shape)), tensor.clone())
            tensor.copy_(self.take(("result", rank, tuple(tensor.shape))))

    def _put(self, key: Any, tensor: Tensor) -> None:
        with self.changed:
            assert key not in self.arrived, key
            self.arrived[key] = tensor
            self.changed.notify_all()

    def take(self, key: Any) -> Tensor:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.arrived, WAIT_S), key
            return self.arrived.pop(key)


class _Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


@dataclass
class _Coming:
    wire: Wire
    buffer: Tensor
    key: Any

    def wait(self) -> None:
        found = self.wire.take(self.key)
        self.wire.note("take", self.key[-1])
        with _disable_current_modes():
            self.buffer.copy_(found)


@contextmanager
def wired(wire: Wire) -> Iterator[None]:
    """The runtime's messages on our wire."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mail, "dist", wire)
        for module in (mail, results):
            patch.setattr(module, "dist", wire)
            patch.setattr(module, "group_named", lambda name: name)
        yield


def run_stages(
    lanes: Sequence[tuple[Sequence[Program], Row]],
    stages: tuple[int, ...],
    tensors: Mapping[str, Tensor],
) -> tuple[list[LiveBytes], list[list[tuple[Any, ...]]]]:
    """Live bytes of every stage, and what it did in which order; one rank a stage.

    Args:
        lanes: For every stage: the program of every microbatch, and its row.
        stages: Stage of every chunk.
        tensors: Whole tensor of every program input, by input name.
    """
    wire = Wire(len(lanes))
    counts = [LiveBytes() for _ in lanes]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        programs, row = lanes[rank]
        wire.place.rank = rank
        peers = StagePeers(rank, tuple(range(len(lanes))), MailGroups("down", "up"))
        count = 1 + max((m.number for p, _ in lanes for m in p[0].sends), default=0)
        route = Route(peers=peers, stages=stages, num_transfers=count)
        source = StageSource(row=tuple(row), route=route, stage=rank)
        sharing = Sharing(peers=peers, results=())
        groups = tuple(AxisGroup("", 1) for _ in programs[0].mesh.sizes)
        values = [piece(tensors[i.name], i.sharding, (0,)) for i in programs[0].inputs]
        try:
            stage = pipeline._Stage(list(programs), source, sharing, groups, torch.device("cpu"))
            _note_turns(stage, wire)
            with torch.no_grad(), counts[rank]:
                stage.run(*values)
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            errors.append(error)

    with wired(wire):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(lanes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return counts, wire.events


def _note_turns(stage: Any, wire: Wire) -> None:
    """Have every turn of a stage noted."""
    for turn, body in stage._bodies.items():
        stage._bodies[turn] = _Noted(body, turn, wire)


@dataclass
class _Noted:
    body: Any
    turn: Turn
    wire: Wire

    @property
    def part(self) -> Any:
        return self.body.part

    def __call__(self, box: list[Tensor], number: int) -> Any:
        self.wire.note("run", self.turn)
        return self.body(box, number)
