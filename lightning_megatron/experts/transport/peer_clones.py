"""One-sided transfer of weights to the clones of experts, and of gradients back to their homes.

All layers share three memories, in addition to that of tokens: counts, ``places`` times the
matrices of an expert in the dtype of weights, and as many float32 gradients. The transfers for
clones share the barriers of the tokens:

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
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.peer_memory import PeerRegion
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    SlotRow,
    add_to_slots,
    cached_stack,
    slots_of,
)
from lightning_megatron.plan.expert_clones import CloneMemory
from lightning_megatron.shapes import Float, Int

#: Function that returns each matrix of all experts at home on this rank.
Matrices = Callable[[], Sequence[Sequence[Tensor]]]
#: Size of a count (bytes).
_COUNT = 4


@dataclass(frozen=True)
class PeerClones:
    """Memories of the clones of one layer, which other ranks access without action of the owner."""

    axis: MeshAxis
    num_experts: int
    places: int
    matrices: Matrices
    kernels: ModuleType

    def exchange(self, ends: Int[Tensor, "experts"]) -> Int[Tensor, "ranks experts"]:
        """Return the counts of all ranks' selections; this also begins the transfer of tokens.

        It allocates all memories, so that a layer that has run forward once can be captured.
        ``ends`` are those of this rank's selections of each expert of the layer.

        Communication: a put of the counts, and a barrier.
        """
        shape = (self.axis.size, self.num_experts)
        memory = self.axis.peer_memory
        size = prod(shape) * _COUNT
        region = memory.reserve(self.axis.group, size, ends.device, "clone counts")
        self.weights_memory()
        self.gradients_memory()
        self.axis.note("put_counts")
        self.kernels.put_counts(ends, region.pointers, self.axis.rank)
        memory.wait()
        return region.view(0, shape, torch.int32)

    def weights_memory(self) -> tuple[PeerRegion, CloneMemory]:
        """Return the memory of weights, and its layout."""
        weight = self.matrices()[0][0]
        layout = self._lay_out(weight.dtype)
        memory = self.axis.peer_memory
        region = memory.reserve(self.axis.group, layout.num_bytes, weight.device, "clone weights")
        return region, layout

    def gradients_memory(self) -> tuple[PeerRegion, CloneMemory]:
        """Return the memory of gradients, and its layout."""
        device = self.matrices()[0][0].device
        layout = self._lay_out(torch.float32)
        memory = self.axis.peer_memory
        return memory.reserve(self.axis.group, layout.num_bytes, device, "clone gradients"), layout

    def sources(self) -> tuple[PeerSource, ...]:
        """Return the transfers of each matrix to this rank's clones, and of gradients back."""
        region, layout = self.weights_memory()
        gradients, wide = self.gradients_memory()
        return tuple(
            PeerSource(
                region.view(start, (layout.places, *shape), weights[0].dtype),
                gradients.view(wide_start, (layout.places, *shape), torch.float32),
            )
            for weights, shape, start, wide_start in zip(
                self.matrices(), layout.shapes, layout.starts, wide.starts, strict=True
            )
        )

    def _lay_out(self, dtype: torch.dtype) -> CloneMemory:
        shapes = tuple((weights[0].shape[0], weights[0].shape[1]) for weights in self.matrices())
        return CloneMemory(self.places, shapes, dtype.itemsize)


class PeerRound:
    """Transfers for the clones of one layer and microbatch.

    Communication: puts of weights, and reads of gradients, without a barrier.
    """

    def __init__(self, peers: PeerClones, clones: PlacedClones) -> None:
        self._peers = peers
        self._clones = clones
        self._matrices = [tuple(weights) for weights in peers.matrices()]
        # These are the slots at the time of the forward pass, as in a product.
        self._slots = [slots_of(weights) for weights in self._matrices]

    @property
    def owners(self) -> Int[Tensor, "places"]:
        """Return the expert that is cloned in every place; -1 means none."""
        return self._clones.owners

    @property
    def leaves(self) -> Sequence[Float[Tensor, "out_local in_local"]]:
        """Return all weights; only one if all have slots and autograd passes on no gradient."""
        weights = [weight for matrix in self._matrices for weight in matrix]
        return weights[:1] if self._have_slots else weights

    def put_weights(self, owners: Int[Tensor, "places"]) -> None:
        """Put the weights of this rank's experts into the places of their clones.

        ``owners`` are given because a recomputation plans them again.
        """
        region, layout = self._peers.weights_memory()
        self._peers.axis.note("put_weights")
        for weights, slots, start in zip(self._matrices, self._slots, layout.starts, strict=True):
            view = cached_stack(weights, slots)
            stack = torch.stack(weights) if view is None else view
            self._peers.kernels.put_weights(
                stack.detach(), owners, region.pointers, self._peers.axis.rank, start
            )

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
        region, layout = self._peers.gradients_memory()
        assert region.pointers is not None, "GPUs have the addresses of each other's memory"
        self._peers.axis.note("add_clone_gradients")
        returned: list[Tensor | None] = []
        for weights, slots, start in zip(self._matrices, self._slots, layout.starts, strict=True):
            where = owners, region.pointers, self._peers.axis.rank, start
            add = partial(_add, self._peers.kernels, where)
            if _add_to_slots(slots, add):
                returned += [None] * len(weights)
                continue
            sums = torch.zeros((len(weights), *weights[0].shape), device=weights[0].device)
            add(sums, 1.0)
            needed = [weight.requires_grad for weight in weights]
            returned += add_to_slots(sums, weights, slots, needed)
        return returned[:1] if self._have_slots else returned

    @property
    def _have_slots(self) -> bool:
        return all(slot is not None for slots in self._slots for slot in slots)


@dataclass(frozen=True)
class PeerSource:
    """Transfer of one matrix's weights and float32 gradients through memory that ranks share."""

    weights: Float[Tensor, "places out_local in_local"]
    memory: Float[Tensor, "places out_local in_local"]

    @property
    def plan(self) -> tuple[Int[Tensor, "..."], ...]:
        """Return nothing: weights and gradients are in the same memory under every plan."""
        return ()

    def for_plan(self, *plan: Int[Tensor, "..."]) -> PeerSource:
        """Return this transfer."""
        return self

    def fetch(
        self, weights: Sequence[Float[Tensor, "out_local in_local"]]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return the weights that the homes have put here with the last tokens or gradients."""
        return self.weights

    def gradients(
        self, like: Float[Tensor, "out_local in_local"]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return the memory from which the homes read."""
        return self.memory

    def give_back(self, gradients: Float[Tensor, "places out_local in_local"]) -> None:
        """Leave the gradients to :meth:`PeerRound.add_gradients` of the homes."""


def _add(
    kernels: ModuleType, where: tuple[Tensor, Tensor, int, int], sums: Tensor, scale: float
) -> None:
    kernels.add_clone_gradients(sums, *where, scale)


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
