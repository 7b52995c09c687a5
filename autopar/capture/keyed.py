"""Eager runs that draw the numbers of compiled steps: the one-process reference of every plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.checkpoints import without_checkpoints
from autopar.capture.draws import Draws, Table
from autopar.capture.intercept import Intercept
from autopar.capture.provenance import Provenance
from autopar.capture.random import make_key
from autopar.capture.refusals import refusal_of
from autopar.capture.sdpa import SDPA, Attention
from autopar.errors import UnsupportedError


class _EagerDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs keyed ops in place of ATen's random ones."""

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = self._table.get(func)
        made = NotImplemented if found is None else found(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if torch.Tag.nondeterministic_seeded in func.tags:
            refusal = refusal_of(func)
            reason = refusal(*args) if refusal is not None else ""
            if reason:
                raise UnsupportedError(f"cannot run {str(func)!r} with a key: {reason}")
        return func(*args, **kwargs)


@contextmanager
def keyed(model: nn.Module, seed: int, step: int) -> Iterator[None]:
    """Have the eager model draw the numbers that its compiled step draws.

    Args:
        model: Its module paths name what is drawn.
        seed: As ``options.seed``.
        step: Number of the training call, from 0.
    """
    provenance = Provenance(model)
    draws = Draws(make_key(seed, step), provenance.path)
    attention = Attention(draws)

    def eager_attention(*args: Any, **kwargs: Any) -> Any:
        if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0:
            return attention(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return SDPA(*args, **kwargs)

    intercept = Intercept({F.dropout: draws.dropout, SDPA: eager_attention})
    with provenance.watch(), intercept, _EagerDraws(draws.table()), without_checkpoints():
        yield
