"""State that a captured step would lose or hold twice, refused by name.

A step knows parameters and buffers, each by its own memory, and what is written to them. A program
can change more than that: the memory of another tensor, an attribute that is no buffer, or where a
parameter lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.capture.substitute import Leaves
from autopar.capture.tape import Tape, same_steps, storage_id
from autopar.errors import CaptureError, UnsupportedError

_PLAIN = (bool, int, float, complex, str)


def check_state(leaves: Leaves, tape: Tape, changing: Collection[str]) -> None:
    """Refuse a step that changes what would not outlive it, or what lies in two tensors.

    Args:
        leaves: The model's tensors, before they are put back.
        tape: What was recorded.
        changing: Names of the parameters that are trained and of the buffers that are written.

    Raises:
        CaptureError: It replaced a tensor that is no buffer, or the memory of one that is.
        UnsupportedError: What changes lies in the memory of another tensor too.
    """
    for name in leaves.moved():
        raise CaptureError(
            f"cannot capture an assignment to '{name}.data': where a parameter or buffer lies is "
            "fixed once a step is planned; assign a buffer itself, or write to it with copy_()"
        )
    read = {id(tensor): name for name, tensor in tape.constants.items()}
    for name, old in _replaced(leaves):
        if id(old) in read:
            raise CaptureError(
                f"cannot capture a new value of attribute {name!r}, read in "
                f"{tape.first_use(read[id(old)])}: it would not outlive the step, being no buffer "
                "of the model; register it as a buffer"
            )
    for one, other in _shared({**leaves.own, **tape.constants}):
        if other in tape.constants and one in leaves.own:
            raise UnsupportedError(
                f"cannot capture a tensor read in {tape.first_use(other)}: its memory is that of "
                f"{one!r}, whose changes it would miss; make it of {one!r} in the forward, or "
                "clone() it"
            )
        if one in changing:
            raise UnsupportedError(
                f"cannot capture a step that changes {one!r}: its memory is also that of "
                f"{other!r}, which a plan keeps apart; assign one tensor to both names, make one "
                "of the other in the forward, or clone() one"
            )


@dataclass(frozen=True, slots=True)
class Counted:
    """An attribute of a module, a plain number or text, that the forward changed."""

    module: nn.Module
    name: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.name!r} of a {type(self.module).__name__}"


def counted_by(leaves: Leaves) -> tuple[Counted, ...]:
    """The numbers and texts that the forward changed, before they are put back."""
    found = []
    for snapshot in leaves.snapshots:
        now = vars(snapshot.module)
        for name, before in snapshot.attributes.items():
            after = now.get(name)
            if type(after) in _PLAIN and type(before) in _PLAIN and after != before:
                found.append(Counted(snapshot.module, name, before, after))
    return tuple(found)


@contextmanager
def counted_on(counted: Iterable[Counted]) -> Iterator[None]:
    """Modules with the numbers that a forward left in them."""
    try:
        for own in counted:
            vars(own.module)[own.name] = own.after
        yield
    finally:
        for own in counted:
            vars(own.module)[own.name] = own.before


def check_counted(counted: Sequence[Counted], first: Tape, second: Tape) -> None:
    """Refuse numbers that a forward changes and the next one computes with.

    Args:
        counted: What the forward changed.
        first: What it recorded.
        second: What it recorded with the changed numbers.

    Raises:
        CaptureError: They are not the same.
    """
    if not same_steps(first, second):
        raise CaptureError(
            f"cannot capture a step that counts in Python: the forward changes attribute "
            f"{', '.join(map(str, counted[:3]))} and computes with it, and a step is captured "
            "once; make it a tensor, registered as a buffer, or pass it in the batch"
        )


def _replaced(leaves: Leaves) -> Iterator[tuple[str, Tensor]]:
    """Attributes that held a tensor and hold something else: their names and what they held."""
    for snapshot in leaves.snapshots:
        for name, old in snapshot.attributes.items():
            if isinstance(old, Tensor) and vars(snapshot.module).get(name) is not old:
                yield name, old


def _shared(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors with an element in the same memory, either way round."""
    storages: dict[int, list[str]] = {}
    for name, tensor in named.items():
        storages.setdefault(storage_id(tensor), []).append(name)
    for names in storages.values():
        for one, other in itertools.permutations(names, 2):
            if _overlap(named[one], named[other]):
                yield one, other


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    if not one.numel() or not other.numel():
        return False
    (begin, end), (begin_2, end_2) = _extent(one), _extent(other)
    if end <= begin_2 or end_2 <= begin:
        return False
    if one.is_contiguous() or other.is_contiguous() or one.dtype != other.dtype:
        return True
    with unset_fake_temporarily():
        places = torch.arange(max(end, end_2) // one.element_size())
        first = places.as_strided(one.shape, one.stride(), one.storage_offset())
        second = places.as_strided(other.shape, other.stride(), other.storage_offset())
        return bool(torch.isin(first, second).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the byte behind its last one."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + reach + 1) * size
