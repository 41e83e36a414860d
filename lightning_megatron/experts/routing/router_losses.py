"""Router losses, kept as sums over tokens from which values and gradients are computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from lightning_megatron.experts.routing.attached_loss import attach_loss
from lightning_megatron.experts.routing.balance import balance_loss
from lightning_megatron.shapes import Float, Shaped


@dataclass(frozen=True, eq=False)
class RouterLosses:
    """This rank's parts of the auxiliary loss and the z-loss of a router.

    ``experts.routing.balance`` documents how the parts of ranks are combined.

    Args:
        share_sums: Probabilities of each expert, summed over this rank's tokens.
        load_factors: Factors of ``share_sums`` in the auxiliary loss; None without this loss.
        coefficient: Factor of the sum of these products.
        square_sum: Sum over tokens of the squared logsumexp of their logits.
        square_coefficient: Factor of ``square_sum`` in the z-loss; 0 without this loss.
        kernels: Fused kernels; None if they do not support these sums.
    """

    share_sums: Float[Tensor, "sequences experts"]
    load_factors: Shaped[Tensor, "sequences experts"] | Shaped[Tensor, "experts"] | None
    coefficient: float
    square_sum: Float[Tensor, ""]
    square_coefficient: float
    kernels: ModuleType | None = None

    @property
    def parts(
        self,
    ) -> tuple[
        Float[Tensor, "sequences experts"],
        Shaped[Tensor, "sequences experts"] | Shaped[Tensor, "experts"] | None,
        float,
        Float[Tensor, ""],
        float,
    ]:
        """Return the inputs of the loss kernels, in the order of their parameters."""
        return (
            self.share_sums,
            self.load_factors,
            self.coefficient,
            self.square_sum,
            self.square_coefficient,
        )

    # The statistics read a loss with gradients off, and `attach_to` reads it with gradients on.
    # `enable_grad` makes the cached value usable for both.
    @cached_property
    @torch.enable_grad()
    def balance(self) -> Float[Tensor, ""] | None:
        """Return the auxiliary loss times its coefficient; None without this loss."""
        if self.load_factors is None:
            return None
        return balance_loss(self.share_sums, self.load_factors, self.coefficient)

    @cached_property
    @torch.enable_grad()
    def z(self) -> Float[Tensor, ""] | None:
        """Return the z-loss times its coefficient; None without this loss."""
        return self.square_sum * self.square_coefficient if self.square_coefficient else None

    def attach_to(
        self, x: Float[Tensor, "*shape"], scale: float | Float[Tensor, ""]
    ) -> Float[Tensor, "*shape"]:
        """Attach both losses to ``x`` as :func:`attach_loss` does, and return it."""
        if self.load_factors is None and not self.square_coefficient:
            return x
        if self.kernels is not None:
            return self.kernels.attach_losses(x, *self.parts, scale)
        losses = [loss for loss in (self.balance, self.z) if loss is not None]
        return attach_loss(x, sum(losses[1:], losses[0]), scale)
