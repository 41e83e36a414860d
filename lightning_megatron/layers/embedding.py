"""Input embedding and output head, cut over the tensor axis by vocabulary."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.init import Initializer, sharded_parameter
from lightning_megatron.layers.loss import check_ids
from lightning_megatron.layers.regions import leave_tensor_region, linear_in_tensor_region
from lightning_megatron.plan.shards import padded_vocab_size, vocab_range, whole_range


class VocabParallelEmbedding(nn.Module):
    """Look token vectors up in a table whose rows are cut over tp.

    Equal to torch.nn.Embedding(vocab_size, hidden_size), transposed to sequence first. The table is padded to a
    multiple of ``multiple * tp`` rows; padded rows are zero, belong to no full tensor and cannot be looked up.

    Shapes: tokens ``(B, S)``; output ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``.

    Args:
        vocab_size: The true vocabulary (tokens).
        hidden_size: Size of each vector (elements).
        mesh: The groups of this rank.
        multiple: Rows of each rank are a multiple of this (rows).
        initializer: How the full table starts.

    Raises:
        IndexError: In forward, if an id is outside the vocabulary (on CPU; a CUDA kernel asserts).

    Communication: see ``leave_tensor_region``.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        multiple: int = 128,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.mesh = vocab_size, mesh
        self.weight = vocab_parameter(vocab_size, hidden_size, mesh, multiple, initializer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vector of every token."""
        check_ids(tokens, self.vocab_size)
        num_rows = self.weight.shape[0]
        ids = tokens.t()
        local = ids - self.mesh.tp.rank * num_rows
        elsewhere = (local < 0) | (local >= num_rows)
        # An illegal id becomes an illegal row, so that the CUDA kernel that reads it asserts.
        index = local.masked_fill(elsewhere, 0).masked_fill((ids < 0) | (ids >= self.vocab_size), num_rows)
        vectors = F.embedding(index, self.weight)
        if self.mesh.tp.size == 1:
            return vectors
        return leave_tensor_region(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.mesh)


class PositionEmbedding(nn.Module):
    """Look vectors of consecutive positions up in a table that every rank holds.

    Equal to torch.nn.Embedding(max_seq_length, hidden_size) of a range.

    Shapes: output ``(S, 1, D)`` or, under sequence parallelism, ``(S/tp, 1, D)``.

    Args:
        max_seq_length: Rows of the table (tokens).
        hidden_size: Size of each vector (elements).
        mesh: The groups of this rank.
        initializer: How the table starts.
    """

    def __init__(
        self, max_seq_length: int, hidden_size: int, mesh: ParallelMesh, *, initializer: Initializer | None = None
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = sharded_parameter(
            (max_seq_length, hidden_size),
            [whole_range(max_seq_length, mesh.tp.rank)],
            initializer or Initializer.normal(),
            # Under sequence parallelism each rank looks up its own positions only.
            partial=mesh.sequence_parallel,
        )

    def forward(self, seq_length: int, offset: int = 0) -> Tensor:
        """Return the vectors of this rank's part of the positions ``offset .. offset + seq_length``.

        Raises:
            ParallelPlanError: If the table has no such positions.
        """
        if offset + seq_length > self.weight.shape[0]:
            raise ParallelPlanError(
                f"seq_length ({offset + seq_length}) must not exceed max_seq_length ({self.weight.shape[0]}), "
                "because later positions have no embedding. "
                f"Use at most {self.weight.shape[0]} tokens or a larger max_seq_length."
            )
        if self.mesh.sequence_parallel:
            seq_length //= self.mesh.tp.size
            offset += self.mesh.tp.rank * seq_length
        return self.weight[offset : offset + seq_length].unsqueeze(1)


class InputEmbedding(nn.Module):
    """Add token and position vectors, then drop elements.

    Shapes: tokens ``(B, S)``; output ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``.

    Args:
        word: The token embedding.
        position: The position embedding; None for models that encode positions otherwise.
        mesh: The groups and random streams of this rank.
        dropout: Probability that an element is dropped.
    """

    def __init__(
        self,
        word: VocabParallelEmbedding,
        position: PositionEmbedding | None,
        *,
        mesh: ParallelMesh,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word, self.position, self.mesh, self.dropout = word, position, mesh, dropout

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """Return the residual stream of the first block; ``offset`` is the position of the first token."""
        self.mesh.random.seek(0)
        hidden = self.word(tokens)
        if self.position is not None:
            hidden = hidden + self.position(tokens.shape[1], offset)
        return hidden_dropout(hidden, self.dropout, self.training, self.mesh)


class VocabParallelHead(nn.Module):
    """Compute logits with a weight whose rows, the vocabulary, are cut over tp.

    Equal to torch.nn.Linear(hidden_size, vocab_size, bias=False), cut and padded.

    Shapes: ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output ``(S, B, padded V/tp)``.

    Args:
        vocab_size: The true vocabulary (tokens).
        hidden_size: Size of each vector (elements).
        mesh: The groups of this rank.
        multiple: Rows of each rank are a multiple of this (rows).
        initializer: How the full weight starts.
        tied_to: Name of the first stage's parameter that this weight is a copy of, if it is one.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        mesh: ParallelMesh,
        *,
        multiple: int = 128,
        initializer: Initializer | None = None,
        tied_to: str | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = vocab_parameter(vocab_size, hidden_size, mesh, multiple, initializer)
        if tied_to is not None:
            set_shard_spec(self.weight, shard_spec_of(self.weight).tied(tied_to))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return this rank's columns of the logits."""
        return vocab_logits(hidden, self.weight, self.mesh)


def vocab_logits(hidden: Tensor, weight: Tensor, mesh: ParallelMesh) -> Tensor:
    """Compute this rank's columns of the logits from a vocabulary-parallel table.

    Shapes: hidden as in ``VocabParallelHead``; weight ``(padded V/tp, D)``; output ``(S, B, padded V/tp)``.
    Communication: see ``linear_in_tensor_region``.
    """
    return linear_in_tensor_region(hidden, weight, None, mesh)


def vocab_parameter(
    vocab_size: int, hidden_size: int, mesh: ParallelMesh, multiple: int, initializer: Initializer | None
) -> nn.Parameter:
    """Create this rank's rows of a table over the padded vocabulary."""
    return sharded_parameter(
        (vocab_size, hidden_size),
        [vocab_range(vocab_size, mesh.tp.size, mesh.tp.rank, multiple)],
        initializer or Initializer.normal(),
        local_size=padded_vocab_size(vocab_size, mesh.tp.size, multiple) // mesh.tp.size,
    )
