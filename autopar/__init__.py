"""Automatic parallelization of PyTorch training.

``autopar.compile(model, cluster, batch)`` plans, rewrites and runs a model on many devices;
``autopar.plan`` plans alone. See the README.

Names are imported when they are first used, so that the command line answers at once.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar import hint
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar import optim
    from autopar.api import compile, plan
    from autopar.capture.precision import Precision
    from autopar.cluster import Cluster
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
    "Precision",
    "clip_grad_norm_",
    "compile",
    "hint",
    "load",
    "optim",
    "plan",
    "rule",
]

_PLACES = {
    "Cluster": "autopar.cluster:Cluster",
    "OptimizerSpec": "autopar.options:OptimizerSpec",
    "Options": "autopar.options:Options",
    "Plan": "autopar.plan.records:Plan",
    "Precision": "autopar.capture.precision:Precision",
    "clip_grad_norm_": "autopar.runtime.clip:clip_grad_norm_",
    "compile": "autopar.api:compile",
    "load": "autopar.runtime.checkpoint:load",
    "optim": "autopar.optim",
    "plan": "autopar.api:plan",
    "rule": "autopar.rules.table:user_rule",
}


class _Package(ModuleType):
    """This package: ``plan`` is the function, though a package of that name is inside too."""

    def __getattr__(self, name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'autopar' has no attribute {name!r}")
        place, _, attribute = _PLACES[name].partition(":")
        found = importlib.import_module(place)
        return getattr(found, attribute) if attribute else found

    def __setattr__(self, name: str, value: object) -> None:
        if name != "plan" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
