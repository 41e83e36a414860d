"""The losses of a router as sums of products, of which their numbers and their gradients are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.experts.attached_loss import attach_loss
from lightning_megatron.experts.balance import balance_loss


@dataclass(frozen=True, eq=False)
class RouterLosses:
    """Hold what this rank's parts of a router's losses are made of; the rule of parts is in ``experts.balance``.

    Shapes: share_sums ``(C, E)``; of_choices ``(C, E)`` or ``(E,)``; square_sum a number.

    Args:
        share_sums: Sums over this rank's tokens of the probabilities of each expert.
        of_choices: What those are multiplied by in the auxiliary loss; None where there is none.
        coefficient: What the sum of these products is multiplied by.
        square_sum: Sum of the squared logarithms of sums of exponentials.
        square_coefficient: What it is multiplied by in the loss of logits; 0 where there is none.
        kernels: The fused kernels, if they serve these sums.
    """

    share_sums: Tensor
    of_choices: Tensor | None
    coefficient: float
    square_sum: Tensor
    square_coefficient: float
    kernels: ModuleType | None = None

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, float, Tensor, float]:
        """List what the kernels make losses of, in the order in which they take it."""
        return self.share_sums, self.of_choices, self.coefficient, self.square_sum, self.square_coefficient

    # Who counts a microbatch asks where gradients are off, who attaches losses where they are on: both get one number.
    @cached_property
    @torch.enable_grad()
    def balance(self) -> Tensor | None:
        """Compute the auxiliary loss, coefficient included; None where there is none."""
        if self.of_choices is None:
            return None
        return balance_loss(self.share_sums, self.of_choices, self.coefficient)

    @cached_property
    @torch.enable_grad()
    def z(self) -> Tensor | None:
        """Compute the loss of logits, coefficient included; None where there is none."""
        return self.square_sum * self.square_coefficient if self.square_coefficient else None

    def attach_to(self, x: Tensor, scale: float | Tensor) -> Tensor:
        """Return ``x``, whose backward pass also starts those of both losses, as :func:`attach_loss` says.

        Args:
            x: What the main loss is computed from.
            scale: Factor of the losses in the backward pass.
        """
        if self.of_choices is None and not self.square_coefficient:
            return x
        if self.kernels is not None:
            return self.kernels.attach_losses(x, *self.parts, scale)
        losses = [loss for loss in (self.balance, self.z) if loss is not None]
        return attach_loss(x, sum(losses[1:], losses[0]), scale)
