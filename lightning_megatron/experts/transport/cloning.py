"""Clones of busy experts, planned on the device.

All ranks compute the same plan from the same counts: all numbers are int64, because a rounded share
could be one selection too large. All sizes follow from shapes, and nothing is copied from the
device to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.experts.transport.permute import RowMap
from lightning_megatron.layers.fused.choose_kernels import fused_kernels, warn_of_slow_path
from lightning_megatron.plan.expert_clones import NO_EXPERT, ExpertPlaces
from lightning_megatron.shapes import Int


@dataclass(frozen=True)
class PlacedClones:
    """Clones of one layer and microbatch, and the selections that are sent to them, on the device.

    All tensors are int64.

    Args:
        amounts: Number of selections that are sent to every place.
        off: Number of selections that every rank sends to every place.
        rows: Number of rows that every rank computes, homes and clones.
    """

    layout: ExpertPlaces
    owners: Int[Tensor, "places"]
    amounts: Int[Tensor, "places"]
    off: Int[Tensor, "ranks places"]
    rows: Int[Tensor, "ranks"]


def place_clones(
    counts: Int[Tensor, "ranks experts"], places: int, min_rows: int | None = None
) -> PlacedClones:
    """Return the clones that balance the rows of ranks.

    Afterwards no rank has more rows than the busiest had before. Experts with few selections stay
    whole, so that few clones are needed. For every place, the rank with the most room among those
    with a free place takes as many selections as fit of the expert with the most left. Each rank
    sends the same fraction of its selections of an expert, rounded down; the remainder comes from
    the ranks in order. Selections without a place stay at home. There are as many ``places`` on
    every rank; ``min_rows`` is the smallest number of selections for which a clone is created.
    """
    num_ranks, num_experts = counts.shape
    layout = ExpertPlaces(num_ranks, num_experts, places)
    kernels = _kernels(counts, layout)
    min_rows = min_rows or 0
    if kernels is None:
        return place_by_torch(counts, layout, min_rows)
    return PlacedClones(layout, *kernels.assign_clones(counts, places, min_rows))


def place_by_torch(
    counts: Int[Tensor, "ranks experts"], layout: ExpertPlaces, min_rows: int
) -> PlacedClones:
    """Plan clones with operators of torch, as :func:`place_clones` does."""
    counts = counts.long()
    by_rank = counts.sum(0).unflatten(0, (layout.num_ranks, layout.homes))
    load = by_rank.sum(1)
    mean = load.sum() // layout.num_ranks
    room = (mean - load).clamp(min=0)
    owners, amounts = _assign(_surplus(by_rank, mean), room, layout)
    is_kept = amounts >= max(min_rows, 1)
    owners = owners.where(is_kept, NO_EXPERT)
    amounts = amounts.where(is_kept, 0)
    # A place without an owner moves nothing, so rank 0 can be used as the owner's rank.
    homes = owners.clamp(min=0) // layout.homes
    arrived = amounts.unflatten(0, (layout.num_ranks, layout.places)).sum(1)
    rows = (load + arrived).index_add(0, homes, -amounts)
    return PlacedClones(layout, owners, amounts, _divide(counts, owners, amounts), rows)


def to_physical(
    experts: Int[Tensor, "tokens top_k"], row_map: RowMap, clones: PlacedClones, rank: int
) -> Int[Tensor, "tokens top_k"]:
    """Return the physical expert of each selection of this rank's tokens.

    The first selections of an expert, in the order of tokens, are sent to its places in order, as
    many to each as the plan says. The others stay at home, and selections of no expert (-1) stay
    so. The map sorts these selections by expert, for all experts of the layer, and the clones must
    have been planned from its counts, among others.
    """
    layout = clones.layout
    kernels = _kernels(experts, layout)
    if kernels is None:
        return physical_by_torch(experts, row_map, clones, rank)
    return kernels.physical_experts(
        experts,
        row_map.rows,
        row_map.ends,
        clones.owners,
        clones.off[rank],
        layout.homes,
        layout.places,
    )


def physical_by_torch(
    experts: Int[Tensor, "tokens top_k"], row_map: RowMap, clones: PlacedClones, rank: int
) -> Int[Tensor, "tokens top_k"]:
    """Compute physical experts with operators of torch, as :func:`to_physical` does."""
    layout = clones.layout
    starts = torch.cat([row_map.ends.new_zeros(1), row_map.ends])
    numbers = row_map.rows - starts[experts.clamp(min=0)]
    # Every place takes an interval of its owner's numbers. Sorted by owner, the ends of all
    # intervals ascend with the owner as leading digit, and the first end beyond a selection is that
    # of its place.
    base = experts.numel() + 1
    owners, places = clones.owners.sort(stable=True)
    off = clones.off[rank][places]
    ends_of_places = off.cumsum(0)
    first = torch.searchsorted(owners, owners)
    ends = owners * base + ends_of_places - (ends_of_places - off)[first]
    keys = experts * base + numbers
    location = torch.searchsorted(ends, keys, right=True).clamp(max=layout.num_places - 1)
    is_moved = (owners[location] == experts) & (keys < ends[location]) & (experts != NO_EXPERT)
    place = places[location]
    size = layout.homes + layout.places
    moved = place // layout.places * size + layout.homes + place % layout.places
    home = experts // layout.homes * size + experts % layout.homes
    return torch.where(is_moved, moved, home).where(experts != NO_EXPERT, NO_EXPERT)


def _kernels(tensor: Int[Tensor, "..."], layout: ExpertPlaces) -> ModuleType | None:
    """Return the fused kernels if they support a tensor and as many experts and places."""
    kernels = fused_kernels(tensor)
    if kernels is None:
        return None
    most: int = kernels.MAX_PLACED_EXPERTS
    if max(layout.num_experts, layout.num_places) <= most:
        return kernels
    warn_of_slow_path(
        f"clones of {layout.num_experts} experts in {layout.num_places} places are planned by "
        f"operators of torch, because the fused kernels plan at most {most} of both. Fewer places "
        "on a rank make the plan faster."
    )
    return None


def _surplus(
    by_rank: Int[Tensor, "ranks homes"], mean: Int[Tensor, ""]
) -> Int[Tensor, "ranks*homes"]:
    """Return how many selections of every expert should leave its rank, light experts last."""
    totals, order = by_rank.sort(dim=1, stable=True)
    excess = (totals.cumsum(1) - mean).clamp(min=0)
    leaving = excess.diff(dim=1, prepend=torch.zeros_like(excess[:, :1]))
    return torch.empty_like(leaving).scatter_(1, order, leaving).flatten()


def _assign(
    surplus: Int[Tensor, "experts"], room: Int[Tensor, "ranks"], layout: ExpertPlaces
) -> tuple[Int[Tensor, "places"], Int[Tensor, "places"]]:
    """Return the expert and the number of selections of every place, largest first."""
    free = torch.full_like(room, layout.places)
    owners = surplus.new_full((layout.num_places,), NO_EXPERT)
    amounts = torch.zeros_like(owners)
    for _ in range(layout.num_places):
        # Among equal values, argmax returns the first. As tensors of one element both are indices
        # that the host does not read.
        rank = room.where(free > 0, -1).argmax(0, keepdim=True)
        expert = surplus.argmax(0, keepdim=True)
        amount = torch.minimum(room[rank], surplus[expert])
        place = (rank + 1) * layout.places - free[rank]
        owners = owners.index_copy(0, place, expert)
        amounts = amounts.index_copy(0, place, amount)
        surplus = surplus.index_add(0, expert, -amount)
        room = room.index_add(0, rank, -amount)
        free = free.index_add(0, rank, torch.full_like(rank, -1))
    return owners, amounts


def _divide(
    counts: Int[Tensor, "ranks experts"],
    owners: Int[Tensor, "places"],
    amounts: Int[Tensor, "places"],
) -> Int[Tensor, "ranks places"]:
    """Return how many selections every rank sends to every place.

    Each rank sends the same fraction of its selections, rounded down, and the first ranks send the
    remainder.
    """
    # A place without an owner moves nothing, so expert 0 can be used as its owner.
    expert = owners.clamp(min=0)
    sent = counts[:, expert]
    first = sent * amounts // sent.sum(0).clamp(min=1)
    left = (counts.index_add(1, expert, -first))[:, expert]
    missing = amounts - first.sum(0)
    # The places of one owner, in order, and the remaining selections of ranks form intervals on one
    # line.
    is_before = (owners == owners.unsqueeze(1)).tril()
    place_end = torch.where(is_before, missing, 0).sum(1)
    rank_end = left.cumsum(0)
    overlap = torch.minimum(rank_end, place_end) - torch.maximum(
        rank_end - left, place_end - missing
    )
    return first + overlap.clamp(min=0)
