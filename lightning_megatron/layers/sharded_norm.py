"""RMS norm over features that are sharded over the tensor-parallel axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.groups.collectives import copy_to_axis, reduce_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import ONES, Initializer, sharded_parameter
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.shapes import Float


class ShardedRMSNorm(nn.Module):
    """RMS norm of vectors whose features are sharded over the tensor-parallel axis.

    Equal to torch.nn.RMSNorm(num_features, eps) of the full vectors. The mean square of half types
    is computed in float32.

    Args:
        num_features: Features of the full vectors (elements).
        part: Features that this rank holds; ranks may hold copies of them (elements).
        mesh: Process groups of this rank.
        eps: Number that is added to the mean square.
        offset: Number that is added to the weight; the weight starts at 1 minus it.

    Communication: one all-reduce over tp forward, one backward, of a number for each vector.
    """

    def __init__(
        self,
        num_features: int,
        part: ShardRange,
        mesh: ParallelMesh,
        *,
        eps: float = 1e-5,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.mesh = mesh
        self.eps = eps
        self.offset = offset
        #: Features on all ranks, copies included.
        self.num_counted = part.size * mesh.tp.size
        initializer = Initializer.constant(1.0 - offset) if offset else ONES
        has_copies = self.num_counted > num_features
        self.weight = sharded_parameter((num_features,), [part], initializer, partial=has_copies)

    def forward(
        self, features: Float[Tensor, "seq batch in_local"]
    ) -> Float[Tensor, "seq batch in_local"]:
        """Return this rank's features of the normalised vectors in the dtype of the input.

        Args:
            features: This rank's features.
        """
        wide = features.to(torch.promote_types(features.dtype, torch.float32))
        # Every rank's result depends on the sum, so the gradient of the sum is summed, too.
        squares = reduce_from_axis(wide.square().sum(-1, keepdim=True), self.mesh.tp)
        mean = copy_to_axis(squares, self.mesh.tp) / self.num_counted
        scale = self.weight.to(wide.dtype) + self.offset
        return (wide * torch.rsqrt(mean + self.eps) * scale).to(features.dtype)
