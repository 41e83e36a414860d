"""Python's garbage collection, kept away from what lives as long as a training."""

from __future__ import annotations

import gc


def keep_out_of_collections() -> None:
    """Let collections of this process pass over all objects that there are now.

    A full collection goes through every object of torch, Lightning and the model, a quarter of a second in which no
    Python code runs; it comes at another step on every rank, and all ranks wait for each of them.
    """
    gc.collect()
    gc.freeze()


def return_to_collections() -> None:
    """Let collections see all objects again."""
    gc.unfreeze()
