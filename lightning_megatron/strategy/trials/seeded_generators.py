"""Seeded Python and NumPy generators, to compare draws for a batch and its parts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class SeededGenerators:
    """Python and NumPy generators, seeded before each part of a batch, and their positions.

    Random orders (``shuffle``, ``permutation``) become a rotation by one place and draw nothing.
    The final states of the generators show how often a step draws. A step that draws equally often
    for one sample and for two draws once per batch, such as a mixing ratio. A step that draws more
    often for two samples draws once per sample, and cannot see the same numbers in both cases.

    Args:
        seed: Seed of both generators.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._ends: list[int] = []
        self._is_begun = False

    @property
    def ends(self) -> frozenset[int]:
        """Return the distinct states of the generators after the parts, as hashes."""
        return frozenset(self._ends)

    def begin(self) -> None:
        """Seed the generators for the next part."""
        self._note_end()
        self._is_begun = True
        random.seed(self._seed)
        np.random.seed(self._seed)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace random orders inside the block, and record the final state of the last part."""
        before = random.shuffle, np.random.shuffle, np.random.permutation
        random.shuffle = _shuffle  # type: ignore[assignment]
        np.random.shuffle = _shuffle  # type: ignore[assignment]
        np.random.permutation = _permutation  # type: ignore[assignment]
        try:
            yield
            self._note_end()
        finally:
            random.shuffle, np.random.shuffle, np.random.permutation = before

    def _note_end(self) -> None:
        if self._is_begun:
            _, keys, *rest = np.random.get_state()
            self._ends.append(hash((random.getstate(), np.asarray(keys).tobytes(), *rest)))


def _shuffle(values: Any) -> None:
    # Rows of an array are views into it, so they must be copied before they are overwritten.
    before = values.copy() if isinstance(values, np.ndarray) else list(values)
    for place in range(len(before)):
        values[place] = before[place - 1]


def _permutation(values: Any) -> Any:
    array = np.arange(values) if np.ndim(values) == 0 else np.asarray(values)
    return np.roll(array, 1, axis=0)
