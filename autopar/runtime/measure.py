"""What a step really takes: bytes of live tensors, and seconds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.host import MAKE_HOST


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages made while it is active.

    A storage counts from the op that made it until it is freed, whichever tensors view it;
    storages that existed before do not count. Bytes are those of the storage, not of the
    allocator's blocks.

    What copies to host memory make counts apart, also where that is the same memory.

    Attributes:
        live_bytes: Bytes alive now.
        peak_bytes: Most bytes that were alive at once.
        host_bytes: Bytes alive now in host memory; ``host_peak_bytes`` the most there were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self._known: dict[int, int] = {}
        self._on_host: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._see(value, made=False)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                if func in MAKE_HOST:
                    self._see_on_host(value)
                self._see(value, made=True)
        return result

    def _see_on_host(self, tensor: Tensor) -> None:
        """Count a storage as one of host memory."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self._known[storage._cdata] = num_bytes
        self._on_host.add(storage._cdata)
        self.host_bytes += num_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _see(self, tensor: Tensor, made: bool) -> None:
        """Count a storage if it is new; operands that are new were there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes() if made else 0
        self._known[key] = num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        num_bytes = self._known.pop(key, 0)
        if key in self._on_host:
            self._on_host.remove(key)
            self.host_bytes -= num_bytes
        else:
            self.live_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of repeated steps.

    Attributes:
        seconds: Each step's, in order, after the warm-up.
    """

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        ordered = sorted(self.seconds)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return (ordered[middle - 1] + ordered[middle]) / 2


def time_steps(step: Callable[[], Any], *, warm_up: int = 3, repeats: int = 10) -> StepTimes:
    """Time a step, to its end on the device.

    Args:
        step: Runs one step.
        warm_up: Steps before the first that counts.
        repeats: Steps that count.
    """
    for _ in range(warm_up):
        step()
    seconds = []
    for _ in range(repeats):
        _wait_for_device()
        start = time.perf_counter()
        step()
        _wait_for_device()
        seconds.append(time.perf_counter() - start)
    return StepTimes(tuple(seconds))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
