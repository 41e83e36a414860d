"""Clones of busy experts: the plan in two launches, and the physical experts of selections in one.

The first launch, of one program, computes the surplus of every expert and assigns places. The
second has one program for every place, which computes how many selections each rank sends there.
All arithmetic is on integers, so that all ranks compute the same plan.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Int

#: Largest number of experts, and of places over all ranks, of the kernels (experts, places).
MAX_PLACED_EXPERTS = 512
# Selections of a program.
_BLOCK = 256
# Elements of the first program from which it has several warps: reductions over one warp need no
# shared memory.
_ONE_WARP = 256


def assign_clones(
    counts: Int[Tensor, "ranks experts"], places: int, min_rows: int
) -> tuple[
    Int[Tensor, "places"], Int[Tensor, "places"], Int[Tensor, "ranks places"], Int[Tensor, "ranks"]
]:
    """Plan the clones that balance the rows of ranks; all results are int64.

    ``experts.transport.cloning.place_clones`` describes the plan. The tokens of rank r have
    selected expert e ``counts[r, e]`` times; a clone is created for at least ``min_rows``
    selections.

    Returns:
        The expert that is cloned in every place, or -1; the number of selections that are sent
        there; the number that every rank sends there; the number of rows that every rank computes.
    """
    counts = counts.contiguous()
    num_ranks, num_experts = counts.shape
    num_places = num_ranks * places
    homes = num_experts // num_ranks
    owners = counts.new_empty(num_places, dtype=torch.int64)
    amounts = torch.empty_like(owners)
    off = counts.new_empty((num_ranks, num_places), dtype=torch.int64)
    rows = counts.new_empty(num_ranks, dtype=torch.int64)
    ranks = power_of_two(num_ranks)
    home_slots = power_of_two(homes)
    slots = power_of_two(num_places)
    with on_device_of(counts):
        _assign_places[(1,)](
            counts, owners, amounts, rows, num_ranks, homes, places, max(min_rows, 1),
            RANKS=ranks, HOMES=home_slots, PLACES=slots,
            num_warps=1 if ranks * home_slots <= _ONE_WARP else 4,
        )  # fmt: skip
        _divide_over_ranks[(num_places,)](
            counts, owners, amounts, off, num_ranks, num_experts, num_places,
            PLACES=slots, num_warps=1,
        )  # fmt: skip
    return owners, amounts, off, rows


def physical_experts(
    experts: Int[Tensor, "tokens top_k"],
    rows: Int[Tensor, "tokens top_k"],
    ends: Int[Tensor, "experts"],
    owners: Int[Tensor, "places"],
    off: Int[Tensor, "places"],
    homes: int,
    places: int,
) -> Int[Tensor, "tokens top_k"]:
    """Return the physical expert, a home or a place, of each selection of this rank's tokens.

    ``experts.transport.cloning.to_physical`` describes the result.

    Args:
        experts: Experts selected for each token, int64; -1 means none.
        rows: Row of each selection, sorted by expert.
        ends: End (exclusive) of the rows of every expert of the layer.
        off: Number of selections that this rank sends to every place (selections).
    """
    experts = experts.contiguous()
    rows = rows.contiguous()
    physical = torch.empty_like(experts)
    number = experts.numel()
    if number:
        with on_device_of(experts):
            _write_physical[(ceil_div(number, _BLOCK),)](
                experts, rows, ends, owners, off.contiguous(), physical, number, homes, places,
                owners.numel(), BLOCK=_BLOCK,
            )  # fmt: skip
    return physical


@triton.jit
def _assign_places(
    counts: tl.tensor, owners: tl.tensor, amounts: tl.tensor, rows: tl.tensor,
    num_ranks: tl.tensor, homes: tl.tensor, places: tl.tensor, min_rows: tl.tensor,
    RANKS: tl.constexpr, HOMES: tl.constexpr, PLACES: tl.constexpr,
) -> None:  # fmt: skip
    rank = tl.arange(0, RANKS)
    home = tl.arange(0, HOMES)
    inside = (rank < num_ranks)[:, None] & (home < homes)[None, :]
    number = rank[:, None] * homes + home[None, :]
    total = tl.zeros((RANKS, HOMES), tl.int64)
    for source in range(num_ranks):
        at = counts + source * num_ranks * homes + number
        total += tl.load(at, mask=inside, other=0).to(tl.int64)
    load = tl.sum(total, axis=1)
    mean = tl.sum(load, axis=0) // num_ranks
    # The number of an expert is the low digit, so that no two keys are equal and the sort is
    # stable. Elements beyond the experts have no rows, so their place in the order does not matter.
    key = tl.sort(total * HOMES + home[None, :], dim=1)
    until = tl.cumsum(key // HOMES, axis=1)
    over = tl.maximum(until - mean, 0)
    surplus = over - tl.maximum(until - key // HOMES - mean, 0)
    LAST: tl.constexpr = RANKS * HOMES - 1
    at_home = (key % HOMES).to(tl.int32)
    expert = tl.where(at_home < homes, rank[:, None] * homes + at_home, LAST)
    room = tl.where(rank < num_ranks, tl.maximum(mean - load, 0), -1)
    free = tl.where(rank < num_ranks, places, 0)
    place = tl.arange(0, PLACES)
    owner = tl.full((PLACES,), -1, tl.int64)
    amount = tl.zeros((PLACES,), tl.int64)
    for _ in range(num_ranks * places):
        # The low digits make the lowest number the largest among equal values.
        best = tl.max(tl.where(free > 0, room, -1) * RANKS + (RANKS - 1 - rank), axis=0)
        taker = RANKS - 1 - best % RANKS
        most = tl.max(tl.max(surplus * (LAST + 1) + (LAST - expert), axis=1), axis=0)
        given = LAST - most % (LAST + 1)
        moved = tl.minimum(best // RANKS, most // (LAST + 1))
        kept = tl.where(moved >= min_rows, moved, 0)
        used = places - tl.sum(tl.where(rank == taker, free, 0), axis=0)
        is_place = place == taker * places + used
        owner = tl.where(is_place & (kept > 0), given, owner)
        amount = tl.where(is_place, kept, amount)
        surplus -= tl.where(expert == given, moved, 0)
        room -= tl.where(rank == taker, moved, 0)
        free -= (rank == taker).to(tl.int32)
        load += tl.where(rank == taker, kept, 0) - tl.where(rank == given // homes, kept, 0)
    tl.store(owners + place, owner, mask=place < num_ranks * places)
    tl.store(amounts + place, amount, mask=place < num_ranks * places)
    tl.store(rows + rank, load, mask=rank < num_ranks)


@triton.jit
def _divide_over_ranks(
    counts: tl.tensor, owners: tl.tensor, amounts: tl.tensor, off: tl.tensor,
    num_ranks: tl.tensor, num_experts: tl.tensor, num_places: tl.tensor,
    PLACES: tl.constexpr,
) -> None:  # fmt: skip
    here = tl.program_id(0)
    place = tl.arange(0, PLACES)
    owner = tl.load(owners + here)
    expert = tl.maximum(owner, 0)
    is_shared = (tl.load(owners + place, mask=place < num_places, other=-1) == owner) & (owner >= 0)
    amount = tl.load(amounts + place, mask=is_shared, other=0)
    total = tl.zeros((), tl.int64)
    for rank in range(num_ranks):
        total += tl.load(counts + rank * num_experts + expert).to(tl.int64)
    total = tl.maximum(total, 1)
    missing = amount
    for rank in range(num_ranks):
        missing -= tl.load(counts + rank * num_experts + expert).to(tl.int64) * amount // total
    # The missing selections of the owner's places, in order, and the remaining selections of ranks
    # form intervals on one line.
    stop = tl.sum(tl.where(place <= here, missing, 0), axis=0)
    start = stop - tl.sum(tl.where(place == here, missing, 0), axis=0)
    end = tl.zeros((), tl.int64)
    for rank in range(num_ranks):
        selected = tl.load(counts + rank * num_experts + expert).to(tl.int64)
        first = selected * amount // total
        begin = end
        end += selected - tl.sum(first, axis=0)
        more = tl.maximum(tl.minimum(end, stop) - tl.maximum(begin, start), 0)
        sent = tl.sum(tl.where(place == here, first, 0), axis=0) + more
        tl.store(off + rank * num_places + here, sent)


@triton.jit
def _write_physical(
    experts: tl.tensor, rows: tl.tensor, ends: tl.tensor, owners: tl.tensor, off: tl.tensor,
    physical: tl.tensor, num_selections: tl.tensor, homes: tl.tensor, places: tl.tensor,
    num_places: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    selection = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = selection < num_selections
    expert = tl.load(experts + selection, mask=inside, other=-1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    # The number of a selection among those of its expert; less at every place of the expert, and
    # negative once it has found its own.
    number = tl.load(rows + selection, mask=inside, other=0) - start
    physical_expert = expert // homes * (homes + places) + expert % homes
    for place in range(num_places):
        here = tl.load(off + place)
        is_owner = expert == tl.load(owners + place)
        of_place = place // places * (homes + places) + homes + place % places
        physical_expert = tl.where(
            is_owner & (number >= 0) & (number < here), of_place, physical_expert
        )
        number = tl.where(is_owner, number - here, number)
    tl.store(physical + selection, tl.where(expert < 0, -1, physical_expert), mask=inside)
