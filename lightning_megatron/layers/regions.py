"""Entry to and exit from tensor-parallel regions, with or without sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    copy_to_axis,
    reduce_from_axis,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh


def enter_tensor_region(hidden: Tensor, mesh: ParallelMesh) -> Tensor:
    """Give every tensor-parallel rank the whole sequence.

    Shapes: ``(S, B, D)`` to the same; under sequence parallelism ``(S/tp, B, D)`` to ``(S, B, D)``.
    Communication: backward all-reduce over tp; under sequence parallelism all-gather, backward reduce-scatter.
    """
    return all_gather_sequence(hidden, mesh.tp) if mesh.sequence_parallel else copy_to_axis(hidden, mesh.tp)


def linear_in_tensor_region(hidden: Tensor, weight: Tensor, bias: Tensor | None, mesh: ParallelMesh) -> Tensor:
    """Enter a tensor-parallel region and multiply by this rank's rows of a weight.

    Equal to ``linear(enter_tensor_region(hidden, mesh), weight, bias)``. Under sequence parallelism only this rank's
    positions are kept for the backward pass, which gathers the sequence a second time.

    Shapes: hidden ``(S, B, in)`` or ``(S/tp, B, in)``; weight ``(out/tp, in)``; output ``(S, B, out/tp)``.
    Communication: that of ``enter_tensor_region``; under sequence parallelism one more all-gather backward.
    Source: Korthikanti et al. 2022, section 4.2.2.
    """
    if mesh.sequence_parallel:
        return _GatheredLinear.apply(hidden, weight, bias, mesh.tp)
    return F.linear(enter_tensor_region(hidden, mesh), weight, bias)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tp: MeshAxis) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.tp, ctx.bias_dtype = tp, None if bias is None else bias.dtype
        return F.linear(all_gather_sequence(hidden, tp), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        # Under autocast the product ran in a narrower dtype than that of its operands.
        grad = grads[0]
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = reduce_scatter_sequence(grad @ weight.to(grad.dtype), ctx.tp).to(hidden.dtype)
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            full = all_gather_sequence(hidden, ctx.tp).flatten(0, -2)
            grad_weight = (rows.t() @ full.to(grad.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None


def leave_tensor_region(part: Tensor, mesh: ParallelMesh) -> Tensor:
    """Add the parts that the tensor-parallel ranks computed.

    Shapes: ``(S, B, D)`` to the same; under sequence parallelism to ``(S/tp, B, D)``.
    Communication: all-reduce over tp; under sequence parallelism reduce-scatter, backward all-gather.
    """
    return reduce_scatter_sequence(part, mesh.tp) if mesh.sequence_parallel else reduce_from_axis(part, mesh.tp)
