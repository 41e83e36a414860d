"""Attention spans from the arguments of Hugging Face's models: padding, packed rows and caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.layers.attention.key_value_cache import CachedTokens, KeyValueCache
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.shapes import Int, Shaped
from lightning_megatron.swap.hugging_face.replaced_model import IGNORED, pad_batch


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Sequences that are packed into a row, in the form of the arguments of flash attention.

    Args:
        borders: Cumulative lengths of the sequences, from 0; None means one sequence (tokens).
        longest: Upper bound of the lengths; None means the length of the row (tokens).
        by_positions: How position_ids cut a row without borders and mask: ``"steps"`` begins a
            sequence at each position that is not one more than its predecessor, ``"minimum"`` at
            each smallest position, if there is one row; None does not cut.
    """

    borders: Tensor | None = None
    longest: int | None = None
    by_positions: Literal["steps", "minimum"] | None = None


def span_of(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    packed: PackedRow,
    shape: torch.Size,
    labels: Tensor | None = None,
    host: HostValues | None = None,
    shifts: bool = False,
) -> AttentionSpan | None:
    """Return the attention span of padded or packed rows; None for rows without either.

    Attention is causal, so only padding attends to the padding after the last token. If this
    padding has no labels, no span is needed, which is fastest. Padding before the tokens becomes a
    separate document. Padding between tokens, or with labels, needs a mask. The host waits for the
    device only if it lacks the values on which this choice depends.

    Args:
        position_ids: Position of every token. None counts along the row, as Hugging Face's models
            do.
        labels: Label of every position, or -100; None if results of padding are not used.
        shifts: Whether labels must still be shifted, because each is that of its own position.
    """
    host = host or HostValues()
    positions = None if position_ids is None else position_ids.expand(shape)
    if packed.borders is not None:
        if attention_mask is not None:
            raise UnsupportedError(
                "a call takes either attention_mask or cu_seq_lens_q: both were given. Packed rows "
                "have no padding but the rest of the row. Leave one of them out."
            )
        lengths = packed.borders.diff().to(torch.int64).expand(shape[0], -1)
        return AttentionSpan(lengths, packed.longest, positions, restarts=False)
    if attention_mask is not None:
        check_mask(attention_mask, shape)
        labels_on_host = None if labels is None else host.read(labels)
        known = host.read(attention_mask).to(torch.bool)
        kind = _kind_of(known, shifted(labels_on_host) if shifts else labels_on_host)
        return _padding(attention_mask.to(torch.bool), positions, kind)
    if position_ids is None:
        return None
    if packed.by_positions is None or (packed.by_positions == "minimum" and shape[0] > 1):
        return AttentionSpan(positions=positions)
    most = int(_begins(host.read(position_ids), packed.by_positions).sum(1).max())
    if most == 0:
        return AttentionSpan(positions=positions)
    begins = _begins(position_ids, packed.by_positions)
    # A power of two, so that steps with similar numbers of documents have equal shapes.
    columns = 1 << most.bit_length()
    lengths = position_ids.new_zeros(len(begins), columns)
    lengths.scatter_add_(1, begins.cumsum(1), torch.ones_like(position_ids))
    return AttentionSpan(lengths=lengths.expand(shape[0], -1), positions=positions)


def shifted(labels: Tensor | None) -> Tensor | None:
    """Return the label of each position's next token."""
    return None if labels is None else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def pad_span(span: AttentionSpan | None, extra: int, num_rows: int) -> AttentionSpan | None:
    """Return a span with additional padding positions and rows."""
    if span is None:
        return None
    mask = span.mask
    if mask is not None:
        mask = F.pad(mask, (0, extra, 0, 0, 0, 0, 0, num_rows), value=False)
    longest = span.longest
    if longest is not None:
        longest = max(longest, extra)
    lengths = pad_batch(span.lengths, 0, 0, num_rows)
    positions = pad_batch(span.positions, extra, 0, num_rows)
    return replace(span, lengths=lengths, longest=longest, positions=positions, mask=mask)


def cut_by_positions(
    config: Any, use_cache: bool | None, recomputes: bool
) -> Literal["steps", "minimum"] | None:
    """Return how Hugging Face's model cuts rows by position_ids; see :class:`PackedRow`.

    Flash attention looks at the positions in every call. The masks of other attention depend on
    them only in a call that fills no cache.

    Args:
        recomputes: Whether this call checkpoints blocks, which excludes a cache.
    """
    if "flash" in (getattr(config, "_attn_implementation", None) or ""):
        return "minimum"
    if use_cache is None:
        use_cache = getattr(config, "use_cache", None)
    return None if use_cache and not recomputes else "steps"


def _begins(position_ids: Tensor, rule: Literal["steps", "minimum"]) -> Tensor:
    """Return whether a new sequence begins at each position, the first one excepted."""
    if rule == "steps":
        return position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
    begins = position_ids == position_ids.min()
    return F.pad(begins[:, 1:], (1, 0), value=False)


def _kind_of(mask: Tensor, labels: Tensor | None) -> Literal["plain", "separate", "mixed"]:
    """Return how padding must be separated: not at all, as a document, or by a mask."""
    if labels is not None and not bool((mask | (labels == IGNORED)).all()):
        return "mixed"
    begins = mask[:, 1:] > mask[:, :-1]
    if not bool(begins.any()):
        return "plain"
    # There must be no padding between the first token and the last token of a row.
    return "separate" if bool((begins.sum(1) + mask[:, 0] <= 1).all()) else "mixed"


def _padding(
    mask: Tensor, positions: Tensor | None, kind: Literal["plain", "separate", "mixed"]
) -> AttentionSpan | None:
    if kind == "plain":
        return None if positions is None else AttentionSpan(positions=positions)
    if kind == "mixed":
        return AttentionSpan(positions=positions, mask=mask[:, None, None, :])
    before = mask.int().argmax(1)
    # Padding after the tokens attends to the tokens, as in plain rows. Its states enter the losses
    # of routers, and must not depend on the other rows.
    lengths = torch.stack((before, mask.shape[1] - before), 1)
    return AttentionSpan(lengths=lengths, positions=positions, restarts=False)


def check_mask(attention_mask: Tensor, shape: torch.Size) -> None:
    """Refuse a mask that does not have one number for each token."""
    if attention_mask.shape != shape:
        raise UnsupportedError(
            f"attention_mask must have a number for each token {tuple(shape)}: its shape is "
            f"{tuple(attention_mask.shape)}. Masks with an entry for each pair of tokens are not "
            "supported. Mark padding with 0 in a mask of that shape; in a language model, "
            "position_ids can separate packed sequences."
        )


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
