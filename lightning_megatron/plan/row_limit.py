"""Limit on the rows of the buffers of experts, as a multiple of an even share."""

from __future__ import annotations

import math

#: Limits are multiples of the tile of a grouped product (rows).
ROW_MULTIPLE = 128
#: Growth of a factor relative to the one that would have been enough.
_GROWTH = 1.1


def limited_rows(factor: float, share: int) -> int:
    """Return the rows of a buffer: the factor times an even share, to the next multiple of 128.

    Args:
        factor: Factor of ``expert_rows``, at least 1.
        share: Rows of a rank if all ranks get equally many (rows).
    """
    return -(-math.ceil(factor * share) // ROW_MULTIPLE) * ROW_MULTIPLE


def smallest_factor(needed: int, share: int) -> float:
    """Return the smallest factor in hundredths that has room for a number of rows.

    Args:
        needed: Rows that a rank gets (rows).
        share: Rows of a rank if all ranks get equally many (rows).
    """
    return -(-needed * 100 // share) / 100


def grown_factor(needed: int, share: int) -> float:
    """Return a factor in hundredths with a tenth more room than a number of rows needs.

    Args:
        needed: Rows that a rank gets (rows).
        share: Rows of a rank if all ranks get equally many (rows).
    """
    return math.ceil(_GROWTH * needed / share * 100) / 100
