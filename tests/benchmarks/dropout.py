"""Time of keyed random ops on the CPU against torch's own, paired.

``python -m tests.benchmarks.dropout`` prints the median of the ratios ours / torch for ten million
elements, whole and as a rank's share of the columns. One thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from autopar.capture import random_kernels as kernels
from autopar.capture.random import make_key

ROWS, COLUMNS = 10_000, 1_000
PAIRS = 15
KEY = make_key(1, 2)
CPU = torch.device("cpu")
SHARE = [COLUMNS, 0, ROWS, 2 * COLUMNS, COLUMNS, 1]
"""The second half of the columns of ``[ROWS, 2 * COLUMNS]``."""


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pairs() -> Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Ours and torch's, by name."""
    x = torch.randn(ROWS, COLUMNS)
    few = torch.randn(64, 128)
    size = (ROWS, COLUMNS)

    def uniform() -> torch.Tensor:
        return kernels.uniform(KEY, "a", size, torch.float32, CPU)

    def normal() -> torch.Tensor:
        return kernels.normal(KEY, "a", size, torch.float32, CPU)

    return {
        "dropout": (lambda: kernels.dropout(x, KEY, "a", 0.1), lambda: F.dropout(x, 0.1)),
        "dropout of a rank's columns": (
            lambda: kernels.dropout(x, KEY, "a", 0.1, SHARE),
            lambda: F.dropout(x, 0.1),
        ),
        "dropout of 8192 elements": (
            lambda: kernels.dropout(few, KEY, "a", 0.1),
            lambda: F.dropout(few, 0.1),
        ),
        "rand": (uniform, lambda: torch.rand(size)),
        "randn": (normal, lambda: torch.randn(size)),
    }


def main() -> None:
    torch.set_num_threads(1)
    table = Table("", "ours", "torch", "median ratio", title=f"{ROWS * COLUMNS:,} elements")
    for name, (ours, other) in pairs().items():
        ours(), other()
        found = [(seconds(ours), seconds(other)) for _ in range(PAIRS)]
        mine, theirs = (statistics.median(times) for times in zip(*found, strict=True))
        ratio = statistics.median(a / b for a, b in found)
        table.add_row(name, f"{mine * 1e3:.2f} ms", f"{theirs * 1e3:.2f} ms", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
