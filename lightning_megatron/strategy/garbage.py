"""Garbage collection that skips objects that live as long as the training."""

from __future__ import annotations

import gc


class LongLived:
    """Objects that exist when training starts, excluded from garbage collection.

    A full collection goes through every object of torch, Lightning and the model, a quarter of a second in which no
    Python code runs; it comes at another step on every rank, and all ranks wait for each of them. A program that has
    frozen objects itself knows about that and is left alone.
    """

    def __init__(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        """Collect garbage once, and exclude all remaining objects from later collections."""
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Include these objects in collections again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
