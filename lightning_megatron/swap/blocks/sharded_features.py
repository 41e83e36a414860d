"""Modules between column and row layers, whose inputs are sharded features."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import BoundaryGradients, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.dropout import tensor_region_stream
from lightning_megatron.layers.parameters.init import ZEROS, sharded_parameter
from lightning_megatron.plan.shards import even_range


def shard_rows(source: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """Return a module like ``source`` with room for this rank's rows of every parameter.

    The result equals ``source`` on this rank's part of the features or heads. Each feature or head
    has its own row.

    Args:
        source: Module without children, whose parameters have the same number of rows; not changed.
    """
    result = copy.copy(source)
    result._parameters = dict(source._parameters)
    for key, parameter in source._parameters.items():
        if parameter is not None:
            cut = even_range(parameter.shape[0], mesh.tp.size, mesh.tp.rank, what=key)
            result._parameters[key] = sharded_parameter(tuple(parameter.shape), [cut], ZEROS)
    return result


class LatentLinear(nn.Linear):
    """Replicated torch.nn.Linear whose last outputs enter the heads of every rank.

    Latent attention compresses keys and values together with one positional key that all heads use.
    A ``column`` layer consumes the compressed features. The positional key enters the
    tensor-parallel region in this layer.

    Shapes: input ``(..., in)``; output ``(..., out)``.

    Args:
        num_shared: Number of last outputs, which the heads of every rank use (elements).

    Communication: one all-reduce over tp of these outputs' gradient backward.
    """

    def __init__(self, source: nn.Linear, num_shared: int, mesh: ParallelMesh) -> None:
        nn.Module.__init__(self)
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.num_shared = num_shared
        self.mesh = mesh
        self.weight = source.weight
        self.register_parameter("bias", source.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs."""
        return _LastFeatures.apply(
            F.linear(input, self.weight, self.bias), self.num_shared, self.mesh.tp
        )


class _LastFeatures(torch.autograd.Function):
    """Entry of the last features into a tensor-parallel region; only their gradient is summed."""

    @staticmethod
    def border(ctx: Any) -> BoundaryGradients:
        """Describe this call as a border at which partial gradients are summed."""
        return BoundaryGradients((False,), takes_parts=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, tp: MeshAxis) -> Tensor:
        ctx.count = count
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result = grads[0].clone()
        last = result[..., -ctx.count :]
        last.copy_(all_reduce_(last.contiguous(), ctx.tp))
        return result, None, None


class TensorDropout(nn.Dropout):
    """Dropout between a column and a row layer, with different masks on every rank.

    Equal to torch.nn.Dropout, except that masks differ between tensor-parallel ranks. Recomputation
    draws the same masks again.

    Args:
        layer: Number of the layer for random streams; None inside a block that selects the streams
            itself.
    """

    def __init__(self, p: float, mesh: ParallelMesh, layer: int | None = None) -> None:
        super().__init__(p)
        self.mesh = mesh
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, with elements dropped during training."""
        if not self.training or self.p == 0.0:
            return input
        if self.layer is not None:
            self.mesh.random.seek(self.layer)
        with tensor_region_stream(self.p, self.training, self.mesh):
            return F.dropout(input, self.p, training=True)
