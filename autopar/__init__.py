"""Automatic parallelization of PyTorch training.

``autopar.compile(model, cluster, batch)`` plans, rewrites and runs a model on many devices;
``autopar.plan`` plans alone. See the README.
"""

from autopar import hint
from autopar.api import compile, plan
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.options import OptimizerSpec, Options
from autopar.plan.records import Plan
from autopar.rules.table import user_rule as rule
from autopar.runtime.checkpoint import load
from autopar.runtime.clip import clip_grad_norm_

__all__ = [
    "AutoparError",
    "Cluster",
    "OptimizerSpec",
    "Options",
    "Plan",
    "clip_grad_norm_",
    "compile",
    "hint",
    "load",
    "plan",
    "rule",
]
