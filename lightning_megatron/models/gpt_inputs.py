"""Checks and preparation of the inputs of a GPT: tokens or embeddings, and attention spans."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.attend_across import cut_documents
from lightning_megatron.models.gpt_losses import Targets
from lightning_megatron.plan.context_transport import ContextChoice
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class GPTCall:
    """Inputs of one call of a GPT, which are the same on all stages.

    Args:
        tokens: Token ids; None if vectors, which replace their embeddings, are given.
        positions: Position of each token in its row; None counts along the row.
        order: Positions of the rows that each rank of cp holds; None means equal parts.
        targets: Labels and settings of the loss; None means that the call returns logits.
        place: Index of the only position whose logits are returned; None means all positions.
        continues: Whether the rows have a cache of earlier tokens, so that the shapes differ in
            each call.
    """

    tokens: Int[Tensor, "batch seq"] | None
    vectors: Float[Tensor, "batch seq hidden"] | None
    positions: Int[Tensor, "batch seq"] | None
    order: TokenOrder | None
    targets: Targets | None
    place: int | None
    continues: bool


def tokens_or_embeddings(
    tokens: Int[Tensor, "batch seq"] | None, embeddings: Float[Tensor, "batch seq hidden"] | None
) -> Shaped[Tensor, "batch seq ..."]:
    """Return the tokens, or the embeddings if these are given instead; refuse neither or both."""
    inputs = embeddings if tokens is None else tokens
    if inputs is None or (tokens is not None and embeddings is not None):
        raise UnsupportedError(
            "GPT takes either tokens or embeddings, because both describe the same input: "
            f"{'neither' if inputs is None else 'both'} were given. Pass one of them."
        )
    return inputs


def continues_cache(span: AttentionSpan | None) -> bool:
    """Return whether rows continue the tokens of a cache, so that cp does not divide them."""
    return span is not None and span.past is not None and span.past.cache.length > 0


def laid_out(
    span: AttentionSpan | None,
    inputs: Shaped[Tensor, "batch seq ..."],
    mesh: ParallelMesh,
    choice: ContextChoice,
) -> AttentionSpan | None:
    """Return a span with document borders and positions, and over cp with the order of tokens."""
    if span is None:
        return None
    num_sequences, length = inputs.shape[:2]
    span.check_shape(num_sequences, length)
    if mesh.cp.size == 1:
        return span.laid_out(num_sequences, length, inputs.device)
    if continues_cache(span):
        # All ranks compute each new token, and one of them stores its keys and values.
        order = TokenOrder.uncut(num_sequences, length, inputs.device)
        return replace(span, order=order)
    span = span.laid_out(num_sequences, length, inputs.device)
    return cut_documents(span, num_sequences, length, mesh, choice)
