"""One-sided transport of expert parallelism: kernels that write into the memory of other GPUs.

Ranks write tokens to the ranks of their experts, and sums of expert outputs back to the ranks of
the tokens. Reads are local. Every rank has one row for each token of all ranks;
:class:`~lightning_megatron.plan.experts.TokenBuffer` defines their memory layout. A row is
neither written nor read if its token has no expert on the rank.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import as_rows, ceil_div, on_device_of, power_of_two
from lightning_megatron.plan.experts import TokenBuffer
from lightning_megatron.shapes import Float, Int

# Elements of a row in one iteration of a program.
_BLOCK = 2048
# Programs that share all rows: eight for every multiprocessor of an H200.
_PROGRAMS = 1056
_WARPS = 8


def put_tokens(
    hidden: Float[Tensor, "tokens hidden"],
    probabilities: Float[Tensor, "tokens top_k"] | None,
    experts: Int[Tensor, "tokens top_k"],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    experts_each: int,
    layout: TokenBuffer,
) -> None:
    """Write every token into its row on the ranks of its experts, this rank included.

    If probabilities are given, they and the selections of every token are written to all ranks. An
    expert of -1 means none.
    """
    hidden = as_rows(hidden)
    experts = experts.contiguous()
    width = hidden.shape[1]
    top_k = experts.shape[1]
    with on_device_of(hidden):
        _put_tokens[(min(_PROGRAMS, hidden.shape[0] * layout.num_ranks),)](
            hidden, experts if probabilities is None else probabilities.contiguous(), experts,
            pointers, hidden.stride(0), width, layout.num_tokens, rank, experts_each,
            layout.scales_at, layout.experts_at, NUM_RANKS=layout.num_ranks, K=top_k,
            PADDED_K=power_of_two(top_k), HAS_EXPERTS=probabilities is not None,
            BLOCK=_block(width), num_warps=_WARPS,
        )  # fmt: skip


def put_sums(
    values: Float[Tensor, "rows hidden"],
    scales: Float[Tensor, "rows"] | None,
    rows: Int[Tensor, "buffer_rows top_k"],
    ends: Int[Tensor, "experts"],
    needed: Int[Tensor, "1"],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    layout: TokenBuffer,
) -> None:
    """Sum the rows of every token in float32 and write the sum to the token's rank.

    Tokens without an expert on this rank are skipped. Rows past the last end count as zero: a limit
    on the rows has left them out. The gradients of probabilities are written next to
    the sums. They are zero for selections without a row on this rank. Float64 rows are summed in
    float64.

    Shapes: there are ``ranks * tokens`` rows of the buffer.

    Args:
        values: Rows to sum; rows past the last end are not read.
        scales: Gradient of the probability of every row; None means no gradients.
        rows: Row of every selection of the tokens of all ranks; past the last end for experts of
            other ranks.
        ends: End (exclusive) of the rows of every expert, on the device.
        needed: Number of rows that all selections of this rank's experts need, on the device.
    """
    values = as_rows(values)
    rows = rows.contiguous()
    width = values.shape[1]
    top_k = rows.shape[1]
    with on_device_of(values):
        _put_sums[(min(_PROGRAMS, rows.shape[0]),)](
            values, rows if scales is None else scales.contiguous(), rows, ends, needed, pointers,
            values.stride(0), width, values.shape[0], ends.shape[0], layout.num_tokens, rank,
            layout.scales_at, NUM_RANKS=layout.num_ranks, K=top_k, PADDED_K=power_of_two(top_k),
            HAS_SCALES=scales is not None, IS_WIDE=_is_wide(values), BLOCK=_block(width),
            num_warps=_WARPS,
        )  # fmt: skip


def add_buffer_rows(
    buffer: Float[Tensor, "buffer_rows hidden"],
    scales: Float[Tensor, "buffer_rows top_k"] | None,
    experts: Int[Tensor, "tokens top_k"],
    experts_each: int,
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens top_k"] | None]:
    """Sum the rows that the ranks of a token's experts have written, in the order of ranks.

    The sum is computed in float32, or in float64 for float64 rows. The buffer and the gradients of
    probabilities are ordered by the rank that wrote them. An expert of -1 means none.

    Shapes: there are ``ranks * tokens`` rows of the buffer.
    """
    experts = experts.contiguous()
    width = buffer.shape[1]
    num_tokens, top_k = experts.shape
    result = buffer.new_empty((num_tokens, width))
    added = None if scales is None else scales.new_empty((num_tokens, top_k))
    # The kernel does not access a tensor that replaces None.
    scales_read = experts if scales is None else scales
    scales_written = result if added is None else added
    with on_device_of(buffer):
        _add_buffer_rows[(num_tokens, ceil_div(width, _block(width)))](
            buffer, scales_read, experts, result, scales_written, width, num_tokens, experts_each,
            NUM_RANKS=buffer.shape[0] // num_tokens, K=top_k, PADDED_K=power_of_two(top_k),
            HAS_SCALES=scales is not None, IS_WIDE=_is_wide(buffer), BLOCK=_block(width),
        )  # fmt: skip
    return result, added


def _block(width: int) -> int:
    return min(_BLOCK, power_of_two(width))


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64


@triton.jit
def _put_tokens(
    hidden: tl.tensor,
    probabilities: tl.tensor,
    experts: tl.tensor,
    pointers: tl.tensor,
    hidden_stride: tl.tensor,
    width: tl.tensor,
    num_tokens: tl.tensor,
    rank: tl.tensor,
    experts_each: tl.tensor,
    scales_at: tl.tensor,
    experts_at: tl.tensor,
    NUM_RANKS: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    selections = tl.arange(0, PADDED_K)
    # Neighbouring programs write to different ranks, so that all links are in use.
    for item in range(tl.program_id(0), num_tokens * NUM_RANKS, tl.num_programs(0)):
        token = tl.cast(item // NUM_RANKS, tl.int64)
        peer = (item + rank) % NUM_RANKS
        buffer_row = token + rank * num_tokens
        selection = tl.load(experts + token * K + selections, mask=selections < K, other=-1)
        local = selection - peer * experts_each
        is_needed = tl.max(((local >= 0) & (local < experts_each)).to(tl.int32), axis=0) > 0
        base = tl.multiple_of(tl.load(pointers + peer), 16)
        target = tl.multiple_of(base.to(tl.pointer_type(hidden.dtype.element_ty)), 16)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = (columns < width) & is_needed
            x = tl.load(hidden + token * hidden_stride + columns, mask=inside)
            tl.store(target + buffer_row * width + columns, x, mask=inside)
        if HAS_EXPERTS:
            scales = (base + scales_at).to(tl.pointer_type(probabilities.dtype.element_ty))
            probability = tl.load(probabilities + token * K + selections, mask=selections < K)
            tl.store(scales + buffer_row * K + selections, probability, mask=selections < K)
            selected = (base + experts_at).to(tl.pointer_type(experts.dtype.element_ty))
            tl.store(selected + buffer_row * K + selections, selection, mask=selections < K)


@triton.jit
def _put_sums(
    values: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    needed: tl.tensor,
    pointers: tl.tensor,
    value_stride: tl.tensor,
    width: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    num_tokens: tl.tensor,
    rank: tl.tensor,
    scales_at: tl.tensor,
    NUM_RANKS: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    selections = tl.arange(0, PADDED_K)
    end = tl.minimum(tl.load(ends + num_experts - 1), num_rows)
    all_needed = tl.load(needed)
    for item in range(tl.program_id(0), num_tokens * NUM_RANKS, tl.num_programs(0)):
        token = tl.cast(item // NUM_RANKS, tl.int64)
        peer = (item + rank) % NUM_RANKS
        source = token + peer * num_tokens
        buffer_row = token + rank * num_tokens
        token_rows = tl.load(rows + source * K + selections, mask=selections < K, other=all_needed)
        # The token's rank reads a sum from here, even if no row of the token is before the end.
        is_needed = tl.min(token_rows, axis=0) < all_needed
        base = tl.multiple_of(tl.load(pointers + peer), 16)
        target = tl.multiple_of(base.to(tl.pointer_type(values.dtype.element_ty)), 16)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = (columns < width) & is_needed
            total = tl.zeros((BLOCK,), tl.float64 if IS_WIDE else tl.float32)
            for number in tl.static_range(K):
                row = tl.load(rows + source * K + number)
                total += tl.load(
                    values + row * value_stride + columns,
                    mask=inside & (row < end),
                    other=0.0,
                )
            tl.store(
                target + buffer_row * width + columns,
                total.to(values.dtype.element_ty),
                mask=inside,
            )
        if HAS_SCALES:
            gradient = tl.load(
                scales + token_rows, mask=(selections < K) & (token_rows < end), other=0.0
            )
            there = (base + scales_at).to(tl.pointer_type(scales.dtype.element_ty))
            tl.store(
                there + buffer_row * K + selections, gradient, mask=(selections < K) & is_needed
            )


@triton.jit
def _add_buffer_rows(
    buffer: tl.tensor,
    scales: tl.tensor,
    experts: tl.tensor,
    result: tl.tensor,
    added: tl.tensor,
    width: tl.tensor,
    num_tokens: tl.tensor,
    experts_each: tl.tensor,
    NUM_RANKS: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    selections = tl.arange(0, PADDED_K)
    is_first = (selections < K) & (tl.program_id(1) == 0)
    selection = tl.load(experts + token * K + selections, mask=selections < K, other=-1)
    total = tl.zeros((BLOCK,), tl.float64 if IS_WIDE else tl.float32)
    if HAS_SCALES:
        gradient = tl.zeros((PADDED_K,), scales.dtype.element_ty)
    for peer in tl.static_range(NUM_RANKS):
        local = selection - peer * experts_each
        is_there = (local >= 0) & (local < experts_each)
        is_needed = tl.max(is_there.to(tl.int32), axis=0) > 0
        buffer_row = token + peer * num_tokens
        total += tl.load(
            buffer + buffer_row * width + columns,
            mask=(columns < width) & is_needed,
            other=0.0,
        )
        if HAS_SCALES:
            # Only one rank has the expert of a selection, so at most one term is not zero.
            gradient += tl.load(
                scales + buffer_row * K + selections, mask=is_first & is_there, other=0.0
            )
    tl.store(
        result + token * width + columns,
        total.to(result.dtype.element_ty),
        mask=columns < width,
    )
    if HAS_SCALES:
        tl.store(added + token * K + selections, gradient, mask=is_first)
