"""Linear maps of single tokens without gradients, as text generation computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.shapes import Float

#: Widest input of the kernel, whose loop over the input is unrolled.
_MAX_IN = 32768


def linear(
    hidden: Float[Tensor, "*tokens in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, "out_features"] | None = None,
) -> Float[Tensor, "*tokens out_features"]:
    """Return ``torch.nn.functional.linear`` of its arguments.

    Without gradients, a kernel multiplies a single token of a half type on a GPU: it reads the
    weight at the speed of memory, which products of matrices reach for large weights only.

    A hidden state whose tokens do not lie in a row, as attention leaves it for several samples, is
    copied first: torch would multiply it by a frozen weight position by position.
    """
    kernels = fused_kernels(hidden) if _is_vector(hidden, weight, bias) else None
    if kernels is None:
        return F.linear(hidden.contiguous(), weight, bias)
    product: Tensor = kernels.multiply_vector(
        hidden.view(-1), weight, bias, is_stored=is_stored(weight)
    )
    return product.view(*hidden.shape[:-1], -1)


def is_stored(weight: Float[Tensor, "out_features in_features"]) -> bool:
    """Return whether a weight is in memory: a parameter, or a view of adjacent parameters.

    Other weights are results of a kernel.
    """
    return isinstance(weight, nn.Parameter) or weight._is_view()


def _is_vector(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    width = hidden.shape[-1]
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    if not hidden.is_cuda or hidden.numel() != width or width > _MAX_IN:
        return False
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return False
    return all(operand.dtype == hidden.dtype and operand.is_contiguous() for operand in operands)
