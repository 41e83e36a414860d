"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatron.layers.kernel_choice import fused_kernels
from lightning_megatron.layers.rotary_frequencies import rotary_frequencies
from lightning_megatron.plan.rotary_scaling import RotaryScaling


def rotary_tables(
    seq_length: int,
    head_dim: int,
    *,
    base: float = 10000.0,
    offset: int = 0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the positions ``offset .. offset + seq_length``.

    Equal to Hugging Face's LlamaRotaryEmbedding of every type: angles in float32, rounded to ``dtype`` once.

    Shapes: both ``(S, 1, 1, K)``.

    Args:
        seq_length: Number of positions (tokens).
        head_dim: Elements of a head that are rotated; even (elements).
        base: Ratio of the longest to the shortest wavelength.
        offset: First position (tokens).
        scaling: How angles are stretched; None means not at all.
        dtype: Of the result.
        device: Of the result.

    Source: Su et al. 2021, section 3.2.2; the halves convention of Llama.
    """
    is_long = scaling is not None and seq_length > (scaling.original_length or seq_length)
    frequencies = rotary_frequencies(head_dim, base, scaling, is_long=is_long, device=device)
    positions = torch.arange(offset, offset + seq_length, dtype=torch.float32, device=device)
    return _tables(positions[:, None], frequencies, scaling, dtype)


def position_tables(
    positions: Tensor,
    head_dim: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of given positions.

    Equal to ``rotary_tables`` for the positions ``0 .. S`` in every row.

    Shapes: positions ``(B, S)``; both results ``(S, B, 1, K)``.

    Args:
        positions: Position of every token.
        head_dim: Elements of a head that are rotated; even (elements).
        base: Ratio of the longest to the shortest wavelength.
        scaling: How angles are stretched; None means not at all.
        dtype: Of the result.
    """
    frequencies = rotary_frequencies(head_dim, base, scaling, device=positions.device)
    if scaling is not None and scaling.kind == "longrope" and scaling.original_length is not None:
        stretched = rotary_frequencies(head_dim, base, scaling, is_long=True, device=positions.device)
        # Chosen on the device: reading the largest position would wait for it.
        frequencies = torch.where(positions.max() + 1 > scaling.original_length, stretched, frequencies)
    return _tables(positions.t().float(), frequencies, scaling, dtype)


def _tables(
    positions: Tensor, frequencies: Tensor, scaling: RotaryScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles = positions[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    cosines, sines = angles.cos(), angles.sin()
    if scaling is not None:
        cosines, sines = cosines * scaling.amplitude, sines * scaling.amplitude
    return cosines.to(dtype), sines.to(dtype)


class RotaryTables:
    """Keep the tables of the last sequence length, dtype and device that were asked for.

    Equal to ``rotary_tables`` at every call, or to ``position_tables`` where positions are given.

    Args:
        head_dim: Elements of a head that are rotated; even (elements).
        base: Ratio of the longest to the shortest wavelength.
        scaling: How angles are stretched; None means not at all.
    """

    def __init__(self, head_dim: int, base: float, scaling: RotaryScaling | None = None) -> None:
        self.head_dim, self.base, self.scaling = head_dim, base, scaling
        self._kept: tuple[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] | None = None

    def __call__(self, seq_length: int, hidden: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the tables for sequences of a length, or for given positions, in dtype and device of ``hidden``."""
        if positions is not None:
            return position_tables(positions, self.head_dim, base=self.base, scaling=self.scaling, dtype=hidden.dtype)
        key = (seq_length, hidden.dtype, hidden.device)
        if self._kept is None or self._kept[0] != key:
            # Tables made under inference_mode, in a validation loop, could not be used in training after it.
            with torch.inference_mode(False):
                tables = rotary_tables(
                    seq_length,
                    self.head_dim,
                    base=self.base,
                    scaling=self.scaling,
                    dtype=hidden.dtype,
                    device=hidden.device,
                )
            self._kept = (key, tables)
        return self._kept[1]


def apply_rotary(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair ``(i, i + R/2)`` of the first R elements of every head by the angle of its position.

    Shapes: heads ``(S, B, H, K)``; tables ``(S, 1, 1, R)`` or ``(S, B, 1, R)`` each; output ``(S, B, H, K)``.
    """
    cosines, sines = tables
    rotated = cosines.shape[-1]
    if rotated < heads.shape[-1]:
        return torch.cat((apply_rotary(heads[..., :rotated], tables), heads[..., rotated:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def split_heads(
    qkv: Tensor,
    widths: Sequence[int],
    head_dim: int,
    tables: tuple[Tensor, Tensor] | None,
    norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into heads and give queries and keys their positions; the caller gives ``qkv`` up.

    Shapes: qkv ``(S, B, (H + 2 G) K)``; tables ``(S, 1, 1, R)`` or ``(S, B, 1, R)`` each; query ``(S, B, H, K)``, key
        and value ``(S, B, G, K)``.

    Args:
        qkv: The projection; the fused kernel overwrites it.
        widths: Features of query, key and value (elements).
        head_dim: Size K of a head (elements).
        tables: Tables of ``rotary_tables``; None leaves queries and keys as they are.
        norms: What queries and keys go through before they are rotated.
    """
    kernels = fused_kernels(qkv) if norms is None and _is_plain(tables, head_dim) else None
    if kernels is not None:
        return kernels.rotate_qkv(qkv, tables, widths[0] // head_dim, widths[1] // head_dim)
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(list(widths), dim=-1))
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    if tables is not None:
        query, key = apply_rotary(query, tables), apply_rotary(key, tables)
    return query, key, value


def _is_plain(tables: tuple[Tensor, Tensor] | None, head_dim: int) -> bool:
    """Tell whether all rows have the same positions, and heads are rotated whole: what the fused kernel does."""
    return tables is not None and tables[0].shape[1] == 1 and tables[0].shape[-1] == head_dim
