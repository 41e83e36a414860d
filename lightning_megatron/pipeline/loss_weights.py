"""What the losses of microbatches are multiplied by, for losses that layers attach, on every stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.experts.attached_loss import LossWeight
from lightning_megatron.plan.transfers import Transfer


class MicrobatchWeights:
    """Hold a weight for each microbatch of a step, which the last stage knows and tells the others with gradients.

    Args:
        told: What layers read; None where no layer attaches a loss, and then nothing is held or sent.
        device: Where the weights are.
    """

    def __init__(self, told: LossWeight | None, device: torch.device) -> None:
        self._told, self._device = told, device
        self._weights: dict[int, Tensor] = {}

    def begin(self, number: int) -> None:
        """Let layers read the weight of a microbatch from now on; it may be filled in until its backward pass."""
        if self._told is not None:
            self._told.value = self._weight(number)

    def fill(self, number: int, value: float | Tensor) -> None:
        """Set the weight of a microbatch."""
        if self._told is not None:
            self._weight(number).fill_(value)

    def beside(self, transfers: Sequence[Transfer]) -> list[tuple[Tensor, int]]:
        """List the weights that go with gradients, and the position of the stage at the other end."""
        if self._told is None:
            return []
        return [(self._weight(transfer.microbatch), transfer.peer) for transfer in transfers if transfer.kind == "B"]

    def _weight(self, number: int) -> Tensor:
        if number not in self._weights:
            self._weights[number] = torch.zeros((), dtype=torch.float64, device=self._device)
        return self._weights[number]
