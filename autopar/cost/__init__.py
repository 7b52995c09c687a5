"""Seconds and bytes of nodes and of changes of sharding."""
