"""One new token of each row: storage in a cache, and attention to the keys and values there."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import (
    ceil_div,
    early_start,
    on_device_of,
    power_of_two,
    wait_early,
)
from lightning_megatron.shapes import Float, Int

#: Keys that a program reads at once (tokens).
_BLOCK = 64
#: Number of programs among which keys are divided: two for each of about 132 multiprocessors.
_PROGRAMS = 264
#: Most parts of the keys of a row.
_MAX_PARTS = 64


def attend_one_token(
    query: Float[Tensor, "1 batch heads head_dim"],
    keys: Float[Tensor, "batch kv_heads slots head_dim"],
    values: Float[Tensor, "batch kv_heads slots value_dim"],
    place: Int[Tensor, "1"],
    padding: Int[Tensor, " batch"] | None,
    scale: float,
) -> Float[Tensor, "1 batch heads*value_dim"]:
    """Return the attention of one token of each row to the tokens up to it.

    Equal to ``layers.attention.cached_attention.attend_by_mask``. The host does not read places,
    and keys after the token cost nothing: programs share the keys that the token attends to, and a
    second kernel merges their sums by their log-sum-exps. There is no gradient.

    Args:
        keys: Keys of all slots. Slot ``p % slots`` holds the token at place ``p``.
        place: Place of the new token in its row, on the device (tokens).
        padding: Padding before each row; None means none (tokens).
    """
    _, num_rows, num_heads, head_dim = query.shape
    kv_heads, slots, value_dim = values.shape[1:]
    pairs = num_rows * kv_heads
    group = num_heads // kv_heads
    parts = min(_MAX_PARTS, ceil_div(slots, _BLOCK), ceil_div(_PROGRAMS, pairs))
    query = query.contiguous()
    sums = query.new_empty(pairs, parts, group, value_dim, dtype=torch.float32)
    bests = query.new_empty(pairs, parts, group, dtype=torch.float32)
    totals = torch.empty_like(bests)
    output = query.new_empty(1, num_rows, num_heads * value_dim)
    lanes = max(16, power_of_two(value_dim))
    with on_device_of(query):
        # The kernel takes powers of two, so the factor includes log2(e).
        _attend_part[(pairs, parts)](
            query, keys, values, place, padding, sums, bests, totals, kv_heads, slots, head_dim,
            value_dim, group, scale * 1.4426950408889634, HAS_PADDING=padding is not None,
            PARTS=parts, ROWS=max(16, power_of_two(group)), LANES=max(16, power_of_two(head_dim)),
            VALUE_LANES=lanes, BLOCK=_BLOCK, num_warps=4, **early_start(1),
        )  # fmt: skip
        _add_parts[(pairs, group)](
            sums, bests, totals, output, value_dim, group, PARTS=parts,
            PART_LANES=power_of_two(parts), VALUE_LANES=lanes, num_warps=4, **early_start(1),
        )  # fmt: skip
    return output


def store_token(
    key: Float[Tensor, "1 batch kv_heads head_dim"],
    value: Float[Tensor, "1 batch kv_heads value_dim"],
    keys: Float[Tensor, "batch kv_heads slots head_dim"],
    values: Float[Tensor, "batch kv_heads slots value_dim"],
    place: Int[Tensor, "1"],
) -> None:
    """Store one token of each row in slot ``place % slots`` of the contiguous keys and values.

    Equal to ``index_copy_`` of both.
    """
    _, num_rows, kv_heads, head_dim = key.shape
    slots, value_dim = values.shape[2:]
    with on_device_of(key):
        _store[(num_rows * kv_heads,)](
            key,
            value,
            keys,
            values,
            place,
            kv_heads,
            slots,
            head_dim,
            value_dim,
            *key.stride()[1:],
            *value.stride()[1:],
            LANES=power_of_two(max(head_dim, value_dim)),
            num_warps=1,
            **early_start(1),
        )


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    place: tl.tensor,
    kv_heads: tl.tensor,
    slots: tl.tensor,
    head_dim: tl.tensor,
    value_dim: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_lane: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_lane: tl.tensor,
    LANES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_early(EARLY)
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    slot = pair * slots + tl.load(place) % slots
    lanes = tl.arange(0, LANES)
    new_key = tl.load(
        key + row * key_row + head * key_head + lanes * key_lane, mask=lanes < head_dim
    )
    tl.store(keys + slot * head_dim + lanes, new_key, mask=lanes < head_dim)
    source = value + row * value_row + head * value_head + lanes * value_lane
    new_value = tl.load(source, mask=lanes < value_dim)
    tl.store(values + slot * value_dim + lanes, new_value, mask=lanes < value_dim)


@triton.jit
def _attend_part(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, place: tl.tensor, padding: tl.tensor,
    sums: tl.tensor, bests: tl.tensor, totals: tl.tensor, kv_heads: tl.tensor, slots: tl.tensor,
    head_dim: tl.tensor, value_dim: tl.tensor, group: tl.tensor, scale: tl.tensor,
    HAS_PADDING: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_early(EARLY)
    pair = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    is_lane = lanes < head_dim
    is_value_lane = value_lanes < value_dim
    is_row = rows < group
    queries = tl.load(
        query + (pair * group + rows)[:, None] * head_dim + lanes[None, :],
        mask=is_row[:, None] & is_lane[None, :], other=0.0,
    )  # fmt: skip
    at = tl.load(place)
    start_of_row = at - at
    if HAS_PADDING:
        start_of_row = tl.load(padding + pair // kv_heads)
    count = tl.minimum(at + 1, slots).to(tl.int32)
    size = tl.cdiv(tl.cdiv(count, PARTS), BLOCK) * BLOCK
    first = part * size
    last = tl.minimum(first + size, count)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_LANES), tl.float32)
    for start in range(first, last, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        is_slot = slot < last
        # A slot holds the latest token whose place it is.
        visible = is_slot & (at - (at - slot + slots) % slots >= start_of_row)
        index = pair * slots + slot
        key = tl.load(
            keys + index[None, :] * head_dim + lanes[:, None],
            mask=is_slot[None, :] & is_lane[:, None], other=0.0,
        )  # fmt: skip
        products = tl.dot(queries, key, input_precision="ieee")
        scores = tl.where(visible[None, :], products * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(best - finite)
        value = tl.load(
            values + index[:, None] * value_dim + value_lanes[None, :],
            mask=is_slot[:, None] & is_value_lane[None, :], other=0.0,
        )  # fmt: skip
        total = total * decay + tl.sum(weights, 1)
        mixed *= decay[:, None]
        mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = higher
    row = (pair * PARTS + part) * group + rows
    tl.store(bests + row, best, mask=is_row)
    tl.store(totals + row, total, mask=is_row)
    target = sums + row[:, None] * value_dim + value_lanes[None, :]
    tl.store(target, mixed, mask=is_row[:, None] & is_value_lane[None, :])


@triton.jit
def _add_parts(
    sums: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    partial: tl.tensor,
    value_dim: tl.tensor,
    group: tl.tensor,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_early(EARLY)
    pair = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = tl.arange(0, PART_LANES)
    lanes = tl.arange(0, VALUE_LANES)
    is_part = parts < PARTS
    is_lane = lanes < value_dim
    row = (pair * PARTS + parts) * group + head
    best = tl.load(bests + row, mask=is_part, other=float("-inf"))
    # The token sees itself, so that one part has a score.
    weights = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(weights * tl.load(totals + row, mask=is_part, other=0.0), 0)
    mixed = tl.load(
        sums + row[:, None] * value_dim + lanes[None, :],
        mask=is_part[:, None] & is_lane[None, :],
        other=0.0,
    )
    result = tl.sum(mixed * weights[:, None], 0) / total
    target = partial + (pair * group + head) * value_dim + lanes
    tl.store(target, result.to(partial.dtype.element_ty), mask=is_lane)
