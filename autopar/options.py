"""Options of `autopar.compile` and `autopar.plan`, as documented records with defaults."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import UnsupportedError
from autopar.ir.graph import DTYPE_BYTES
from autopar.rules.notation import RuleMaker
from autopar.rules.table import UserRule

_TINY = sys.float_info.min


def _check(
    name: str,
    value: object,
    what: str,
    least: float = 0.0,
    most: float = math.inf,
    *,
    whole: bool = False,
) -> None:
    """Refuse what is no such number.

    Raises:
        UnsupportedError: It is not, or lies outside of ``least`` to ``most``.
    """
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise UnsupportedError(f"cannot use {value!r} as {name}: give {what}")


@dataclass(frozen=True, slots=True)
class Transients:
    """Tensors of a parameter's shape and dtype that an update makes for a moment.

    Attributes:
        every: Of all parameters at once, as torch's multi-tensor kernels on CUDA do.
        each: Of one parameter at a time, as its loops do.
        left: Of the one before that, which are still there then.
    """

    every: float = 0.0
    each: float = 0.0
    left: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What the planner needs to know of an optimizer.

    Attributes:
        state_bytes: State of one parameter element, in bytes (AdamW in fp32: 8).
        step_transient_bytes: Bytes an element, of all at once, that the update needs for a moment.
        transients: The same in tensors, as torch's optimizers make them.
        moments: State tensors of the parameter's shape and dtype, as torch's optimizers make them
            (AdamW: 2); None for ``state_bytes`` whatever the dtype.
        host_bucket_elements: Half of the elements that are on the device at a time while it updates
            state that is in host memory; None if it keeps its state on the device.
    """

    state_bytes: float = 8.0
    step_transient_bytes: float = 0.0
    transients: Transients = Transients()
    moments: int | None = None
    host_bucket_elements: int | None = None

    def __post_init__(self) -> None:
        for name in ("state_bytes", "step_transient_bytes"):
            _check(f"OptimizerSpec({name}=...)", getattr(self, name), "bytes, 0 or more")
        for name, least in (("moments", 0), ("host_bucket_elements", 1)):
            value = getattr(self, name)
            if value is not None:
                what = f"a whole number, {least} or more"
                _check(f"OptimizerSpec({name}=...)", value, what, least, whole=True)

    def element_bytes(self, dtype: str) -> float:
        """State of one element of a parameter of this dtype, in bytes."""
        return self.state_bytes if self.moments is None else self.moments * DTYPE_BYTES[dtype]

    def every_bytes(self, dtype: str) -> float:
        """Bytes of an element of all such parameters at once that the update makes."""
        return self.step_transient_bytes + self.transients.every * DTYPE_BYTES[dtype]

    @property
    def at_rest(self) -> OptimizerSpec:
        """The same with nothing that the update makes for a moment."""
        return replace(self, step_transient_bytes=0.0, transients=Transients())

    def each_bytes(self, dtype: str) -> tuple[float, float]:
        """Bytes of an element of one such parameter at a time, and of the one before it."""
        size = DTYPE_BYTES[dtype]
        return self.transients.each * size, self.transients.left * size


ADAMW = OptimizerSpec(moments=2)
"""An AdamW whose kernel makes nothing, as torch's fused one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to plan and run.

    Attributes:
        seed: Seed of random ops; None takes rank 0's ``torch.initial_seed()``.
        time_limit_s: Wall-clock limit of the search, in seconds.
        memory_fraction: Part of a device's memory a plan may fill; None takes the cluster's.
        keep_model: Keep the model's own full parameters after compilation (they are released
            otherwise when the caller drops the model).
        rules: Rules of the user's ops, from ``autopar.rule``.
        check: Run debug checks: every program's collectives are proven consistent on all ranks.
        timeout_s: Longest wait for another rank before the step fails, in seconds.
    """

    seed: int | None = None
    time_limit_s: float = 120.0
    memory_fraction: float | None = None
    keep_model: bool = True
    rules: tuple[UserRule, ...] = ()
    check: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _check("Options(time_limit_s=...)", self.time_limit_s, "seconds, 0 or more")
        _check("Options(timeout_s=...)", self.timeout_s, "seconds, more than 0", _TINY)
        if self.memory_fraction is not None:
            what = "a part of the device's memory, more than 0 and at most 1"
            _check("Options(memory_fraction=...)", self.memory_fraction, what, _TINY, 1.0)


def rules_by_op(options: Options) -> Mapping[str, RuleMaker]:
    """The user's rules by op."""
    return {rule.op: rule.make for rule in options.rules}
