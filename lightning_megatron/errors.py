"""Errors and warnings that users can act on; messages give rule, values, reason and remedy."""

from __future__ import annotations


class ParallelPlanError(ValueError):
    """Setting of a wrong type or out of its range, or sizes that do not fit together."""


class UnsupportedError(ValueError):
    """Combination of settings that is valid but not supported."""


class RankMismatchError(ValueError):
    """Configuration, versions or data that differ between the ranks of one job."""


class ReplicaMismatchError(RankMismatchError):
    """Replicas of a parameter, or of its gradient, that differ between ranks."""


class CheckpointMismatchError(ValueError):
    """Checkpoint whose tensors do not match the model or optimizer that loads it."""


class CorruptDataError(ValueError):
    """File that is truncated, damaged or of another format than its name suggests."""


class MissingExtraError(ImportError):
    """Optional dependency that is not installed, with the command that installs it."""


class CheckpointSaveError(RuntimeError):
    """Checkpoint that could not be written, with the reason of every rank that failed."""


class CaptureError(RuntimeError):
    """CUDA graph that could not be captured, with the part of the step and the reason."""


class NonFiniteError(RuntimeError):
    """Infinite or NaN loss, weight or gradient, with the place where it first appeared."""


class NonFiniteGradientError(NonFiniteError):
    """Infinite or NaN gradient, caused by the numerics of the run and not by a setting."""


#: Errors about what the user gave: a command ends with their message alone.
REFUSALS = (
    CheckpointMismatchError,
    CorruptDataError,
    MissingExtraError,
    ParallelPlanError,
    RankMismatchError,
    UnsupportedError,
)
#: Environment variable: 1 prints the traceback of a refusal, 0 only its message.
TRACEBACK = "LIGHTNING_MEGATRON_TRACEBACK"


class SpeedWarning(UserWarning):
    """Warning of a path that is slower than the hardware allows, with its remedy."""
