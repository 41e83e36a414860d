"""How the routers of a stage spread the tokens of a step: counted on the device, added up over ranks at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.experts.balance import add_over_tokens_
from lightning_megatron.experts.router import Routing
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.routing_sums import RoutingSum


class RouterStatistics:
    """Add up what a layer's router does with the microbatches of a step on this rank.

    The sums stay where they are and are changed in place, and nothing is read back from the device, so that a captured
    graph can count. It is no module: whatever it holds belongs to a step, and neither moves with the weights of a layer
    nor is saved with them.

    Shapes: sums ``(5 + E)`` float64, which has every integer below 2 to the power of 53: choices that were dropped,
    entropies of the tokens (nats), this rank's parts of the balance loss and of the loss of logits, coefficients
    included, microbatches, and the choices that each expert had, dropped ones included.

    Args:
        config: What the mixture is.
        device: Where the routings are. A later move of the model is followed when the next one comes.
    """

    def __init__(self, config: ExpertsConfig, device: torch.device) -> None:
        self.config = config
        # On a device by name: a model may be built on meta.
        self.sums = torch.zeros(RoutingSum.LOAD + config.num_experts, dtype=torch.float64, device=device)

    @property
    def load(self) -> Tensor:
        """Return the choices that each expert had. Shape ``(E,)``, int64."""
        return self.sums[RoutingSum.LOAD :].long()

    @torch.no_grad()
    def add_(self, routing: Routing) -> None:
        """Count a microbatch; once, also where its forward pass runs again for the activations.

        Args:
            routing: Where its tokens go.
        """
        if self.sums.device != routing.load.device:
            self.sums = self.sums.to(routing.load.device)
        losses = routing.losses
        if losses.kernels is not None:
            counts = routing.load, routing.entropy_sum, routing.dropped
            losses.kernels.add_routing(self.sums, *counts, *losses.parts)
            return
        numbers = self.sums[: RoutingSum.LOAD].unbind()
        self.sums[RoutingSum.LOAD :].add_(routing.load)
        numbers[RoutingSum.ENTROPY].add_(routing.entropy_sum)
        for index, value in (
            (RoutingSum.DROPPED, routing.dropped),
            (RoutingSum.BALANCE_LOSS, routing.balance_loss),
            (RoutingSum.Z_LOSS, routing.z_loss),
        ):
            if value is not None:
                numbers[index].add_(value)
        numbers[RoutingSum.NUM_MICROBATCHES].add_(1)


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """Say how a layer's router spread the tokens of a step over all ranks. Everything is on the device.

    Args:
        sums: Those of :class:`RouterStatistics` over all ranks that had other tokens.
        config: What the mixture is.
        num_parts: Ranks that had the tokens of a microbatch between them, and each counted it.
    """

    sums: Tensor
    config: ExpertsConfig
    num_parts: int

    @property
    def load(self) -> Tensor:
        """Return the choices that each expert had, dropped ones included. Shape ``(E,)``, int64."""
        return self.sums[RoutingSum.LOAD :].long()

    @property
    def dropped(self) -> Tensor:
        """Return how many choices were dropped. A number, int64."""
        return self.sums[RoutingSum.DROPPED].long()

    @property
    def entropy(self) -> Tensor:
        """Return the mean entropy of a token's scores: the logarithm of E where experts are alike (nats)."""
        num_tokens = self.sums[RoutingSum.LOAD :].sum().clamp(min=1.0) / self.config.top_k
        return self.sums[RoutingSum.ENTROPY] / num_tokens

    @property
    def balance_loss(self) -> Tensor:
        """Return the mean auxiliary loss, without its coefficient: 1 where experts are alike; 0 if there is none."""
        return self._mean(RoutingSum.BALANCE_LOSS) / (self.config.aux_loss or 1.0)

    @property
    def z_loss(self) -> Tensor:
        """Return the same of the loss of logits."""
        return self._mean(RoutingSum.Z_LOSS) / (self.config.z_loss or 1.0)

    def _mean(self, index: int) -> Tensor:
        """Return the mean of a number over microbatches."""
        return self.sums[index] * self.num_parts / self.sums[RoutingSum.NUM_MICROBATCHES].clamp(min=1.0)


@torch.no_grad()
def clear_statistics_(layers: Sequence[RouterStatistics]) -> None:
    """Let all layers begin another step."""
    if layers:
        torch._foreach_zero_([layer.sums for layer in layers])


@torch.no_grad()
def step_statistics(layers: Mapping[int, RouterStatistics], mesh: ParallelMesh) -> Mapping[int, StepStatistics]:
    """Add up what the routers of this stage did in a step over all ranks that have other tokens.

    Nothing is read back from the device.

    Args:
        layers: What every layer with experts of this stage counted, by the layer's number in the model.
        mesh: The groups of this rank.

    Returns:
        One record for every layer, the same on all ranks of the stage.

    Communication: for all layers together one all-reduce over tp under sequence parallelism, and one over the data
        group.
    """
    if not layers:
        return {}
    sums = add_over_tokens_(torch.stack([layer.sums for layer in layers.values()]), mesh)
    num_parts = mesh.tp.size if mesh.sequence_parallel else 1
    return {
        number: StepStatistics(of_layer, layer.config, num_parts)
        for (number, layer), of_layer in zip(layers.items(), sums, strict=True)
    }
