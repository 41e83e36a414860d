"""The input embedding of an encoder: tokens, positions and token types."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.groups.collectives import split_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.replicated import TableEmbedding
from lightning_megatron.shapes import Float, Int


class EncoderEmbedding(nn.Module):
    """Sum of token, token-type and position embeddings, followed by a norm and dropout.

    Equal to Hugging Face's BertEmbeddings and RobertaEmbeddings; without a norm to
    MegatronBertEmbeddings.

    Args:
        word: The token embedding.
        position: The position embedding.
        token_type: The token-type embedding.
        norm: The norm of the sum; None means no norm.
        mesh: Process groups and random streams of this rank.
        dropout: Probability that an element is dropped.
    """

    def __init__(
        self,
        word: VocabParallelEmbedding,
        position: TableEmbedding,
        token_type: TableEmbedding,
        norm: LayerNorm | None,
        *,
        mesh: ParallelMesh,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.token_type = token_type
        self.norm = norm
        self.mesh = mesh
        self.dropout = dropout

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"] | None,
        positions: Int[Tensor, "batch seq"],
        token_types: Int[Tensor, "batch seq"],
        vectors: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the residual stream of the first block.

        Args:
            tokens: Token ids; None if vectors are given.
            positions: Position of every token.
            token_types: Type of every token.
            vectors: Full tensor that replaces the token vectors.
        """
        self.mesh.random.seek(0)
        hidden = self._words(tokens, vectors)
        hidden = hidden + self.token_type(token_types) + self.position(positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden_dropout(hidden, self.dropout, self.training, self.mesh)

    def _words(self, tokens: Tensor | None, vectors: Tensor | None) -> Tensor:
        if vectors is not None:
            hidden = vectors.transpose(0, 1).contiguous()
            if self.mesh.sequence_parallel:
                return split_to_axis(hidden, self.mesh.tp, dim=0)
            return hidden
        assert tokens is not None, "there are tokens where there are no vectors"
        embedded: Tensor = self.word(tokens)
        return embedded
