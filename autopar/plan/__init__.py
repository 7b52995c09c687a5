"""Every decision for a model on a cluster, and what is predicted of it."""
