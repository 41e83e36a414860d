"""The padding mask of bidirectional attention."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.shapes import Bool, Float

#: Multiple of the row stride of a mask (elements).
_ALIGNMENT = 8


def padding_mask(
    valid: Bool[Tensor, "batch seq"] | None, *, dtype: torch.dtype
) -> Float[Tensor, "batch 1 1 seq"] | None:
    """Return the additive attention mask: 0 at tokens, minus infinity at padding.

    A row without any token is not masked, so that its outputs stay finite.

    Args:
        valid: False at padding; None means no padding.
        dtype: Dtype of queries, keys and values.
    """
    if valid is None:
        return None
    seen = valid | ~valid.any(-1, keepdim=True)
    num_sequences, seq_length = valid.shape
    # Memory-efficient attention copies a mask whose row stride is not aligned, in every layer.
    width = -(-seq_length // _ALIGNMENT) * _ALIGNMENT
    mask = torch.zeros((num_sequences, 1, 1, width), dtype=dtype, device=valid.device)
    mask = mask[..., :seq_length]
    return mask.masked_fill_(~seen[:, None, None, :], -torch.inf)
