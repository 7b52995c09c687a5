"""Results that the ranks of one stage make and all ranks return.

The loss, entries of the dict and new values of buffers are whole on every rank, whichever stage
makes them and whether or not a rank has a stage at all. What a stage makes of one dtype travels
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.capture.ops import torch_dtype
from autopar.ir.graph import TensorType
from autopar.lower.program import Program
from autopar.runtime.groups import StagePeers, group_named
from autopar.runtime.loop import Built
from autopar.runtime.mail import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResult:
    """A result that one stage makes and every rank has: the loss, an entry of the dict, a buffer.

    Attributes:
        index: Its place among the program's results.
        stage: Stage whose ranks make it.
        type: Type of the whole.
    """

    index: int
    stage: int
    type: TensorType


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How results reach every rank.

    Attributes:
        peers: The ranks of every stage.
        results: What is shared, in the order of the program's results.
    """

    peers: StagePeers
    results: tuple[SharedResult, ...]

    def share(self, found: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, ...]:
        """All results, from those that this rank has; every rank must call it.

        Args:
            found: This rank's results, None where another stage makes one.
            device: Where those of others arrive.
        """
        together: dict[tuple[int, str], list[SharedResult]] = {}
        for item in self.results:
            if item.type.num_elements:
                together.setdefault((item.stage, item.type.dtype), []).append(item)
        arrived = list(found)
        for (stage, dtype), items in together.items():
            sizes = [item.type.num_elements for item in items]
            if stage == self.peers.stage:
                flat = torch.cat([_there(found[item.index]).reshape(-1) for item in items])
            else:
                flat = torch.empty(sum(sizes), dtype=torch_dtype(dtype), device=device)
            first = self.peers.first_ranks[stage]
            dist.broadcast(plain(flat), src=first, group=group_named(self.peers.mail.down))
            for item, piece in zip(items, torch.split(flat, sizes), strict=True):
                arrived[item.index] = piece.view(item.type.shape)
        for item in self.results:
            if not item.type.num_elements and arrived[item.index] is None:
                kind = item.type
                empty = torch.empty(kind.shape, dtype=torch_dtype(kind.dtype), device=device)
                arrived[item.index] = empty
        return tuple(map(_there, arrived))


def _there(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def shared(built: Built, sharing: Sharing, device: torch.device) -> Built:
    """A step without a pipeline whose results go on to idle ranks."""

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        found = built.run(*values)
        with sharing.peers.mail.sound():
            return sharing.share(found, device)

    return Built(run, built.modules, built.doing)


def build_idle(
    program: Program, parameters: Sequence[Tensor], sharing: Sharing, device: torch.device
) -> Built:
    """What an idle rank runs in a step: it takes the results, and its gradients have no elements.

    Args:
        program: Without instructions.
        parameters: This rank's pieces of the parameters that get a gradient.
        sharing: What it takes.
        device: Where it arrives.
    """
    first = (program.loss is not None) + len(program.aux)
    none: list[None] = [None]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        nothing = [torch.zeros_like(piece) for piece in parameters]
        with sharing.peers.mail.sound():
            return sharing.share([*none * first, *nothing, *none * len(program.mutations)], device)

    return Built(run, ())
