"""Attention masks for padding, packed documents and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.shapes import Float, Int, Shaped

#: Multiple of the row stride of a mask (elements).
_ALIGNMENT = 8


@dataclass(frozen=True, eq=False)
class AttentionSpan:
    """Padding, positions and documents of the tokens of a batch.

    If all fields are None, every row is one document without padding. No token attends to padding.
    A padded index that could attend to nothing attends to itself, so that its output stays finite.

    Args:
        valid: False at padding, which may be left or right of the tokens; None means no padding.
        positions: Position of every token, for rotary or learned embeddings; None counts from 0
            along the row.
        documents: Number of the document of every token. Tokens attend only within their document;
            None means one document per row.
    """

    valid: Shaped[Tensor, "batch seq"] | None = None
    positions: Int[Tensor, "batch seq"] | None = None
    documents: Int[Tensor, "batch seq"] | None = None

    def check_shape(self, num_sequences: int, seq_length: int) -> None:
        """Refuse fields whose shape differs from the shape of the tokens.

        Raises:
            ParallelPlanError: If a shape differs.
        """
        for name in ("valid", "positions", "documents"):
            found = getattr(self, name)
            if found is not None and tuple(found.shape) != (num_sequences, seq_length):
                raise ParallelPlanError(
                    f"span.{name} must have the shape of the tokens ({num_sequences}, "
                    f"{seq_length}), because it describes each of them: its shape is "
                    f"{tuple(found.shape)}. Expand or cut it."
                )

    @property
    def hides(self) -> bool:
        """Return whether attention needs a mask in addition to the causal one."""
        return self.valid is not None or self.documents is not None


def attention_mask(
    span: AttentionSpan | None,
    window: int | None,
    seq_length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "#batch 1 seq seq"] | None:
    """Return the additive attention mask: 0 for visible tokens, minus infinity elsewhere.

    Args:
        span: Padding and documents of the batch; None means one document per row without padding.
        window: Number of tokens that a token attends to, itself and those before it; None means all
            (tokens).
        seq_length: Length of the rows (tokens).
        dtype: Dtype of queries, keys and values.
        device: Device of the result.

    Returns:
        The mask; None if the causal mask is enough.
    """
    window = None if window is None or window >= seq_length else window
    if window is None and (span is None or not span.hides):
        return None
    index = torch.arange(seq_length, device=device)
    distance = index[:, None] - index
    seen = (distance >= 0).unsqueeze(0)
    if window is not None:
        seen = seen & (distance < window)
    if span is not None and span.documents is not None:
        seen = seen & (span.documents[:, :, None] == span.documents[:, None, :])
    if span is not None and span.valid is not None:
        seen = seen & span.valid[:, None, :].bool()
        # A query that attends to nothing would have the weights 0 / 0, so it attends to itself.
        seen = seen | ((distance == 0) & ~seen.any(-1, keepdim=True))
    # Memory-efficient attention copies a mask whose row stride is not aligned, in every layer.
    width = -(-seq_length // _ALIGNMENT) * _ALIGNMENT
    mask = torch.zeros((*seen.shape[:-1], width), dtype=dtype, device=device)[..., :seq_length]
    return mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)
