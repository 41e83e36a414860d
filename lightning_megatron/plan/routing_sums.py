"""Where each number lies among the sums that a router keeps of a step."""

from __future__ import annotations

from enum import IntEnum


class RoutingSum(IntEnum):
    """Name the place of a number; from :attr:`LOAD` on there are the choices that each expert had."""

    DROPPED = 0
    ENTROPY = 1
    BALANCE_LOSS = 2
    Z_LOSS = 3
    NUM_MICROBATCHES = 4
    LOAD = 5
