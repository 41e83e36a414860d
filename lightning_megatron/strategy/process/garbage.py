"""Garbage collection that skips objects that live as long as the training."""

from __future__ import annotations

import gc

#: Objects that Python itself may have excluded when it started (375 in Python 3.12); a program that
#: has imported torch and calls ``gc.freeze`` excludes more than 100,000.
_MAX_FROZEN_BY_PYTHON = 5_000


class LongLivedObjects:
    """Objects that exist when training starts, excluded from garbage collection.

    A full collection visits every object of torch, Lightning and the model. It stops all Python
    code for about a quarter of a second. Collections run at different steps on each rank, and all
    ranks wait for each of them. Nothing changes if the program has already called ``gc.freeze``.
    """

    def __init__(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        """Collect garbage once, and exclude all remaining objects from later collections."""
        if gc.get_freeze_count() <= _MAX_FROZEN_BY_PYTHON:
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Include these objects in collections again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
