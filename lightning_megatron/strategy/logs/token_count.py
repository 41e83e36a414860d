"""Number of tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch, from its first integer tensor of two dimensions.

    Returns:
        The number of tokens, or 0 if the batch has no such tensor.
    """
    if isinstance(batch, torch.Tensor):
        return batch.numel() if batch.ndim >= 2 and not batch.is_floating_point() else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return next((tokens for item in batch if (tokens := count_tokens(item))), 0)
    return 0
