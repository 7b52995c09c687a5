"""Optimizers that can keep their state in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from autopar.errors import UnsupportedError
from autopar.runtime.host import Copies, computes_on, host_zeros, settle
from autopar.runtime.optimizer import has_host_state, is_at_home
from autopar.runtime.params import lying_as
from cost_models.memory import PIECES, piece_elements

BUCKET_ELEMENTS = 1 << 24
"""Elements of a bucket: the state of twice as many is on the device at once."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """Elements of a parameter, their gradient and their state.

    Attributes:
        parameter: Where the parameter lies; ``gradient`` lies there too.
        moments: Of the state.
        step: Steps so far.
        at_home: Whether parameter and gradient are in host memory, as the moments are.
    """

    parameter: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    step: Tensor
    at_home: bool = False

    @property
    def away(self) -> tuple[Tensor, ...]:
        """What is brought to the device for an update."""
        return (*self.moments, self.parameter, self.gradient) if self.at_home else self.moments

    @property
    def changed(self) -> tuple[Tensor, ...]:
        """The part of it that the update changes."""
        return self.away[:3]

    def brought(self, here: Sequence[Tensor]) -> _Slice:
        """The same with ``away`` on the device, and a count of steps of its own."""
        first, second, *rest = here
        parameter, gradient = rest or (self.parameter, self.gradient)
        return _Slice(parameter, gradient, (first, second), self.step.clone(), self.at_home)


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with the state of some parameters in host memory.

    The plan says of which parameters; of others it is on the device. What is in host memory is
    updated in pieces, three of which take what two buckets do: two moments of a piece (and the
    parameter and its gradient, if their home is there) come to the device while the piece before is
    updated and the one before that goes back. Every element is computed as torch's AdamW does.
    State dicts are those of torch's AdamW.
    """

    updates_from_host = True
    """That it can follow a plan with state in host memory."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        """Take the parameters of a compiled model, or any others.

        Args:
            params: As of torch's AdamW.
            lr: Learning rate.
            betas: Decay of the two moments.
            eps: Added to the root of the second.
            weight_decay: Part of a parameter, times the learning rate, that a step takes off.
            maximize: Step up the gradient.
            bucket_elements: Half of the elements whose state is on the device at once.
        """
        if not isinstance(bucket_elements, int) or bucket_elements < 1:
            raise UnsupportedError(
                f"cannot use {bucket_elements!r} as bucket_elements: it is a number of elements, 1 "
                "or more"
            )
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
        self.bucket_elements = bucket_elements
        self._copies: dict[torch.device, Copies] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            for parameter in stepped:
                self._begin(parameter)
            here = [_whole(p, self.state[p]) for p in stepped if not has_host_state(p)]
            if here:
                _update(group, here)
            away = [p for p in stepped if has_host_state(p)]
            for device, own in _by_device(away).items():
                items = [_whole(p, self.state[p]) for p in own]
                size = piece_elements(self.bucket_elements)
                self._update_away(group, _pieces(items, size), device)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As of torch's AdamW: moments lie as their parameters do."""
        found = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in found["state"].items():
            parameter = parameters[number]
            for name in MOMENTS:
                if isinstance(parameter, DTensor) and not isinstance(state[name], DTensor):
                    found["state"][number] = state = {
                        **state,
                        name: _like(parameter, state[name].to(computes_on(parameter))),
                    }
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch's AdamW.

        Raises:
            UnsupportedError: Of a group with ``amsgrad``, whose third moment it does not have.
        """
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch's AdamW; moments go where their parameters lie, or into host memory.

        Args:
            state_dict: Moments are DTensors of any placements, or whole tensors.

        Raises:
            UnsupportedError: It was saved by an AdamW with ``amsgrad``.
        """
        for group in state_dict["param_groups"]:
            _check_group(group)
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in MOMENTS:
                if isinstance(parameter, DTensor):
                    state[name] = lying_as(parameter, state[name])
                if has_host_state(parameter):
                    given = _local(state[name])
                    state[name] = _on_host(parameter)
                    _local(state[name]).copy_(given)

    def _begin(self, parameter: Tensor) -> None:
        """Make the state of a parameter that has none."""
        state = self.state[parameter]
        if state:
            return
        state["step"] = torch.tensor(0.0)
        for name in MOMENTS:
            if has_host_state(parameter):
                state[name] = _on_host(parameter)
            else:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _update_away(
        self, group: dict[str, Any], pieces: Sequence[Sequence[_Slice]], device: torch.device
    ) -> None:
        """Update pieces, each while the next one comes and the one before it leaves."""
        copies = self._copies.setdefault(device, Copies(device))
        coming = _fetched(copies, pieces[0])
        leaving: deque[list[Tensor]] = deque()
        for number, piece in enumerate(pieces):
            here = [item.brought([copies.wait(value) for value in own]) for item, own in coming]
            # The next one takes the place of the last but one.
            while len(leaving) > PIECES - 2:
                _landed(copies, leaving.popleft())
            coming = _fetched(copies, pieces[number + 1]) if number + 1 < len(pieces) else []
            _update(group, here)
            leaving.append(_returned(copies, piece, here))
            del here
        while leaving:
            _landed(copies, leaving.popleft())
        if any(item.at_home for piece in pieces for item in piece):
            settle(device)
        for step in {id(s.step): s.step for piece in pieces for s in piece}.values():
            step += 1


