"""Attention of one new token in one kernel, from the fused projection to the mixed values."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lightning_megatron.kernels.triton.launch import (
    ceil_div,
    early_start,
    on_device_of,
    power_of_two,
)
from lightning_megatron.kernels.triton.normed_rotary import rotation_angles, rotation_partners
from lightning_megatron.shapes import Float, Int

#: Keys that a program reads at once (tokens).
_BLOCK = 64
#: Number of programs among which keys are divided: one for each of about 132 multiprocessors.
_PROGRAMS = 132
_WARPS = 4
#: Most parts of the keys of a head.
_MAX_PARTS = 64
#: Sums that a program merges at once (elements).
_MERGED = 8192


def attend_rotated_token(
    qkv: Float[Tensor, "qkv_local"],
    tables: tuple[Float[Tensor, "seq 1 1 rotary_dim"], Float[Tensor, "seq 1 1 rotary_dim"]],
    keys: Float[Tensor, "1 kv_heads slots head_dim"],
    values: Float[Tensor, "1 kv_heads slots head_dim"],
    place: Int[Tensor, "1"],
    counters: Int[Tensor, "kv_heads"],
    *,
    scale: float,
    scales: tuple[Float[Tensor, "head_dim"], Float[Tensor, "head_dim"]] | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Float[Tensor, "out_local"]:
    """Rotate the queries and keys of one token, store the token, and return its attention.

    Equal to ``norm_and_rotate_qkv``, ``store_token`` and ``attend_one_token`` of one row without
    padding. Programs share the keys that the token attends to, and the last one to end merges
    their sums by their log-sum-exps. There is no gradient.

    Args:
        qkv: Output of the fused projection: queries, keys, values; contiguous.
        tables: Cosines and sines of all places, for the first elements of a head; the others are
            not rotated.
        keys: Keys of all slots; contiguous. Slot ``p % slots`` holds the token at place ``p``.
        place: Place of the new token in its row, on the device (tokens). In a captured pass it is
            not written by a kernel of the graph.
        counters: Zeros, of int32; the kernel leaves zeros.
        scales: Factors of the normalised queries and keys; None means no norm before the rotation.
    """
    _, kv_heads, slots, head_dim = keys.shape
    heads = qkv.numel() // head_dim - 2 * kv_heads
    group = heads // kv_heads
    parts = min(_MAX_PARTS, ceil_div(slots, _BLOCK), ceil_div(_PROGRAMS, kv_heads))
    sums = qkv.new_empty(kv_heads, parts, group, head_dim, dtype=torch.float32)
    bests = qkv.new_empty(kv_heads, parts, group, dtype=torch.float32)
    totals = torch.empty_like(bests)
    output = qkv.new_empty(heads * head_dim)
    query_scale, key_scale = scales or (None, None)
    lanes = max(16, power_of_two(head_dim))
    with on_device_of(qkv):
        # The kernel takes powers of two, so the factor includes log2(e).
        _attend[(kv_heads, parts)](
            qkv, *tables, query_scale, key_scale, keys, values, place, counters, sums,
            bests, totals, output, kv_heads, slots, eps, scale * 1.4426950408889634, HEADS=group,
            HEAD_DIM=head_dim, ROTATED=tables[0].shape[-1], HAS_NORM=scales is not None,
            INTERLEAVED=interleaved, PARTS=parts, ROWS=max(16, power_of_two(group)), LANES=lanes,
            BLOCK=_BLOCK, GROUP=power_of_two(group),
            MERGED=max(1, min(_MERGED // power_of_two(group) // lanes, power_of_two(parts))),
            num_warps=_WARPS, **early_start(1),
        )  # fmt: skip
    return output


@triton.jit
def _rotated(
    head: tl.tensor,
    scale: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    place: tl.tensor,
    lanes: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Return normalised and rotated heads, in float32."""
    partners = rotation_partners(lanes, ROTATED, INTERLEAVED)
    values = tl.load(head + lanes, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(head + partners, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(values * values, 1)[:, None] / HEAD_DIM + eps)
        values *= factor * tl.load(scale + lanes, mask=inside, other=0.0).to(tl.float32)
        partner *= factor * tl.load(scale + partners, mask=inside, other=0.0).to(tl.float32)
    cosine = rotation_angles(cosines, place, lanes, ROTATED, inside, 1.0, INTERLEAVED)
    sine = rotation_angles(sines, place, lanes, ROTATED, inside, 0.0, INTERLEAVED)
    return values * cosine + tl.where(partners > lanes, -partner, partner) * sine


@triton.jit
def _attend(
    qkv: tl.tensor, cosines: tl.tensor, sines: tl.tensor, query_scale: tl.tensor,
    key_scale: tl.tensor, keys: tl.tensor, values: tl.tensor, place: tl.tensor, counters: tl.tensor,
    sums: tl.tensor, bests: tl.tensor, totals: tl.tensor, output: tl.tensor, kv_heads: tl.tensor,
    slots: tl.tensor, eps: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr, HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MERGED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    is_lane = lanes < HEAD_DIM
    inside = (rows < HEADS) & is_lane
    # No kernel of a captured pass writes the place.
    at = tl.load(place)
    new, first, last = _slots_of_part(at, slots, part, PARTS, BLOCK)
    own_keys = keys + kv_head.to(tl.int64) * slots * HEAD_DIM
    own_values = values + kv_head.to(tl.int64) * slots * HEAD_DIM
    # Kernels of the graph write no other slot than the new one.
    block_keys = _read_block(own_keys, first, last, new, HEAD_DIM, LANES, BLOCK)
    block_values = _read_block(own_values, first, last, new, HEAD_DIM, LANES, BLOCK)
    if EARLY:
        gdc_wait()
    source = qkv + (kv_heads * HEADS + kv_head) * HEAD_DIM
    key = _rotated(
        source, key_scale, cosines, sines, at, lanes, is_lane, eps, HEAD_DIM, ROTATED, HAS_NORM,
        INTERLEAVED,
    ).to(qkv.dtype.element_ty)  # fmt: skip
    value = tl.load(source + kv_heads * HEAD_DIM + lanes, mask=is_lane, other=0.0)
    queries = _rotated(
        qkv + (kv_head * HEADS + rows) * HEAD_DIM, query_scale, cosines, sines, at, lanes,
        inside, eps, HEAD_DIM, ROTATED, HAS_NORM, INTERLEAVED,
    ).to(qkv.dtype.element_ty)  # fmt: skip
    if (first <= new) & (new < last):
        target = new * HEAD_DIM + lanes
        tl.store(own_keys + target, key, mask=is_lane)
        tl.store(own_values + target, value, mask=is_lane)
    best, total, mixed = _attend_part(
        queries, key, value, own_keys, own_values, block_keys, block_values, first, last, new,
        scale, HEAD_DIM, ROWS, LANES, BLOCK,
    )  # fmt: skip
    row = (kv_head * PARTS + part) * HEADS + tl.arange(0, ROWS)
    is_row = tl.arange(0, ROWS) < HEADS
    tl.store(bests + row, best, mask=is_row)
    tl.store(totals + row, total, mask=is_row)
    tl.store(sums + row[:, None] * HEAD_DIM + lanes, mixed, mask=inside)
    # All threads have written before one of them counts this program.
    tl.debug_barrier()
    num_before = tl.atomic_add(counters + kv_head, 1)
    if num_before == PARTS - 1:
        _merge(sums, bests, totals, output, kv_head, HEADS, HEAD_DIM, PARTS, GROUP, MERGED, LANES)
        tl.store(counters + kv_head, 0)


@triton.jit
def _slots_of_part(
    place: tl.tensor,
    slots: tl.tensor,
    part: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the slot of the new token, and the first and the end of the slots of a part."""
    count = tl.minimum(place + 1, slots).to(tl.int32)
    size = tl.cdiv(tl.cdiv(count, PARTS), BLOCK) * BLOCK
    first = part * size
    return (place % slots).to(tl.int32), first, tl.minimum(first + size, count)


@triton.jit
def _attend_part(
    queries: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_keys: tl.tensor,
    block_values: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    new: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest score, the sum of the weights and the weighted sum of some values.

    Args:
        key: Rotated new key.
        block_keys: Keys of the first block, with zeros for the new slot.
        block_values: Values of the first block, with zeros for the new slot.
        last: Slot after the last one.
        new: Slot of the new key and value.
        scale: Factor of the scores, for powers of two.
    """
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, LANES), tl.float32)
    for start in range(first, last, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        is_new = (slots == new)[:, None]
        seen_keys = tl.where(is_new, key, block_keys)
        seen_values = tl.where(is_new, value, block_values)
        products = tl.dot(queries, tl.trans(seen_keys), input_precision="ieee")
        scores = tl.where((slots < last)[None, :], products * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(best - higher)
        total = total * decay + tl.sum(weights, 1)
        mixed *= decay[:, None]
        mixed += tl.dot(weights.to(seen_values.dtype), seen_values, input_precision="ieee")
        best = higher
        block_keys = _read_block(keys, start + BLOCK, last, new, HEAD_DIM, LANES, BLOCK)
        block_values = _read_block(values, start + BLOCK, last, new, HEAD_DIM, LANES, BLOCK)
    return best, total, mixed


@triton.jit
def _read_block(
    rows: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
    new: tl.tensor,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the keys or values of the slots of a block, and zeros for the new slot."""
    slots = start + tl.arange(0, BLOCK)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    inside = (slots < last) & (slots != new) & (lanes < HEAD_DIM)
    return tl.load(rows + slots * HEAD_DIM + lanes, mask=inside, other=0.0)


@triton.jit
def _merge(
    sums: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    output: tl.tensor,
    kv_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    MERGED: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Write the attention of the query heads of a key head, from the sums of all programs."""
    heads = tl.arange(0, GROUP)
    is_head = heads < HEADS
    lanes = tl.arange(0, LANES)
    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, LANES), tl.float32)
    for start in range(0, PARTS, MERGED):
        parts = start + tl.arange(0, MERGED)
        rows = (kv_head * PARTS + parts[:, None]) * HEADS + heads[None, :]
        inside = (parts < PARTS)[:, None] & is_head[None, :]
        # Other programs wrote these numbers, so they are read past the nearest cache.
        part_sums = tl.load(
            sums + rows[:, :, None] * HEAD_DIM + lanes[None, None, :],
            mask=inside[:, :, None] & (lanes < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        best = tl.load(bests + rows, mask=inside, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(totals + rows, mask=inside, other=0.0, cache_modifier=".cg")
        # The token sees at least the first slot, so that the first part of each head has a score.
        higher = tl.where(is_head, tl.maximum(peak, tl.max(best, 0)), 0.0)
        weights = tl.exp2(best - higher[None, :])
        decay = tl.exp2(peak - higher)
        total = total * decay + tl.sum(weights * part_total, 0)
        mixed = mixed * decay[:, None] + tl.sum(part_sums * weights[:, :, None], 0)
        peak = higher
    result = mixed / tl.where(is_head, total, 1.0)[:, None]
    target = output + (kv_head * HEADS + heads[:, None]) * HEAD_DIM + lanes[None, :]
    inside_output = is_head[:, None] & (lanes < HEAD_DIM)[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=inside_output)
