"""Cache check by object identity."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_


def same_objects(ones: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences contain the same objects."""
    return len(ones) == len(others) and all(map(is_, ones, others))
