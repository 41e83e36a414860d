"""Normalisation layers, held whole by every tensor-parallel rank."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import ONES, ZEROS, Initializer, sharded_parameter
from lightning_megatron.plan.shards import whole_range


class LayerNorm(nn.Module):
    """Normalise each vector to mean 0 and variance 1, then scale and shift it; statistics of half types in float32.

    Equal to torch.nn.LayerNorm(hidden_size, eps, bias=bias).

    Shapes: ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output the same.

    Args:
        hidden_size: Size of each vector (elements).
        mesh: The groups of this rank.
        eps: Added to the variance.
        bias: Whether to shift.
    """

    def __init__(self, hidden_size: int, mesh: ParallelMesh, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _replicated(hidden_size, mesh, ONES)
        self.bias = _replicated(hidden_size, mesh, ZEROS) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised vectors in the dtype of the input."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Scale each vector to a root mean square of 1, then by a weight; statistics of half types in float32.

    Equal to torch.nn.RMSNorm(hidden_size, eps).

    Shapes: ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output the same.

    Args:
        hidden_size: Size of each vector (elements).
        mesh: The groups of this rank.
        eps: Added to the mean square.
    """

    def __init__(self, hidden_size: int, mesh: ParallelMesh, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _replicated(hidden_size, mesh, ONES)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised vectors in the dtype of the input."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def _replicated(size: int, mesh: ParallelMesh, initializer: Initializer) -> nn.Parameter:
    # Under sequence parallelism each rank sees its own positions only, so gradients are parts of a sum over tp.
    return sharded_parameter((size,), [whole_range(size, mesh.tp.rank)], initializer, partial=mesh.sequence_parallel)
