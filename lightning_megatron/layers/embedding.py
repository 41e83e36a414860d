"""Embeddings of tokens, positions and segments, and the output head, sharded over tp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.groups.collectives import split_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.fused.dropout import hidden_dropout
from lightning_megatron.layers.linear.regions import column_linear, leave_tensor_region
from lightning_megatron.layers.loss.cross_entropy import check_ids
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, slot_of
from lightning_megatron.layers.parameters.init import Initializer, sharded_parameter
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.plan.shards import padded_vocab_size, vocab_range
from lightning_megatron.shapes import Float, Int


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are sharded over tp.

    Equal to torch.nn.Embedding(vocab_size, hidden_size), with the output transposed to sequence
    first. The table is padded to a multiple of ``multiple * tp`` rows. The padding rows are zero,
    are not part of the full tensor, and cannot be looked up.

    Args:
        padding_id: Token whose row gets no gradient from lookups, like ``padding_idx`` of
            torch.nn.Embedding.

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
        self.vocab_size = vocab_size
        self.mesh = mesh
        self.padding_id = padding_id
        self.weight = vocab_parameter(vocab_size, hidden_size, mesh, multiple, initializer)

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "seq_local batch hidden"]:
        check_ids(tokens, self.vocab_size)
        num_rows = self.weight.shape[0]
        ids = tokens.t()
        padding = None if self.padding_id is None else ids == self.padding_id
        # An illegal id must not wrap around to a legal row of this rank. It becomes an illegal row,
        # on which the CUDA kernel asserts.
        illegal = (ids < 0) | (ids >= self.vocab_size)
        if self.mesh.tp.size == 1:
            return _look_up(self.weight, ids.masked_fill(illegal, num_rows), None, padding)
        # Ids of other ranks' rows read an arbitrary row here, and their vectors are set to zero.
        is_remote = ids.div(num_rows, rounding_mode="floor") != self.mesh.tp.rank
        index = ids.remainder(num_rows).masked_fill(illegal, num_rows)
        return leave_tensor_region(_look_up(self.weight, index, is_remote, padding), self.mesh)


def _look_up(
    weight: Tensor,
    index: Tensor,
    is_remote: Tensor | None,
    padding: Tensor | None,
) -> Tensor:
    """Look up rows; vectors of ``is_remote`` are zero, those of ``padding`` get no gradient."""
    slot = slot_of(weight)
    if slot is not None:
        return _TableLookup.apply(weight, index, is_remote, padding, slot)
    vectors = F.embedding(index, weight)
    if padding is not None:
        vectors = torch.where(padding.unsqueeze(-1), vectors.detach(), vectors)
    return vectors if is_remote is None else vectors.masked_fill(is_remote.unsqueeze(-1), 0.0)


class _TableLookup(torch.autograd.Function):
    """Table lookup whose backward pass adds the gradients of the read rows to a gradient slot."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        index: Tensor,
        is_remote: Tensor | None,
        padding: Tensor | None,
        slot: GradientSlot,
    ) -> Tensor:
        unread = is_remote
        if padding is not None:
            unread = padding if is_remote is None else is_remote | padding
        ctx.save_for_backward(index, unread)
        ctx.slot = slot
        ctx.num_rows = weight.shape[0]
        vectors = F.embedding(index, weight)
        return vectors if is_remote is None else vectors.masked_fill_(is_remote.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, unread = ctx.saved_tensors
        key = index.reshape(-1)
        if unread is not None:
            # Keys from num_rows on are excluded from the sums.
            key = key + unread.reshape(-1) * ctx.num_rows
        rows, sums = _sum_by_key(
            grads[0].flatten(0, -2).to(ctx.slot.gradient.dtype),
            key,
            ctx.num_rows,
        )
        ctx.slot.add_rows(rows, sums)
        return None, None, None, None, None


def _sum_by_key(
    grads: Float[Tensor, "rows hidden"], keys: Int[Tensor, "rows"], num_rows: int
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows hidden"]]:
    """Sum the gradients of equal keys in an order that depends on the keys only.

    All shapes are known without a synchronisation with the device. The sum of a key is in the row
    of its first occurrence in the sorted keys, and the rows of its other occurrences are zero.
    Later additions of rows with equal index therefore give the same sum in any order. Keys from
    ``num_rows`` on are excluded.
    """
    num = keys.numel()
    ordered = keys.sort().values
    first = torch.searchsorted(ordered, keys).masked_fill(keys >= num_rows, num)
    sums = torch.ops.aten.embedding_dense_backward(grads, first, num + 1, num, False)
    return ordered.remainder(num_rows), sums[:num]


class InputEmbedding(nn.Module):
    """Sum of scaled token embeddings, token types and positions, normed, followed by dropout.

    With token types equal to Hugging Face's BertEmbeddings and RobertaEmbeddings; without a norm to
    MegatronBertEmbeddings.

    Args:
        scale: Factor of the token vectors, rounded to their dtype.
        scales_vectors: Whether vectors that replace token vectors get the factor, too.
    """

    def __init__(
        self,
        word: VocabParallelEmbedding,
        position: TableEmbedding | None,
        token_type: TableEmbedding | None = None,
        *,
        mesh: ParallelMesh,
        dropout: float = 0.0,
        scale: float = 1.0,
        scales_vectors: bool = False,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.token_type = token_type
        self.norm = norm
        self.mesh = mesh
        self.dropout = dropout
        self.scale = scale
        self.scales_vectors = scales_vectors

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"] | None,
        positions: Int[Tensor, "batch seq"] | None = None,
        token_types: Int[Tensor, "batch seq"] | None = None,
        vectors: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the residual stream of the first block; full vectors may replace those of tokens.

        Positions count from 0 if they are not given.
        """
        self.mesh.random.seek(0)
        hidden = self.word(tokens) if vectors is None else _local_part(vectors, self.mesh)
        if self.scale != 1.0 and (vectors is None or self.scales_vectors):
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype, device="cpu").item()
        if self.token_type is not None:
            hidden = hidden + self.token_type(token_types)
        if self.position is not None:
            given = tokens if vectors is None else vectors
            assert given is not None, "there are tokens where there are no vectors"
            hidden = hidden + self.position(given.shape[1] if positions is None else positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden_dropout(hidden, self.dropout, self.training, self.mesh)


def _local_part(vectors: Tensor, mesh: ParallelMesh) -> Tensor:
    """Return this rank's positions of given vectors, sequence first."""
    hidden = vectors.transpose(0, 1).contiguous()
    return split_to_axis(hidden, mesh.tp, dim=0) if mesh.sequence_parallel else hidden


class VocabParallelHead(nn.Module):
    """Output head whose weight rows, the vocabulary, are sharded over tp.

    Equal to torch.nn.Linear(hidden_size, vocab_size, bias=False), with padded and sharded outputs.
    A head may be tied to a parameter of the first stage, by name.
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

    def forward(
        self,
        hidden: Float[Tensor, "... hidden"],
        compute: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """Return this rank's columns of the logits, or the result of a function of the weight.

        Code must read the weight only through calls of this module, whose hooks may wait for the
        weight's values.

        Args:
            hidden: Output of the last norm, ``(seq_local, batch, hidden)`` for logits.
            compute: Function of ``hidden`` and the weight, such as a loss that stores no logits;
                None computes the logits ``(seq, batch, vocab_local)``.
        """
        if compute is None:
            return vocab_logits(hidden, self.weight, self.mesh)
        return compute(hidden, self.weight)


def vocab_logits(
    hidden: Float[Tensor, "seq_local batch hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    mesh: ParallelMesh,
) -> Float[Tensor, "seq batch vocab_local"]:
    """Compute this rank's columns of the logits from a vocabulary-parallel table.

    Communication: see ``column_linear``.
    """
    return column_linear(hidden, weight, None, mesh)


def vocab_parameter(
    vocab_size: int,
    hidden_size: int,
    mesh: ParallelMesh,
    multiple: int,
    initializer: Initializer | None,
) -> nn.Parameter:
    """Create this rank's rows of a table over the padded vocabulary."""
    return sharded_parameter(
        (vocab_size, hidden_size),
        [vocab_range(vocab_size, mesh.tp.size, mesh.tp.rank, multiple)],
        initializer or Initializer.normal(),
        local_size=padded_vocab_size(vocab_size, mesh.tp.size, multiple) // mesh.tp.size,
    )
