"""Losses of tokens, from logits or from the output of the last norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.chunked_loss import LogitForm, chunked_cross_entropy
from lightning_megatron.layers.context_parallel.sequence_order import joined_parts, own_part
from lightning_megatron.layers.document_cut import DocumentCut
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class Targets:
    """Labels of the tokens of a microbatch.

    Args:
        labels: Id of the token that follows each token, or ``ignore_index``.
        label_smoothing: Probability spread evenly over the vocabulary.
        ignore_index: Label whose loss is zero.
        cut: Cut of packed documents over cp; None means that rows are cut.
    """

    labels: Int[Tensor, "batch seq"]
    label_smoothing: float
    ignore_index: int
    cut: DocumentCut | None = None

    def losses(
        self, logits: Float[Tensor, "seq_part batch vocab_local"], mesh: ParallelMesh, vocab: int
    ) -> Float[Tensor, "batch seq"]:
        """Return the loss of each token of the whole sequences.

        Args:
            logits: This rank's columns of the logits, whose memory the gradient may take.
            mesh: Process groups of this rank.
            vocab: The true vocabulary, without padding (tokens).

        Communication: that of ``vocab_parallel_cross_entropy``, and a gather over cp.
        """
        losses = vocab_parallel_cross_entropy(
            logits,
            own_part(self.labels, mesh.cp, 1, self.cut).t(),
            mesh,
            vocab,
            self.label_smoothing,
            self.ignore_index,
            overwrite_logits=True,
        )
        return joined_parts(losses, mesh.cp, cut=self.cut).t().contiguous()

    def chunked_losses(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        weight: Float[Tensor, "vocab_local hidden"],
        mesh: ParallelMesh,
        vocab: int,
        chunk: int,
        form: LogitForm | None = None,
    ) -> Float[Tensor, "batch seq"]:
        """Return the loss of each token of the whole sequences, without storing logits.

        Args:
            hidden: Output of the last norm.
            weight: This rank's rows of the head.
            mesh: Process groups of this rank.
            vocab: The true vocabulary, without padding (tokens).
            chunk: Tokens whose logits exist at once (tokens).
            form: Scale and bound of the logits; None means none.

        Communication: that of ``chunked_cross_entropy``, and a gather over cp.
        """
        losses = chunked_cross_entropy(
            hidden,
            weight,
            own_part(self.labels, mesh.cp, 1, self.cut).t(),
            mesh,
            vocab,
            chunk,
            self.label_smoothing,
            self.ignore_index,
            form,
        )
        return joined_parts(losses, mesh.cp, cut=self.cut).t().contiguous()
