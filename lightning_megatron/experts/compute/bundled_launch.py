"""Launches of the bundled grouped products, without a read by the host."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_megatron.plan.grouped_gemm import (
    Pass,
    VariantChoice,
    choose_variant,
    workspace_bytes,
)
from lightning_megatron.shapes import Float, Int, Shaped

# Cache size for kernel variants: the number of rows may differ from step to step.
_REMEMBERED_LAUNCHES = 1024


def launch(
    product: Pass,
    result: Shaped[Tensor, "..."],
    a: Float[Tensor, "rows _"],
    b: Shaped[Tensor, "..."],
    ends: Int[Tensor, "_"],
    alpha: float = 1.0,
    first_group: int = 0,
) -> Shaped[Tensor, "..."]:
    """Launch the kernel variant that ``plan.grouped_gemm`` chooses, and return the result.

    A CUDA graph can capture it: the workspace comes from the graph's memory pool.

    Args:
        a: Rows, or their gradients.
        b: Weights of the groups; in weight gradients the rows of the input.
        alpha: Factor of float32 weight gradients.
        first_group: Group of the first weight, which starts at the end before it. Rows of groups
            before it are neither read nor written.
    """
    stack = b if product is Pass.FORWARD or product is Pass.DATA_GRAD else result
    choice, num_sms, num_bytes = _plan_launch(product, a.shape[0], *stack.shape, a.device)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=a.device)
    run = torch.ops.lm_kernels.grouped_gemm.default
    run(
        result,
        a,
        b,
        ends,
        workspace,
        choice.variant,
        choice.along_n,
        choice.band,
        num_sms,
        alpha,
        first_group,
    )
    return result


def launch_swiglu(
    result: Float[Tensor, "rows ffn"],
    kept: Float[Tensor, "rows gate_up"] | None,
    rows: Float[Tensor, "rows hidden"],
    stack: Float[Tensor, "_ gate_up hidden"],
    probabilities: Float[Tensor, "rows"],
    ends: Int[Tensor, "_"],
    first_group: int = 0,
) -> None:
    """Launch the product fused with SwiGLU; the product is not stored if ``kept`` is None."""
    choice, num_sms, num_bytes = _plan_launch(
        Pass.FORWARD_SWIGLU, rows.shape[0], *stack.shape, rows.device
    )
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
    run = torch.ops.lm_kernels.grouped_swiglu.default
    run(
        result,
        kept,
        rows,
        stack,
        probabilities,
        ends,
        workspace,
        choice.variant,
        choice.along_n,
        choice.band,
        num_sms,
        first_group,
    )


@lru_cache(_REMEMBERED_LAUNCHES)
def _plan_launch(
    product: Pass, num_rows: int, num_groups: int, n: int, k: int, device: torch.device
) -> tuple[VariantChoice, int, int]:
    """Return the kernel variant, its number of CTAs and the size of its workspace (bytes)."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        choose_variant(product, num_rows, num_groups, n, k),
        num_sms,
        workspace_bytes(num_groups, num_sms),
    )
