"""How rotary positions are stretched beyond the length that a model was first trained on: plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Positive, settle

RotaryScalingKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Describe how the angles of rotary positions are changed.

    Args:
        kind: "linear" (all angles divided by the factor), "llama3" (slow ones divided, fast ones kept, those between
            blended), "yarn" (the same by another ramp, and longer queries and keys) or "longrope" (a factor for every
            angle, one set for short and one for long sequences, and longer queries and keys).
        factor: how many times longer the sequences became.
        original_length: longest sequence before (tokens); all kinds but linear need it.
        low_frequency_factor: llama3: angles that turn fewer times than this over `original_length` are divided.
        high_frequency_factor: llama3: those that turn more times than this are kept.
        beta_fast: yarn: angles that turn more times than this over `original_length` are kept.
        beta_slow: yarn: those that turn fewer times than this are divided.
        truncate: yarn: whether the ends of the ramp are rounded to whole angles.
        short_factors: longrope: divisor of every angle in sequences of at most `original_length` tokens.
        long_factors: longrope: the same in longer sequences.
        attention_factor: multiplies cosines and sines; None means what the kind's authors recommend.

    Raises:
        ParallelPlanError: if a number that the kind needs is missing or cannot be.

    Source: Chen et al. 2023 (linear); Dubey et al. 2024 (llama3); Peng et al. 2023 (yarn); Ding et al. 2024 (longrope).
    """

    kind: RotaryScalingKind
    factor: Positive = 1.0
    original_length: Count | None = None
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    short_factors: tuple[Positive, ...] = ()
    long_factors: tuple[Positive, ...] = ()
    attention_factor: Positive | None = None

    def __post_init__(self) -> None:
        settle(self, "rotary_scaling.")
        length = self.original_length
        needs = f"the {self.kind} kind looks at the length that the model was first trained on"
        _require(self.kind == "linear" or length is not None, "original_length", length, "be given", needs)
        if self.kind == "llama3":
            rule = f"exceed low_frequency_factor ({self.low_frequency_factor})"
            holds = 0.0 < self.low_frequency_factor < self.high_frequency_factor
            _require(holds, "high_frequency_factor", self.high_frequency_factor, rule, "angles between are blended")
        if self.kind == "longrope":
            holds = length is not None and length > 1
            _require(holds, "original_length", length, "be at least 2", "its logarithm is divided by")
            for name in ("short_factors", "long_factors"):
                values = getattr(self, name)
                _require(bool(values), name, values, "be numbers above 0", "every angle is divided by its own")
            numbers = f"{len(self.short_factors)} and {len(self.long_factors)}"
            same = len(self.short_factors) == len(self.long_factors)
            _require(same, "short_factors and long_factors", numbers, "be equally many", "both divide the same angles")

    @property
    def amplitude(self) -> float:
        """Return what cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        if self.kind == "longrope":
            assert self.original_length is not None, "longrope has been refused without it"
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0


def _require(holds: bool, name: str, value: object, rule: str, why: str) -> None:
    if not holds:
        raise ParallelPlanError(f"rotary_scaling: {name} ({value}) must {rule}, because {why}. Change {name}.")
