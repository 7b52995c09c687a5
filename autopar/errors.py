"""The errors a caller can meet, one class per thing a caller might handle.

Every message is one line, lower case, and says what could not be done, where, what was found and
what to do about it, in the user's own names.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error that autopar raises because of its input or its surroundings."""


class CaptureError(AutoparError):
    """The training step cannot be captured as one graph."""


class MissingRuleError(AutoparError):
    """The captured graph holds an op that no rule describes."""


class RuleError(AutoparError):
    """A rule does not fit the op it was given for, or its text does not parse."""


class ClusterError(AutoparError):
    """A cluster description is incomplete or contradicts itself or the running processes."""


class HintError(AutoparError):
    """A hint matches nothing, names something absent, or contradicts another hint."""


class InfeasibleError(AutoparError):
    """No plan was found that meets limits and hints; the message says whether that is proven."""


class SearchTimeoutError(AutoparError):
    """The time limit ended the search before any plan was found."""


class PlanError(AutoparError):
    """A plan cannot be read, or is not a plan for this model, cluster or batch."""


class BatchError(AutoparError):
    """A batch does not fit what the step was compiled for."""


class UnsupportedError(AutoparError):
    """The request is outside what this version can do exactly."""


class RuntimeFailure(AutoparError):
    """A rank failed or was lost while the programs were running."""
