"""Counts the bytes of live tensor storages while a program runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.ir.graph import Ref
from autopar.lower.program import Program
from autopar.runtime.module import AxisGroup, build_module
from tests.oracles.lockstep import piece

_REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that ops made and that are still alive.

    Attributes:
        now: Bytes; ``peak`` the most at once.
        history: (op, ``now``) after every op that made a storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.history: list[tuple[str, int]] = []
        self._alive: dict[int, int] = {}
        self._given: set[int] = set()

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do not count these tensors, nor views of them."""
        self._given |= {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(str(func), result)
        return result

    def add(self, name: str, result: Any) -> None:
        """Count what an op returned."""
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if any([self._add(t.untyped_storage()) for t in tensors]):
            self.history.append((name, self.now))

    def _add(self, storage: torch.UntypedStorage) -> bool:
        key = storage._cdata
        if key in self._alive or key in self._given:
            return False
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def counted_peaks(
    programs: Sequence[Program], tensors: Mapping[str, torch.Tensor]
) -> tuple[list[LiveBytes], list[tuple[torch.Tensor, ...]]]:
    """Live bytes of every rank while the programs' FX modules run, a thread a rank.

    Args:
        programs: One a rank, in rank order.
        tensors: Whole tensor of every program input, by input name.
    """
    exchange = _Exchange(programs)
    counts = [LiveBytes() for _ in programs]
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
        counts[rank].ignore(values)
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

    def function(self, rank: int, count: LiveBytes, target: str) -> Callable[..., Any]:
        op = target.split(".")[1]

        def wait_tensor(value: torch.Tensor) -> torch.Tensor:
            self.held[rank].pop(id(value), None)
            return value

        def collective(value: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.slots[rank] = value
            self.barrier.wait()
            with _disable_current_modes():
                result = self._result(op, rank, int(rest[-1]), rest)
            self.barrier.wait()
            self.slots[rank] = None
            count.add(op, result)
            if op != "all_reduce":
                self.held[rank][id(result)] = value
            return result

        return wait_tensor if op == "wait_tensor" else collective

    def _result(self, op: str, rank: int, axis: int, rest: tuple[Any, ...]) -> torch.Tensor:
        where = self.mesh.coordinates(rank)
        places = [(*where[:axis], i, *where[axis + 1 :]) for i in range(self.mesh.sizes[axis])]
        parts = [self.slots[self.mesh.rank(place)] for place in places]
        if op == "all_gather_into_tensor":
            return torch.cat(parts)
        if op == "all_to_all_single":
            return torch.cat([part.chunk(len(parts))[where[axis]] for part in parts])
        total = _REDUCE[str(rest[0])](torch.stack(parts), 0)
        if op == "all_reduce":
            return total.contiguous()
        assert op == "reduce_scatter_tensor", op
        return total.chunk(len(parts))[where[axis]].clone()


__all__ = ["LiveBytes", "Ref", "counted_peaks"]
