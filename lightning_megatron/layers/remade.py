"""Tensors that a backward pass makes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.shapes import Shaped


@dataclass(frozen=True)
class Recipe:
    """How the backward pass makes a tensor again, from tensors that are kept in any case.

    Args:
        make: Function from these tensors to the tensor. It runs without gradients.
        tensors: The tensors.
    """

    make: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, make: Callable[..., Tensor], *tensors: Shaped[Tensor, "..."]) -> Recipe:
        """Return the recipe of what a function makes of tensors, whose gradients do not matter."""
        return cls(make, tuple(tensor.detach() for tensor in tensors))

    def to(self, dtype: torch.dtype) -> Recipe:
        """Return the recipe of the tensor in another dtype."""
        # Not `self.make`: an operator that keeps the function would keep the tensors by it.
        make = self.make
        return Recipe(lambda *tensors: make(*tensors).to(dtype), self.tensors)

    @classmethod
    def keeping(cls, tensor: Shaped[Tensor, "..."]) -> Recipe:
        """Return the recipe of a tensor that is kept itself."""
        return cls(_itself, (tensor,))


def _itself(tensor: Tensor) -> Tensor:
    return tensor
