"""Process pools as a fixture."""

from __future__ import annotations

from tests.dist.conftest import pool

__all__ = ["pool"]
