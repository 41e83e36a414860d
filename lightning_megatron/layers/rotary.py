"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.layers.kernel_choice import fused_kernels


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


class RotaryTables:
    """Keep the tables of the last sequence length, dtype and device that were asked for.

    Equal to ``rotary_tables`` at every call.

    Args:
        head_dim: Size of a head; even (elements).
        base: Ratio of the longest to the shortest wavelength.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        self.head_dim, self.base = head_dim, base
        self._kept: tuple[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] | None = None

    def __call__(self, seq_length: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for sequences of a length, in dtype and device of ``hidden``."""
        key = (seq_length, hidden.dtype, hidden.device)
        if self._kept is None or self._kept[0] != key:
            # Tables made under inference_mode, in a validation loop, could not be used in training after it.
            with torch.inference_mode(False):
                tables = rotary_tables(
                    seq_length, self.head_dim, base=self.base, dtype=hidden.dtype, device=hidden.device
                )
            self._kept = (key, tables)
        return self._kept[1]


def apply_rotary(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair ``(i, i + K/2)`` of every head by the angle of its position.

    Shapes: heads ``(S, B, H, K)``; tables ``(S, 1, 1, K)`` each; output ``(S, B, H, K)``.
    """
    cosines, sines = tables
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def split_heads(
    qkv: Tensor, widths: Sequence[int], head_dim: int, tables: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into heads and give queries and keys their positions; the caller gives ``qkv`` up.

    Shapes: qkv ``(S, B, (H + 2 G) K)``; tables ``(S, 1, 1, K)`` each; query ``(S, B, H, K)``, key and value
        ``(S, B, G, K)``.

    Args:
        qkv: The projection; the fused kernel overwrites it.
        widths: Features of query, key and value (elements).
        head_dim: Size K of a head (elements).
        tables: Tables of ``rotary_tables``; None leaves queries and keys as they are.
    """
    kernels = None if tables is None else fused_kernels(qkv)
    if kernels is not None:
        return kernels.rotate_qkv(qkv, tables, widths[0] // head_dim, widths[1] // head_dim)
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(list(widths), dim=-1))
    if tables is not None:
        query, key = apply_rotary(query, tables), apply_rotary(key, tables)
    return query, key, value
