"""Counts the bytes of live tensor storages while a program runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autopar.lower.program import Program
from autopar.runtime.measure import LiveBytes
from autopar.runtime.module import AxisGroup, build_module
from tests.oracles.lockstep import piece

_REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class RecordedBytes(LiveBytes):
    """Live bytes after every op that made a storage.

    Attributes:
        history: (op, bytes alive).
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[str, int]] = []
        self._num_made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._num_made
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._num_made > before:
            self.history.append((str(func), self.live_bytes))
        return result

    def add(self, name: str, result: torch.Tensor) -> None:
        """Count what a collective returned."""
        self._see(result, made=True)
        self.history.append((name, self.live_bytes))

    def _see(self, tensor: torch.Tensor, made: bool) -> None:
        self._num_made += made and tensor.untyped_storage()._cdata not in self._known
        super()._see(tensor, made)


def counted_peaks(
    programs: Sequence[Program], tensors: Mapping[str, torch.Tensor]
) -> tuple[list[RecordedBytes], list[tuple[torch.Tensor, ...]]]:
    """Live bytes of every rank while the programs' FX modules run, a thread a rank.

    Args:
        programs: One a rank, in rank order.
        tensors: Whole tensor of every program input, by input name.
    """
    exchange = _Exchange(programs)
    counts = [RecordedBytes() for _ in programs]
    results: list[Any] = [None] * len(programs)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        program = programs[rank]
        values = [piece(tensors[i.name], i.sharding, program.coordinates) for i in program.inputs]
        sizes = program.mesh.sizes
        groups = tuple(AxisGroup(str(axis), size) for axis, size in enumerate(sizes))
        module = build_module(program, groups, torch.device("cpu"))
        for node in module.graph.nodes:
            if str(node.target).startswith("_c10d_functional"):
                node.target = exchange.function(rank, counts[rank], str(node.target))
        module.recompile()
        try:
            with torch.no_grad(), counts[rank]:
                results[rank] = module.forward(*values)
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return counts, results


class _Exchange:
    """Collectives between threads: a result of its own, the operand held until the wait."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.mesh = programs[0].mesh
        self.barrier = threading.Barrier(len(programs), timeout=60)
        self.slots: list[Any] = [None] * len(programs)
        self.held: list[dict[int, torch.Tensor]] = [{} for _ in programs]

    def function(self, rank: int, count: RecordedBytes, target: str) -> Callable[..., Any]:
        op = target.split(".")[1]

        def wait_tensor(value: torch.Tensor) -> torch.Tensor:
            self.held[rank].pop(id(value), None)
            return value

        def collective(
            value: torch.Tensor, *rest: Any, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            self.slots[rank] = value
            self.barrier.wait()
            with _disable_current_modes():
                result = self._result(op, rank, int(rest[-1]), rest)
            self.barrier.wait()
            self.slots[rank] = None
            if out is None:
                count.add(op, result)
            else:
                result = out.copy_(result)
            if op != "all_reduce":
                self.held[rank][id(result)] = value
            return result

        return wait_tensor if op == "wait_tensor" else collective

    def _result(self, op: str, rank: int, axis: int, rest: tuple[Any, ...]) -> torch.Tensor:
        where = self.mesh.coordinates(rank)
        places = [(*where[:axis], i, *where[axis + 1 :]) for i in range(self.mesh.sizes[axis])]
        parts = [self.slots[self.mesh.rank(place)] for place in places]
        if op == "all_gather_into_tensor_out":
            return torch.cat(parts)
        if op == "all_to_all_single":
            return torch.cat([part.chunk(len(parts))[where[axis]] for part in parts])
        total = _REDUCE[str(rest[0])](torch.stack(parts), 0)
        if op == "all_reduce":
            return total.contiguous()
        assert op == "reduce_scatter_tensor", op
        return total.chunk(len(parts))[where[axis]].clone()
