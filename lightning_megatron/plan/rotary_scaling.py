"""Scaling of rotary positions for sequences longer than those of the original training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, Positive, coerce_fields, shown

RotaryScalingKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Change of the angles of rotary positions.

    Args:
        kind: "linear" divides all angles by the factor. "llama3" divides slow angles, keeps fast
            ones and blends those in between. "yarn" does the same with another ramp, and scales
            queries and keys. "longrope" divides every angle by its own factor, with one set of
            factors for short and one for long sequences, and scales queries and keys.
        factor: Ratio of the new sequence length to the original one.
        original_length: Longest sequence of the original training; required by all kinds except
            "linear" (tokens).
        low_frequency_factor: Angles with fewer turns than this over ``original_length`` are divided
            ("llama3").
        high_frequency_factor: Angles with more turns than this are kept ("llama3").
        beta_fast: Angles with more turns than this over ``original_length`` are kept ("yarn").
        beta_slow: Angles with fewer turns than this are divided ("yarn").
        truncate: Whether the ends of the ramp are rounded to whole angles ("yarn").
        short_factors: Divisor of every angle in sequences of at most ``original_length`` tokens
            ("longrope").
        long_factors: Divisor of every angle in longer sequences ("longrope").
        attention_factor: Factor of cosines and sines; None means the value that the kind's authors
            recommend.

    Raises:
        ParallelPlanError: If a number that the kind needs is missing or out of range.

    Source: Chen et al. 2023 (linear); Dubey et al. 2024 (llama3); Peng et al. 2023 (yarn); Ding et
        al. 2024 (longrope).
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
        coerce_fields(self, "rotary_scaling.")
        if self.kind != "linear":
            rule = "be given, because this kind depends on the length of the first training"
            self._require(self.original_length is not None, "original_length", rule)
        if self.kind == "llama3":
            rule = f"exceed low_frequency_factor ({self.low_frequency_factor})"
            holds = self.low_frequency_factor < self.high_frequency_factor
            self._require(holds, "high_frequency_factor", rule)
        if self.kind == "longrope":
            holds = self.original_length != 1
            self._require(holds, "original_length", "be at least 2: its logarithm is divided by")
            self._require(bool(self.short_factors), "short_factors", "have a number for each angle")
            number = len(self.short_factors)
            rule = f"be as many as short_factors ({number}, not {len(self.long_factors)})"
            self._require(len(self.long_factors) == number, "long_factors", rule)

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ParallelPlanError(
                f"rotary_scaling ({self.kind}): {name} ({shown(getattr(self, name))}) must {rule}. "
                f"Change {name}."
            )

    @property
    def amplitude(self) -> float:
        """Return the factor of cosines and sines."""
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
