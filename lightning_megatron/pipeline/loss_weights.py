"""Loss weights of microbatches, made available to layers with attached losses on every stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.experts.routing.attached_loss import LossWeight
from lightning_megatron.plan.transfers import Transfer


class MicrobatchWeights:
    """Loss weights of a step's microbatches.

    Only the last stage knows the weights. It sends each of them to the earlier stages, together
    with the gradients of the microbatch.

    Args:
        loss_weight: Record that layers read; None if no layer attaches a loss, so that nothing is
            sent.
        device: Device of the weights.
    """

    def __init__(self, loss_weight: LossWeight | None, device: torch.device) -> None:
        self._loss_weight = loss_weight
        self._device = device
        self._weights: dict[int, Tensor] = {}

    def begin(self, number: int) -> None:
        """Make a microbatch current. Its weight may be filled in until its backward pass."""
        if self._loss_weight is not None:
            self._loss_weight.value = self._weight(number)

    def fill(self, number: int, value: float | Tensor) -> None:
        """Set the weight of a microbatch."""
        if self._loss_weight is not None:
            self._weight(number).fill_(value)

    def messages(self, transfers: Sequence[Transfer]) -> list[tuple[Tensor, int]]:
        """Return the weights that accompany gradients, each with the index of the peer stage."""
        if self._loss_weight is None:
            return []
        return [
            (self._weight(transfer.microbatch), transfer.peer)
            for transfer in transfers
            if transfer.kind == "B"
        ]

    def _weight(self, number: int) -> Tensor:
        if number not in self._weights:
            self._weights[number] = torch.zeros((), dtype=torch.float64, device=self._device)
        return self._weights[number]
