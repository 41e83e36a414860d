"""Settings of clones of busy experts, as users give them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.clone_cost import CloneCost
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.plan.settings import Count, Index, coerce_fields

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
        coerce_fields(self, "expert_clones.")

    def on(self, device_type: str) -> CloneSettings:
        """Return the settings of layers on a type of devices.

        Args:
            device_type: Type of the devices, such as ``cuda``.
        """
        if self.min_rows is not None:
            return CloneSettings(self.places, self.min_rows)
        return CloneSettings(self.places, _GPU_COST.min_rows if device_type == "cuda" else 0)

    def reason_on(self, device_type: str) -> str:
        """Return which clones are created on a type of devices, and why, for the log.

        Args:
            device_type: Type of the devices, such as ``cuda``.
        """
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

        Args:
            num_experts: Number of experts of a layer, a multiple of ep (experts).
            ep: Ranks that share them (ranks).

        Raises:
            ParallelPlanError: If a rank has more places than other ranks have experts.
        """
        remote = num_experts - num_experts // ep
        if self.places > remote:
            raise ParallelPlanError(
                f"expert_clones ({self.places}) must be at most {remote}: with ep ({ep}) the other "
                f"ranks have {remote} of the {num_experts} experts, and a place holds a clone of "
                f"one of them. Use at most {remote}."
            )
