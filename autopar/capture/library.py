"""The torch library of autopar's own ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str) -> None:
    """Declare ``autopar::name`` from ``name(arguments) -> results``."""
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]


def implement(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Use ``kernel`` where the op runs under a dispatch key, ``CPU`` and the like."""
    LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]


def give_shapes(name: str, fake: Callable[..., Any]) -> None:
    """Use ``fake`` for the op's result on tensors without values."""
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
