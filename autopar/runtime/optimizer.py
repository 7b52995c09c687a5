"""What optimizers make while they step, and a watch of those that step a compiled model."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.errors import UnsupportedError
from autopar.options import OptimizerSpec, Transients
from autopar.runtime.measure import LiveBytes

MIN_DIFFERENCE = 0.01
"""Part of the predicted state bytes below which a difference is not worth a warning: AdamW also
keeps a step count of 4 bytes for every parameter."""


PROBE = 1 << 12
"""Elements of the parameters that an optimizer is tried on."""


def transients_of(make: functools.partial[Any], device_type: str) -> Transients:
    """What an optimizer makes for a moment, counted in steps on small parameters.

    Args:
        make: Makes it of parameters.
        device_type: ``cpu`` or ``cuda``, where torch's own take their multi-tensor kernels unless
            they are told otherwise.
    """
    key = f"{make.func.__module__}.{make.func.__qualname__} {make.keywords} on {device_type}"
    if key not in _KNOWN:
        _KNOWN[key] = _counted(make, device_type)
    return _KNOWN[key]


_KNOWN: dict[str, Transients] = {}


def _counted(make: functools.partial[Any], device_type: str) -> Transients:
    options = {**make.keywords, "capturable": False} if "capturable" in make.keywords else {}
    own = functools.partial(make.func, **{**make.keywords, **options})
    told = [own.keywords.get(name) for name in ("foreach", "fused", "differentiable")]
    in_loop = isinstance(own.keywords.get("lr"), Tensor) or told[0] is not None or any(told[1:])
    if device_type == "cuda" and not in_loop:
        own = functools.partial(own, foreach=True)
    one, few, more = (_made_by(own, count) / (4 * PROBE) for count in (1, 2, 4))
    every, each = round((more - few) / 2, 2), round(one, 2)
    # A loop may still hold what it made of the parameter before.
    return Transients(every, each - every, round(few, 2) - each - every)


def _made_by(make: functools.partial[Any], count: int) -> int:
    """Most bytes at once that a second step makes for some fp32 parameters of `PROBE` elements."""
    fp32 = torch.zeros(PROBE, dtype=torch.float32, device="cpu")
    parameters = [nn.Parameter(fp32.clone()) for _ in range(count)]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(fp32)
    optimizer.step()
    with LiveBytes() as made:
        optimizer.step()
    return int(made.peak_bytes)


def watch_optimizers(
    owner: object, parameters: Iterable[nn.Parameter], expected: OptimizerSpec | None
) -> None:
    """Check every optimizer of these parameters while ``owner`` lives.

    A step under a `torch.amp.GradScaler` is refused; after an optimizer's first step, state that
    takes other bytes than the plan counted on is a warning.

    Args:
        owner: Object whose end ends the watch.
        parameters: DTensors.
        expected: What the plan counted on; None to check no bytes.
    """
    watch = _Watch(parameters, expected)
    for handle in (
        register_optimizer_step_pre_hook(watch.before),
        register_optimizer_step_post_hook(watch.after),
    ):
        weakref.finalize(owner, handle.remove)


class _Watch:
    def __init__(self, parameters: Iterable[nn.Parameter], expected: OptimizerSpec | None) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._expected = expected
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._owns(optimizer) and _called_by_scaler():
            raise UnsupportedError(
                "cannot step under torch.amp.GradScaler: the gradients were computed with the "
                "loss, before it could be scaled; train in bf16 or fp32, without a scaler"
            )

        if self._owns(optimizer):
            _check_groups(optimizer)

        # What is at home on the host is updated there by any optimizer.
        away = sum(has_host_state(p) and not is_at_home(p) for p in _parameters(optimizer))
        if away and not getattr(optimizer, "updates_from_host", False):
            raise UnsupportedError(
                f"cannot step with {type(optimizer).__name__}: the plan keeps the state of {away} "
                "parameters in host memory, where it would take device memory; use "
                "autopar.optim.AdamW, or plan with optimizer= as it is"
            )

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._expected is None or optimizer in self._checked or not self._owns(optimizer):
            return
        self._checked.add(optimizer)
        # The state of a 0-d parameter cannot be told from a count of steps.
        own = [p for p in _parameters(optimizer) if id(p) in self._ids and p.ndim]
        stepped = [p for p in own if p.grad is not None]
        expected = sum(
            _local(p).numel() * self._expected.element_bytes(str(p.dtype).removeprefix("torch."))
            for p in stepped
        )
        found = sum(
            _local(value).numel() * value.element_size()
            for parameter in stepped
            for value in optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.ndim
        )
        if abs(found - expected) > MIN_DIFFERENCE * max(expected, 1.0):
            warnings.warn(
                f"the state of {type(optimizer).__name__} takes {found:,} bytes on this rank where "
                f"the plan counted on {expected:,.0f}; pass optimizer= to autopar.compile, so that "
                "the plan fits the memory",
                stacklevel=2,
            )

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._ids for parameter in _parameters(optimizer)[:1])


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups that a checkpoint of another stage left without their settings."""
    for group in optimizer.param_groups:
        if optimizer.defaults and not optimizer.defaults.keys() & group.keys():
            raise UnsupportedError(
                f"cannot step with {type(optimizer).__name__}: its parameter group lacks "
                f"{', '.join(sorted(optimizer.defaults))}, since the state that was loaded lists "
                "the parameters of another stage alone; save and load the optimizer of a pipeline "
                "with StateDictOptions(flatten_optimizer_state_dict=True)"
            )


def mark_home(
    parameter: nn.Parameter, *, state_on_host: bool = False, on_host: bool = False
) -> None:
    """Note whether the plan keeps a parameter, or its state alone, in host memory."""
    parameter._autopar_host_state = state_on_host or on_host  # type: ignore[attr-defined]
    parameter._autopar_at_home = on_host  # type: ignore[attr-defined]


def is_at_home(parameter: Tensor) -> bool:
    """Whether the plan keeps a parameter and its gradient in host memory."""
    return getattr(parameter, "_autopar_at_home", False)


def has_host_state(parameter: Tensor) -> bool:
    """Whether the plan keeps the state of a parameter in host memory."""
    return getattr(parameter, "_autopar_host_state", False)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _called_by_scaler() -> bool:
    """Whether a GradScaler is stepping an optimizer right now; torch passes no word of it."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
    return False
