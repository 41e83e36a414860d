"""Rows of an encoder: tokens or vectors, their padding, and the attention that skips it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.choose_core import choose_core
from lightning_megatron.layers.attention.core import prepared
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.attend_across import transport_of
from lightning_megatron.models.layered import either_input
from lightning_megatron.plan.context_transport import ContextChoice
from lightning_megatron.shapes import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """Inputs of an encoder: either tokens or vectors, and optional masks and indices.

    Padding, to which no token attends, is described by ``valid`` anywhere in a row, or by
    ``lengths`` on the right of each row. On GPUs, attention in half types is faster with
    ``lengths``: it reads no mask and skips the padding.

    Args:
        tokens: Token ids; None if vectors are given.
        vectors: Vectors that replace the token embeddings.
        valid: Mask that is False at padding; None means no padding, or that of ``lengths``.
        positions: Position of each token; None means the default of the configuration.
        token_types: Type of each token; None means 0.
        lengths: Number of tokens before the padding of each row; None means no padding, or that of
            ``valid``. The host does not read it (tokens).

    Raises:
        UnsupportedError: If both descriptions of padding are given, or ``lengths`` has another
            shape.
    """

    tokens: Int[Tensor, "batch seq"] | None = None
    vectors: Float[Tensor, "batch seq hidden"] | None = None
    valid: Bool[Tensor, "batch seq"] | None = None
    positions: Int[Tensor, "batch seq"] | None = None
    token_types: Int[Tensor, "batch seq"] | None = None
    lengths: Int[Tensor, " _"] | None = None

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        if self.valid is not None:
            raise UnsupportedError(
                "an encoder takes either valid or lengths, because both describe the padding of "
                "the rows: both were given. Pass lengths if all padding is on the right, and valid "
                "otherwise."
            )
        given = self.vectors if self.tokens is None else self.tokens
        if given is not None and self.lengths.shape != given.shape[:1]:
            raise UnsupportedError(
                f"lengths must have a number for each of the {given.shape[0]} rows: its shape is "
                f"{tuple(self.lengths.shape)}. Pass the number of tokens before the padding of "
                "each row."
            )

    @property
    def tokens_or_vectors(self) -> Int[Tensor, "batch seq"] | Float[Tensor, "batch seq hidden"]:
        """Return the tokens or the vectors.

        Raises:
            UnsupportedError: If neither or both are given.
        """
        return either_input("an encoder takes either tokens or vectors", self.tokens, self.vectors)

    @property
    def not_padding(self) -> Bool[Tensor, "batch seq"] | None:
        """Return a mask that is False at padding; None without padding."""
        if self.lengths is None:
            return None if self.valid is None else self.valid.bool()
        index = torch.arange(self.tokens_or_vectors.shape[1], device=self.lengths.device)
        return index < self.lengths[:, None]

    def joined(self, positions: Int[Tensor, "batch seq"]) -> EncoderInput:
        """Return the inputs as one row, without a description of padding."""
        given = (self.tokens, self.vectors, positions, self.token_types)
        tokens, vectors, places, types = (
            None if tensor is None else tensor.flatten(0, 1)[None] for tensor in given
        )
        return EncoderInput(tokens, vectors, positions=places, token_types=types)


@dataclass(frozen=True)
class RowAttention:
    """Attention of an encoder to rows with padding, by lengths or by a mask."""

    mesh: ParallelMesh
    context: ContextChoice
    head_dim: int
    dropout: float
    dtype: torch.dtype
    device: torch.device

    def reads_lengths(self, rows: EncoderInput) -> bool:
        """Return whether a kernel takes the lengths of rows; otherwise it needs a mask of keys."""
        if rows.lengths is None or (self.mesh.cp.size > 1 and self.context.transport != _WHOLE):
            # With parts of rows, each rank skips its own padding keys by their mask.
            return False
        # The kernel depends on the kind of the span alone.
        borders = torch.empty(0, dtype=torch.int32)
        like = AttentionSpan(causal=False, borders=borders, key_borders=borders)
        choice = choose_core(
            self.device, self.dtype, like, dropout=self.dropout, head_dim=self.head_dim
        )
        return choice.core == "flash"

    def span(self, rows: EncoderInput) -> AttentionSpan | None:
        """Return the attention span of the layers; None without padding."""
        if rows.lengths is not None and self.reads_lengths(rows):
            return AttentionSpan.padded(rows.lengths, rows.tokens_or_vectors.shape[1])
        mask = rows.not_padding
        if mask is None:
            return None
        span = AttentionSpan(causal=False, mask=mask[:, None, None, :])
        if self.mesh.cp.size > 1 and transport_of(span, self.mesh, self.context) != _WHOLE:
            # Each rank has parts of rows, and applies the mask to its keys itself.
            return span
        return prepared(span, *mask.shape, dtype=self.dtype, device=self.device)


#: Transport over cp that gives each rank whole rows of some heads.
_WHOLE = "all_to_all"
