"""Dropout for activations that are cut over the tensor-parallel axis."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.dropout import tensor_region_stream


class TensorDropout(nn.Dropout):
    """Dropout between a column and a row layer, with different masks on every rank.

    Equal to torch.nn.Dropout, except that masks differ between tensor-parallel ranks. Recomputation
    draws the same masks again.

    Args:
        p: Probability that an element is dropped.
        mesh: Mesh with the random streams of this rank.
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
