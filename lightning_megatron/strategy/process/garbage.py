"""Garbage collection that skips objects that live as long as the training."""

from __future__ import annotations

import gc


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
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Include these objects in collections again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
