"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.context_parallel.sequence_order import own_part
from lightning_megatron.layers.fused.choose_kernels import fused_kernels, warn_of_slow_path
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.shapes import Float, Int

#: Cosines and sines of the positions that the ranks of one position on the cp axis hold.
Rotary: TypeAlias = tuple[
    Float[Tensor, "seq_part #batch 1 rotary_dim"], Float[Tensor, "seq_part #batch 1 rotary_dim"]
]

#: Sequence length, dtype and device of tables.
_TableKey: TypeAlias = tuple[int, torch.dtype, torch.device]

#: Maximum number of cached tables.
_MAX_CACHED_TABLES = 8


def position_tables(
    positions: Int[Tensor, "batch seq"],
    head_dim: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "seq batch 1 rotary_dim"], Float[Tensor, "seq batch 1 rotary_dim"]]:
    """Compute the cosines and sines of given positions.

    Equal to Hugging Face's LlamaRotaryEmbedding of every type. The angles are computed in float32,
    the results rounded to ``dtype`` once. ``head_dim`` counts the rotated elements of a head.

    Source: Su et al. 2021, section 3.2.2; elements ``i`` and ``i + rotary_dim / 2`` are a pair, as
        in Llama.
    """
    device = positions.device
    frequencies = rotary_frequencies(head_dim, base, scaling, device=device)
    if scaling is not None and scaling.kind == "longrope" and scaling.original_length is not None:
        stretched = rotary_frequencies(head_dim, base, scaling, is_long=True, device=device)
        # Select on the device: reading the largest position on the host would synchronise with the
        # device.
        is_long = positions.max() + 1 > scaling.original_length
        frequencies = torch.where(is_long, stretched, frequencies)
    angles = positions.t().float()[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    cosines = angles.cos()
    sines = angles.sin()
    if scaling is not None:
        cosines = cosines * scaling.amplitude
        sines = sines * scaling.amplitude
    return cosines.to(dtype), sines.to(dtype)


class RotaryTables:
    """Rotary tables with a cache for the last sequence lengths, dtypes and devices.

    Equal to ``position_tables``, with positions counted from 0 if none are given. Tables in the
    cache keep their addresses, so that CUDA graphs can read them in place. Each rank of ``context``
    gets the tables of its positions; None means whole sequences.
    """

    def __init__(
        self,
        head_dim: int,
        base: float,
        scaling: RotaryScaling | None = None,
        context: MeshAxis | None = None,
    ) -> None:
        self.head_dim = head_dim
        self.base = base
        self.scaling = scaling
        self.context = context or MeshAxis("cp")
        #: Tables by key, the most recently used first.
        self._cache: tuple[tuple[_TableKey, tuple[Tensor, Tensor]], ...] = ()

    def __call__(
        self,
        seq_length: int,
        hidden: Float[Tensor, "..."],
        positions: Int[Tensor, "batch seq"] | None = None,
        cut: TokenOrder | None = None,
    ) -> Rotary:
        """Return the tables in the dtype and on the device of ``hidden``.

        Args:
            seq_length: Number of positions of whole sequences, if none are given (tokens).
            cut: Positions that each rank holds, only with ``positions``; None means that rows are
                cut without regard to documents.
        """
        if positions is not None:
            return self._local_tables(positions, hidden.dtype, cut)
        key = (seq_length, hidden.dtype, hidden.device)
        if not self._cache or self._cache[0][0] != key:
            kept = dict(self._cache)
            tables = kept.pop(key, None)
            if tables is None:
                # Autograd cannot use tensors that were created in inference mode. A validation loop
                # may create the tables that training uses next.
                with torch.inference_mode(False):
                    row = torch.arange(seq_length, device=hidden.device)[None]
                    tables = self._local_tables(row, hidden.dtype)
            # Captured steps refer to the old tuple and its tables, so a new tuple is made.
            self._cache = ((key, tables), *list(kept.items())[: _MAX_CACHED_TABLES - 1])
        return self._cache[0][1]

    def _local_tables(
        self, positions: Tensor, dtype: torch.dtype, cut: TokenOrder | None = None
    ) -> tuple[Tensor, Tensor]:
        # Scalings may depend on the largest position, so full tables are computed and then cut.
        cosines, sines = position_tables(
            positions, self.head_dim, base=self.base, scaling=self.scaling, dtype=dtype
        )
        return own_part(cosines, self.context, 0, cut), own_part(sines, self.context, 0, cut)


def apply_rotary(
    heads: Float[Tensor, "seq batch heads head_dim"],
    tables: Rotary,
    interleaved: bool = False,
) -> Float[Tensor, "seq batch heads head_dim"]:
    """Rotate pairs of the first elements of every head.

    Args:
        interleaved: Whether neighbouring elements ``(2 i, 2 i + 1)`` are a pair; otherwise
            ``(i, i + rotary_dim / 2)`` are.
    """
    cosines, sines = tables
    rotated = cosines.shape[-1]
    if rotated < heads.shape[-1]:
        turned = apply_rotary(heads[..., :rotated], tables, interleaved)
        return torch.cat((turned, heads[..., rotated:]), dim=-1)
    if interleaved:
        # Each half of a table contains the values of all pairs.
        cosines, sines = (table[..., : rotated // 2] for table in tables)
        first, second = heads.unflatten(-1, (-1, 2)).unbind(-1)
        pairs = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.stack(pairs, -1).flatten(-2)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def split_heads(
    qkv: Float[Tensor, "seq batch qkv_local"],
    widths: Sequence[int],
    head_dim: int,
    tables: Rotary | None,
    norms: tuple[Any, Any] | None = None,
    *,
    norms_layer: bool = False,
    interleaved: bool = False,
) -> tuple[
    Float[Tensor, "seq batch heads head_dim"],
    Float[Tensor, "seq batch kv_heads head_dim"],
    Float[Tensor, "seq batch kv_heads head_dim"],
]:
    """Split a fused projection into heads and rotate queries and keys.

    A fused kernel may overwrite ``qkv``, so the caller must not use it afterwards.

    Args:
        widths: Number of query, key and value features (elements).
        tables: Cosines and sines from ``position_tables``; None means no rotation.
        norms: Modules that normalise queries and keys before the rotation; None means no norms.
        norms_layer: Whether the norms normalise the features of all heads together; otherwise they
            normalise each head.
    """
    kernels = fused_kernels(qkv)
    if kernels is not None and tables is not None:
        if norms is None and _is_plain(tables, head_dim, interleaved):
            return kernels.rotate_qkv(qkv, tables, widths[0] // head_dim, widths[1] // head_dim)
        if norms is None or not norms_layer:
            sizes = widths[0] // head_dim, widths[1] // head_dim, head_dim
            scales = None if norms is None else (norms[0].scale(), norms[1].scale())
            eps = 0.0 if norms is None else norms[0].eps
            return kernels.norm_and_rotate_qkv(qkv, tables, sizes, scales, eps, interleaved)
        warn_of_slow_path(
            "Rotary embeddings run on operators of torch, not on the fused kernel: the features of "
            "all heads are normalised together before it. This is the model's architecture, which "
            "no option changes."
        )
    parts = qkv.split(list(widths), dim=-1)
    if norms is not None and norms_layer:
        parts = (norms[0](parts[0]), norms[1](parts[1]), parts[2])
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    if norms is not None and not norms_layer:
        query = norms[0](query)
        key = norms[1](key)
    if tables is not None:
        query = apply_rotary(query, tables, interleaved)
        key = apply_rotary(key, tables, interleaved)
    return query, key, value


def _is_plain(tables: tuple[Tensor, Tensor], head_dim: int, interleaved: bool) -> bool:
    """Return whether whole heads are rotated in halves, by the same angles in all rows."""
    return tables[0].shape[1] == 1 and tables[0].shape[-1] == head_dim and not interleaved


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
