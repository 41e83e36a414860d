"""Transfers of weights to the clones of experts, and of gradients back to their homes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_to_all_rows
from lightning_megatron.plan.expert_clones import ExpertPlaces
from lightning_megatron.shapes import Bool, Float, Int


@dataclass(frozen=True)
class CloneCollectives:
    """Transfers by all-to-alls over ep, whose sizes do not depend on the plan.

    Every rank sends every other rank a matrix for each of its places, ``ep - 1`` times as much as
    clones need. In exchange the host reads nothing.

    Communication: :meth:`fetch` and :meth:`give_back` are one all-to-all each.
    """

    axis: MeshAxis
    layout: ExpertPlaces
    owners: Int[Tensor, "places"]

    @property
    def plan(self) -> tuple[Int[Tensor, "..."], ...]:
        """Return the owners, which the backward pass reads again."""
        return (self.owners,)

    def for_plan(self, *plan: Int[Tensor, "places"]) -> CloneCollectives:
        """Return the transfer for owners that a recomputation has planned again."""
        (owners,) = plan
        return replace(self, owners=owners)

    def fetch(
        self, weights: Sequence[Float[Tensor, "out_local in_local"]]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return the weights of the clones on this rank; those of empty places are zeros."""
        local, is_home = self._homes()
        stack = torch.stack([weight.detach() for weight in weights])
        received = self._exchange(stack[local].where(_widened(is_home, stack), 0))
        owners = self._local_owners()
        places = torch.arange(owners.shape[0], device=owners.device)
        source = owners.clamp(min=0) // self.layout.homes
        fetched = received[source * owners.shape[0] + places]
        return fetched.where(_widened(owners >= 0, fetched), 0)

    def gradients(
        self, like: Float[Tensor, "out_local in_local"]
    ) -> Float[Tensor, "places out_local in_local"]:
        """Return a new tensor for the gradients of the clones on this rank."""
        return like.new_empty((self.layout.places, *like.shape))

    def give_back(
        self, gradients: Float[Tensor, "places out_local in_local"]
    ) -> Float[Tensor, "homes out_local in_local"]:
        """Return the gradients of all clones of this rank's experts, added in order of places."""
        owners = self._local_owners()
        ranks = torch.arange(self.axis.size, device=owners.device).unsqueeze(1)
        is_for = (owners // self.layout.homes == ranks) & (owners >= 0)
        sent = torch.where(_widened(is_for, gradients), gradients, 0).flatten(0, 1)
        received = self._exchange(sent)
        local, is_home = self._homes()
        result = received.new_zeros((self.layout.homes, *received.shape[1:]))
        for place, gradient in enumerate(received.where(_widened(is_home, received), 0).split(1)):
            # Gradients are added one by one, because a GPU would add several gradients to one home
            # in an undefined order.
            result.index_add_(0, local[place : place + 1], gradient)
        return result

    def _homes(self) -> tuple[Int[Tensor, "all_places"], Bool[Tensor, "all_places"]]:
        """Return the local index of every place's owner, and whether it is at home on this rank."""
        owners = self.owners
        homes = self.layout.homes
        local = owners - self.axis.rank * homes
        is_home = (owners >= 0) & (local >= 0) & (local < homes)
        return local.clamp(0, homes - 1), is_home

    def _local_owners(self) -> Int[Tensor, "places"]:
        places = self.layout.places
        return self.owners[self.axis.rank * places :][:places]

    def _exchange(
        self, matrices: Float[Tensor, "all_places out_local in_local"]
    ) -> Float[Tensor, "all_places out_local in_local"]:
        rows_per_rank = (self.layout.places,) * self.axis.size
        return all_to_all_rows(matrices, rows_per_rank, rows_per_rank, self.axis)


def _widened(
    mask: Bool[Tensor, "*shape"], matrices: Float[Tensor, "_ out_local in_local"]
) -> Bool[Tensor, "*shape 1 1"]:
    return mask.view(*mask.shape, *[1] * (matrices.dim() - 1))
