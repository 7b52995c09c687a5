"""State beyond parameters and buffers, and tensors that share memory: followed, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture_step
from autopar.errors import AutoparError
from tests.autopar.capture.eager import capture_equals_eager


class Program(nn.Module):
    """A function of a linear layer, its input and whatever else the module holds."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def equal(model: nn.Module) -> Any:
    return capture_equals_eager(model, torch.randn(4, 8), square)


def refused(model: nn.Module) -> str:
    with pytest.raises(AutoparError) as caught:
        capture_step(model, torch.randn(4, 8), square, grad=True)
    return str(caught.value)


def test_a_module_under_two_paths_has_all_their_names() -> None:
    shared = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = Program(lambda m, x: m.second[0](m.first(x)), first=shared)
    model.second = nn.ModuleList([shared])
    graph = equal(model).graph
    names = {name for name, _ in shared.state_dict().items()}
    assert graph.aliases == {f"second.0.{name}": f"first.{name}" for name in names}


def test_a_buffer_or_frozen_parameter_read_from_a_list_is_itself() -> None:
    model = Program(lambda m, x: m.linear(x) * m.kept[0].mul_(0.9) * m.kept[1], scale=torch.ones(8))
    model.fixed = nn.Parameter(torch.randn(8), requires_grad=False)
    model.kept = [model.scale, model.fixed]
    graph = equal(model).graph
    assert set(graph.mutations) == {"scale"}
    assert not list(graph.sources("constant"))


def test_a_trained_parameter_read_from_a_list_is_refused_by_name() -> None:
    model = Program(lambda m, x: x @ m.kept[0])
    model.kept = [model.linear.weight]
    assert "'linear.weight'" in refused(model)


def test_parts_of_one_memory_that_do_not_overlap_are_trained() -> None:
    both = torch.randn(8, 16)
    model = Program(lambda m, x: torch.tanh(x @ m.left) @ m.right)
    model.left, model.right = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])
    equal(model)


def test_memory_that_nothing_changes_may_be_shared() -> None:
    scale = torch.randn(8)
    equal(Program(lambda m, x: m.linear(x) * m.one * m.other, one=scale, other=scale[:]))


def _transposed(model: Any) -> Tensor:
    return model.linear.weight.data.t()  # type: ignore[no-any-return]


def test_memory_that_changes_in_two_tensors_is_refused() -> None:
    tied = Program(lambda m, x: m.linear(x) @ m.again)
    tied.again = nn.Parameter(_transposed(tied))
    assert "'linear.weight'" in refused(tied)
    tied.again = nn.Parameter(tied.linear.weight.data)
    assert "assign one tensor to both names" in refused(tied)
    seen = Program(lambda m, x: m.linear(x) @ m.view)
    seen.register_buffer("view", _transposed(seen))
    assert "'view'" in refused(seen)
    written = Program(lambda m, x: m.linear(x) * m.one.mul_(0.5) * m.other, one=torch.ones(8))
    written.register_buffer("other", written.one[:])
    assert "changes 'one'" in refused(written)
    hidden = Program(lambda m, x: m.linear(x) @ m.kept[0])
    hidden.kept = [_transposed(hidden)]
    assert "of 'linear.weight' in the forward" in refused(hidden)


def test_state_that_is_no_buffer_is_refused_by_name() -> None:
    def replaced(model: Any, x: Tensor) -> Tensor:
        found: Tensor = model.linear(x) + model.before
        model.before = found.detach().mean(0)
        return found

    model = Program(replaced)
    model.before = torch.zeros(8)
    assert "attribute 'before'" in refused(model)


@pytest.mark.parametrize("name", ["linear.weight", "scale"])
def test_a_tensor_given_other_memory_is_refused_by_name(name: str) -> None:
    def moved(model: Any, x: Tensor) -> Tensor:
        held = model.scale if name == "scale" else model.linear.weight
        held.data = held.data / 2
        return model.linear(x) * model.scale  # type: ignore[no-any-return]

    assert f"'{name}.data'" in refused(Program(moved, scale=torch.ones(8)))


def test_a_count_in_python_that_the_next_step_computes_with_is_refused() -> None:
    def warmed(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        return model.linear(x) * min(1.0, model.calls / 10)  # type: ignore[no-any-return]

    assert "attribute 'calls' of a Program" in refused(Program(warmed, calls=0))
    # As soon as it changes nothing any more, it may count on.
    equal(Program(warmed, calls=20))


def test_a_cache_that_is_filled_in_the_first_call_is_captured() -> None:
    def cached(model: Any, x: Tensor) -> Tensor:
        if model.filled < x.shape[1]:
            model.filled, model.scales = x.shape[1], torch.arange(8.0)
        return model.linear(x) * model.scales  # type: ignore[no-any-return]

    model = Program(cached, filled=0)
    model.scales = None
    equal(model)
    assert model.filled == 0 and model.scales is None
