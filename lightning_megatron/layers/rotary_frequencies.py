"""How fast each pair of a head's elements turns with the position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_megatron.plan.rotary_scaling import RotaryScaling


def rotary_frequencies(
    dim: int, base: float, scaling: RotaryScaling | None = None, *, is_long: bool = False, device: torch.device | str
) -> Tensor:
    """Compute the angle by which each pair turns from one position to the next, in float32.

    Equal, to the last bit, to Hugging Face's functions for the kinds of scaling.

    Shapes: ``(dim / 2)``.

    Args:
        dim: Elements of a head that are rotated; even (elements).
        base: Ratio of the longest to the shortest wavelength.
        scaling: How the angles are stretched; None means not at all.
        is_long: Whether the sequence is longer than ``scaling.original_length``; only longrope looks at it.
        device: Of the result.
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
    length, factor = scaling.original_length, scaling.factor
    assert length is not None, "RotaryScaling refuses this kind without it"
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    plain = 1.0 / powers
    wavelengths = 2 * math.pi / plain
    is_slow, is_fast = wavelengths > length / low, wavelengths < length / high
    stretched = torch.where(is_slow, plain / factor, plain)
    part = (length / wavelengths - low) / (high - low)
    blended = (1 - part) * stretched / factor + part * stretched
    return torch.where(is_slow | is_fast, stretched, blended)


def _yarn(powers: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    num, length = len(powers), scaling.original_length
    assert length is not None, "RotaryScaling refuses this kind without it"

    def pair_that_turns(times: float) -> float:
        return (2 * num * math.log(length / (times * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num - 1)
    last += 0.001 if first == last else 0.0
    kept = 1 - ((torch.arange(num, dtype=torch.float32, device=powers.device) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
