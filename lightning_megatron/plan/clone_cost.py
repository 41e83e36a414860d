"""Number of rows from which a clone of an expert saves more time than it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.legal_values import require_positive

# Floating-point operations for each row and parameter, forward and backward.
_OPERATIONS = 6


@dataclass(frozen=True, kw_only=True)
class CloneCost:
    """Speed of products and of links, and the bytes that a clone moves over the links.

    Rows that move to a clone save the busiest rank ``6 * rows * parameters / products`` seconds,
    and the clone's transfers take ``num_bytes * parameters / bandwidth`` seconds of the links. The
    number of parameters of an expert cancels.

    Args:
        products: Speed of the experts' products (FLOP/s).
        bandwidth: Speed of the links between two GPUs, in one direction (bytes/s).
        weight: Size of a weight that is sent (bytes).
        gradient: Size of a weight's gradient that is returned (bytes).
        sends_again: Whether the weights are sent again for the backward pass.

    Raises:
        ParallelPlanError: For a value that is not positive.
    """

    products: float
    bandwidth: float
    weight: int = 2
    gradient: int = 4
    sends_again: bool = True

    def __post_init__(self) -> None:
        for name in ("weight", "gradient"):
            require_positive(name, getattr(self, name))
        for name in ("products", "bandwidth"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ParallelPlanError(
                    f"{name} must be a positive speed: it is {value!r}. Use the measured rate of "
                    f"{name} per second."
                )

    @property
    def num_bytes(self) -> int:
        """Return the bytes that move for each parameter of a clone."""
        return self.weight * (2 if self.sends_again else 1) + self.gradient

    def seconds_saved(self, rows: float, clones: float, num_parameters: int) -> float:
        """Return the time that clones save in a microbatch, less that of their transfers (seconds).

        Transfers are counted as if nothing overlapped with them.

        Args:
            rows: Rows of the busiest rank without clones less those with clones (rows).
            clones: Clones of the experts of one rank, whose links all their transfers use (clones).
            num_parameters: Parameters of an expert on its rank (elements).
        """
        saved = _OPERATIONS * rows * num_parameters / self.products
        return saved - clones * self.num_bytes * num_parameters / self.bandwidth

    @property
    def min_rows(self) -> int:
        """Return the break-even number of rows of a clone in one microbatch, to the nearest row."""
        return round(self.num_bytes * self.products / (_OPERATIONS * self.bandwidth))
