"""From an ``nn.Module``, a batch and a loss to the graph of the whole training step."""

from autopar.capture.batch import flatten_batch, unflatten_batch
from autopar.capture.interpret import run_graph, source_values
from autopar.capture.step import Captured, capture_key, capture_step

__all__ = [
    "Captured",
    "capture_key",
    "capture_step",
    "flatten_batch",
    "run_graph",
    "source_values",
    "unflatten_batch",
]
