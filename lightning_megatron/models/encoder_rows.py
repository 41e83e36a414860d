"""Rows of an encoder: tokens or vectors, and their padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.layered import either_input
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
