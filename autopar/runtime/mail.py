"""Messages between the stages of a pipeline: receives posted early, sends waited for late.

Messages carry tags, so their order between two ranks does not matter where the backend knows tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from autopar.capture.ops import torch_dtype
from autopar.ir.graph import Ref
from autopar.lower.program import Message, Program
from autopar.runtime.groups import StagePeers


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


class Mail:
    """A rank's messages of a step.

    Attributes:
        waits: The message that is waited for, if any.
    """

    def __init__(self, programs: Sequence[Program], route: Route, device: torch.device) -> None:
        """Take what the messages need.

        Args:
            programs: This rank's program of every microbatch.
            route: Where messages go.
            device: Where they arrive.
        """
        self.waits: Message | None = None
        self._types = [{m.number: m.local_type for m in p.receives} for p in programs]
        self._route = route
        self._device = device
        self._rank = dist.get_rank()
        self._posted: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def post(self, messages: Sequence[Message], microbatch: int) -> None:
        """Post the receives of messages; what has been sent meanwhile is let go of."""
        self._sent[:] = [(work, held) for work, held in self._sent if not work.is_completed()]
        types = self._types[min(microbatch, len(self._types) - 1)]
        for message in messages:
            kind = types[message.number]
            buffer = torch.empty(kind.shape, dtype=torch_dtype(kind.dtype), device=self._device)
            work = None
            if buffer.numel():
                work = dist.irecv(
                    plain(buffer),
                    src=self.peer(message),
                    group=self._direction(message.peer, message.chunk),
                    tag=self._tag(message, microbatch),
                )
            self._posted[message.number, microbatch] = buffer, work

    def take(self, messages: Sequence[Message], microbatch: int, env: dict[Ref, Tensor]) -> None:
        """Wait for messages that were posted."""
        for message in messages:
            key = message.number, microbatch
            if self._posted[key][1] is not None:
                self.waits = message
                self._posted[key][1].wait()
                self.waits = None
            env[message.ref] = self._posted.pop(key)[0]

    def give(self, messages: Sequence[Message], microbatch: int, env: Mapping[Ref, Tensor]) -> None:
        """Send messages; what they hold lives until they are done."""
        for message in messages:
            held = env[message.ref].contiguous()
            if held.numel():
                work = dist.isend(
                    plain(held),
                    dst=self.peer(message),
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

    def peer(self, message: Message) -> int:
        """The rank at the other end of a message."""
        return self._route.peers.rank_of(self._rank, self._route.stages[message.peer])

    def _tag(self, message: Message, microbatch: int) -> int:
        return microbatch * self._route.num_transfers + message.number

    def _direction(self, source: int, target: int) -> Any:
        """Group of messages from one chunk to another."""
        peers = self._route.peers
        return group_named(peers.down if source < target else peers.up)


def group_named(name: Any) -> Any:
    """The open process group of a name."""
    return _resolve_process_group(name)


def plain(tensor: Tensor) -> Tensor:
    """The tensor as backends carry it."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
