"""The first product of experts with SwiGLU and the probability of each row applied in the same launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.grouped_linear import differentiable_product
from lightning_megatron.experts.product_choice import choose_swiglu
from lightning_megatron.experts.products import Bundled
from lightning_megatron.layers.kernel_choice import fused_kernels


def is_one_launch(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Tell whether :func:`grouped_swiglu` serves a product, and pays.

    Never under autocast or inside of ``torch.compile``: the activation is then left to torch.

    Args:
        rows: Rows sorted by group.
        weights: One weight for each group.
    """
    if fused_kernels(rows) is None:
        return False
    out_features, in_features = weights[0].shape
    return choose_swiglu(rows.device, rows.dtype, len(weights), in_features, out_features).is_fused


def grouped_swiglu(rows: Tensor, weights: Sequence[Tensor], probabilities: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own weight, apply SwiGLU, and multiply each row by its probability.

    Equal to ``silu(gate) * up * probability`` of ``gate, up = grouped_linear(rows, weights, ends).chunk(2, -1)``, with
    the product rounded to the dtype of rows before the activation. So the gradients are those of the two one after the
    other, which compute them: the product is kept for the backward pass. Where gradients are off it is not stored at
    all, which is also the first of the two forward passes of recomputed experts.

    Weights, slots, ends and what rows past the last end hold are as of :func:`grouped_linear`.

    Shapes: rows ``(R, K)``; weights E of ``(2 F, K)``, gates first; probabilities ``(R)``; ends ``(E)`` int32 on the
    device of rows; output ``(R, F)``.

    Args:
        rows: Rows sorted by group, in bfloat16 on a GPU that the bundled kernels run on.
        weights: One weight for each group.
        probabilities: What each row is multiplied by, in float32.
        ends: One past the last row of every group.

    Raises:
        UnsupportedError: If there is no Triton for the backward pass.

    Source: Shazeer 2020.
    """
    kernels = fused_kernels(rows)
    if kernels is None:
        raise UnsupportedError(
            f"rows must be of a half type on a GPU with Triton, outside of autocast: they are {rows.dtype} on "
            f"{rows.device}. The kernels of this project compute the gradients. Use grouped_linear and an activation."
        )
    weights, factors = tuple(weights), probabilities.detach().float().contiguous()
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
