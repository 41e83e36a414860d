"""Clones of busy experts: the settings that users give, their places, memory and cost.

Over ep every rank computes the rows of its own experts, its homes, so all ranks wait for the one
with the most rows. Every rank also has places, in which clones of other ranks' experts compute for
one microbatch. A plan (``experts.transport.cloning``) says which expert is cloned in which place,
and how many selections every rank sends there instead of to the home. The sum over a token's
experts stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Index, coerce_fields

#: Alignment of every stack (bytes): more than tensor maps and the widest accesses need.
_ALIGNMENT = 128
#: Owner of a place that has no clone.
NO_EXPERT = -1
#: Speed of grouped products in bfloat16, as measured on H200s (FLOP/s).
PRODUCTS = 650e12
#: Speed of puts between two GPUs, in one direction, as measured on H200s (bytes/s).
BANDWIDTH = 350e9
#: Operations for each row and parameter of an expert, forward and backward.
OPERATIONS = 6
#: What a clone sends for each parameter: its weight for either pass, and its gradient (bytes).
BYTES_OF_PARAMETER = 2 + 2 + 4
#: Rows from which a clone saves the busiest rank more time than its transfers take.
MIN_ROWS_ON_GPUS = round(BYTES_OF_PARAMETER * PRODUCTS / (OPERATIONS * BANDWIDTH))


@dataclass(frozen=True)
class ExpertPlaces:
    """Homes and places of experts over the ranks of ep.

    Expert e is at home on rank ``e // homes``, and place p is on rank ``p // places``. A physical
    expert is the index of a home or a place over all ranks: a rank's homes come first, then its
    places.
    """

    num_ranks: int
    num_experts: int
    places: int

    @property
    def homes(self) -> int:
        """Return the number of experts at home on every rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_places(self) -> int:
        """Return the number of places of all ranks."""
        return self.num_ranks * self.places


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

    def on(self, device_type: str) -> ExpertClones:
        """Return the settings of layers on a type of devices, with a number of rows."""
        if self.min_rows is not None:
            return self
        return ExpertClones(self.places, MIN_ROWS_ON_GPUS if device_type == "cuda" else 0)

    def reason_on(self, device_type: str) -> str:
        """Return which clones are created on a type of devices, and why, for the log."""
        if self.min_rows is not None:
            return f"of at least {self.min_rows:,} rows, as asked for"
        if device_type != "cuda":
            return f"of any number of rows on {device_type}"
        return (
            f"of at least {MIN_ROWS_ON_GPUS:,} rows: fewer save less time at "
            f"{PRODUCTS / 1e12:g} TFLOP/s than {BYTES_OF_PARAMETER} bytes a parameter take at "
            f"{BANDWIDTH / 1e9:g} GB/s"
        )

    def check_transport(self, transport: str) -> None:
        """Check that tokens have a transport that clones share.

        Raises:
            ParallelPlanError: If they are not.
        """
        if transport not in ("auto", "one_sided"):
            raise ParallelPlanError(
                f"experts.clones ({self.places}) needs experts.transport of one_sided or auto, not "
                f"{transport}: weights of clones move like tokens. Use auto, or experts.clones=0."
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
