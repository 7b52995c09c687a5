"""The search over shardings: problems in, choices out; no torch."""
