"""Python's garbage collection, kept away from what lives as long as a training."""

from __future__ import annotations

import gc


class LongLived:
    """Let collections of this process pass over the objects that a training finds when it starts.

    A full collection goes through every object of torch, Lightning and the model, a quarter of a second in which no
    Python code runs; it comes at another step on every rank, and all ranks wait for each of them. A program that has
    frozen objects itself knows about that and is left alone.
    """

    def __init__(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        """Collect what nobody needs, and pass over all other objects that there are now."""
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Let collections see them again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
