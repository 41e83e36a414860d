"""Tensors that a backward pass recomputes instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.shapes import Shaped


@dataclass(frozen=True)
class Recipe:
    """Function without gradients, and tensors, from which the backward pass recomputes a tensor.

    Args:
        tensors: Tensors that stay in memory until the backward pass anyway.
    """

    make: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, make: Callable[..., Tensor], *tensors: Shaped[Tensor, "..."]) -> Recipe:
        """Return the recipe of a function of tensors, which are detached."""
        return cls(make, tuple(tensor.detach() for tensor in tensors))

    def to(self, dtype: torch.dtype) -> Recipe:
        """Return the recipe of the tensor in another dtype."""
        # The function must not refer to `self`, or an operator that stores the function would keep
        # the tensors alive.
        make = self.make
        return Recipe(lambda *tensors: make(*tensors).to(dtype), self.tensors)

    @classmethod
    def of_tensor(cls, tensor: Shaped[Tensor, "..."]) -> Recipe:
        """Return the recipe of a tensor that is kept instead of recomputed."""
        return cls(_itself, (tensor,))


def _itself(tensor: Tensor) -> Tensor:
    return tensor
