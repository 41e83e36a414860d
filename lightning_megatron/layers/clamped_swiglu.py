"""SwiGLU of clamped features, as in gpt-oss, which keeps only its input for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.plan.activation_kinds import FEATURE_LIMIT, GATE_FACTOR
from lightning_megatron.shapes import Float


def apply_clamped_swiglu(
    gate_up: Float[Tensor, "*tokens gate_up"],
) -> Float[Tensor, "*tokens gate_up//2"]:
    """Clamp both halves of the features, and multiply the gated first half by the second plus 1.

    Equal to ``gate * sigmoid(1.702 * gate) * (up + 1)``, where ``gate`` is the first half, clamped
    to at most 7, and ``up`` is the second half, clamped to [-7, 7]. Features outside of these
    bounds get the gradient 0; one that equals a bound gets that of a feature inside, as in torch
    before 2.15. The backward pass recomputes everything from the input.

    Source: the reference implementation of OpenAI 2025 (gpt-oss).
    """
    return _ClampedSwiGLU.apply(gate_up)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=FEATURE_LIMIT)
        result = (gate * GATE_FACTOR).sigmoid_().mul_(gate)
        del gate
        return result.mul_(up.clamp(-FEATURE_LIMIT, FEATURE_LIMIT).add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        first, second = gate_up.chunk(2, dim=-1)
        # Both halves of the result also hold intermediate values.
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, dim=-1)
        torch.clamp(first, max=FEATURE_LIMIT, out=of_gate)
        sigmoid = (of_gate * GATE_FACTOR).sigmoid_()
        glu = of_gate * sigmoid
        # d glu / d gate = sigmoid * (1 + factor * gate * (1 - sigmoid))
        of_gate.sub_(glu).mul_(GATE_FACTOR).add_(1).mul_(sigmoid)
        del sigmoid
        torch.clamp(second, -FEATURE_LIMIT, FEATURE_LIMIT, out=of_up)
        of_gate.mul_(of_up.add_(1)).mul_(grads[0]).masked_fill_(first > FEATURE_LIMIT, 0)
        torch.mul(glu, grads[0], out=of_up).masked_fill_(second.abs() > FEATURE_LIMIT, 0)
        return result
