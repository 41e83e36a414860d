"""Rotation frequencies of rotary position embedding, with the scalings for long sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.shapes import Float


def rotary_frequencies(
    dim: int,
    base: float,
    scaling: RotaryScaling | None = None,
    *,
    is_long: bool = False,
    device: torch.device | str,
) -> Float[Tensor, "{dim}//2"]:
    """Compute the angle in radians between neighbouring positions for every pair of elements.

    Bitwise equal to Hugging Face's functions for each kind of scaling. The result is float32.

    Args:
        dim: Number of rotated elements of a head; even (elements).
        is_long: Whether the sequence is longer than ``scaling.original_length``; only longrope uses
            this.
    """
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if scaling is None:
        return 1.0 / powers
    if scaling.kind == "linear":
        return (1.0 / powers) / scaling.factor
    if scaling.kind == "longrope":
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * powers)
    return _llama3(powers, scaling) if scaling.kind == "llama3" else _yarn(powers, base, scaling)


def _llama3(powers: Tensor, scaling: RotaryScaling) -> Tensor:
    length = scaling.original_length
    factor = scaling.factor
    assert length is not None, "RotaryScaling refuses this kind without it"
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    plain = 1.0 / powers
    wavelengths = 2 * math.pi / plain
    # Low frequencies are divided by the factor, high ones do not change, and frequencies between
    # both limits are interpolated.
    is_slow = wavelengths > length / low
    is_fast = wavelengths < length / high
    stretched = torch.where(is_slow, plain / factor, plain)
    part = (length / wavelengths - low) / (high - low)
    blended = (1 - part) * stretched / factor + part * stretched
    return torch.where(is_slow | is_fast, stretched, blended)


def _yarn(powers: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    num = len(powers)
    length = scaling.original_length
    assert length is not None, "RotaryScaling refuses this kind without it"

    # Returns the index of the pair that makes ``times`` turns over the original length.
    def pair_that_turns(times: float) -> float:
        return (2 * num * math.log(length / (times * 2 * math.pi))) / (2 * math.log(base))

    first = pair_that_turns(scaling.beta_fast)
    last = pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * num - 1)
    last += 0.001 if first == last else 0.0
    pairs = torch.arange(num, dtype=torch.float32, device=powers.device)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
