"""Settings of every test process."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Several processes share few cores; a pool of threads in each would only wait for the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run; `make test-all` draws more of them.
settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say so."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is visible"))
