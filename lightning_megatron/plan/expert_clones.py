"""Clones of busy experts: the settings that users give, their places, memory and cost.

Over ep every rank computes the rows of its own experts, its homes, so all ranks wait for the one
with the most rows. Every rank also has places, in which clones of other ranks' experts compute for
one microbatch. A plan (``experts.transport.cloning``) says which expert is cloned in which place,
and how many selections every rank sends there instead of to the home. The sum over a token's
experts stays the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Index, coerce_fields, require_positive

#: Alignment of every stack (bytes): more than tensor maps and the widest accesses need.
_ALIGNMENT = 128
#: Owner of a place that has no clone.
NO_EXPERT = -1


@dataclass(frozen=True)
class ExpertPlaces:
    """Homes and places of experts over the ranks of ep.

    Expert e is at home on rank ``e // homes``, and place p is on rank ``p // places``. A physical
    expert is the index of a home or a place over all ranks: a rank's homes come first, then its
    places.

    Raises:
        ParallelPlanError: If the experts do not divide by the ranks, or a rank has more places than
            other ranks have experts.
    """

    num_ranks: int
    num_experts: int
    places: int

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_experts", "places"):
            require_positive(name, getattr(self, name))
        if self.num_experts % self.num_ranks:
            raise ParallelPlanError(
                f"num_experts ({self.num_experts}) must be a multiple of num_ranks "
                f"({self.num_ranks}), because every rank has the same number of experts. Change "
                "one of them."
            )
        remote = self.num_experts - self.homes
        if self.places > remote:
            raise ParallelPlanError(
                f"places ({self.places}) must be at most {remote}, because other ranks have only "
                f"{remote} of the {self.num_experts} experts. Use fewer places."
            )

    @property
    def homes(self) -> int:
        """Return the number of experts at home on every rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_places(self) -> int:
        """Return the number of places of all ranks."""
        return self.num_ranks * self.places

    def physical_home(self, expert: int) -> int:
        """Return the physical expert that is the home of an expert."""
        rank, home = divmod(expert, self.homes)
        return rank * (self.homes + self.places) + home

    def physical_place(self, place: int) -> int:
        """Return the physical expert that is a place."""
        rank, number = divmod(place, self.places)
        return rank * (self.homes + self.places) + self.homes + number


@dataclass(frozen=True)
class CloneSettings:
    """Places for clones of busy experts, and the smallest clone that is worth its transfers.

    Raises:
        ParallelPlanError: For values out of range.
    """

    places: int
    min_rows: int = 0

    def __post_init__(self) -> None:
        require_positive("places", self.places)
        if self.min_rows < 0:
            raise ParallelPlanError(
                f"min_rows must not be negative: it is {self.min_rows} selections. Use 0 or more."
            )


@dataclass(frozen=True)
class CloneMemory:
    """Layout of one stack over a rank's places for every matrix of an expert.

    Args:
        shapes: Shape of each matrix of an expert.
        element: Size of an element (bytes).
    """

    places: int
    shapes: tuple[tuple[int, int], ...]
    element: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the offset of every stack (bytes)."""
        return self._ends[:-1]

    @property
    def num_bytes(self) -> int:
        """Return the size of the memory (bytes)."""
        return self._ends[-1]

    @property
    def _ends(self) -> tuple[int, ...]:
        sizes = [self.places * prod(shape) * self.element for shape in self.shapes]
        return (0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))


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


#: Grouped products in bfloat16 and puts between two GPUs, as measured on H200s.
_GPU_COST = CloneCost(products=650e12, bandwidth=350e9)


@dataclass(frozen=True)
class ExpertClones:
    """Places for clones of busy experts on every rank, and the smallest clone.

    A clone is a temporary copy of another rank's expert, for one layer and microbatch. It moves
    tokens from a rank with many tokens to a rank with few.

    Args:
        places: Clones that a rank can have at a time (clones).
        min_rows: Smallest number of rows, of one layer and microbatch, for which a clone is created
            (rows). None means the number from which a clone saves more time than its transfers
            take, at speeds measured on H200s; on CPUs it means every clone.

    Raises:
        ParallelPlanError: If a value has the wrong type or is out of its range.
    """

    places: Count
    min_rows: Index | None = None

    def __post_init__(self) -> None:
        coerce_fields(self, "experts.clones.")

    def on(self, device_type: str) -> CloneSettings:
        """Return the settings of layers on a type of devices."""
        if self.min_rows is not None:
            return CloneSettings(self.places, self.min_rows)
        return CloneSettings(self.places, _GPU_COST.min_rows if device_type == "cuda" else 0)

    def reason_on(self, device_type: str) -> str:
        """Return which clones are created on a type of devices, and why, for the log."""
        if self.min_rows is not None:
            return f"of at least {self.min_rows:,} rows, as asked for"
        if device_type != "cuda":
            return f"of any number of rows on {device_type}"
        cost = _GPU_COST
        return (
            f"of at least {cost.min_rows:,} rows: fewer save less time at "
            f"{cost.products / 1e12:g} TFLOP/s than {cost.num_bytes} bytes a parameter take at "
            f"{cost.bandwidth / 1e9:g} GB/s"
        )

    def check(self, num_experts: int, ep: int) -> None:
        """Check that other ranks have enough experts for the places of a rank.

        Raises:
            ParallelPlanError: If a rank has more places than other ranks have experts.
        """
        remote = num_experts - num_experts // ep
        if self.places > remote:
            raise ParallelPlanError(
                f"experts.clones ({self.places}) must be at most {remote}: with ep ({ep}) the "
                f"other ranks have {remote} of the {num_experts} experts, and a place holds a "
                f"clone of one of them. Use at most {remote}."
            )
