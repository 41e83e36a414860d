"""The errors that users can act on: each says the rule, the values, the reason and the legal values."""

from __future__ import annotations


class ParallelPlanError(ValueError):
    """Report a setting of a wrong type or out of its range, or sizes that do not fit together."""


class UnsupportedError(ValueError):
    """Report a combination of settings that is understood but cannot be honoured."""


class RankMismatchError(ValueError):
    """Report that the ranks of one job do not agree on their configuration, versions or data."""


class ReplicaMismatchError(RankMismatchError):
    """Report copies of a parameter, or of its gradient, that must be equal on several ranks and are not."""


class CheckpointMismatchError(ValueError):
    """Report a checkpoint whose tensors are not those of the model or optimizer that loads it."""


class CorruptDataError(ValueError):
    """Report a file that is truncated, damaged or not what its name says."""


class MissingExtraError(ImportError):
    """Report an optional dependency that is not installed, with the command that installs it."""


class CheckpointSaveError(RuntimeError):
    """Report a checkpoint that could not be written, with the reason of every rank that failed."""


class NonFiniteError(RuntimeError):
    """Report a loss, weight or gradient that is infinite or not a number, and where it began."""


class NonFiniteGradientError(NonFiniteError):
    """Report a gradient that is infinite or not a number: no setting is at fault, the numbers of the run are."""
