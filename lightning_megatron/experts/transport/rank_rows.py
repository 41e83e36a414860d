"""Rows that the experts of every rank compute in a step, with and without clones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.groups.collectives import all_gather_sequence, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.shapes import Float, Int


class RowSum:
    """Index of a number that a layer counts on its rank over the microbatches of a step."""

    #: Rows that the rank computed, homes and clones.
    ROWS: Final = 0
    #: Rows that clones on the rank received.
    ARRIVED: Final = 1
    #: Rows of the rank's own experts that were sent to clones on other ranks.
    LEFT: Final = 2
    #: Places of the rank that had a clone.
    CLONES: Final = 3
    #: Clones of the rank's own experts on other ranks.
    AWAY: Final = 4
    NUM_MICROBATCHES: Final = 5
    #: Largest number of rows that the rank needed in one microbatch: a maximum, not a sum.
    NEEDED: Final = 6
    SIZE: Final = 7


class RankRows:
    """Running counts of the rows of a layer's experts on this rank.

    Nothing is counted until :attr:`is_on` is set. The counts are updated in place and never copied
    to the host, so that a captured CUDA graph can update them; they move to the device of the next
    rows if the model has moved.

    Shapes: sums ``(7,)`` in int64, in the order of :class:`RowSum`.
    """

    def __init__(self, device: torch.device) -> None:
        # The tensor is on an explicit device: the ambient one is meta while a model is built.
        self.sums = torch.zeros(RowSum.SIZE, dtype=torch.int64, device=device)
        #: Whether :meth:`add_` counts; the same on all ranks.
        self.is_on = False

    @torch.no_grad()
    def add_(self, needed: Int[Tensor, "1"], clones: PlacedClones | None, rank: int) -> None:
        """Add the rows of a microbatch, homes and clones, to the counts, if they are on.

        The caller adds each microbatch once, and not again when its activations are recomputed.
        ``rank`` is the number of this rank over ep.
        """
        if not self.is_on:
            return
        if self.sums.device != needed.device:
            self.sums = self.sums.to(needed.device)
        sums = self.sums
        sums[RowSum.ROWS : RowSum.ROWS + 1].add_(needed)
        most = sums[RowSum.NEEDED :]
        torch.maximum(most, needed, out=most)
        sums[RowSum.NUM_MICROBATCHES].add_(1)
        if clones is not None:
            layout = clones.layout
            local_experts = slice(rank * layout.places, (rank + 1) * layout.places)
            # The owner of an empty place, -1, is at home on no rank.
            is_home = clones.owners // layout.homes == rank
            sums[RowSum.ARRIVED].add_(clones.amounts[local_experts].sum())
            sums[RowSum.LEFT].add_(torch.where(is_home, clones.amounts, 0).sum())
            sums[RowSum.CLONES].add_((clones.owners[local_experts] >= 0).sum())
            sums[RowSum.AWAY].add_(is_home.sum())

    def counted(self) -> Int[Tensor, "7"] | None:
        """Return a copy of the counts; None if they are off."""
        return self.sums.clone() if self.is_on else None


@dataclass(frozen=True, eq=False)
class StepRows:
    """Rows of a layer's experts in a step, on the CPU.

    Args:
        before: Rows of every rank if no expert had a clone, summed over microbatches and replicas.
        after: Rows that every rank computed, summed in the same way.
        moved: Rows that clones computed, as a share of all rows.
        clones: Clones of all ranks in a microbatch, as a mean over microbatches and replicas.
        away: Clones of the experts of every rank on other ranks in a microbatch, as such a mean.
        num_microbatches: Microbatches of all replicas.
        needed: Largest number of rows that any rank needed in one microbatch.
    """

    before: Float[Tensor, "ranks"]
    after: Float[Tensor, "ranks"]
    moved: Float[Tensor, ""]
    clones: Float[Tensor, ""]
    away: Float[Tensor, "ranks"]
    num_microbatches: Float[Tensor, ""]
    needed: Float[Tensor, ""]


def gather_rows(counts: Mapping[int, Int[Tensor, "7"]], mesh: ParallelMesh) -> dict[int, StepRows]:
    """Return the rows of all ranks that share the experts of this stage, the same on all of them.

    Ranks of etp compute the same rows for parts of the same experts and count as one.

    Communication: an all-gather over ep, and two all-reduces over edp.
    """
    if not counts:
        return {}
    sums = all_gather_sequence(torch.stack(list(counts.values())).unsqueeze(0), mesh.ep)
    # The maximum is taken before the sum over replicas overwrites it.
    most = sums[:, :, RowSum.NEEDED].amax(0)
    sums = all_reduce_(sums.contiguous(), mesh.edp)
    most = all_reduce_(most, mesh.edp, "max")
    by_layer = torch.cat([sums, most.expand(sums.shape[0], -1).unsqueeze(-1)], -1).cpu().double()
    return {
        number: _of_layer(layer_rows, layer_rows[0, -1])
        for number, layer_rows in zip(counts, by_layer.unbind(1), strict=True)
    }


def _of_layer(sums: Float[Tensor, "ranks _"], needed: Float[Tensor, ""]) -> StepRows:
    after = sums[:, RowSum.ROWS]
    arrived = sums[:, RowSum.ARRIVED]
    num_microbatches = sums[0, RowSum.NUM_MICROBATCHES].clamp(min=1.0)
    return StepRows(
        before=after + sums[:, RowSum.LEFT] - arrived,
        after=after,
        moved=arrived.sum() / after.sum().clamp(min=1.0),
        clones=sums[:, RowSum.CLONES].sum() / num_microbatches,
        away=sums[:, RowSum.AWAY] / num_microbatches,
        num_microbatches=sums[0, RowSum.NUM_MICROBATCHES],
        needed=needed,
    )
