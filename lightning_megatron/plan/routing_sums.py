"""Indices into the sums that a router accumulates over a step."""

from __future__ import annotations

from enum import IntEnum


class RoutingSum(IntEnum):
    """Index of a sum; the number of selections of each expert starts at :attr:`LOAD`."""

    DROPPED = 0
    ENTROPY = 1
    BALANCE_LOSS = 2
    Z_LOSS = 3
    NUM_MICROBATCHES = 4
    LOAD = 5
