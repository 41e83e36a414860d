"""Embedding and linear layers cut over the vocabulary, with torch.nn's shapes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.groups.collectives import copy_to_axis, gather_from_axis, reduce_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.loss.cross_entropy import check_ids
from lightning_megatron.layers.parameters.init import ZEROS, Initializer, sharded_parameter
from lightning_megatron.plan.shards import padded_vocab_size, vocab_range

#: Multiple to which each rank's rows are padded for tensor cores. A full tensor has no padding.
ROWS_MULTIPLE = 8


class EmbeddingOverVocabulary(nn.Module):
    """Embedding whose rows are cut over tp.

    Equal to torch.nn.Embedding(num_embeddings, embedding_dim, padding_idx).

    Shapes: ids ``(...)``; output ``(..., D)``.

    Raises:
        IndexError: In forward, if an id is outside the table (on CPU; a CUDA kernel asserts).

    Communication: one all-reduce over tp forward.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: ParallelMesh,
        *,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.mesh = mesh
        self.weight = _vocabulary_parameter(
            (num_embeddings, embedding_dim), Initializer.normal(), mesh
        )
        self.first = mesh.tp.rank * self.weight.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        """Return the vector of every id."""
        check_ids(input, self.num_embeddings)
        num_rows = self.weight.shape[0]
        local = input - self.first
        is_remote = (local < 0) | (local >= num_rows)
        # An illegal id is mapped to an illegal row, so that the CUDA kernel that reads the row
        # asserts.
        illegal = (input < 0) | (input >= self.num_embeddings)
        index = local.masked_fill(is_remote, 0).masked_fill(illegal, num_rows)
        vectors = F.embedding(index, self.weight, padding_idx=self._local_padding_idx())
        return reduce_from_axis(vectors.masked_fill(is_remote.unsqueeze(-1), 0.0), self.mesh.tp)

    def _local_padding_idx(self) -> int | None:
        if self.padding_idx is None:
            return None
        local = self.padding_idx - self.first
        return local if 0 <= local < self.weight.shape[0] else None

    @override
    def extra_repr(self) -> str:
        return f"{self.num_embeddings} ({self.weight.shape[0]} here), {self.embedding_dim}"


class LinearOverVocabulary(nn.Module):
    """Linear layer ``x A^T + b`` with outputs cut over tp and gathered.

    Equal to torch.nn.Linear(in_features, out_features, bias). Its rows are sharded like those of
    EmbeddingOverVocabulary, so that the two can share one weight.

    Shapes: input ``(..., in)``; output ``(..., out)``.

    Communication: an all-gather over tp forward, an all-reduce backward.
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: ParallelMesh, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.mesh = mesh
        self.weight = _vocabulary_parameter((out_features, in_features), Initializer.normal(), mesh)
        self.bias = _vocabulary_parameter((out_features,), ZEROS, mesh) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs on every rank."""
        part = F.linear(copy_to_axis(input, self.mesh.tp), self.weight, self.bias)
        # Padding rows follow the last true row, so that removing them keeps the true outputs in
        # order.
        return gather_from_axis(part, self.mesh.tp, dim=-1)[..., : self.out_features]

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features} ({self.weight.shape[0]} here), "
            f"bias={self.bias is not None}"
        )


def _vocabulary_parameter(
    full_shape: tuple[int, ...], initializer: Initializer, mesh: ParallelMesh
) -> nn.Parameter:
    num_rows = full_shape[0]
    tp = mesh.tp
    return sharded_parameter(
        full_shape,
        [vocab_range(num_rows, tp.size, tp.rank, ROWS_MULTIPLE)],
        initializer,
        local_size=padded_vocab_size(num_rows, tp.size, ROWS_MULTIPLE) // tp.size,
    )
