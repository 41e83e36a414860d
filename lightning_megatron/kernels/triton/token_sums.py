"""Sums over ranks of products of one token, with the residual addition and the norm after them.

Products are sent by the kernels that compute them: ``send_vector_product`` writes them into the
regions of all ranks. One kernel receives them, adds them, adds the sum to the residual stream and
normalises the result.

Memory layout of a region: the number of sums before this pass, then two slots with one row for each
rank. A word of two half-type numbers travels together with the sequence number of the sum in one
store of 8 bytes, so a reader knows from that number that the word has arrived. Sums use the two
slots in turn. A rank writes to a slot again only after it has received the words of the sum in
between, which the others send after they have read that slot.

The kernel that receives does not wait for the previous kernel: the words of this rank have the
sequence number of the sum only after all of that kernel's programs have read their inputs, and that
kernel has waited for all kernels before it.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from lightning_megatron.kernels.triton.launch import (
    ceil_div,
    early_start,
    on_device_of,
    power_of_two,
)
from lightning_megatron.kernels.triton.two_halves import pack_halves, unpack_halves
from lightning_megatron.shapes import Float, Int

#: Widest residual stream, of which one program has all elements.
MAX_SUM_WIDTH = 16384
#: Words of a vector that one program sends. A power of two.
_WORDS = 512
#: Words of 8 bytes before the slots; the first one is the number of sums before this pass.
_HEADER = tl.constexpr(2)


def token_sum_bytes(num_ranks: int, width: int) -> int:
    """Return the size of the region of a rank, for an even width of the residual stream (bytes)."""
    return 8 * (_HEADER.value + 2 * num_ranks * power_of_two(width // 2))


def send_token_vector(
    tokens: Int[Tensor, "1 1"],
    table: Float[Tensor, "vocab_local hidden"],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    number: int,
) -> None:
    """Send the vector of a token to all ranks if this rank holds it, and zeros otherwise.

    Args:
        table: Vectors of this rank, of a half type with an even number of elements; ranks have
            equal numbers of consecutive tokens.
        number: Number of the sum in the pass.
    """
    num_rows, width = table.shape
    words = width // 2
    block = min(_WORDS, power_of_two(words))
    with on_device_of(table):
        _send_vector[(ceil_div(words, block),)](
            tokens, table, pointers, rank, number, num_rows, words, NUM_RANKS=pointers.shape[0],
            SLOT=power_of_two(words), BLOCK=block, num_warps=4,
        )  # fmt: skip


def add_norm_sums(
    stream: Float[Tensor, "hidden"] | None,
    scale: Float[Tensor, "hidden"],
    eps: float,
    pointers: Int[Tensor, "ranks"],
    rank: int,
    number: int,
) -> tuple[Float[Tensor, "hidden"], Float[Tensor, "hidden"]]:
    """Add the products that all ranks have sent to the residual stream, and normalise the sum.

    Equal to ``add_norm(stream, sum of the products)``, where the sum is computed in float32 and
    rounded once. All ranks get the same bits. There is no gradient.

    Args:
        stream: The residual stream, of a half type; None means zeros.
        scale: Factors of the RMS norm, of the same type; at most ``MAX_SUM_WIDTH`` elements.
        number: Number of the sum in the pass; the sums of a pass have the numbers 1, 2 and so on.
    """
    total = scale.new_empty(scale.shape)
    normalised = scale.new_empty(scale.shape)
    words = scale.numel() // 2
    lanes = power_of_two(words)
    with on_device_of(scale):
        _add_norm[(1,)](
            stream, scale, total, normalised, pointers, rank, number, words, eps,
            NUM_RANKS=pointers.shape[0], SLOT=lanes, num_warps=min(16, max(4, lanes // 128)),
            **early_start(1),
        )  # fmt: skip
    return total, normalised


@triton.jit(do_not_specialize=["number"])
def _send_vector(
    tokens: tl.tensor,
    table: tl.tensor,
    pointers: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    NUM_RANKS: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_words
    row = tl.load(tokens) - rank * num_rows
    is_held = (row >= 0) & (row < num_rows)
    rows = table.to(tl.pointer_type(tl.int32), bitcast=True) + row * num_words
    words = tl.load(rows + places, mask=inside & is_held, other=0)
    sequence = sequence_number(region_of(pointers, rank), number)
    regions = ()
    for peer in tl.static_range(NUM_RANKS):
        regions = regions + (region_of(pointers, peer),)  # type: ignore[assignment]
    send_words(words, places, inside, regions, sequence, rank, NUM_RANKS, SLOT)


@triton.jit
def region_of(pointers: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return the address of the region of a rank."""
    return tl.load(pointers + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def sequence_number(region: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return the sequence number of a sum of this pass, which counts the sums of all passes."""
    return (tl.load(region) + number).to(tl.int32)


@triton.jit
def send_words(
    words: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    regions: tl.tuple,
    sequence: tl.tensor,
    rank: tl.tensor,
    NUM_RANKS: tl.constexpr,
    SLOT: tl.constexpr,
) -> None:
    """Write int32 words that are inside into all regions, at places in this rank's row."""
    row = _HEADER + ((sequence & 1) * NUM_RANKS + rank) * SLOT
    sent = (words.to(tl.int64) & 0xFFFFFFFF) | (sequence.to(tl.int64) << 32)
    for peer in tl.static_range(NUM_RANKS):
        tl.store(regions[peer] + row + places, sent, mask=inside)


@triton.jit(do_not_specialize=["number"])
def _add_norm(
    stream: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
    normalised: tl.tensor,
    pointers: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    num_words: tl.tensor,
    eps: tl.tensor,
    NUM_RANKS: tl.constexpr,
    SLOT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    lanes = tl.arange(0, SLOT)
    inside = lanes < num_words
    region = region_of(pointers, rank)
    sequence = sequence_number(region, number)
    factors = tl.load(
        scale.to(tl.pointer_type(tl.int32), bitcast=True) + lanes, mask=inside, other=0
    )
    low, high = _received(region, sequence, inside, scale, NUM_RANKS, SLOT)
    if stream is not None:
        # The words have arrived, so earlier kernels have written the residual stream; the barrier
        # keeps its load behind the loads of the words.
        tl.debug_barrier()
        residual = tl.load(
            stream.to(tl.pointer_type(tl.int32), bitcast=True) + lanes, mask=inside, other=0
        )
        low_before, high_before = unpack_halves(residual, stream)
        low += low_before
        high += high_before
    low_total = low.to(total.dtype.element_ty)
    high_total = high.to(total.dtype.element_ty)
    words = total.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + lanes, pack_halves(low_total, high_total), mask=inside)
    # Normalise the rounded sum, which the next layers read.
    low = low_total.to(tl.float32)
    high = high_total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * num_words) + eps)
    low_scale, high_scale = unpack_halves(factors, scale)
    low_normed = (low * factor * low_scale).to(normalised.dtype.element_ty)
    high_normed = (high * factor * high_scale).to(normalised.dtype.element_ty)
    words = normalised.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + lanes, pack_halves(low_normed, high_normed), mask=inside)


@triton.jit
def _received(
    region: tl.tensor,
    sequence: tl.tensor,
    inside: tl.tensor,
    like: tl.tensor,
    NUM_RANKS: tl.constexpr,
    SLOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Wait for the words of all ranks, and return the rounded sums of their numbers."""
    # Ranks are padded to a power of two; the words of the padding are zeros that have arrived.
    peers = tl.arange(0, triton.next_power_of_2(NUM_RANKS))[:, None]
    row = _HEADER + ((sequence & 1) * NUM_RANKS + peers) * SLOT
    words = region + row + tl.arange(0, SLOT)[None, :]
    expected = (peers < NUM_RANKS) & inside[None, :]
    number = sequence.to(tl.int64) << 32
    arrived = tl.load(words, mask=expected, other=number, volatile=True)
    while tl.max(((arrived >> 32).to(tl.int32) != sequence).to(tl.int32)) > 0:
        arrived = tl.load(words, mask=expected, other=number, volatile=True)
    low, high = unpack_halves(arrived.to(tl.int32), like)
    low = tl.sum(low, 0).to(like.dtype.element_ty).to(tl.float32)
    high = tl.sum(high, 0).to(like.dtype.element_ty).to(tl.float32)
    return low, high
