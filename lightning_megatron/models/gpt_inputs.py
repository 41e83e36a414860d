"""Inputs of a GPT: tokens or vectors, and the rows that they form."""

from __future__ import annotations

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.context_parallel.attend_across import cut_documents
from lightning_megatron.plan.context_transport import ContextChoice
from lightning_megatron.shapes import Float, Int, Shaped


def one_of(
    tokens: Int[Tensor, "batch seq"] | None, embeddings: Float[Tensor, "batch seq hidden"] | None
) -> Shaped[Tensor, "batch seq ..."]:
    """Return the tokens or the embeddings, whichever are given.

    Args:
        tokens: Token ids.
        embeddings: Vectors that replace the token embeddings.

    Raises:
        UnsupportedError: If neither or both are given.
    """
    given = embeddings if tokens is None else tokens
    if given is None or (tokens is not None and embeddings is not None):
        raise UnsupportedError(
            f"GPT takes either tokens or embeddings: {'neither' if given is None else 'both'} were "
            "given. Both describe the same input. Pass one of them."
        )
    return given


def laid_out(
    span: AttentionSpan | None,
    given: Shaped[Tensor, "batch seq ..."],
    mesh: ParallelMesh,
    choice: ContextChoice,
) -> AttentionSpan | None:
    """Return a span with borders, positions and, over cp, the cut of its documents.

    Args:
        span: Documents, padding and positions of the rows; None means plain rows.
        given: Tokens or embeddings.
        mesh: Process groups of this rank.
        choice: Transport of attention over cp.

    Raises:
        ParallelPlanError: If a shape of the span differs from that of the rows.
    """
    if span is None:
        return None
    num_sequences, length = given.shape[:2]
    span.check_shape(num_sequences, length)
    span = span.laid_out(num_sequences, length, given.device)
    if mesh.cp.size == 1:
        return span
    return cut_documents(span, num_sequences, length, mesh, choice)
