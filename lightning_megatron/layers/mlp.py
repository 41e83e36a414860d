"""The MLP of a Transformer block, sharded over the tensor axis, and its activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.magnitude import (
    GradientMagnitude,
    Magnitude,
    find_magnitude,
    no_magnitude,
)
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameters.init import Initializer
from lightning_megatron.layers.recompute import output_recomputed, recomputed
from lightning_megatron.plan.model_shape import FEATURE_LIMIT, GATE_FACTOR, GATED, Activation
from lightning_megatron.plan.shards import gated_ranges
from lightning_megatron.shapes import Float, Int


def apply_swiglu(
    gate_up: Float[Tensor, "*tokens gate_up"],
    magnitudes: Int[Tensor, "parts"] | None = None,
    of_gradient: GradientMagnitude | None = None,
) -> Float[Tensor, "*tokens gate_up//2"]:
    """Multiply the SiLU of the first half of the features by the second half.

    The fused kernel finds magnitudes in the pass over memory that computes the values.

    Args:
        magnitudes: Bit patterns of magnitudes, whose maximum is raised to the largest magnitude of
            the output; None computes no magnitude.
        of_gradient: Object in which the backward pass stores the largest magnitude of the gradient
            of ``gate_up``; None computes no magnitude.

    Source: Shazeer 2020.
    """
    kernels = fused_kernels(gate_up)
    if kernels is not None:
        take = None if of_gradient is None else of_gradient.put
        return kernels.apply_swiglu(gate_up, magnitudes, take)
    if of_gradient is not None and gate_up.requires_grad:
        gate_up.register_hook(of_gradient.find)
    gate, up = gate_up.chunk(2, dim=-1)
    output = F.silu(gate) * up
    if magnitudes is not None:
        find_magnitude(output, magnitudes)
    return output


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


class MLP(nn.Module):
    """Feed-forward network of two linear layers with an activation between them.

    Equal to Linear, GELU (or ReLU), Linear; ``gelu`` is exact. With ``swiglu`` equal to
    ``down(silu(gate(x)) * up(x))``, where gate and up are one fused layer. ``geglu`` and
    ``geglu_tanh`` use GELU in place of SiLU; ``clamped_swiglu`` uses
    :func:`~lightning_megatron.layers.mlp.apply_clamped_swiglu`.

    Communication: one all-reduce over tp forward, one backward; see ``layers.linear.regions`` for
        sequence parallelism.
    Source: Shoeybi et al. 2019, section 3, figure 3a; Shazeer 2020 (gates).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        mesh: ParallelMesh,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        #: Whether the backward pass recomputes the output of the activation.
        self.recomputes_activation = False
        width = ffn_hidden_size
        ranges = None
        if is_gated(activation):
            width = 2 * ffn_hidden_size
            ranges = gated_ranges(ffn_hidden_size, mesh.tp.size, mesh.tp.rank)
        first = ColumnParallelLinear(
            hidden_size, width, mesh, bias=bias, ranges=ranges, initializer=initializer
        )
        if is_gated(activation):
            self.gate_up = first
        else:
            self.up = first
        self.down = RowParallelLinear(
            ffn_hidden_size, hidden_size, mesh, bias=bias, initializer=output_initializer
        )

    @property
    def reads_magnitude(self) -> bool:
        """Return whether :meth:`forward` uses the magnitude of its input."""
        return self._first.reads_magnitude

    @property
    def _first(self) -> ColumnParallelLinear:
        return self.gate_up if is_gated(self.activation) else self.up

    def forward(
        self,
        hidden: Float[Tensor, "seq_local *batch hidden"],
        magnitude: Magnitude | None = None,
    ) -> Float[Tensor, "seq_local *batch hidden"]:
        first = self._first
        run: Callable[[Tensor], Tensor] = partial(activate, activation=self.activation)
        of_gradient = None
        magnitudes = None
        if self.activation == "swiglu":
            # SwiGLU finds the magnitudes of the tensors that the layers before and after it cast.
            if first.reads_magnitude and torch.is_grad_enabled():
                of_gradient = GradientMagnitude()
            if self.down.reads_magnitude:
                magnitudes = no_magnitude(hidden)
            run = partial(apply_swiglu, magnitudes=magnitudes, of_gradient=of_gradient)
        features = first(hidden, magnitude=magnitude, of_gradient=of_gradient)
        is_recomputed = self.recomputes_activation and self.activation != "relu"
        is_one_kernel = fused_kernels(features) is not None and self.activation == "swiglu"
        if is_recomputed and is_gated(self.activation) and not is_one_kernel:
            activated = recomputed(run, features)
        else:
            activated = run(features)
        largest = None if magnitudes is None else Magnitude(activated, magnitudes)
        # ReLU keeps only its output for the backward pass, so there is nothing to recompute.
        if not is_recomputed:
            return self.down(activated, magnitude=largest)
        with output_recomputed(activated, partial(activate, features.detach(), self.activation)):
            return self.down(activated, magnitude=largest)


def is_gated(activation: Activation) -> bool:
    """Return whether an activation multiplies one half of the features by the other."""
    return activation in GATED


def activate(
    hidden: Float[Tensor, "*tokens features"], activation: Activation
) -> Float[Tensor, "*tokens ffn"]:
    """Apply an activation; gated activations halve the features."""
    if activation == "relu":
        return F.relu(hidden)
    if activation == "clamped_swiglu":
        return apply_clamped_swiglu(hidden)
    if activation == "swiglu":
        return apply_swiglu(hidden)
    if is_gated(activation):
        gate, up = hidden.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up
    return gelu_activation(hidden, by_tanh=activation == "gelu_tanh")


def gelu_activation(
    hidden: Float[Tensor, "*tokens ffn"], by_tanh: bool
) -> Float[Tensor, "*tokens ffn"]:
    """Apply GELU, exact or with the tanh approximation."""
    kernels = fused_kernels(hidden)
    if kernels is not None:
        return kernels.apply_gelu(hidden, by_tanh)
    return F.gelu(hidden, approximate="tanh" if by_tanh else "none")
