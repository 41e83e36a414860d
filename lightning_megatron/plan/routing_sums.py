"""Indices of the sums that a router accumulates over a step."""

from __future__ import annotations

from typing import Final


class RoutingSum:
    """Index of a sum; the number of selections of each expert starts at :attr:`LOAD`.

    The indices are plain integers, because ``torch.compile`` cannot index with the members of an
    enumeration.
    """

    DROPPED: Final = 0
    ENTROPY: Final = 1
    BALANCE_LOSS: Final = 2
    Z_LOSS: Final = 3
    NUM_MICROBATCHES: Final = 4
    LOAD: Final = 5
