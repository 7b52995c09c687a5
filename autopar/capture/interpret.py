"""Run a graph with real tensors in this process: the reference for every other way to run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.capture.ops import resolve, to_torch
from autopar.capture.random import make_key
from autopar.ir.graph import CONSTANT, KEY, SOURCE_OPS, Graph, Node, Ref


def run_graph(
    graph: Graph,
    values: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    step: int = 0,
) -> dict[Ref, torch.Tensor]:
    """Every value of the graph.

    Args:
        graph: What to run.
        values: Tensor of every parameter, buffer and input node, by the node's name.
        constants: ``Captured.constants``.
        device: What device constants mean.
        seed: Seed of random ops.
        step: Step of random ops.
    """
    env: dict[Ref, Any] = {}
    for node in graph.nodes:
        if node.op == CONSTANT:
            env[Ref(node.name)] = constants[node.target].to(device)
        elif node.op == KEY:
            env[Ref(node.name)] = make_key(seed, step)
        elif node.op in SOURCE_OPS:
            env[Ref(node.name)] = values[node.name]
    run_nodes(graph.nodes, env, device)
    return env


@torch.no_grad()
def run_nodes(nodes: Iterable[Node], env: dict[Ref, Any], device: torch.device | str) -> None:
    """Run nodes in order; sources must be in ``env``, which receives every output."""
    for node in nodes:
        if node.op in SOURCE_OPS:
            continue
        args = [to_torch(arg, env, device) for arg in node.args]
        kwargs = {name: to_torch(arg, env, device) for name, arg in node.kwargs}
        result = resolve(node.op)(*args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for index, output in enumerate(outputs):
            env[Ref(node.name, index)] = output


def source_values(
    graph: Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """``values`` for `run_graph` from tensors under the names of the model and the batch."""
    tables = {"parameter": parameters, "buffer": buffers, "input": inputs}
    return {
        node.name: tables[node.op][node.target].detach()
        for node in graph.nodes
        if node.op in tables
    }
