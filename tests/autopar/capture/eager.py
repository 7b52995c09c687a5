"""Captured graphs against the program they were captured from."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured, capture_step, flatten_batch, run_graph, source_values
from autopar.capture.keyed import keyed
from autopar.capture.step import default_loss
from autopar.ir.graph import Ref

SEED, STEP = 11, 2
"""Key of what a model draws."""

CASES = Path(__file__).parents[2] / "cases" / "given"


def load_case(name: str) -> ModuleType:
    """One of the case files, by the start of its name."""
    (path,) = CASES.glob(f"{name}_*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_captured(captured: Captured, model: nn.Module, batch: Any) -> dict[Ref, torch.Tensor]:
    """Every value of the graph for this model and batch."""
    paths, tensors, _ = flatten_batch(batch)
    values = source_values(
        captured.graph,
        dict(model.named_parameters(remove_duplicate=False)),
        {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)},
        dict(zip(paths, tensors, strict=True)),
    )
    return run_graph(captured.graph, values, captured.constants, seed=SEED, step=STEP)


def capture_equals_eager(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None = None,
    *,
    tolerance: float = 1e-5,
) -> Captured:
    """Capture, run, and compare loss, results, gradients, buffers and all types with the model."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    captured = capture_step(model, batch, loss, grad=True)
    graph = captured.graph
    env = run_captured(captured, model, batch)
    assert_types_hold(captured, env)

    program = copy.deepcopy(model)
    program.zero_grad()
    with keyed(program, SEED, STEP):
        made = (loss or default_loss)(program, copy.deepcopy(batch))
    value, aux = made if isinstance(made, tuple) else (made, {})
    value.backward()
    assert graph.loss is not None
    assert_near(env[graph.loss], value, tolerance, "loss")
    for name, ref in graph.aux:
        assert_near(env[ref], aux[name], tolerance, name)
    named = dict(program.named_parameters())
    assert {name for name, p in named.items() if p.grad is not None} == set(graph.gradients)
    for name, ref in graph.gradients.items():
        assert_near(env[ref], named[name].grad, tolerance, name)
    for name, buffer in program.named_buffers():
        now = env[graph.mutations[name]] if name in graph.mutations else before[name]
        assert_near(now, buffer, tolerance, name)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), f"capture changed buffer {name}"
    return captured


def assert_near(found: Any, wanted: Any, tolerance: float, what: str) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, what
    if wanted.dtype == torch.bool:
        assert torch.equal(found, wanted), what
        return
    scale = max(0.1, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    worst = float((found - wanted.detach()).abs().max()) if found.numel() else 0.0
    assert worst <= tolerance * scale, f"{what}: {worst} of {scale}"


def assert_types_hold(captured: Captured, env: dict[Ref, Any]) -> None:
    """Every value has the type the graph says; absent outputs are empty."""
    for node in captured.graph.nodes:
        for index, kind in enumerate(node.outputs):
            value = env[Ref(node.name, index)]
            if value is None:
                assert kind.shape == (0,), node
            else:
                assert tuple(value.shape) == kind.shape, node
                assert value.dtype == getattr(torch, kind.dtype), node


def ops_of(captured: Captured) -> list[str]:
    return [node.op for node in captured.graph.nodes]
