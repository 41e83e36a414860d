"""Routing statistics of a step, counted on the device and summed over ranks at the step's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.experts.routing.balance import add_over_tokens_
from lightning_megatron.experts.routing.router import Routing
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ExpertsConfig, RoutingSum
from lightning_megatron.shapes import Float, Int, Shaped


class RunningSums(Protocol):
    """Interface of sums over the microbatches of a step, which start at zero."""

    sums: Tensor


class RouterStatistics:
    """Running sums of a layer's routings over the microbatches of a step on this rank.

    The sums are updated in place and never copied to the host, so that a captured CUDA graph can
    update them; they move to the device of the next routing if the model has moved. The class is
    not a module, because its state belongs to a step: it must not move with the weights of a layer,
    nor be saved with them.

    Shapes: sums ``(5 + experts,)`` in float64, which represents all integers up to 2^53 exactly.
        The entries are the dropped selections, the entropies of the tokens (nats), this rank's
        parts of the balance loss and of the z-loss (both times their coefficients), the
        microbatches, and the selections of each expert, including dropped ones.
    """

    def __init__(self, config: ExpertsConfig, device: torch.device) -> None:
        self.config = config
        # The tensor is on an explicit device: the ambient one is meta while a model is built.
        self.sums = torch.zeros(
            RoutingSum.LOAD + config.num_experts, dtype=torch.float64, device=device
        )

    @property
    def load(self) -> Shaped[Tensor, "experts"]:
        """Return the number of selections of each expert. The dtype is int64."""
        return self.sums[RoutingSum.LOAD :].long()

    @torch.no_grad()
    def add_(self, routing: Routing) -> None:
        """Add the routing of a microbatch to the sums.

        The caller adds each microbatch once, and not again when its activations are recomputed.
        """
        if self.sums.device != routing.load.device:
            self.sums = self.sums.to(routing.load.device)
        losses = routing.losses
        if losses.kernels is not None:
            losses.kernels.add_routing(
                self.sums, routing.load, routing.entropy_sum, routing.dropped, *losses.parts
            )
            return
        numbers = self.sums[: RoutingSum.LOAD].unbind()
        self.sums[RoutingSum.LOAD :].add_(routing.load)
        numbers[RoutingSum.ENTROPY].add_(routing.entropy_sum)
        for index, value in (
            (RoutingSum.DROPPED, routing.dropped),
            (RoutingSum.BALANCE_LOSS, losses.balance),
            (RoutingSum.Z_LOSS, losses.z),
        ):
            if value is not None:
                numbers[index].add_(value)
        numbers[RoutingSum.NUM_MICROBATCHES].add_(1)


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """Routing statistics of one layer and step, summed over ranks. All tensors are on the device.

    Args:
        sums: Sums of :class:`RouterStatistics` over all ranks with different tokens.
        num_parts: Number of ranks that share the tokens of a microbatch, each of which counted it.
        rows: Counts of this rank's rows, as ``RankRows`` sums them; None if they are not counted.
    """

    sums: Float[Tensor, "sums"]
    config: ExpertsConfig
    num_parts: int
    rows: Int[Tensor, "7"] | None = None

    @property
    def load(self) -> Shaped[Tensor, "experts"]:
        """Return the selections of each expert, including dropped ones. The dtype is int64."""
        return self.sums[RoutingSum.LOAD :].long()

    @property
    def dropped(self) -> Shaped[Tensor, ""]:
        """Return the number of dropped selections. A scalar, int64."""
        return self.sums[RoutingSum.DROPPED].long()

    @property
    def entropy(self) -> Float[Tensor, ""]:
        """Return the mean entropy of a token's scores, which is log(E) for equal scores (nats)."""
        num_tokens = self.sums[RoutingSum.LOAD :].sum().clamp(min=1.0) / self.config.top_k
        return self.sums[RoutingSum.ENTROPY] / num_tokens

    @property
    def balance_loss(self) -> Float[Tensor, ""]:
        """Return the mean auxiliary loss over its coefficient: 1 for an even load, 0 if unused."""
        return self._mean(RoutingSum.BALANCE_LOSS) / (self.config.aux_loss or 1.0)

    @property
    def z_loss(self) -> Float[Tensor, ""]:
        """Return the mean z-loss without its coefficient; 0 if unused."""
        return self._mean(RoutingSum.Z_LOSS) / (self.config.z_loss or 1.0)

    def _mean(self, index: int) -> Tensor:
        """Return the mean of one of the sums over microbatches."""
        return (
            self.sums[index]
            * self.num_parts
            / self.sums[RoutingSum.NUM_MICROBATCHES].clamp(min=1.0)
        )


@torch.no_grad()
def clear_statistics_(running: Sequence[RunningSums]) -> None:
    """Reset sums for the next step."""
    if running:
        torch._foreach_zero_([layer.sums for layer in running])


@torch.no_grad()
def step_statistics(
    layers: Mapping[int, RouterStatistics], mesh: ParallelMesh
) -> Mapping[int, StepStatistics]:
    """Sum the statistics of this stage's routers over all ranks that have different tokens.

    Nothing is copied from the device to the host. The keys are indices of layers in the model.

    Communication: one all-reduce for all layers together over tp (under sequence parallelism), and
        one over the data group.
    """
    if not layers:
        return {}
    sums = add_over_tokens_(torch.stack([layer.sums for layer in layers.values()]), mesh)
    num_parts = mesh.tp.size if mesh.sequence_parallel else 1
    return {
        number: StepStatistics(of_layer, layer.config, num_parts)
        for (number, layer), of_layer in zip(layers.items(), sums, strict=True)
    }
