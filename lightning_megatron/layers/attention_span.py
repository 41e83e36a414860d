"""Who attends to whom, where that is not every position to all before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError

#: Elements.
_ALIGNMENT = 8


@dataclass(frozen=True, eq=False)
class AttentionSpan:
    """Describe the rows of a batch: which places hold tokens, at which positions, of which documents.

    None everywhere means one document a row, without padding. A place that holds no token is seen by none, but
    by itself where it would see nothing, so that what it computes is finite.

    Shapes: all ``(B, S)``.

    Args:
        valid: False at padding, on either side of the tokens; None means no padding.
        positions: Position of every place, for rotary or learned positions; None counts from 0 along the row.
        documents: Number of the document that a place belongs to; it sees none but that. None means one a row.
    """

    valid: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None

    def check_shape(self, num_sequences: int, seq_length: int) -> None:
        """Refuse a description of other rows than those that are given.

        Raises:
            ParallelPlanError: If a shape differs.
        """
        for name in ("valid", "positions", "documents"):
            found = getattr(self, name)
            if found is not None and tuple(found.shape) != (num_sequences, seq_length):
                raise ParallelPlanError(
                    f"span.{name} must have the shape of the tokens ({num_sequences}, {seq_length}), because it "
                    f"describes each of them: its shape is {tuple(found.shape)}. Expand or cut it."
                )

    @property
    def hides(self) -> bool:
        """Tell whether some place may not see all before it."""
        return self.valid is not None or self.documents is not None


def attention_mask(
    span: AttentionSpan | None,
    window: int | None,
    seq_length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Return what is added to the scores: 0 where a place sees another, minus infinity where not.

    Shapes: ``(B, 1, S, S)``, or ``(1, 1, S, S)`` where all rows are alike.

    Args:
        span: The rows of the batch; None means one document a row, without padding.
        window: How many places one sees, itself and those before it along the row; None means all (tokens).
        seq_length: Length of the rows (tokens).
        dtype: Of queries, keys and values.
        device: Of the result.

    Returns:
        The mask; None where every place sees all before it.
    """
    window = None if window is None or window >= seq_length else window
    if window is None and (span is None or not span.hides):
        return None
    places = torch.arange(seq_length, device=device)
    distance = places[:, None] - places
    seen = (distance >= 0 if window is None else (distance >= 0) & (distance < window)).unsqueeze(0)
    if span is not None and span.documents is not None:
        seen = seen & (span.documents[:, :, None] == span.documents[:, None, :])
    if span is not None and span.valid is not None:
        seen = seen & span.valid[:, None, :].bool()
        # The weights of a row that sees nothing would be 0 / 0: it sees itself.
        seen = seen | ((distance == 0) & ~seen.any(-1, keepdim=True))
    # Memory-efficient attention would copy rows that do not begin at a multiple of this, in every layer.
    width = -(-seq_length // _ALIGNMENT) * _ALIGNMENT
    mask = torch.zeros((*seen.shape[:-1], width), dtype=dtype, device=device)[..., :seq_length]
    return mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)
