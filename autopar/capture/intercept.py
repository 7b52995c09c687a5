"""Functions of torch replaced while a program runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class Intercept(TorchFunctionMode):
    """While active, calls of some functions of torch are calls of others.

    A function is replaced in ``torch.nn.functional``, where nearly all calls look it up; as a torch
    function mode this also catches calls of the original under another name.
    """

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __enter__(self) -> Intercept:
        for original, other in self._replaced.items():
            if hasattr(F, original.__name__):
                setattr(F, original.__name__, other)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for original in self._replaced:
            if hasattr(F, original.__name__):
                setattr(F, original.__name__, original)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = self._replaced.get(func, func)
        return func(*args, **kwargs) if kwargs else func(*args)
