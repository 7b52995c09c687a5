"""Ops on fake tensors, each distinct one worked out once.

Finding the shape of a result takes torch's fake mode about 0.1 ms; a model repeats few distinct
ops many times, so results are remembered by the op and the layouts of its operands, and a new
fake tensor of that layout costs a quarter of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Result:
    """Layouts of an op's outputs.

    Attributes:
        layouts: (shape, stride, dtype, storage offset) of each, None for an absent output.
        single: Whether the op returns a tensor rather than a tuple.
        view: Whether the outputs share the storage of the first operand.
    """

    layouts: tuple[tuple[Any, ...] | None, ...]
    single: bool
    view: bool


class Shapes:
    """Runs ops on fake tensors on the CPU.

    Attributes:
        fake_mode: The mode of all its tensors; it must be active.
    """

    def __init__(self) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._layouts: dict[int, Any] = {}
        self._results: dict[tuple[Any, ...], _Result | None] = {}

    def layout(self, tensor: Tensor) -> Any:
        """All of a tensor that decides results; the caller keeps the tensor alive."""
        found = self._layouts.get(id(tensor))
        if found is None:
            found = self._layouts[id(tensor)] = _layout(tensor)
        return found

    def like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> FakeTensor:
        """A fake tensor of the same shape, strides and, if no other is given, dtype."""
        return self._fake((tensor.shape, tensor.stride(), dtype or tensor.dtype, 0), None)

    def forget(self, tensors: Any) -> None:
        """These tensors may have changed their layout."""
        for tensor in tensors:
            self._layouts.pop(id(tensor), None)

    def run(self, func: Any, args: Any, kwargs: Any, key: list[Any] | None) -> Any:
        """The op's result.

        Args:
            func: The op.
            args: Its arguments.
            kwargs: Its keyword arguments.
            key: All that decides the result; None to run it in any case.
        """
        if key is None:
            return func(*args, **kwargs)
        found = tuple(key)
        known = self._results.get(found)
        if known is not None:
            return self._again(known, args)
        result = func(*args, **kwargs)
        if found not in self._results:
            self._results[found] = _remember(func, args, result)
        return result

    def _again(self, known: _Result, args: Any) -> Any:
        storage = args[0].untyped_storage() if known.view else None
        made = [None if like is None else self._fake(like, storage) for like in known.layouts]
        return made[0] if known.single else tuple(made)

    def _fake(self, like: tuple[Any, ...], storage: Any) -> FakeTensor:
        shape, stride, dtype, offset = like
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if storage is not None:
                elem.set_(storage, offset, shape, stride)
        return FakeTensor(self.fake_mode, elem, _CPU)


def _layout(tensor: Tensor) -> Any:
    if getattr(tensor, "constant", None) is not None or tensor.layout != torch.strided:
        return object()  # equal to nothing: fake mode computes with constants
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _remember(func: Any, args: Any, result: Any) -> _Result | None:
    """The result's layouts; None if they are not all there is to it."""
    single = isinstance(result, Tensor)
    outputs = (result,) if single else result
    if not isinstance(outputs, (tuple, list)):
        return None
    layouts: list[tuple[Any, ...] | None] = []
    for output in outputs:
        if output is None:
            layouts.append(None)
            continue
        plain = type(output) is FakeTensor and not (output.is_conj() or output.is_neg())
        if not plain or output.constant is not None or any(output is arg for arg in args):
            return None
        layouts.append((output.shape, output.stride(), output.dtype, output.storage_offset()))
    view = bool(getattr(func, "is_view", False))
    if view and not isinstance(args[0], FakeTensor):
        return None
    return _Result(tuple(layouts), single, view)
