"""Initialization of models too large to make whole: every rank draws only its own rows.

The initialization runs once on meta, where it costs nothing, and the ops that write each tensor
are recorded. Each tensor is then made alone, by running its ops on blocks of rows with a generator
that depends on the seed, the tensor's name and the block: the same numbers under every plan, though
not those of one process that draws everything in turn.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import AutoparError

aten = torch.ops.aten

BLOCK_ELEMENTS = 1 << 20
"""Elements that are drawn with one generator, in whole rows."""

_ELEMENTWISE = frozenset(
    {
        aten.normal_.default,
        aten.uniform_.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.mul_.Scalar,
        aten.add_.Scalar,
        aten.mul_.Tensor,
        aten.add_.Tensor,
        aten.div_.Tensor,
        aten.erfinv_.default,
        aten.clamp_.default,
    }
)
"""Ops that treat all elements alike, so that they may run on some rows alone."""


@dataclass(frozen=True, slots=True)
class Write:
    """One op of an initialization.

    Attributes:
        func: The op.
        args: Its arguments; a `_Slot` stands for every tensor on meta.
        kwargs: Its keyword arguments.
    """

    func: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor on meta, as an argument of a `Write`.

    Attributes:
        number: 0 for the tensor that is made, n for the result of its n-th write.
        index: Which of several results.
    """

    number: int
    index: int | None = None


_TARGET = _Slot(0)


@dataclass(eq=False)
class Recipe:
    """How one tensor is made.

    Attributes:
        like: The tensor on meta.
        writes: Ops in order.
    """

    like: Tensor
    writes: list[Write] = field(default_factory=list)

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be made without the others."""
        return self.like.ndim > 0 and all(
            write.func in _ELEMENTWISE
            and write.args[0] == _TARGET
            and not any(isinstance(leaf, (_Slot, Tensor)) for leaf in tree_leaves(write.args[1:]))
            for write in self.writes
        )


def recipes(model: nn.Module, init: Callable[[nn.Module], None]) -> dict[str, Recipe | Tensor]:
    """How to make every tensor that is on meta, by name; itself where ``init`` replaced it.

    Args:
        model: Left as it is.
        init: The initialization; it sees a copy on meta.
    """
    made = copy.deepcopy(model)
    before = {name: t for name, t in _named(made) if t.is_meta}
    found = {name: Recipe(tensor) for name, tensor in before.items()}
    # Tied tensors are one recipe; `to_empty` would make them apart, and the first name counts.
    by_tensor: dict[int, Recipe] = {}
    for name, tensor in before.items():
        found[name] = by_tensor.setdefault(id(tensor), found[name])
    with torch.no_grad(), _Recorder(by_tensor.values()):
        init(made)
    after = dict(_named(made))
    return {name: recipe if after[name].is_meta else after[name] for name, recipe in found.items()}


def make(name: str, recipe: Recipe, seed: int, rows: Sequence[int] | None) -> Tensor:
    """The tensor on the CPU; where rows can be made alone, only those asked for hold values.

    Memory that is never written is never committed, so the other rows cost none.

    Args:
        name: Name that its numbers depend on.
        recipe: How it is made.
        seed: Seed that its numbers depend on.
        rows: Indices along dim 0 that are wanted; None for all.

    Raises:
        AutoparError: Part of what was asked for is not written.
    """
    full = torch.empty(recipe.like.shape, dtype=recipe.like.dtype)
    for number, block in _blocks(recipe, rows):
        piece = full[block] if recipe.like.ndim else full
        _fill_sentinel(piece)
        _replay(recipe, piece, _generator(seed, name, number))
        if _has_sentinel(piece):
            raise AutoparError(
                f"cannot initialize {name!r} of a model on meta: its module's initialization "
                "leaves it undefined; pass init=function(model) that fills every parameter and "
                "buffer"
            )
    return full


def _blocks(recipe: Recipe, rows: Sequence[int] | None) -> Iterator[tuple[int, slice]]:
    """Blocks of rows that hold what is wanted, with their numbers."""
    shape = recipe.like.shape
    if not recipe.by_rows or recipe.like.numel() == 0:
        yield 0, slice(None)
        return
    height = max(1, BLOCK_ELEMENTS // max(1, recipe.like[0].numel()))
    wanted = range(shape[0]) if rows is None else rows
    for number in sorted({row // height for row in wanted}):
        yield number, slice(number * height, min((number + 1) * height, shape[0]))


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _fill_sentinel(piece: Tensor) -> None:
    piece.fill_(float("nan") if piece.is_floating_point() or piece.is_complex() else 91)


def _has_sentinel(piece: Tensor) -> bool:
    if piece.is_floating_point() or piece.is_complex():
        return bool(piece.isnan().any())
    return False


@torch.no_grad()
def _replay(recipe: Recipe, piece: Tensor, generator: torch.Generator) -> None:
    """Run the recorded ops on a piece of the tensor."""
    slots: dict[int, Any] = {_TARGET.number: piece}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            found = slots[leaf.number]
            return found if leaf.index is None else found[leaf.index]
        return torch.device("cpu") if leaf == torch.device("meta") else leaf

    for number, write in enumerate(recipe.writes, 1):
        args, kwargs = tree_map(real, write.args), tree_map(real, write.kwargs)
        if any(a.name == "generator" for a in write.func._schema.arguments):
            kwargs["generator"] = generator
        slots[number] = write.func(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which ops write which tensors on meta."""

    def __init__(self, found: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner: dict[int, tuple[Recipe, _Slot]] = {}
        self._alive: list[Tensor] = []
        for recipe in found:
            self._own(recipe, recipe.like, _TARGET)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = [leaf for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)]
        owners = {id(recipe): recipe for leaf in on_meta for recipe in self._recipe_of(leaf)}
        result = func(*args, **kwargs)
        if not on_meta:
            return result
        if len(owners) != 1:
            raise AutoparError(
                f"cannot initialize a model on meta piece by piece: {func} combines several of its "
                "parameters; pass init=function(model)"
            )
        (recipe,) = owners.values()
        recipe.writes.append(Write(func, *tree_map(self._slot, (args, kwargs))))
        number = len(recipe.writes)
        if isinstance(result, Tensor):
            self._own(recipe, result, _Slot(number))
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                self._own(recipe, item, _Slot(number, index))
        return result

    def _own(self, recipe: Recipe, tensor: Tensor, slot: _Slot) -> None:
        """Note whose tensor it is; what an op wrote in place is known already."""
        if id(tensor) not in self._owner:
            self._owner[id(tensor)] = (recipe, slot)
            self._alive.append(tensor)  # so that no other tensor gets its id

    def _recipe_of(self, leaf: Tensor) -> list[Recipe]:
        return [self._owner[id(leaf)][0]] if id(leaf) in self._owner else []

    def _slot(self, leaf: Any) -> Any:
        return self._owner[id(leaf)][1] if id(leaf) in self._owner else leaf


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
