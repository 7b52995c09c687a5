"""In which dtypes a model is stored, computed, and its gradients are summed.

The casts are part of the captured step: a parameter enters in the dtype it is stored in, one cast
of it serves all its uses, and the floating-point inputs of the model are cast where it is called.
Gradients come back in the stored dtype through the casts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import UnsupportedError
from autopar.ir.graph import PARAMETER, Graph, Node, Phase, Ref, TensorType

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "float64": torch.float64,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""The dtypes that are cast, by the names people write."""

_CAST = frozenset(DTYPES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In which dtypes a model is stored, computed and summed.

    A dtype is given as ``torch.bfloat16`` or as text (``"bf16"``, ``"bfloat16"``) and kept as the
    former. Only float64, float32 and bfloat16 tensors are cast; integers, booleans, complex
    numbers and buffers stay as they are.

    Attributes:
        param: Stored parameters: what ``parallel.parameters()`` and checkpoints hold; None as the
            model's are.
        compute: What the model computes in: parameters where they are used, and the floating-point
            inputs of the model; None as ``param``.
        grad: Gradients in ``.grad``; None as the parameter is stored.
        reduce: The narrowest dtype in which the terms of a gradient may be summed, over ranks and
            over microbatches; None for the wider of stored and computed.
        state: Optimizer state; None as the parameter is stored.

    Raises:
        UnsupportedError: A field names no dtype, or float16.
    """

    param: torch.dtype | str | None = None
    compute: torch.dtype | str | None = None
    grad: torch.dtype | str | None = None
    reduce: torch.dtype | str | None = None
    state: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            dtype = _dtype(entry.name, getattr(self, entry.name))
            object.__setattr__(self, entry.name, dtype)

    def stored(self, own: torch.dtype) -> torch.dtype:
        """What a parameter of this dtype is stored in."""
        return self._cast(own, self.param)

    def computed(self, own: torch.dtype) -> torch.dtype:
        """What a parameter or input of this dtype is computed in."""
        return self._cast(own, self.param if self.compute is None else self.compute)

    def summed(self, own: torch.dtype) -> torch.dtype:
        """The narrowest dtype in which terms of the gradient of such a parameter are summed."""
        both = (self.stored(own), self.computed(own))
        return self._cast(own, max(both, key=lambda d: d.itemsize), self.reduce)

    def through_sum(self, gradient: Tensor) -> Tensor:
        """A gradient in its parameter's dtype, by way of the dtype its terms are summed in.

        It is only cast if neither what is computed nor what is stored is as wide as that.
        """
        stored, wanted = gradient.dtype, self.summed(gradient.dtype)
        if max(stored, self.computed(stored), key=lambda d: d.itemsize).itemsize < wanted.itemsize:
            return gradient.to(wanted).to(stored)
        return gradient

    @staticmethod
    def _cast(own: torch.dtype, *wanted: torch.dtype | str | None) -> torch.dtype:
        """The last dtype that is given, for what is cast at all."""
        given = [dtype for dtype in wanted if isinstance(dtype, torch.dtype)]
        return given[-1] if given and own in _CAST else own


def _dtype(field: str, given: object) -> torch.dtype | None:
    if given is None:
        return None
    dtype = DTYPES.get(given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in _CAST:
        raise UnsupportedError(
            f"cannot use {given!r} as Precision({field}=...): give 'fp32', 'bf16' or 'fp64', the "
            "torch.dtype of one, or None"
        )
    if dtype is torch.float16:
        raise UnsupportedError(
            f"cannot use float16 as Precision({field}=...): its gradients need a loss scale, and a "
            "compiled step computes them before torch.amp.GradScaler could scale the loss; use "
            "'bf16'"
        )
    return dtype


AS_IT_IS = Precision()

PRESETS: Mapping[str, Precision] = {
    "fp32": Precision(param="fp32", compute="fp32"),
    "bf16": Precision(param="fp32", compute="bf16", grad="fp32", reduce="fp32", state="fp32"),
    "zero_paper": Precision(param="bf16", compute="bf16", grad="bf16", reduce="bf16", state="fp32"),
}
"""Precisions by name."""


def precision_of(given: Precision | str | None) -> Precision:
    """The precision that a preset or a record means; None leaves the model as it is.

    Raises:
        UnsupportedError: There is no such preset, or it is neither.
    """
    if given is None:
        return AS_IT_IS
    if isinstance(given, Precision):
        return given
    if isinstance(given, str) and given in PRESETS:
        return PRESETS[given]
    if isinstance(given, str) and DTYPES.get(given) is torch.float16:
        return Precision(compute=given)
    near = difflib.get_close_matches(str(given), list(PRESETS), n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise UnsupportedError(
        f"cannot use precision {given!r}: {guess}the presets are "
        f"{', '.join(map(repr, PRESETS))}; for others give an autopar.Precision"
    )


def check_held(precision: Precision, model: nn.Module, *, own_optimizer: bool) -> None:
    """Refuse gradients and states that nothing could hold.

    Args:
        precision: What is asked for.
        model: Its parameters.
        own_optimizer: Whether the caller said what the optimizer's state takes, so that it may be
            one that keeps state in dtypes of its own.

    Raises:
        UnsupportedError: It names the parameter, and what can be had.
    """
    kinds = [("gradient", precision.grad)]
    kinds += [] if own_optimizer else [("state", precision.state)]
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _CAST or not parameter.requires_grad:
            continue
        stored = precision.stored(parameter.dtype)
        for kind, dtype in kinds:
            if dtype is None or dtype == stored:
                continue
            raise UnsupportedError(
                f"cannot keep the {kind} of parameter {name!r} in {_text(dtype)}: it is stored in "
                f"{_text(stored)}, and torch's optimizers take gradients and keep their state in "
                "the dtype of the parameter; use precision='bf16', whose fp32 parameters, "
                "gradients and two AdamW states take the same 16 bytes an element, or pass "
                "optimizer=autopar.OptimizerSpec(state_bytes=12) for an optimizer of your own that "
                "keeps fp32 states and a master copy of bf16 parameters"
            )


def dtype_of(kind: TensorType) -> torch.dtype:
    """The dtype of a value of a graph."""
    dtype = getattr(torch, kind.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _text(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def casting(
    model: nn.Module,
    precision: Precision,
    inside: Callable[[str], AbstractContextManager[None]] = lambda path: nullcontext(),
) -> Iterator[None]:
    """The model with casts in place of its parameters, and its inputs cast when it is called.

    Casts are made once, in the grad mode that is set; a tensor has one, under all its names.

    Args:
        model: Its parameters are in the stored dtype.
        precision: What to cast to.
        inside: Entered with the path of a parameter's module while its cast is made.
    """
    if precision.param is None and precision.compute is None:
        yield
        return
    made: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for path, module in model.named_modules():
        table: dict[str, Any] = module._parameters
        for key, tensor in table.items():
            if tensor is None:
                continue
            if id(tensor) not in made:
                with inside(path):
                    made[id(tensor)] = tensor.to(precision.computed(tensor.dtype))
            places.append((table, key, tensor))
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: _cast_inputs(precision, args, kwargs),
        prepend=True,
        with_kwargs=True,
    )
    try:
        for table, key, tensor in places:
            table[key] = made[id(tensor)]
        yield
    finally:
        handle.remove()
        for table, key, tensor in places:
            table[key] = tensor


def _cast_inputs(precision: Precision, args: Any, kwargs: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(precision.computed(leaf.dtype)) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(cast, (args, kwargs))


def with_precision(graph: Graph, precision: Precision) -> Graph:
    """The captured step with its casts in their places, and the dtypes its gradients are summed in.

    Without casts it is the graph as it was.
    """
    stored = {node.target: dtype_of(node.outputs[0]) for node in graph.sources(PARAMETER)}
    summed = {}
    for name in graph.gradients:
        wanted = precision.summed(stored[name])
        least = min(stored[name].itemsize, precision.computed(stored[name]).itemsize)
        if least < wanted.itemsize:
            summed[name] = _text(wanted)
    if not summed and all(precision.computed(dtype) == dtype for dtype in stored.values()):
        return graph
    return replace(graph, nodes=_placed(graph.nodes, graph.gradients), summed=summed)


def _placed(nodes: Sequence[Node], gradients: Mapping[str, Ref]) -> tuple[Node, ...]:
    """The nodes with every cast of a parameter at its first reader, and of a gradient at its maker.

    Recorded, the former stand before the whole forward and the latter behind the whole backward:
    copies of all parameters would be alive at once.
    """
    parameters = {node.name for node in nodes if node.op == PARAMETER}
    delayed = {
        node.name: node
        for node in nodes
        if _is_cast(node) and node.phase is Phase.FORWARD and node.operands[0].node in parameters
    }
    early = _casts_of(nodes, {ref.node for ref in gradients.values()})
    found: list[Node] = []
    done: set[str] = set()

    def emit(node: Node) -> None:
        if node.name in done:
            return
        done.add(node.name)
        for ref in node.operands:
            if ref.node in delayed:
                emit(delayed[ref.node])
        found.append(node)
        for cast in early.get(node.name, ()):
            emit(cast)

    for node in nodes:
        if node.name not in delayed:
            emit(node)
    for node in delayed.values():
        emit(node)
    return tuple(found)


def _casts_of(nodes: Sequence[Node], wanted: set[str]) -> Mapping[str, Sequence[Node]]:
    """The casts behind which only these nodes stand, by the node whose value they cast."""
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for ref in node.operands:
            readers.setdefault(ref.node, set()).add(node.name)
    found: dict[str, list[Node]] = {}
    chosen: set[str] = set()
    for node in reversed(nodes):
        own = readers.get(node.name, set())
        last = node.name in wanted or (bool(own) and own <= chosen)
        if _is_cast(node) and node.phase is Phase.BACKWARD and last:
            chosen.add(node.name)
            found.setdefault(node.operands[0].node, []).append(node)
    return found


def _is_cast(node: Node) -> bool:
    return node.op == "aten._to_copy.default"
