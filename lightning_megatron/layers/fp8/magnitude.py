"""Largest magnitudes of tensors, computed by the operators that compute the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.plan.fp8 import MAGNITUDE_PARTS
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True)
class Magnitude:
    """Largest magnitude of a tensor, found by the operator that computed the tensor.

    The layer that calls the operator passes the magnitude to the linear layer that casts the
    tensor, which then need not read the tensor a second time to find it.

    Args:
        parts: Bit patterns of float32 numbers, the largest of which is the magnitude.
    """

    tensor: Shaped[Tensor, "..."]
    parts: Int[Tensor, "parts"]
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.tensor._version)

    def of(self, tensor: Shaped[Tensor, "..."]) -> Int[Tensor, "parts"] | None:
        """Return the bit patterns if they belong to a tensor; None if its values may differ.

        They also belong to views of all elements in the same order, until a write changes values.
        """
        measured = self.tensor
        is_same = (
            tensor.untyped_storage()._cdata == measured.untyped_storage()._cdata
            and (tensor.numel(), tensor.storage_offset())
            == (measured.numel(), measured.storage_offset())
            and tensor.dtype == measured.dtype
            and tensor.is_contiguous()
            and measured.is_contiguous()
            and tensor._version == self._version
        )
        return self.parts if is_same else None


class GradientMagnitude:
    """Largest magnitude of the gradient of a linear layer's output.

    The layer that calls a linear layer, and then an operator on its output, passes this object to
    both. The backward pass of the operator puts the magnitude in. The backward pass of the linear
    layer, which casts the gradient, takes it out.
    """

    def __init__(self) -> None:
        self._kept: Magnitude | None = None

    def put(self, gradient: Float[Tensor, "..."], parts: Int[Tensor, "parts"]) -> None:
        """Keep the magnitude of a gradient, and the gradient itself, until it is taken."""
        self._kept = Magnitude(gradient, parts)

    def find(self, gradient: Float[Tensor, "..."]) -> None:
        """Find the magnitude of a gradient in a separate pass over its memory, and keep it."""
        parts = no_magnitude(gradient)
        find_magnitude(gradient, parts)
        self.put(gradient, parts)

    def take(self, gradient: Float[Tensor, "..."]) -> Int[Tensor, "parts"] | None:
        """Return the bit patterns if they belong to a gradient, as :meth:`Magnitude.of` does."""
        magnitude = self._kept
        self._kept = None
        return None if magnitude is None else magnitude.of(gradient)


def no_magnitude(like: Shaped[Tensor, "..."]) -> Int[Tensor, "parts"]:
    """Return new bit patterns of the magnitude 0, on the device of a tensor."""
    return like.new_zeros(MAGNITUDE_PARTS, dtype=torch.int32)


def find_magnitude(tensor: Float[Tensor, "..."], seen: Int[Tensor, "parts"]) -> None:
    """Raise bit patterns to the largest magnitude of a tensor, in a separate pass."""
    row = tensor.detach().reshape(1, -1)
    casts = fused_kernels(row) or torch_casts
    seen.copy_(torch.maximum(seen, casts.magnitude_parts(row).amax()))
