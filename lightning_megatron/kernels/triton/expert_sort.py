"""Stable counting sort of selections by expert, in three launches of static sizes without atomics.

A selection is a pair of a token and one of its experts. Selections are divided into blocks. The
first launch counts the selections of each expert in every block. The second computes prefix sums of
these counts over the blocks. The third computes the row of every selection: the selections of lower
experts, plus the selections of its expert in earlier blocks, plus the earlier selections of its
expert in its own block.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Int

# Selections of a block; all pairs of them are compared.
_BLOCK = 64
# Experts of a program of the second launch, and blocks in one iteration of its loop.
_EXPERTS = 4
_ROWS = 1024
#: Largest number of experts of the kernels (experts).
MAX_SORTED_EXPERTS = 1024


def sort_selections(
    experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int
) -> tuple[Int[Tensor, "tokens*top_k"], Int[Tensor, "tokens top_k"], Int[Tensor, "{num_experts}"]]:
    """Sort the selections of tokens by expert, with the selections of other ranks' experts last.

    The ends are int32, the other results int64.

    Args:
        experts: Experts selected for every token, int64; -1 means none.

    Returns:
        The selection of every row, the row of every selection, and the end (exclusive) of the rows
        of every expert.
    """
    experts = experts.contiguous()
    num_selections = experts.numel()
    device = experts.device
    rows = torch.empty_like(experts)
    pairs = torch.empty(num_selections, dtype=torch.int64, device=device)
    if not num_selections:
        return pairs, rows, torch.zeros(num_experts, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    num_blocks = ceil_div(num_selections, _BLOCK)
    # The last row receives the sums over all blocks.
    counts = torch.empty((num_blocks + 1, num_experts), dtype=torch.int32, device=device)
    bins = power_of_two(num_experts)
    with on_device_of(experts):
        _count_selections[(num_blocks,)](
            experts,
            counts,
            first,
            num_experts,
            num_selections,
            BINS=bins,
            BLOCK=_BLOCK,
        )
        _add_up_counts[(ceil_div(num_experts, _EXPERTS),)](
            counts,
            num_blocks,
            num_experts,
            EXPERTS=_EXPERTS,
            ROWS=_ROWS,
        )
        _write_rows[(num_blocks,)](
            experts,
            counts,
            ends,
            rows,
            pairs,
            first,
            num_experts,
            num_selections,
            num_blocks,
            BINS=bins,
            BLOCK=_BLOCK,
        )
    return pairs, rows, ends


@triton.jit
def _count_selections(
    experts: tl.tensor,
    counts: tl.tensor,
    first: tl.tensor,
    num_experts: tl.tensor,
    num_selections: tl.tensor,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    selection = block * BLOCK + tl.arange(0, BLOCK)
    key = (
        tl.load(experts + selection, mask=selection < num_selections, other=-1).to(tl.int32) - first
    )
    is_here = (selection < num_selections) & (key >= 0) & (key < num_experts)
    histogram = tl.histogram(tl.where(is_here, key, 0), BINS, mask=is_here)
    columns = tl.arange(0, BINS)
    tl.store(counts + block * num_experts + columns, histogram, mask=columns < num_experts)


@triton.jit
def _add_up_counts(
    counts: tl.tensor,
    num_blocks: tl.tensor,
    num_experts: tl.tensor,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        at = counts + block[:, None] * num_experts + columns[None, :]
        inside = (block < num_blocks)[:, None] & (columns < num_experts)[None, :]
        block_counts = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(block_counts, axis=0) - block_counts + total[None, :], mask=inside)
        total += tl.sum(block_counts, axis=0)
    tl.store(counts + num_blocks * num_experts + columns, total, mask=columns < num_experts)


@triton.jit
def _write_rows(
    experts: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    pairs: tl.tensor,
    first: tl.tensor,
    num_experts: tl.tensor,
    num_selections: tl.tensor,
    num_blocks: tl.tensor,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    selection = block * BLOCK + tl.arange(0, BLOCK)
    key = (
        tl.load(experts + selection, mask=selection < num_selections, other=-1).to(tl.int32) - first
    )
    # Selections of other ranks' experts and indices past the last selection share one extra key.
    key = tl.where((key >= 0) & (key < num_experts), key, num_experts)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, 32):
        peer = block * BLOCK + start + tl.arange(0, 32)
        peer_key = tl.load(experts + peer, mask=peer < num_selections, other=-1)
        peer_key = peer_key.to(tl.int32) - first
        peer_key = tl.where((peer_key >= 0) & (peer_key < num_experts), peer_key, num_experts)
        is_before = (peer_key[None, :] == key[:, None]) & (peer[None, :] < selection[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    columns = tl.arange(0, BINS)
    totals = tl.load(
        counts + num_blocks * num_experts + columns,
        mask=columns < num_experts,
        other=0,
    )
    until = tl.cumsum(totals, axis=0)
    if block == 0:
        tl.store(ends + columns, until, mask=columns < num_experts)
    in_earlier = tl.load(
        counts + block * num_experts + columns,
        mask=columns < num_experts,
        other=0,
    )
    is_here = key < num_experts
    start_here = tl.gather(until - totals + in_earlier, tl.where(is_here, key, 0), 0)
    # The number of selections of other experts in earlier blocks is the size of these blocks minus
    # their selections of this rank's experts.
    start_elsewhere = tl.sum(totals, axis=0) + block * BLOCK - tl.sum(in_earlier, axis=0)
    row = (tl.where(is_here, start_here, start_elsewhere) + rank).to(tl.int64)
    inside = selection < num_selections
    tl.store(rows + selection, row, mask=inside)
    tl.store(pairs + row, selection.to(tl.int64), mask=inside)
