"""Copies to host memory and back, as programs start and await them.

On CUDA each direction has a stream of its own and host memory is pinned; a copy runs beside the
compute that was issued behind it. On CPU, host memory is the same memory: the copies are real
tensors all the same, made by ops of their own, so that whoever counts bytes can tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.capture.library import define, implement

define("to_host(Tensor value, bool dense=False) -> Tensor")
define("to_device(Tensor value) -> Tensor")
define("host_zeros(Tensor like) -> Tensor")


def _copied(value: Tensor, dense: bool = False) -> Tensor:
    layout = torch.contiguous_format if dense else torch.preserve_format
    return value.clone(memory_format=layout)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)


implement("to_host", _copied, "CPU")
implement("to_device", _copied, "CPU")
implement("host_zeros", _zeros, "CPU")

TO_HOST = torch.ops.autopar.to_host.default
TO_DEVICE = torch.ops.autopar.to_device.default
HOST_ZEROS = torch.ops.autopar.host_zeros.default
MAKE_HOST = (TO_HOST, HOST_ZEROS)
"""The ops that make tensors in host memory."""


def at_home(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy in host memory, cast; pinned where the device that it is copied to is another."""
    if device.type == "cpu":
        found: Tensor = TO_HOST(value.to(dtype))
        return found
    return value.to("cpu", dtype).pin_memory()


def computes_on(value: Tensor) -> torch.device:
    """The device that computes with a parameter or gradient, wherever it lies."""
    if isinstance(value, DTensor) and value.device.type != value.device_mesh.device_type:
        return torch.device(value.device_mesh.device_type)
    return value.device


def by_device(tensors: Iterable[Tensor]) -> Mapping[torch.device, list[Tensor]]:
    """Tensors by the device, or the host, whose memory holds them."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found


def settle(device: torch.device) -> None:
    """Wait until what was copied to host memory, and awaited by the device, can be read there."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


def host_zeros(like: Tensor, device: torch.device) -> Tensor:
    """Zeros in host memory, contiguous; pinned where the device that reads them is another."""
    if device.type == "cpu":
        zeros: Tensor = HOST_ZEROS(like)
        return zeros
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=True)


@dataclass(frozen=True, slots=True)
class _Started:
    """A copy on its way: what it reads, and when it is done (None: it is)."""

    source: Tensor
    done: torch.cuda.Event | None = None


@dataclass(eq=False)
class Copies:
    """The copies of one module or optimizer, each awaited by who starts it.

    Attributes:
        device: Where the programs compute.
    """

    device: torch.device
    _started: dict[int, _Started] = field(default_factory=dict)
    _streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)

    def to_host(self, value: Tensor, room: Tensor | None = None, *, dense: bool = False) -> Tensor:
        """Start a copy to host memory.

        Args:
            value: What is copied.
            room: Where to; None for new memory, laid out as ``value`` is.
            dense: Whether new memory is contiguous instead.
        """
        if self.device.type == "cpu":
            return self._begun(TO_HOST(value, dense) if room is None else room.copy_(value), value)
        if room is None:
            layout = torch.contiguous_format if dense else torch.preserve_format
            room = torch.empty_like(value, device="cpu", pin_memory=True, memory_format=layout)
        return self._beside("to_host", room, value)

    def gradient_to_host(self, value: Tensor) -> Tensor:
        """Start a copy of a gradient to host memory, laid out as its parameter is."""
        return self.to_host(value, dense=True)

    def to_device(self, value: Tensor) -> Tensor:
        """Start a copy of what is in host memory to the device."""
        if self.device.type == "cpu":
            return self._begun(TO_DEVICE(value), value)
        room = torch.empty_like(value, device=self.device)
        return self._beside("to_device", room, value)

    def wait(self, value: Tensor) -> Tensor:
        """What is computed from here on finds the copy done; what it read is let go."""
        started = self._started.pop(id(value))
        if started.done is not None:
            torch.cuda.current_stream(self.device).wait_event(started.done)
        return value

    def _begun(self, room: Tensor, source: Tensor) -> Tensor:
        self._started[id(room)] = _Started(source)
        return room

    def _beside(self, direction: str, room: Tensor, source: Tensor) -> Tensor:
        """Copy on the stream of a direction, behind all that was issued so far."""
        stream = self._streams.get(direction)
        if stream is None:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._streams[direction] = stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            room.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        self._started[id(room)] = _Started(source, done)
        return room
