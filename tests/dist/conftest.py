"""Process pools as a fixture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.dist.pool import Pool, get_pool


@pytest.fixture(scope="session")
def pool() -> Callable[[int], Pool]:
    """``pool(world_size)``: long-lived gloo processes, started once a session."""
    return get_pool
