"""The attention core by FlexAttention, a kernel that torch generates for the span.

The kernel skips blocks of queries and keys without visible pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from lightning_megatron.layers.attention.operators import (
    KeyRows,
    PartInputs,
    keys_of,
    places_from_end,
)
from lightning_megatron.layers.attention.span import (
    AttentionSpan,
    Results,
    add_sinks,
    document_of_tokens,
)
from lightning_megatron.shapes import Bool, Float, Int

#: Number of kernels that a process may compile, for different spans, dtypes and shapes of batches.
_NUM_KERNELS = 128
#: Number of queries, and of keys, in a block (tokens).
BLOCK = 128


def attend_by_flex(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads head_dim"],
    span: AttentionSpan,
) -> Float[Tensor, "seq batch heads head_dim"]:
    """Compute attention without the scores of all pairs of tokens in memory.

    Equal to ``attend_by_operators`` without dropout, for spans without a mask. The first call for a
    span of another kind compiles a kernel, which takes seconds.
    """
    if span.sinks is None:
        mixed: Tensor = _called(query, key, value, span).permute(2, 0, 1, 3)
        return mixed
    return add_sinks(*flex_forward(query, key, value, span), span.sinks)[0]


def flex_forward(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    value: Float[Tensor, "_ batch kv_heads head_dim"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> Results:
    """Compute attention to a part of the keys and its log-sum-exps, differentiably.

    Equal to ``attention.parts.forward_part``; sinks are ignored.
    """
    out, aux = _called(query, key, value, span, keys, return_aux=AuxRequest(lse=True))
    return out.permute(2, 0, 1, 3), aux.lse


def flex_backward(
    grad_out: Float[Tensor, "seq batch heads head_dim"],
    inputs: PartInputs,
    result: Results,
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> PartInputs:
    """Compute the gradients of queries, keys and values of a part from the merged results.

    The kernel's backward pass takes gradients of a part's own output ``o_p`` and log-sum-exps
    ``l_p``, not the merged ``o`` and ``l``. With ``l = log sum_p exp l_p`` and
    ``o = sum_p exp(l_p - l) o_p``, and with the gradient ``do`` of ``o``, these are::

        do_p = exp(l_p - l) do        dl_p = exp(l_p - l) sum(do (o_p - o))

    The part computes ``o_p`` and ``l_p`` again, because keeping them for each part would take the
    memory of the outputs of whole rows. Sinks are a part that ``o`` and ``l`` include.

    Equal to ``attention.parts.backward_part``.
    """
    out, lse = result
    query, key, value = leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    with torch.enable_grad():
        part, part_lse = flex_forward(query, key, value, span, keys)
    # Both log-sum-exps may be minus infinity, for queries without visible keys.
    share = (part_lse.detach() - lse).exp().masked_fill(part_lse == -torch.inf, 0.0)
    wide = grad_out.to(share.dtype)
    grad_part = wide * share.permute(2, 0, 1)[..., None]
    lean = (wide * (part.detach().to(share.dtype) - out.to(share.dtype))).sum(-1)
    gradients = grad_part.to(part.dtype), share * lean.permute(1, 2, 0)
    input_gradients = torch.autograd.grad((part, part_lse), leaves, gradients)
    return input_gradients[0], input_gradients[1], input_gradients[2]


def _called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: AttentionSpan,
    keys: KeyRows | None = None,
    **kernel_options: Any,
) -> Any:
    length, num_sequences = query.shape[:2]
    keys = keys or keys_of(span, length)
    options: dict[str, Any] = {
        "score_mod": _of_scores(span, query, keys),
        "block_mask": visible_blocks(span, num_sequences, length, query.device, keys),
        "scale": span.scale,
        "enable_gqa": query.shape[2] != key.shape[2],
    }
    if query.is_cuda:
        # Below 128 queries torch would take its kernel for few queries, which does not support
        # these blocks.
        options["kernel_options"] = {"BACKEND": "TRITON"}
    rows = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    return _compiled()(*rows, **options, **kernel_options)


def _of_scores(
    span: AttentionSpan, query: Tensor, keys: KeyRows | None
) -> Callable[..., Tensor] | None:
    """Return the function of scaled scores that the kernel inlines; None if they do not change."""
    soft_cap = span.soft_cap
    slopes = places = None
    if span.slopes is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        slopes = span.slopes.on(query.device).to(wide)
        places = _places(span, query, keys)
    if soft_cap is None and slopes is None:
        return None

    def changed(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if slopes is not None:
            distance = query - key
            if places is not None:
                distance = places[0][row, query] - places[1][row, key]
            score = score - slopes[head] * distance.abs()
        return score

    return changed


def _places(span: AttentionSpan, query: Tensor, keys: KeyRows | None) -> tuple[Tensor, ...] | None:
    """Return the places of queries and keys in every row; None if places are their indices."""
    query_places = span.places
    key_places = query_places if keys is None else keys.places
    if query_places is None or key_places is None:
        return None
    return _of_all_rows(query.shape[1], query_places, key_places)


@cache
def _compiled() -> Callable[..., Any]:
    # Without fullgraph, torch would silently fall back to operators.
    return _by_kinds(torch.compile(flex_attention, fullgraph=True))


def _by_kinds(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a kernel of its own for each kind of attention."""
    # Another soft cap would become a symbol, which torch 2.15 cannot inline into the kernel.
    kinds = torch._dynamo.config.patch(recompile_limit=_NUM_KERNELS, specialize_float=True)
    return cast(Callable[..., Any], kinds(attend))


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Places and documents of queries or of keys.

    Args:
        places: Place of each token. The place of a query minus the place of a key of the same
            document is their distance.
        documents: Document of each token; None means one document for each row.
        in_order: Whether places are the indices of the tokens.
    """

    places: Int[Tensor, "#batch seq"]
    documents: Int[Tensor, "#batch seq"] | None
    in_order: bool

    @property
    def length(self) -> int:
        return self.places.shape[1]

    def bounds(self, values: Int[Tensor, "#batch seq"]) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each block."""
        index = torch.arange(-(-self.length // BLOCK) * BLOCK, device=values.device)
        blocks = values[:, index.clamp(max=self.length - 1)].unflatten(1, (-1, BLOCK))
        return blocks.amin(-1), blocks.amax(-1)

    @property
    def is_full(self) -> Bool[Tensor, "1 _"]:
        """Return for each block whether it is full; the last one may have fewer than ``BLOCK``."""
        starts = torch.arange(0, self.length, BLOCK, device=self.places.device)
        return (starts + BLOCK <= self.length)[None]


def visible_blocks(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    keys: KeyRows | None = None,
) -> BlockMask:
    """Return the blocks with visible pairs, and the blocks in which all pairs are visible.

    Equal to ``create_block_mask`` with the rule for pairs of a span without a mask, which computes
    a tensor with an entry for each pair of tokens. This function computes one entry for each pair
    of blocks. The host reads no value from the device, so that a CUDA graph can capture the call.
    With documents and ``keys``, blocks may be listed although no pair in them is visible.
    """
    is_whole = keys is None and span.borders is None and span.prefix is None
    if not is_whole or _is_capturing(device):
        # Memory that a capture allocates belongs to the graph, so the cache must not refer to it.
        return _blocks(span, num_sequences, seq_length, device, keys)
    return _blocks_of_whole_rows(span.causal, span.window, seq_length, device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=16)
def _blocks_of_whole_rows(
    causal: bool, window: int | None, seq_length: int, device: torch.device
) -> BlockMask:
    return _blocks(AttentionSpan(causal=causal, window=window), 1, seq_length, device)


def _blocks(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    key_rows: KeyRows | None = None,
) -> BlockMask:
    queries, keys = _queries_and_keys(span, num_sequences, seq_length, device, key_rows)
    visible, whole = _visible_and_full(span, queries, keys)
    partly_numbers, partly = _ordered(visible & ~whole)
    whole_numbers, wholly = _ordered(whole)
    return BlockMask.from_kv_blocks(
        partly_numbers,
        partly,
        whole_numbers,
        wholly,
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(span, num_sequences, queries, keys),
        seq_lengths=(seq_length, keys.length),
    )


def _queries_and_keys(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    keys: KeyRows | None,
) -> tuple[_Tokens, _Tokens]:
    if keys is None:
        documents = None
        if span.borders is not None:
            documents = document_of_tokens(span.borders, num_sequences, seq_length)
        index = torch.arange(seq_length, device=device)[None]
        tokens = _Tokens(index, documents, in_order=True)
        return tokens, tokens
    # Places count from the end of a document, as in flash attention.
    of_queries, query_left = places_from_end(span.borders, num_sequences, seq_length, device)
    of_keys, key_left = places_from_end(keys.borders, num_sequences, keys.seq_length, device)
    queries = _Tokens(-query_left, of_queries, in_order=False)
    others = _Tokens(-key_left - keys.behind, of_keys, in_order=False)
    if span.borders is None:
        return replace(queries, documents=None), replace(others, documents=None)
    return queries, others


def _ordered(blocks: Bool[Tensor, "#batch 1 _ _"]) -> tuple[Tensor, Tensor]:
    """Return for each query block the number of chosen key blocks, and indices with these first."""
    numbers = blocks.sum(-1, dtype=torch.int32)
    # A stable sort keeps adjacent blocks in order, so they are read one after the other.
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return numbers, order.to(torch.int32)


def _visible_and_full(
    span: AttentionSpan, queries: _Tokens, keys: _Tokens
) -> tuple[Bool[Tensor, "#batch 1 _ _"], Bool[Tensor, "#batch 1 _ _"]]:
    """Return which blocks may have visible pairs, and which have only visible pairs."""
    first, last = queries.bounds(queries.places)
    key_first, key_last = keys.bounds(keys.places)
    # The nearest and the farthest pair of two blocks, as query minus key.
    least = first[:, :, None] - key_last[:, None, :]
    most = last[:, :, None] - key_first[:, None, :]
    visible = torch.ones_like(least, dtype=torch.bool)
    full = queries.is_full[:, :, None] & keys.is_full[:, None, :]
    whole = full
    if span.causal:
        visible = visible & (most >= 0)
        whole = whole & (least >= 0)
    if span.window is not None:
        nearest = least.clamp(min=0) + (-most).clamp(min=0)
        visible = visible & (nearest < span.window)
        whole = whole & (torch.maximum(least.abs(), most.abs()) < span.window)
    if queries.documents is not None and keys.documents is not None:
        lows, highs = queries.bounds(queries.documents)
        key_lows, key_highs = keys.bounds(keys.documents)
        visible = visible & (lows[:, :, None] <= key_highs[:, None, :])
        visible = visible & (key_lows[:, None, :] <= highs[:, :, None])
        whole = whole & (lows[:, :, None] == key_highs[:, None, :])
        whole = whole & (key_lows[:, None, :] == highs[:, :, None])
    if span.prefix is not None:
        prefix = span.prefix[:, None, None]
        visible = visible | (key_first[:, None, :] < prefix)
        whole = whole | (full & (key_last[:, None, :] < prefix))
    return visible[:, None], whole.expand_as(visible)[:, None]


def _rule(
    span: AttentionSpan, num_sequences: int, queries: _Tokens, keys: _Tokens
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the span's rule as a function of row, head, query and key that the kernel inlines."""
    causal = span.causal
    window = span.window
    prefix = span.prefix
    places = documents = None
    if not queries.in_order and (causal or window is not None):
        places = _of_all_rows(num_sequences, queries.places, keys.places)
    if queries.documents is not None and keys.documents is not None:
        documents = _of_all_rows(num_sequences, queries.documents, keys.documents)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        if places is not None:
            distance = places[0][row, query] - places[1][row, key]
        visible = distance >= 0 if causal else query == query
        if window is not None:
            visible = visible & (distance < window) & (-distance < window)
        if documents is not None:
            visible = visible & (documents[0][row, query] == documents[1][row, key])
        if prefix is not None:
            visible = visible | (key < prefix[row])
        return visible

    return sees


def _of_all_rows(num_sequences: int, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(value.expand(num_sequences, -1).contiguous() for value in values)
