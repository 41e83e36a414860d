"""Norms of Transformer Engine."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.shapes import Float


# torch.compile cannot trace Transformer Engine.
@torch.compiler.disable
def engine_norm(
    hidden: Float[Tensor, "*tokens hidden"],
    weight: Float[Tensor, "hidden"],
    bias: Float[Tensor, "hidden"] | None,
    eps: float,
    is_rms: bool,
    adds_one: bool,
) -> Float[Tensor, "*tokens hidden"]:
    """Normalise vectors with Transformer Engine.

    Equal to torch.nn.functional.layer_norm, or rms_norm with ``is_rms``, up to rounding; with
    ``adds_one`` the factor is 1 plus the weight.
    """
    normed: Tensor = _EngineNorm.apply(hidden, weight, bias, eps, is_rms, adds_one)
    return normed


class _EngineNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        is_rms: bool,
        adds_one: bool,
    ) -> Tensor:
        ctx.adds_one = adds_one
        ctx.has_bias = bias is not None
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        factor = weight.to(rows.dtype)
        kind = import_module("transformer_engine.pytorch.constants").TE_DType[rows.dtype]
        library = import_module("transformer_engine_torch")
        if is_rms:
            output, _, spread = library.rmsnorm_fwd(
                rows, factor, eps, None, None, kind, 0, adds_one
            )
            ctx.save_for_backward(rows, weight, spread)
        else:
            shift = torch.zeros_like(factor) if bias is None else bias.to(rows.dtype)
            output, mean, spread = library.layernorm_fwd(
                rows, factor, shift, eps, None, None, kind, 0, adds_one
            )
            ctx.save_for_backward(rows, weight, spread, mean)
        return output.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, spread, *means = ctx.saved_tensors
        library = import_module("transformer_engine_torch")
        grad = grads[0].contiguous().view(rows.shape)
        factor = weight.to(rows.dtype)
        if means:
            grad_rows, grad_weight, grad_bias = library.layernorm_bwd(
                grad, rows, means[0], spread, factor, 0, ctx.adds_one
            )
        else:
            grad_rows, grad_weight = library.rmsnorm_bwd(
                grad, rows, spread, factor, 0, ctx.adds_one
            )
            grad_bias = None
        return (
            grad_rows.view(grads[0].shape),
            grad_weight.to(weight.dtype),
            grad_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )
