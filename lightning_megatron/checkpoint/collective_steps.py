"""Collective steps: all ranks succeed, or all ranks raise an error with the reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from lightning_megatron.errors import (
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptDataError,
    UnsupportedError,
)
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    broadcast_object,
    gather_objects,
    gather_some,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NUM_SHOWN = 4


class CaughtError:
    """Context manager that stores the exception of its block in ``error``.

    Args:
        kind: Type of exceptions to store; others propagate.
    """

    def __init__(self, kind: type[BaseException] = Exception) -> None:
        self._kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> CaughtError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, self._kind):
            return False
        self.error = error
        return True


def run_collectively(action: Callable[[], T], axis: MeshAxis, what: str) -> list[T]:
    """Run ``action`` on every rank, and return all results on the first rank and none on others.

    If any rank fails, all ranks raise.

    Args:
        what: Description of the step in errors, such as "saving ...".

    Raises:
        CheckpointSaveError: On every rank, with the reasons of the ranks that failed.
        BaseException: On a rank that was interrupted (KeyboardInterrupt and similar), after the
            other ranks were notified.

    Communication: one all-reduce of a flag, and one gather of results, or of failures.
    """
    result: T | None = None
    with CaughtError(BaseException) as caught:
        result = action()
    reasons = gather_some(None if caught.error is None else describe(caught.error), axis)
    if caught.error is not None and not isinstance(caught.error, Exception):
        raise caught.error
    if reasons:
        shown = [f"rank {rank}: {reason}" for rank, reason in reasons.items()][:_NUM_SHOWN]
        more = f"; and {len(reasons) - _NUM_SHOWN} more" if len(reasons) > _NUM_SHOWN else ""
        raise CheckpointSaveError(
            f"every rank must write its part of a checkpoint: {what} failed on {len(reasons)} of "
            f"{axis.size} rank(s): {'; '.join(shown)}{more}. The incomplete checkpoint was "
            "removed; earlier checkpoints are unchanged. Free space there, or save to another "
            "folder."
        ) from caught.error
    return gather_objects(result, axis)


def run_on_first(action: Callable[[], T], axis: MeshAxis) -> T:
    """Run ``action`` on the first rank and return its result on all ranks.

    Raises:
        Exception: On all ranks, the error of the first rank.

    Communication: one broadcast of the result.
    """
    result: T | None = None
    with CaughtError() as caught:
        result = action() if axis.rank == 0 else None
    outcome: tuple[T, Exception | None] = broadcast_object((result, caught.error), axis)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def verify_together(check: Callable[[], object], axis: MeshAxis) -> None:
    """Run a check of files on every rank; if it fails on one rank, all ranks raise.

    Raises:
        CorruptDataError: On all ranks, if a file is damaged or cannot be read on one.
        CheckpointMismatchError: On all ranks, if the check raises it on one.
        UnsupportedError: On all ranks, if the check raises it on one.

    Communication: one all-reduce of a flag, and after a failure a gather of errors.
    """
    with CaughtError(BaseException) as caught:
        check()
    # All ranks raise the error of the first rank that failed: they must continue in the same way.
    errors = list(gather_some(_to_send(caught.error), axis).values())
    if caught.error is not None and not isinstance(caught.error, Exception):
        raise caught.error
    if errors:
        interrupts = [error for error in errors if not isinstance(error, Exception)]
        raise (interrupts or errors)[0]


def _to_send(error: BaseException | None) -> BaseException | None:
    """Convert a rank's error to one that can be sent to other ranks; None stays None."""
    if error is None or isinstance(
        error, (CorruptDataError, CheckpointMismatchError, UnsupportedError)
    ):
        return error
    if not isinstance(error, Exception):
        return KeyboardInterrupt(f"another rank was interrupted: {describe(error)}")
    if not isinstance(error, OSError):
        logger.warning("a check of a checkpoint failed", exc_info=error)
    return CorruptDataError(
        f"every file of a checkpoint must be readable: {describe(error)}. Use another checkpoint, "
        "or repair the file system."
    )


def describe(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}"
