"""Batches of any nesting as named tensors."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from autopar.capture import flatten_batch, unflatten_batch
from autopar.capture.batch import batch_dims
from autopar.errors import BatchError

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: torch.Tensor
    mode: str


def tensor(value: int) -> torch.Tensor:
    return torch.full((2, 3), value)


NESTED: dict[str, Any] = {
    "text": {"ids": tensor(0), "none": None},
    "pair": Pair(tensor(1), 2.0),
    "list": [tensor(2), "word", (tensor(3),)],
    "sample": Sample(tensor(4), "fast"),
    "mapping": UserDict(ids=tensor(5)),
}
PATHS = ("text.ids", "pair.left", "list.0", "list.2.0", "sample.ids", "mapping.ids")


def test_paths_join_the_keys() -> None:
    paths, tensors, _ = flatten_batch(NESTED)
    assert paths == PATHS
    assert [int(t[0, 0]) for t in tensors] == list(range(6))


def test_a_tensor_alone_is_the_first_argument() -> None:
    assert flatten_batch(tensor(0))[0] == ("0",)
    assert flatten_batch((tensor(0), 1))[0] == ("0",)


def test_unflatten_puts_tensors_back() -> None:
    tensors = [tensor(n + 10) for n in range(6)]
    made = unflatten_batch(NESTED, tensors)
    assert flatten_batch(made)[0] == PATHS
    assert all(a is b for a, b in zip(flatten_batch(made)[1], tensors, strict=True))
    assert flatten_batch(made)[2] == flatten_batch(NESTED)[2]
    assert type(made["pair"]) is Pair and made["sample"].mode == "fast"


@pytest.mark.parametrize(
    "other",
    [
        {"x": tensor(0), "n": 2},
        {"x": tensor(0), "n": 1.0},
        {"x": tensor(0), "n": True},
        {"x": tensor(0), "n": None},
        {"x": tensor(0)},
        {"x": tensor(0), "m": 1},
        {"x": [tensor(0)], "n": 1},
    ],
)
def test_the_key_tells_structures_and_values_apart(other: Any) -> None:
    key = flatten_batch({"x": tensor(0), "n": 1})[2]
    assert key == flatten_batch({"x": tensor(9), "n": 1})[2]
    assert key != flatten_batch(other)[2]


def test_what_cannot_be_compared_is_refused_by_path() -> None:
    with pytest.raises(BatchError, match=r"'a\.1'.*set"):
        flatten_batch({"a": [tensor(0), {1, 2}]})


def test_samples_are_counted_along_the_commonest_first_dim() -> None:
    tensors = [torch.zeros(4, 3), torch.zeros(4), torch.zeros(3, 3), torch.zeros(())]
    assert batch_dims(["x", "y", "table", "scale"], tensors) == {"x": 0, "y": 0}
    assert batch_dims(["scale"], [torch.zeros(())]) == {}
