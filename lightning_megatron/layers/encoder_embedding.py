"""The input of an encoder: tokens, positions and kinds of tokens, summed and normalised."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.groups.collectives import split_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.dropout import hidden_dropout
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.replicated import TableEmbedding


class EncoderEmbedding(nn.Module):
    """Add the vectors of tokens, of their kinds and of their positions, normalise the sum, then drop elements.

    Equal to Hugging Face's BertEmbeddings and RobertaEmbeddings.

    Shapes: all ids ``(B, S)``; output ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``.

    Args:
        word: The token embedding.
        position: The position embedding.
        token_type: The embedding of kinds of tokens.
        norm: The norm of the sum.
        mesh: The groups and random streams of this rank.
        dropout: Probability that an element is dropped.
    """

    def __init__(
        self,
        word: VocabParallelEmbedding,
        position: TableEmbedding,
        token_type: TableEmbedding,
        norm: LayerNorm,
        *,
        mesh: ParallelMesh,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word, self.position, self.token_type, self.norm = word, position, token_type, norm
        self.mesh, self.dropout = mesh, dropout

    def forward(
        self, tokens: Tensor | None, positions: Tensor, token_types: Tensor, vectors: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream of the first block.

        Args:
            tokens: Token ids; None where vectors are given.
            positions: Position of every token.
            token_types: Kind of every token.
            vectors: What replaces the token vectors ``(B, S, D)``; whole on every rank.
        """
        self.mesh.random.seek(0)
        hidden = self._words(tokens, vectors) + self.token_type(token_types) + self.position(positions)
        return hidden_dropout(self.norm(hidden), self.dropout, self.training, self.mesh)

    def _words(self, tokens: Tensor | None, vectors: Tensor | None) -> Tensor:
        if vectors is not None:
            hidden = vectors.transpose(0, 1).contiguous()
            return split_to_axis(hidden, self.mesh.tp, dim=0) if self.mesh.sequence_parallel else hidden
        assert tokens is not None, "there are tokens where there are no vectors"
        found: Tensor = self.word(tokens)
        return found
