"""torch's activation checkpoints switched off: what to recompute is for the planner to decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as checkpoints


class _NoCheckpoint:
    """In place of torch's reentrant checkpoint: the function's call, and nothing else."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _around_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what torch's other checkpoint does before and behind the function's call."""
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Run checkpointed functions once, in the forward.

    Reentrant checkpoints cannot be differentiated by ``autograd.grad``, and what runs again in the
    backward would draw its random numbers under other names.
    """
    reentrant = checkpoints.CheckpointFunction
    other = checkpoints._checkpoint_without_reentrant_generator
    checkpoints.CheckpointFunction = _NoCheckpoint  # type: ignore[misc, assignment]
    checkpoints._checkpoint_without_reentrant_generator = _around_nothing
    try:
        yield
    finally:
        checkpoints.CheckpointFunction = reentrant  # type: ignore[misc]
        checkpoints._checkpoint_without_reentrant_generator = other
