"""Input embedding and output head, cut over the tensor axis by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.collectives import split_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.gradient_slot import GradientSlot, slot_of
from lightning_megatron.layers.init import Initializer, sharded_parameter
from lightning_megatron.layers.loss import check_ids
from lightning_megatron.layers.regions import column_linear, leave_tensor_region
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
        padding_id: Token whose lookups give its row no gradient, as ``padding_idx`` of torch.nn.Embedding.

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
        padding_id: int | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.mesh, self.padding_id = vocab_size, mesh, padding_id
        self.weight = vocab_parameter(vocab_size, hidden_size, mesh, multiple, initializer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vector of every token."""
        check_ids(tokens, self.vocab_size)
        num_rows, ids = self.weight.shape[0], tokens.t()
        padding = None if self.padding_id is None else ids == self.padding_id
        # An illegal id becomes an illegal row, so that the CUDA kernel that reads it asserts.
        illegal = (ids < 0) | (ids >= self.vocab_size)
        if self.mesh.tp.size == 1:
            return _look_up(self.weight, ids.masked_fill(illegal, num_rows), None, padding)
        # Ids of other ranks read some row here, and their vectors are cleared.
        elsewhere = ids.div(num_rows, rounding_mode="floor") != self.mesh.tp.rank
        index = ids.remainder(num_rows).masked_fill(illegal, num_rows)
        return leave_tensor_region(_look_up(self.weight, index, elsewhere, padding), self.mesh)


def _look_up(weight: Tensor, index: Tensor, elsewhere: Tensor | None, padding: Tensor | None) -> Tensor:
    """Read rows; those of places ``elsewhere`` become zero, those of ``padding`` get no gradient."""
    slot = slot_of(weight)
    if slot is not None:
        return _LookUp.apply(weight, index, elsewhere, padding, slot)
    vectors = F.embedding(index, weight)
    if padding is not None:
        vectors = torch.where(padding.unsqueeze(-1), vectors.detach(), vectors)
    return vectors if elsewhere is None else vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class _LookUp(torch.autograd.Function):
    """Read rows; backward add the gradients of the rows that were read to a slot, without a table of gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        index: Tensor,
        elsewhere: Tensor | None,
        padding: Tensor | None,
        slot: GradientSlot,
    ) -> Tensor:
        unread = elsewhere if padding is None else padding if elsewhere is None else elsewhere | padding
        ctx.save_for_backward(index, unread)
        ctx.slot, ctx.num_rows = slot, weight.shape[0]
        vectors = F.embedding(index, weight)
        return vectors if elsewhere is None else vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, unread = ctx.saved_tensors
        key = index.reshape(-1)
        if unread is not None:
            key = key + unread.reshape(-1) * ctx.num_rows
        rows, sums = _sum_by_key(grads[0].flatten(0, -2).to(ctx.slot.gradient.dtype), key, ctx.num_rows)
        ctx.slot.add_rows(rows, sums)
        return None, None, None, None, None


def _sum_by_key(grads: Tensor, keys: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Add up the gradients of equal keys, in an order that depends on nothing but the keys.

    All shapes are known without reading the device. The sum of a key is the row of its first place in the sorted keys,
    and the rows of its other places are zero, so that whoever adds rows of equal index gets the same sum in any order.

    Shapes: grads ``(N, D)``; keys ``(N)``, those from ``num_rows`` on are left out; result ``(N)`` and ``(N, D)``.
    """
    num = keys.numel()
    ordered = keys.sort().values
    first = torch.searchsorted(ordered, keys).masked_fill(keys >= num_rows, num)
    sums = torch.ops.aten.embedding_dense_backward(grads, first, num + 1, num, False)
    return ordered.remainder(num_rows), sums[:num]


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

    def forward(self, seq_length: int, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        """Return the vectors of this rank's part of the positions ``offset .. offset + seq_length``.

        Args:
            seq_length: Length of the whole sequence (tokens).
            offset: First position (tokens).
            positions: Position of every token ``(B, S)`` instead; the result is then ``(S, B, D)`` or ``(S/tp, B, D)``.

        Raises:
            ParallelPlanError: If the table has no such positions.
            IndexError: If ``positions`` has others (on CPU; a CUDA kernel asserts).
        """
        if positions is not None:
            check_ids(positions, self.weight.shape[0])
            shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
            return F.embedding(positions.t().chunk(shards)[self.mesh.tp.rank % shards], self.weight)
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
    """Scale token vectors, add position vectors, then drop elements.

    Shapes: tokens ``(B, S)``; output ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``.

    Args:
        word: The token embedding.
        position: The position embedding; None for models that encode positions otherwise.
        mesh: The groups and random streams of this rank.
        dropout: Probability that an element is dropped.
        scale: Token vectors are multiplied by it, rounded to their dtype.
    """

    def __init__(
        self,
        word: VocabParallelEmbedding,
        position: PositionEmbedding | None,
        *,
        mesh: ParallelMesh,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.word, self.position, self.mesh, self.dropout, self.scale = word, position, mesh, dropout, scale

    def forward(
        self,
        tokens: Tensor | None,
        offset: int = 0,
        *,
        positions: Tensor | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream of the first block.

        Args:
            tokens: Token ids; None where vectors are given.
            offset: Position of the first token (tokens).
            positions: Position of every token ``(B, S)``; None counts from ``offset``.
            vectors: What replaces the scaled token vectors ``(B, S, D)``; whole on every rank.
        """
        self.mesh.random.seek(0)
        hidden = self._tokens(tokens) if vectors is None else self._own_part(vectors)
        if self.position is not None:
            given = tokens if vectors is None else vectors
            assert given is not None, "there are tokens where there are no vectors"
            hidden = hidden + self.position(given.shape[1], offset, positions)
        return hidden_dropout(hidden, self.dropout, self.training, self.mesh)

    def _tokens(self, tokens: Tensor | None) -> Tensor:
        hidden = self.word(tokens)
        if self.scale == 1.0:
            return hidden
        return hidden * torch.tensor(self.scale, dtype=hidden.dtype, device="cpu").item()

    def _own_part(self, vectors: Tensor) -> Tensor:
        hidden = vectors.transpose(0, 1).contiguous()
        return split_to_axis(hidden, self.mesh.tp, dim=0) if self.mesh.sequence_parallel else hidden


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
    Communication: see ``column_linear``.
    """
    return column_linear(hidden, weight, None, mesh)


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
