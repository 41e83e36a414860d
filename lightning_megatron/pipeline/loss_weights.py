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
        loss_weight: Record from which layers read the weight; None if no layer attaches a loss, so
            that no weights are sent.
        device: Device of the weights.
        fixed: Tensor from which layers read the weight of every microbatch, such as
            :func:`new_weight` makes. While the backward pass of a microbatch runs, the tensor has
            the weight of that microbatch. A CUDA graph reads the weight at the address of the
            capture, so all steps with graphs must use the same tensor. None makes a new tensor for
            each microbatch of each step.
    """

    def __init__(
        self, loss_weight: LossWeight | None, device: torch.device, fixed: Tensor | None = None
    ) -> None:
        self._loss_weight = loss_weight
        self._device = device
        self._fixed = fixed
        self._weights: dict[int, Tensor] = {}

    def begin_forward(self, number: int) -> None:
        """Make a microbatch current. Its weight must be set before its backward pass."""
        if self._loss_weight is not None:
            self._loss_weight.value = self._weight(number) if self._fixed is None else self._fixed

    def begin_backward(self, number: int) -> None:
        """Make a microbatch current, whose weight has been set.

        A layer whose activations are recomputed attaches its losses again, and reads the weight.
        """
        self.begin_forward(number)
        # Attached losses read their weights in backward passes only, one of which runs at a time.
        if self._loss_weight is not None and self._fixed is not None:
            self._fixed.copy_(self._weight(number))

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
            self._weights[number] = new_weight(self._device)
        return self._weights[number]


def new_weight(device: torch.device) -> Tensor:
    """Return a tensor for the weight of a microbatch, with the value zero."""
    # Validation may come first, and tensors of its inference mode cannot be written later.
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.float64, device=device)
