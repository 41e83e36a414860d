"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    seq_length: int,
    head_dim: int,
    *,
    base: float = 10000.0,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the positions ``offset .. offset + seq_length``.

    Equal to Hugging Face's LlamaRotaryEmbedding (type ``default``): angles in float32, rounded to ``dtype`` once.

    Shapes: both ``(S, 1, 1, K)``.

    Args:
        seq_length: Number of positions (tokens).
        head_dim: Size of a head; even (elements).
        base: Ratio of the longest to the shortest wavelength.
        offset: First position (tokens).
        dtype: Of the result.
        device: Of the result.

    Source: Su et al. 2021, section 3.2.2; the halves convention of Llama.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(offset, offset + seq_length, dtype=torch.float32, device=device)
    angles = positions[:, None] * (1.0 / base**exponents)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair ``(i, i + K/2)`` of every head by the angle of its position.

    Shapes: heads ``(S, B, H, K)``; tables ``(S, 1, 1, K)`` each; output ``(S, B, H, K)``.
    """
    cosines, sines = tables
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
