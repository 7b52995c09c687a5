"""From an ``nn.Module``, a batch and a loss to the graph of the whole training step."""

from autopar.capture.alone import Alone
from autopar.capture.batch import flatten_batch, unflatten_batch
from autopar.capture.interpret import run_graph, source_values
from autopar.capture.step import Captured, capture_key, capture_step, in_turn

__all__ = [
    "Alone",
    "Captured",
    "capture_key",
    "capture_step",
    "flatten_batch",
    "in_turn",
    "run_graph",
    "source_values",
    "unflatten_batch",
]
