"""Dispatcher that sends some tokens of busy experts to clones of these experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.experts.transport.cloning import place_clones, to_physical
from lightning_megatron.experts.transport.dispatchers import Dispatcher
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.experts.transport.transit import (
    ExpertInput,
    ExpertOutput,
    PreparedTokens,
    TokensInTransit,
)
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.layers.remade import Recipe
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class CloningDispatcher:
    """Dispatcher that passes physical experts (homes and places of clones) to another dispatcher.

    All ranks plan the same clones from the counts of all ranks. Probabilities stay those of the
    selected experts, so the router and its losses do not see the clones.

    Args:
        inner: Dispatcher over the homes and places of all ranks.
        axis: Axis that divides the experts into equal parts (ep).
        num_experts: Number of experts of the layer.
        settings: The places, and the smallest clone.

    Communication: ``prepare`` all-gathers the counts of selections; otherwise that of the inner
        dispatcher.
    """

    inner: Dispatcher
    axis: MeshAxis
    num_experts: int
    settings: CloneSettings

    @property
    def is_static(self) -> bool:
        """Return whether the inner dispatcher is static."""
        return self.inner.is_static

    @property
    def needs_equal_counts(self) -> bool:
        """Return whether the inner dispatcher needs equal token counts."""
        return self.inner.needs_equal_counts

    def prepare(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> PreparedTokens:
        """Plan clones, and replace the selected experts by physical ones."""
        row_map = map_rows(experts, 0, self.num_experts)
        counts = torch.diff(row_map.ends, prepend=row_map.ends.new_zeros(1))
        every = all_gather_sequence(counts.unsqueeze(0), self.axis)
        clones = place_clones(every, self.settings.places, self.settings.min_rows)
        physical = to_physical(experts, row_map, clones, self.axis.rank)
        return replace(self.inner.prepare(hidden, probabilities, physical), clones=clones)

    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        """Start to send every token to the ranks of its physical experts."""
        return replace(self.inner.send(prepared), clones=prepared.clones)

    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Wait for the tokens of this rank's homes and clones, and sort them."""
        return replace(self.inner.receive(sent), clones=sent.clones)

    def rows_recipe(self, dispatched: ExpertInput) -> Recipe | None:
        """Return how the inner dispatcher recomputes the rows."""
        return self.inner.rows_recipe(dispatched)

    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Give the outputs to the inner dispatcher."""
        return self.inner.send_back(outputs, dispatched)

    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        """Sum the outputs of each token, of homes and clones."""
        return self.inner.combine(returned)
