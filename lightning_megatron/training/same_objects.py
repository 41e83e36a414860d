"""Cache check by object identity."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_


def same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    """Return whether two sequences contain the same objects."""
    return len(left) == len(right) and all(map(is_, left, right))