MOMENTS = ("exp_avg", "exp_avg_sq")


def _check_group(group: Mapping[str, Any]) -> None:
    """Refuse what torch's AdamW would do to a group and this one does not."""
    if group.get("amsgrad"):
        raise UnsupportedError(
            "cannot update parameters with amsgrad=True: autopar.optim.AdamW keeps no largest "
            "second moment; use torch.optim.AdamW and plan with it, or amsgrad=False"
        )


def _by_device(parameters: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Parameters by the device that computes with them."""
    found: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(computes_on(parameter), []).append(parameter)
    return found


def _fetched(copies: Copies, piece: Sequence[_Slice]) -> list[tuple[_Slice, list[Tensor]]]:
    """What of a piece is in host memory, on its way to the device."""
    return [(item, [copies.to_device(value) for value in item.away]) for item in piece]


def _returned(copies: Copies, piece: Sequence[_Slice], here: Sequence[_Slice]) -> list[Tensor]:
    """What the update of a piece changed, on its way to where it came from."""
    return [
        copies.to_host(value, room)
        for item, now in zip(piece, here, strict=True)
        for room, value in zip(item.changed, now.changed, strict=True)
    ]


def _landed(copies: Copies, leaving: Iterable[Tensor]) -> None:
    """Wait for a piece that leaves, and let it go."""
    for room in leaving:
        copies.wait(room)


def _whole(parameter: Tensor, state: dict[str, Any]) -> _Slice:
    """All of a parameter on this rank."""
    assert parameter.grad is not None
    first, second = (_local(state[name]) for name in MOMENTS)
    own, gradient = _local(parameter), _local(parameter.grad)
    return _Slice(own, gradient, (first, second), state["step"], is_at_home(parameter))


def _pieces(items: Sequence[_Slice], num_elements: int) -> list[list[_Slice]]:
    """The parameters one after the other, cut into pieces of at most so many elements."""
    pieces: list[list[_Slice]] = [[]]
    room = num_elements
    for item in items:
        parameter, gradient = item.parameter.view(-1), item.gradient.reshape(-1)
        first, second = (moment.view(-1) for moment in item.moments)
        start = 0
        while start < parameter.numel():
            if room == 0:
                pieces.append([])
                room = num_elements
            own = slice(start, start + room)
            moments = (first[own], second[own])
            part = _Slice(parameter[own], gradient[own], moments, item.step, item.at_home)
            pieces[-1].append(part)
            room -= part.parameter.numel()
            start += part.parameter.numel()
    return [piece for piece in pieces if piece]


def _update(group: dict[str, Any], items: Sequence[_Slice]) -> None:
    """Torch's own kernel on plain tensors; it counts the steps."""
    beta1, beta2 = group["betas"]
    adamw(
        [item.parameter for item in items],
        [item.gradient for item in items],
        [item.moments[0] for item in items],
        [item.moments[1] for item in items],
        [],
        [item.step for item in items],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _on_host(parameter: Tensor) -> Tensor:
    """Zeros in host memory in the place of a parameter: a DTensor where one can lie there."""
    device = computes_on(parameter)
    zeros = host_zeros(_local(parameter), device)
    return _like(parameter, zeros) if device.type == "cpu" else zeros


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's piece, lying as a parameter does."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
