"""The mask of attention in both directions, where some places hold no token."""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements.
_ALIGNMENT = 8


def padding_mask(valid: Tensor | None, *, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores: 0 where all places see one, minus infinity where none does.

    A row without any token sees everything, so that what it computes is finite.

    Shapes: valid ``(B, S)``; output ``(B, 1, 1, S)``.

    Args:
        valid: False at padding; None means no padding.
        dtype: Of queries, keys and values.
    """
    if valid is None:
        return None
    seen = valid | ~valid.any(-1, keepdim=True)
    num_sequences, seq_length = valid.shape
    # Memory-efficient attention would copy rows that do not begin at a multiple of this, in every layer.
    width = -(-seq_length // _ALIGNMENT) * _ALIGNMENT
    mask = torch.zeros((num_sequences, 1, 1, width), dtype=dtype, device=valid.device)[..., :seq_length]
    return mask.masked_fill_(~seen[:, None, None, :], -torch.inf)
