"""SwiGLU, which also computes the largest magnitudes that 8-bit layers around it need."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.fp8.magnitude import GradientMagnitude, find_magnitude
from lightning_megatron.shapes import Float, Int


def apply_swiglu(
    gate_up: Float[Tensor, "*tokens gate_up"],
    magnitudes: Int[Tensor, "parts"] | None = None,
    of_gradient: GradientMagnitude | None = None,
) -> Float[Tensor, "*tokens gate_up//2"]:
    """Multiply the SiLU of the first half of the features by the second half.

    The fused kernel finds magnitudes in the pass over memory that computes the values.

    Args:
        gate_up: The features.
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
