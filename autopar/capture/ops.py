"""From the strings of a graph to torch: ops and constant arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch

from autopar.capture import (  # noqa: F401  (they define autopar's own ops)
    attention,
    attention_dropout,
    onehot,
    random,
    routed,
)
from autopar.errors import CaptureError
from autopar.ir.graph import STREAM, Arg, Const, Ref

TorchOp = Callable[..., Any]

_OWN = ("aten", "prims", "autopar")

_DENSE = frozenset(
    {
        "aten._cdist_backward.default",
        "aten._cdist_forward.default",
        "aten._embedding_bag.default",
        "aten.native_group_norm.default",
        "aten.native_group_norm_backward.default",
        "aten.view.dtype",
        "aten.view_as_complex.default",
    }
)
"""Ops of ATen that fail or go wrong on operands that are not contiguous."""


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``torch.float32`` of ``float32``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


_LASTING = ("aten", "prims", "autopar")
"""Namespaces whose ops are never defined again; users' are, where a notebook's cell runs twice."""


def _kept(find: Callable[[str], TorchOp]) -> Callable[[str], TorchOp]:
    """What finds an op once, unless it may be defined again."""
    lasting = cache(find)

    @wraps(find)
    def found(op: str) -> TorchOp:
        return (lasting if op.split(".")[0] in _LASTING else find)(op)

    return found


@_kept
def overload(op: str) -> TorchOp:
    """The op's ``OpOverload``, of ``"aten.mm.default"`` and the like.

    Raises:
        CaptureError: This process has no such op.
    """
    space, name, overload_name = op.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload_name)  # type: ignore[no-any-return]
    except AttributeError:
        raise CaptureError(
            f"cannot find op {op!r} of the captured graph: this process has not defined it; import "
            "the module that registers it"
        ) from None


def runs_on_dense(op: str) -> bool:
    """Whether operands of an op that are not contiguous are copied before it runs."""
    return op.split(".")[0] not in _OWN or op in _DENSE


@_kept
def resolve(op: str) -> TorchOp:
    """The callable that runs an op on real tensors.

    Strides are not part of a graph: views have reshape semantics, and ops that may need contiguous
    operands (the users' own ones among them) get them, since ``.contiguous()`` calls were dropped.

    Raises:
        CaptureError: This process has no such op.
    """
    if op == "aten.view.default":
        return torch.reshape
    found = overload(op)
    if not runs_on_dense(op):
        return found

    def on_contiguous(*args: Any, **kwargs: Any) -> Any:
        dense = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        named = {k: a.contiguous() if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
        return found(*dense, **named)

    return on_contiguous


def to_torch(arg: Arg, env: Mapping[Ref, Any], device: torch.device | str) -> Any:
    """The torch argument of a graph's argument.

    Args:
        arg: An argument of a node.
        env: What each value is now.
        device: What device constants mean.
    """
    if isinstance(arg, Ref):
        return env[arg]
    if isinstance(arg, tuple):
        return [to_torch(item, env, device) for item in arg]
    if isinstance(arg, Const):
        return constant_to_torch(arg, device)
    return arg


def constant_to_torch(arg: Const, device: torch.device | str) -> Any:
    """The torch object of a constant argument; every device constant means ``device``."""
    if arg.kind == "device":
        return torch.device(device)
    if arg.kind == STREAM:
        return arg.value
    if arg.kind == "complex":
        return complex(arg.value)
    return getattr(torch, arg.value)
