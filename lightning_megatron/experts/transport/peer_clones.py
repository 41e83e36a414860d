"""Transfer of weights to the clones of experts, and of gradients back to their homes.

All layers share three memories, in addition to that of tokens: counts, ``places`` times the
matrices of an expert in the dtype of weights, and as many gradients. Between GPUs the transfers for
clones share the barriers of the tokens; between CPUs collectives replace the puts, at the same
points:

====================================  =========================================================
forward                               backward
====================================  =========================================================
put own counts; **wait**              **wait**; put weights again, put gradients of outputs;
                                      **wait**
plan; put weights, put tokens;        products: gradients of clones go into this rank's memory
**wait**
products read the weights             **wait**; homes add their clones' gradients, put sums;
                                      **wait**
====================================  =========================================================

No memory is overwritten while it is read, because its writer first passes a barrier that its reader
reaches only after its last read:

- Counts are put before a barrier that follows the last barrier of the previous layer's tokens.
  Every rank has planned the previous layer before it reaches that last barrier.
- Weights are put after the first barrier of a transfer. On every rank the products that read the
  previous weights come before that barrier: in the forward pass before the sums of outputs are put,
  in the backward pass before the sums of gradients are put.
- A rank writes gradients into its own memory after the barrier that ends the transfer of gradients
  of outputs. Every home has read the previous gradients before the barrier at the end of the sums
  of gradients, which is earlier.

No other transfer over the axis may run between a put and its last read. The steps of a layer
between them therefore must not be divided into separate pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.experts.transport.cloning import PlacedClones, place_clones, to_physical
from lightning_megatron.experts.transport.peer_transfer import CloneStack, PeerTransfer
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    SlotRow,
    add_to_slots,
    cached_stack,
    slots_of,
)
from lightning_megatron.plan.expert_clones import CloneMemory, ExpertClones
from lightning_megatron.shapes import Float, Int

#: Function that returns each matrix of all experts at home on this rank.
Matrices = Callable[[], Sequence[Sequence[Tensor]]]


@dataclass(frozen=True)
class PeerClones:
    """Clones of one layer: their plans, and the memories of their weights and gradients."""

    num_experts: int
    settings: ExpertClones
    matrices: Matrices
    transfer: PeerTransfer

    def begin(
        self, experts: Int[Tensor, "tokens top_k"]
    ) -> tuple[Int[Tensor, "tokens top_k"], PeerRound]:
        """Begin the transfer of tokens: plan clones, and put their weights.

        It allocates all memories, so that a layer that has run forward once can be captured.

        Returns:
            The physical expert of each selection of this rank's tokens, and the transfers for these
            clones.

        Communication: an exchange of counts, and a put of weights.
        """
        row_map = map_rows(experts, 0, self.num_experts)
        self.stacks("weights")
        self.stacks("gradients")
        counts = self.transfer.exchange_counts(row_map.ends)
        clones = place_clones(counts, self.settings.places, self.settings.min_rows)
        physical = to_physical(experts, row_map, clones, self.transfer.axis.rank)
        begun = PeerRound(self, clones)
        begun.put_weights(clones.owners)
        return physical, begun

    def stacks(self, kind: Literal["weights", "gradients"]) -> list[CloneStack]:
        """Return the memory of each matrix of this rank's clones."""
        first_of_each = [weights[0] for weights in self.matrices()]
        weight = first_of_each[0]
        is_weight = kind == "weights"
        dtype = weight.dtype if is_weight else self.transfer.gradient_dtype(weight.dtype)
        shapes = tuple((matrix.shape[0], matrix.shape[1]) for matrix in first_of_each)
        layout = CloneMemory(self.settings.places, shapes, dtype.itemsize)
        axis = self.transfer.axis
        region = axis.peer_memory.reserve(
            axis.group,
            layout.num_bytes,
            weight.device,
            "clone weights" if is_weight else "clone gradients",
        )
        return [
            CloneStack(region, start, region.view(start, (layout.places, *shape), dtype))
            for shape, start in zip(shapes, layout.starts, strict=True)
        ]

    def memory(
        self,
    ) -> list[
        tuple[
            Float[Tensor, "places out_local in_local"], Float[Tensor, "places out_local in_local"]
        ]
    ]:
        """Return the weights and the gradients of this rank's clones, for each matrix."""
        pairs = zip(self.stacks("weights"), self.stacks("gradients"), strict=True)
        return [(weights.matrices, gradients.matrices) for weights, gradients in pairs]


class PeerRound:
    """Transfers for the clones of one layer and microbatch.

    Communication: puts of weights, and reads of gradients, without a barrier.
    """

    def __init__(self, peers: PeerClones, clones: PlacedClones) -> None:
        self._peers = peers
        self.clones = clones
        self._matrices = [tuple(weights) for weights in peers.matrices()]
        # These are the slots at the time of the forward pass, as in a product.
        self._slots = [slots_of(weights) for weights in self._matrices]

    @property
    def owners(self) -> Int[Tensor, "places"]:
        """Return the expert that is cloned in every place; -1 means none."""
        return self.clones.owners

    @property
    def leaves(self) -> Sequence[Float[Tensor, "out_local in_local"]]:
        """Return all weights; only one if all have slots and autograd passes on no gradient."""
        weights = [weight for matrix in self._matrices for weight in matrix]
        return weights[:1] if self._have_slots else weights

    def put_weights(self, owners: Int[Tensor, "places"]) -> None:
        """Put the weights of this rank's experts into the places of their clones.

        ``owners`` are given because a recomputation plans them again.
        """
        stacks = self._peers.stacks("weights")
        for weights, slots, stack in zip(self._matrices, self._slots, stacks, strict=True):
            view = cached_stack(weights, slots)
            homes = torch.stack(weights) if view is None else view
            self._peers.transfer.put_weights(homes.detach(), owners, stack)

    def add_gradients(
        self, owners: Int[Tensor, "places"]
    ) -> list[Float[Tensor, "out_local in_local"] | None]:
        """Add the gradients of clones to those of their homes, in the order of places.

        Each is multiplied by the scale of its slot. The gradient of a home is then complete, and is
        reported to its slot, even if the home has no clone.

        Returns:
            Gradients of :attr:`leaves`; None for those that have slots.
        """
        if not any(weight.requires_grad for matrix in self._matrices for weight in matrix):
            return [None for _ in self.leaves]
        returned: list[Tensor | None] = []
        stacks = self._peers.stacks("gradients")
        for weights, slots, stack in zip(self._matrices, self._slots, stacks, strict=True):
            add = partial(self._peers.transfer.add_gradients, owners, stack)
            if _add_to_slots(slots, add):
                returned += [None] * len(weights)
                continue
            sums = stack.matrices.new_zeros((len(weights), *weights[0].shape))
            add(sums, 1.0)
            needed = [weight.requires_grad for weight in weights]
            returned += add_to_slots(sums, weights, slots, needed)
        return returned[:1] if self._have_slots else returned

    @property
    def _have_slots(self) -> bool:
        return all(slot is not None for slots in self._slots for slot in slots)


def _add_to_slots(
    slots: Sequence[GradientSlot | None], add: Callable[[Tensor, float], None]
) -> bool:
    """Add to all slots in one launch, and notify them; return False if that is not possible."""
    present = [slot for slot in slots if slot is not None]
    if len(present) < len(slots):
        return False
    row = SlotRow.of(present)

    def add_to(sums: Tensor, overwrite: bool) -> None:
        if overwrite:
            # The experts' own products have added nothing.
            sums.zero_()
        add(sums, row.scale)

    return row.is_contiguous and row.add(add_to)
