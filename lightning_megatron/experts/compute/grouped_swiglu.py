"""Grouped linear layer fused with SwiGLU and the probability of each row, in one kernel launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute.backends import Bundled
from lightning_megatron.experts.compute.choose_backend import choose_swiglu
from lightning_megatron.experts.compute.grouped_linear import differentiable_product
from lightning_megatron.layers.choose_kernels import fused_kernels


def is_one_launch(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether :func:`grouped_swiglu` supports a product and is expected to be faster.

    It is ``False`` under autocast and under ``torch.compile``, where torch computes the activation.

    Args:
        rows: Rows sorted by group.
        weights: One weight for each group.
    """
    if fused_kernels(rows) is None:
        return False
    out_features, in_features = weights[0].shape
    return choose_swiglu(rows.device, rows.dtype, len(weights), in_features, out_features).is_fused


def grouped_swiglu(
    rows: Tensor, weights: Sequence[Tensor], probabilities: Tensor, ends: Tensor
) -> Tensor:
    """Multiply each group of rows by its weight, apply SwiGLU, and scale rows by probabilities.

    Equal to ``silu(gate) * up * probability`` with
    ``gate, up = grouped_linear(rows, weights, ends).chunk(2, -1)``. The product is rounded to the
    dtype of rows before the activation, so the result equals that of the two separate operators.
    Their kernels compute the gradients, from the product that the forward pass saves. With
    gradients off the product is not stored. This includes the first forward pass of recomputed
    experts.

    Weights, slots, ends and rows past the last end follow the rules of :func:`grouped_linear`.

    Shapes: rows ``(R, K)``; weights E of ``(2 F, K)``, gates first; probabilities ``(R)``; ends
    ``(E)`` int32 on the device of rows; output ``(R, F)``.

    Args:
        rows: Rows sorted by group, in bfloat16 on a GPU that the bundled kernels support.
        weights: One weight for each group.
        probabilities: Factor of each row, in float32.
        ends: Index one past the last row of each group.

    Raises:
        UnsupportedError: If the Triton kernels of the backward pass are not available.

    Source: Shazeer 2020.
    """
    kernels = fused_kernels(rows)
    if kernels is None:
        raise UnsupportedError(
            "rows must be of a half type on a GPU with Triton, outside of autocast: they are "
            f"{rows.dtype} on {rows.device}. The kernels of this project compute the gradients. "
            "Use grouped_linear and an activation."
        )
    weights = tuple(weights)
    factors = probabilities.detach().float().contiguous()
    if not torch.is_grad_enabled():
        return Bundled.swiglu(rows.contiguous(), weights, factors, ends, keep=False)[0]
    activated: list[Tensor] = []

    def output(rows: Tensor, weights: Sequence[Tensor] | Tensor, ends: Tensor) -> Tensor:
        result, kept = Bundled.swiglu(rows, weights, factors, ends, keep=True)
        assert kept is not None, "the product is asked for"
        activated.append(result)
        return kept

    inner = differentiable_product(rows, weights, ends, Bundled, output)
    return kernels.apply_weighted_swiglu(inner, probabilities, ends, activated[0])
