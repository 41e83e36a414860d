"""Modules with weights inside of tensor-parallel regions: what is cut with the features, or enters them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import Border, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import ZEROS, sharded_parameter
from lightning_megatron.plan.shards import even_range


def with_part_of_rows(source: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """Return a module like ``source`` that holds this rank's rows of every parameter, unfilled.

    Equal to ``source`` on this rank's part of the features or heads, where each has a row of its own.

    Args:
        source: A module without children, whose parameters have equally many rows; it is not changed.
        mesh: The groups of this rank.
    """
    result = copy.copy(source)
    result._parameters = dict(source._parameters)
    for key, parameter in source._parameters.items():
        if parameter is not None:
            cut = even_range(parameter.shape[0], mesh.tp.size, mesh.tp.rank, what=key)
            result._parameters[key] = sharded_parameter(tuple(parameter.shape), [cut], ZEROS)
    return result


class LatentLinear(nn.Linear):
    """Compute a torch.nn.Linear whole, and hand its last outputs to the heads of every rank.

    Latent attention compresses keys and values together with one key of positions that all heads use. What is
    compressed goes on to a ``column`` layer; the key of positions enters the tensor-parallel region here.

    Shapes: input ``(..., in)``; output ``(..., out)``.

    Args:
        source: The layer; its parameters are taken over.
        num_shared: Outputs at the end that every rank's heads use (elements).
        mesh: The groups of this rank.

    Communication: backward an all-reduce of the gradient of those outputs over tp.
    """

    def __init__(self, source: nn.Linear, num_shared: int, mesh: ParallelMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.num_shared = source.in_features, source.out_features, num_shared
        self.mesh, self.weight = mesh, source.weight
        self.register_parameter("bias", source.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs."""
        return _LastEnter.apply(F.linear(input, self.weight, self.bias), self.num_shared, self.mesh.tp)


class _LastEnter(torch.autograd.Function):
    """Let the last features of a tensor enter a tensor-parallel region: the rest gets complete gradients already."""

    @staticmethod
    def border(ctx: Any) -> Border:
        """Describe the border that this call is: the gradient is summed where it is a part."""
        return Border((False,), takes_parts=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, tp: MeshAxis) -> Tensor:
        ctx.count, ctx.tp = count, tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result = grads[0].clone()
        last = result[..., -ctx.count :]
        last.copy_(all_reduce_(last.contiguous(), ctx.tp))
        return result, None, None
