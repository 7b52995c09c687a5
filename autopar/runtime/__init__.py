"""Runs lowered programs: process groups, sharded parameters, the training step, checkpoints."""
