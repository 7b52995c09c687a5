"""Which module and which line every recorded op comes from, backward ops included."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

import autopar.errors
from autopar.ir.graph import Source

_SKIPPED = tuple(Path(file).resolve().parent for file in (torch.__file__, autopar.errors.__file__))


class Provenance:
    """Tracks the running module, the user's line, and which forward op a backward op belongs to.

    Autograd numbers its nodes; the number of the node that a forward op makes leads its backward
    back to the op's source.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = [""]
        self._users_code: dict[CodeType, str] = {}
        self._sources: dict[tuple[str, str], Source] = {}
        self._by_number: dict[int, Source] = {}
        self._last = Source()
        self._failed: tuple[BaseException | None, str] = (None, "")
        self._module: str | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the calls of the model's modules."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                # compiled modules call these hooks twice, which does no harm here
                warnings.filterwarnings("ignore", message="Using `torch.compile")
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(self._paths.get(id(module), self._running[-1]))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and error is not self._failed[0]:
            self._failed = (error, self._running[-1])
        self._running.pop()

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Ops that no line of the user's program asks for, made for the module of this path."""
        self._module = path
        try:
            yield
        finally:
            self._module = None

    def path(self) -> str:
        """Path of the module that runs."""
        return self._running[-1]

    def failed(self, error: BaseException) -> Source:
        """The innermost module that an error left, and the line that raised it."""
        path = self._failed[1] if self._failed[0] is error else ""
        line = ""
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            name = self._users_file_of(trace.tb_frame.f_code)
            line = f"{name}:{trace.tb_lineno}" if name else line
            trace = trace.tb_next
        return Source(path, line)

    def now(self) -> Source:
        """Source of the op that is being recorded."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            found = self._by_number.get(number)
            if found is not None:
                self._last = found
            return self._last
        key = (self._module, "") if self._module is not None else self._place()
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(*key)
        self._last = source
        self._by_number.setdefault(torch._C._autograd._get_sequence_nr() - 1, source)
        return source

    def _place(self) -> tuple[str, str]:
        return self._running[-1], self._line()

    def between_nodes(self) -> Source:
        """Source of an op that autograd runs between two of its nodes: that of the last one."""
        if torch._C._current_autograd_node() is None:
            return self._last
        return self.now()

    def _line(self) -> str:
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            name = self._users_file_of(frame.f_code)
            if name:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _users_file_of(self, code: CodeType) -> str:
        name = self._users_code.get(code)
        if name is None:
            name = self._users_code[code] = _users_file(code.co_filename)
        return name


def _users_file(filename: str) -> str:
    """Name of the file if it is neither torch's nor ours, else ``""``."""
    path = Path(filename).resolve()
    skipped = any(path.is_relative_to(place) for place in _SKIPPED)
    return "" if skipped else path.name
