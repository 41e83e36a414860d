"""Whether what was found in an earlier step still holds."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_


def same_objects(ones: Sequence[object], others: Sequence[object]) -> bool:
    """Tell whether two sequences hold the very same objects; it is asked of thousands of parameters in every step."""
    return len(ones) == len(others) and all(map(is_, ones, others))
