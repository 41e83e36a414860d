"""Token losses, computed from logits or from the output of the last norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.context_parallel.sequence_order import join_parts, own_part
from lightning_megatron.layers.loss.chunked_loss import (
    ChunkedHead,
    LogitForm,
    chunked_cross_entropy,
    summed_cross_entropy,
)
from lightning_megatron.layers.loss.cross_entropy import LossTerms, vocab_parallel_cross_entropy
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class Targets:
    """Labels of the tokens of a microbatch.

    Args:
        labels: Id of the token that follows each token, or ``ignore_index``, whose loss is zero.
        cut: Order in which the ranks of cp hold the tokens of packed documents; None means that cp
            divides each row.
        are_summed: Whether the result is the sum of the losses of all tokens.
    """

    labels: Int[Tensor, "batch seq"]
    label_smoothing: float
    ignore_index: int
    cut: TokenOrder | None = None
    are_summed: bool = False

    def losses(
        self, logits: Float[Tensor, "seq_part batch vocab_local"], mesh: ParallelMesh, vocab: int
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, ""]:
        """Return the loss of each token of the whole sequences, or the sum of losses.

        The gradient may overwrite the memory of the logits. ``vocab`` does not count padding
        (tokens).

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
        return self._result(losses, mesh)

    def chunked_losses(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"],
        weight: Float[Tensor, "vocab_local hidden"],
        mesh: ParallelMesh,
        vocab: int,
        chunk: int,
        form: LogitForm,
        *,
        early_gradients: bool = False,
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, ""]:
        """Return the same as :meth:`losses`, with the logits of only ``chunk`` tokens at once.

        Args:
            form: Scale and soft cap of the logits.
            early_gradients: Whether the forward pass already computes the gradients of a sum.

        Communication: that of ``chunked_cross_entropy`` or ``summed_cross_entropy``, and a gather
            over cp.
        """
        labels = own_part(self.labels, mesh.cp, 1, self.cut).t()
        sums_early = self.are_summed and early_gradients
        compute = summed_cross_entropy if sums_early else chunked_cross_entropy
        terms = LossTerms(mesh.tp, vocab, self.label_smoothing, self.ignore_index)
        head = ChunkedHead(terms, mesh, chunk, form)
        losses = compute(hidden, weight, labels, head)
        if sums_early:
            return all_gather_sequence(losses.reshape(1), mesh.cp).sum()
        return self._result(losses, mesh)

    def _result(
        self, losses: Float[Tensor, "seq_part batch"], mesh: ParallelMesh
    ) -> Float[Tensor, "batch seq"] | Float[Tensor, ""]:
        joined = join_parts(losses, mesh.cp, cut=self.cut).t().contiguous()
        return joined.sum() if self.are_summed else joined
