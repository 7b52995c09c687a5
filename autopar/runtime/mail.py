"""Messages between the stages of a pipeline: receives posted early, sends waited for late.

Of a value every rank sends each rank that needs some of it one message: from where the elements
lie, if they follow each other in memory, else from a buffer into which they are gathered; they
arrive likewise. Messages carry tags, so their order between two ranks does not matter where the
backend knows tags; it is the same on both sides all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.capture.ops import torch_dtype
from autopar.ir.graph import Ref
from autopar.lower.pieces import Box, Part
from autopar.lower.program import Message, Program
from autopar.runtime.groups import StagePeers, group_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where messages go.

    Attributes:
        peers: This rank's peers.
        stages: Stage that holds each chunk of the model.
        num_transfers: Values that cross chunks, for tags.
    """

    peers: StagePeers
    stages: tuple[int, ...]
    num_transfers: int


@dataclass(frozen=True, slots=True)
class _Coming:
    """One rank's part of a message that was posted.

    Attributes:
        rank: Which rank sends it.
        work: Its receive.
        buffer: Where it arrives, until it is taken out; None where it will lie.
        part: Which elements of the piece it holds.
    """

    rank: int
    work: Any
    buffer: Tensor | None
    part: Part


class Mail:
    """A rank's messages of a step.

    Attributes:
        waits: Rank and stage of the message that is waited for, if any.
    """

    def __init__(self, programs: Sequence[Program], route: Route, device: torch.device) -> None:
        """Take what the messages need.

        Args:
            programs: This rank's program of every microbatch.
            route: Where messages go.
            device: Where they arrive.
        """
        self.waits: tuple[int, int] | None = None
        self._receives = [{m.number: m for m in p.receives} for p in programs]
        self._route = route
        self._device = device
        self._posted: dict[tuple[int, int], tuple[Tensor, list[_Coming]]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def let_go(self) -> None:
        """Let go of what has been sent meanwhile."""
        self._sent[:] = [(work, held) for work, held in self._sent if not work.is_completed()]

    def post(self, messages: Sequence[Message], microbatch: int) -> None:
        """Post the receives of messages; what has been sent meanwhile is let go of."""
        self.let_go()
        own = self._receives[min(microbatch, len(self._receives) - 1)]
        for message in (own[m.number] for m in messages):
            kind = message.local_type
            arriving = sum(part.num_elements for part in message.parts)
            make = torch.empty if arriving == kind.num_elements else torch.zeros
            piece = make(kind.shape, dtype=torch_dtype(kind.dtype), device=self._device)
            coming = [self._posted_part(message, part, microbatch, piece) for part in message.parts]
            self._posted[message.number, microbatch] = piece, coming

    def _posted_part(self, message: Message, part: Part, microbatch: int, piece: Tensor) -> _Coming:
        buffer = None if part.is_contiguous else piece.new_empty(part.num_elements)
        rank = self._rank(message, part)
        work = dist.irecv(
            plain(_elements(piece, part.boxes[0]) if buffer is None else buffer),
            src=rank,
            group=self._direction(message.peer, message.chunk),
            tag=self._tag(message, microbatch),
        )
        return _Coming(rank, work, buffer, part)

    def take(self, messages: Sequence[Message], microbatch: int, env: dict[Ref, Tensor]) -> None:
        """Wait for messages that were posted."""
        for message in messages:
            piece, coming = self._posted[message.number, microbatch]
            for one in coming:
                self.waits = one.rank, self._route.stages[message.peer]
                one.work.wait()
                self.waits = None
                if one.buffer is not None:
                    _scatter(one.buffer, piece, one.part)
            del self._posted[message.number, microbatch]
            env[message.ref] = piece

    def give(self, messages: Sequence[Message], microbatch: int, env: Mapping[Ref, Tensor]) -> None:
        """Send messages; what they hold lives until they are done."""
        for message in messages:
            piece = env[message.ref].contiguous() if message.parts else None
            for part in message.parts:
                assert piece is not None
                held = _gathered(piece, part)
                work = dist.isend(
                    plain(held),
                    dst=self._rank(message, part),
                    group=self._direction(message.chunk, message.peer),
                    tag=self._tag(message, microbatch),
                )
                self._sent.append((work, held))

    @property
    def leaving(self) -> list[Tensor]:
        """What is being sent: nobody may write into it."""
        return [held for _, held in self._sent]

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._sent[-1][0].wait()
            self._sent.pop()

    def drop(self) -> None:
        """Let go of everything: what waits holds its group open, and with it the other ranks."""
        self._posted.clear()
        self._sent.clear()

    def _rank(self, message: Message, part: Part) -> int:
        """The rank at the other end of a part of a message."""
        stage = self._route.stages[message.peer]
        return self._route.peers.first_ranks[stage] + part.place

    def _tag(self, message: Message, microbatch: int) -> int:
        return microbatch * self._route.num_transfers + message.number

    def _direction(self, source: int, target: int) -> Any:
        """Group of messages from one chunk to another."""
        groups = self._route.peers.mail
        return group_named(groups.down if source < target else groups.up)


def _elements(piece: Tensor, box: Box) -> Tensor:
    """A box of a contiguous piece, as a view."""
    return piece.as_strided(box.sizes, box.strides, piece.storage_offset() + box.start)


def _gathered(piece: Tensor, part: Part) -> Tensor:
    """What a part holds of a piece, contiguous: where it lies, or a copy."""
    if part.is_contiguous:
        return _elements(piece, part.boxes[0])
    return torch.cat([_elements(piece, box).reshape(-1) for box in part.boxes])


def _scatter(buffer: Tensor, piece: Tensor, part: Part) -> None:
    """Put a part that has arrived where it lies in the piece."""
    sizes = [box.num_elements for box in part.boxes]
    for box, values in zip(part.boxes, torch.split(buffer, sizes), strict=True):
        _elements(piece, box).copy_(values.view(box.sizes))


def plain(tensor: Tensor) -> Tensor:
    """The tensor as backends carry it."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
