"""Cache with which Hugging Face's generation runs the layers of a GPT."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.layers.attention.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.shapes import Int, Shaped
from lightning_megatron.swap.hugging_face.replaced_model import pad_batch


class GenerationCache(KeyValueCache):
    """Keys and values of rows that ``generate`` continues, with the methods that it calls."""

    #: Hugging Face's generation does not compile a model if its cache has this value.
    is_compileable = False
    #: For each layer, whether it is a linear attention. No layer of this package is.
    is_linear = (False,)

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        #: Whether the rows of this rank have ended, but not those of all ranks. The layers continue
        #: to run, because experts need tokens of every rank, but the cache stores nothing.
        self.has_ended = False
        self._has_padding = False

    def get_seq_length(self) -> int:
        """Return the number of cached tokens of each row (tokens)."""
        return self.length

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Replace each row by another one."""
        self.reorder(beam_idx)

    @override
    def advance(self, count: int) -> None:
        if not self.has_ended:
            super().advance(count)

    def length_after(self, count: int) -> int:
        """Return the number of tokens of each row after new tokens (tokens)."""
        return self.length + (0 if self.has_ended else count)

    def span_of(
        self,
        rows: AttentionSpan | None,
        inputs: Shaped[Tensor, "batch seq ..."],
        attention_mask: Int[Tensor, "batch _"] | None,
        position_ids: Int[Tensor, "#batch seq"] | None,
        *,
        extra: int,
        num_rows: int,
    ) -> AttentionSpan:
        """Return the attention span of new tokens, which includes the cached tokens.

        Args:
            rows: Span of the padded rows without a cache, which is used for the first tokens; None
                means rows without padding.
            position_ids: Position of each new token; None counts along the row.
        """
        shape = inputs.shape[:2]
        past = CachedTokens(self, shape[1])
        if self.length == 0:
            self._has_padding = attention_mask is not None and not bool(attention_mask.all())
            return replace(rows or AttentionSpan(), past=past)
        last = self.length + shape[1]
        if position_ids is None or self.has_ended:
            # Positions of rows that have ended continue beyond those that a model supports.
            position_ids = torch.arange(self.length, last, device=inputs.device)[None]
        if self._has_padding and attention_mask is not None:
            visible = pad_batch(attention_mask[:, :last], 0, 1, num_rows)
            past = replace(past, visible=None if visible is None else visible.to(torch.bool))
        positions = pad_batch(position_ids.expand(shape), extra, 0, num_rows)
        return AttentionSpan(positions=positions, past=past)
