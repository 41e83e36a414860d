"""All-reduce in one kernel: every rank writes its values to all ranks and adds what it receives.

Memory layout: each rank has a region that the other ranks write into. A program reduces ``_WORDS``
words of 4 bytes and has its own part of the region: a counter of its launches, then two slots, and
in each slot one row for each rank. A word travels together with the number of the launch in one
store of 8 bytes, so a reader knows from the number that the word has arrived, and no barrier is
needed. Launches use the two slots in turn. A rank writes to a slot again only after it has received
the words of the launch in between, which the others send after they have read that slot.

Source: the low-latency protocol of NCCL stores data and flags together in the same way.
"""

from __future__ import annotations

from typing import Literal

import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, early_start, on_device_of, wait_early
from lightning_megatron.kernels.triton.two_halves import unpack_halves
from lightning_megatron.shapes import Int, Shaped

#: Words that one program reduces. A power of two.
_WORDS = 512
_WARPS = 4
#: Words of 8 bytes before the slots of a program; the first one is the counter of its launches.
_HEADER = tl.constexpr(2)
_WORD_BYTES = 4


def one_shot_bytes(num_ranks: int, num_bytes: int) -> int:
    """Return the size of the region of a rank, for the largest tensor that is reduced (bytes)."""
    programs = ceil_div(num_bytes, _WORD_BYTES * _WORDS)
    return 8 * programs * (_HEADER.value + 2 * num_ranks * _WORDS)


def reduce_one_shot_(
    x: Shaped[Tensor, "..."],
    pointers: Int[Tensor, "ranks"],
    rank: int,
    op: Literal["sum", "max"],
) -> None:
    """Reduce a tensor in place over the ranks; all ranks get the same bits.

    Sums are computed in float32 in the order of ranks, and rounded once. The regions must be zero
    before the first launch, and all ranks must launch the kernel in the same order.

    Args:
        x: Contiguous tensor with a multiple of 4 bytes: of a half type or float32 for sums, of
            int32 for maxima. A first dimension of one marks a pass over one token of each row.
    """
    num_words = x.numel() * x.element_size() // _WORD_BYTES
    with on_device_of(x):
        _reduce[(ceil_div(num_words, _WORDS),)](
            x, pointers, rank, num_words, NUM_RANKS=pointers.shape[0], IS_SUM=op == "sum",
            IS_HALF=x.element_size() == 2, WORDS=_WORDS, num_warps=_WARPS,
            **early_start(x.shape[0]),
        )  # fmt: skip


@triton.jit
def _reduce(
    x: tl.tensor,
    pointers: tl.tensor,
    rank: tl.tensor,
    num_words: tl.tensor,
    NUM_RANKS: tl.constexpr,
    IS_SUM: tl.constexpr,
    IS_HALF: tl.constexpr,
    WORDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_early(EARLY)
    program = tl.program_id(0)
    lanes = tl.arange(0, WORDS)
    offsets = program * WORDS + lanes
    inside = offsets < num_words
    start = program.to(tl.int64) * (_HEADER + 2 * NUM_RANKS * WORDS)
    own_region = tl.load(pointers + rank).to(tl.pointer_type(tl.int64)) + start
    launch = (tl.load(own_region) + 1).to(tl.int32)
    number = launch.to(tl.int64) << 32
    slot = _HEADER + (launch & 1) * NUM_RANKS * WORDS
    words = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + offsets, mask=inside, other=0)
    sent = (words.to(tl.int64) & 0xFFFFFFFF) | number
    for peer in tl.static_range(NUM_RANKS):
        peer_region = tl.load(pointers + peer).to(tl.pointer_type(tl.int64)) + start
        tl.store(peer_region + slot + rank * WORDS + lanes, sent, mask=inside)
    _wait(own_region + slot, launch, number, num_words - program * WORDS, NUM_RANKS, WORDS)
    low, high = _values(own_region + slot + lanes, inside, x, IS_HALF)
    for peer in tl.static_range(1, NUM_RANKS):
        more_low, more_high = _values(own_region + slot + peer * WORDS + lanes, inside, x, IS_HALF)
        if IS_SUM:
            low += more_low
            high += more_high
        else:
            low = tl.maximum(low, more_low)
    if IS_HALF:
        halves = x + 2 * offsets
        tl.store(halves, low.to(x.dtype.element_ty), mask=inside)
        tl.store(halves + 1, high.to(x.dtype.element_ty), mask=inside)
    else:
        tl.store(x + offsets, low, mask=inside)
    # All threads have read the counter: their words depend on it.
    tl.debug_barrier()
    tl.store(own_region, launch.to(tl.int64))


@triton.jit
def _wait(
    slot: tl.tensor,
    launch: tl.tensor,
    number: tl.tensor,
    num_words: tl.tensor,
    NUM_RANKS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Wait until the words of all ranks have arrived in a slot."""
    lanes = tl.arange(0, WORDS)[None, :]
    # Ranks are padded to a power of two.
    peers = tl.arange(0, triton.next_power_of_2(NUM_RANKS))[:, None]
    words = slot + peers * WORDS + lanes
    expected = (peers < NUM_RANKS) & (lanes < num_words)
    missing = 1
    while missing > 0:
        arrived = tl.load(words, mask=expected, other=number, volatile=True)
        missing = tl.max(((arrived >> 32).to(tl.int32) != launch).to(tl.int32))


@triton.jit
def _values(
    row: tl.tensor, inside: tl.tensor, x: tl.tensor, IS_HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the values of the words of a rank; two for each word of half types."""
    words = tl.load(row, mask=inside, other=0, volatile=True).to(tl.int32)
    if IS_HALF:
        low, high = unpack_halves(words, x)
    else:
        low = words.to(x.dtype.element_ty, bitcast=True)
        high = low
    return low, high
