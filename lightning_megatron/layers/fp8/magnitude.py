"""Largest magnitudes of tensors, found by the operators that compute the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.plan.fp8 import MAGNITUDE_PARTS
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True)
class Magnitude:
    """Largest magnitude of a tensor, which the operator that computed the tensor has found.

    The layer that calls the operator gives the magnitude to the linear layer that casts the tensor,
    which then reads the tensor once.

    Args:
        tensor: The tensor.
        parts: Bit patterns of float32 numbers, the largest of which is the magnitude.
    """

    tensor: Shaped[Tensor, "..."]
    parts: Int[Tensor, "parts"]
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.tensor._version)

    def of(self, tensor: Shaped[Tensor, "..."]) -> Int[Tensor, "parts"] | None:
        """Return the bit patterns if they belong to a tensor; None if it may have other numbers.

        They belong to views of all elements in their order, too, until the numbers are written.

        Args:
            tensor: The tensor.
        """
        own = self.tensor
        is_same = (
            tensor.untyped_storage()._cdata == own.untyped_storage()._cdata
            and (tensor.numel(), tensor.storage_offset()) == (own.numel(), own.storage_offset())
            and tensor.dtype == own.dtype
            and tensor.is_contiguous()
            and own.is_contiguous()
            and tensor._version == self._version
        )
        return self.parts if is_same else None


class GradientMagnitude:
    """Largest magnitude of the gradient of a linear layer's output.

    The layer that calls a linear layer and the operator that reads its output gives this object to
    both. The backward pass of the operator puts the magnitude in, and that of the linear layer,
    which casts the gradient, takes it out.
    """

    def __init__(self) -> None:
        self._found: Magnitude | None = None

    def put(self, gradient: Float[Tensor, "..."], parts: Int[Tensor, "parts"]) -> None:
        """Keep the magnitude of a gradient, and the gradient itself, until it is taken.

        Args:
            gradient: The gradient.
            parts: As for :class:`Magnitude`.
        """
        self._found = Magnitude(gradient, parts)

    def find(self, gradient: Float[Tensor, "..."]) -> None:
        """Find the magnitude of a gradient in a pass of its own, and keep it."""
        parts = no_magnitude(gradient)
        find_magnitude(gradient, parts)
        self.put(gradient, parts)

    def take(self, gradient: Float[Tensor, "..."]) -> Int[Tensor, "parts"] | None:
        """Return the bit patterns if they belong to a gradient, as :meth:`Magnitude.of` does."""
        found = self._found
        self._found = None
        return None if found is None else found.of(gradient)


def no_magnitude(like: Shaped[Tensor, "..."]) -> Int[Tensor, "parts"]:
    """Return new bit patterns of the magnitude 0, on the device of a tensor."""
    return like.new_zeros(MAGNITUDE_PARTS, dtype=torch.int32)


def find_magnitude(tensor: Float[Tensor, "..."], seen: Int[Tensor, "parts"]) -> None:
    """Let bit patterns grow to the largest magnitude of a tensor, in a pass of its own.

    Args:
        tensor: The tensor.
        seen: The bit patterns.
    """
    row = tensor.detach().reshape(1, -1)
    casts = fused_kernels(row) or torch_casts
    seen.copy_(torch.maximum(seen, casts.magnitude_parts(row).amax()))
