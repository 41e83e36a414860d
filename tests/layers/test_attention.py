"""Every kernel and every merge of partial results computes the same attention from a span, which
describes without a mask which keys a query attends to.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_megatron.layers.attention.choose_core import choose_core, choose_part
from lightning_megatron.layers.attention.core import attend, prepared, with_wide_values
from lightning_megatron.layers.attention.document_cut import DocumentCut
from lightning_megatron.layers.attention.operators import KeyRows, attend_by_operators, seen_pairs
from lightning_megatron.layers.attention.parts import attend_by_parts, forward_part
from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan, document_of_tokens
from lightning_megatron.layers.context_parallel.ring import PartialSum
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.oracles import assert_equal
from tests.refusals import check_refusals

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, SINGLE, WIDE = torch.bfloat16, torch.float32, torch.float64
LENGTHS = torch.tensor([[2, 1, 2], [4, 0, 0]])
HIDDEN = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])[:, None, None] > 0
#: Rows of 3 and 5 tokens, the first of them with 2 more of padding.
PADDED = AttentionSpan.padded(torch.tensor([3, 5]), 5)
SINKS = torch.tensor([0.3, -1.0, 0.0, 2.0]).double()

SPANS = {
    "causal": AttentionSpan(),
    "both ways": AttentionSpan(causal=False),
    "scaled": AttentionSpan(scale=0.7),
    "window": AttentionSpan(window=2),
    "window both ways": AttentionSpan(causal=False, window=2),
    "documents": AttentionSpan(LENGTHS),
    "documents both ways": AttentionSpan(LENGTHS, causal=False),
    "documents, window": AttentionSpan(LENGTHS, window=2),
    "prefix": AttentionSpan(prefix=torch.tensor([3, 0])),
    "keys hidden": AttentionSpan(mask=HIDDEN),
    "padded": PADDED,
    "padded, soft cap, slopes, sinks": replace(PADDED, soft_cap=0.5, slopes=AlibiSlopes(4), sinks=SINKS),
    "soft cap": AttentionSpan(LENGTHS, soft_cap=0.3),
    "slopes": AttentionSpan(slopes=AlibiSlopes(4)),
    "slopes both ways, documents": AttentionSpan(LENGTHS, causal=False, slopes=AlibiSlopes(4, 3.0)),
    "slopes, window, cap": AttentionSpan(window=3, soft_cap=0.5, slopes=AlibiSlopes(4)),
    "slopes, keys hidden": AttentionSpan(mask=HIDDEN, slopes=AlibiSlopes(4)),
    "slopes, hidden keys have no place": AttentionSpan(mask=HIDDEN, slopes=AlibiSlopes(4, 5.0, skips_padding=True)),
    "sinks": AttentionSpan(LENGTHS, sinks=SINKS),
    "sinks, cap, window": AttentionSpan(window=3, soft_cap=0.5, sinks=SINKS),
}  # fmt: skip


def draw_inputs(length: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(length, 2, heads, 6, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    )
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def attend_by_loops(query: Tensor, key: Tensor, value: Tensor, span: AttentionSpan) -> Tensor:
    """Compute attention one query at a time."""
    visible_keys = visible_keys_by_loops(span, len(query))
    rows = []
    for place, row, head in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        visible = visible_keys[row][place]
        keys, values = (tensor[visible, row, head // 2] for tensor in (key, value))
        scores = keys @ query[place, row, head] * (span.scale or 6**-0.5)
        if span.soft_cap is not None:
            scores = span.soft_cap * torch.tanh(scores / span.soft_cap)
        if span.slopes is not None:
            # Four heads, whose slopes are powers of one number.
            slope = 2.0 ** (-(head + 1) * span.slopes.bias_max / 4)
            scores = scores - slope * distances(span, row, place, visible).double()
        sink = 0.0 if span.sinks is None else span.sinks[head].exp()
        weights = scores.exp() / (scores.exp().sum() + sink)
        rows.append(weights @ values)
    return torch.stack(rows).view(*query.shape[:2], -1)


def distances(span: AttentionSpan, row: int, place: int, keys: list[int]) -> Tensor:
    """Return the distances in tokens from a query to its keys."""
    places = torch.arange(5)
    if span.slopes is not None and span.slopes.skips_padding and span.mask is not None:
        places = span.mask[row, 0, 0].cumsum(0)
    return (places[place] - places[keys]).abs()


def visible_keys_by_loops(span: AttentionSpan, length: int) -> list[list[list[int]]]:
    """List the keys of each query of the two rows."""
    if span.key_borders is not None:
        assert span.key_borders.tolist() == [0, 3, 5, 10, 10]
        return [[list(range(3))] * length, [list(range(5))] * length]
    rows = []
    for row, sizes in enumerate([[], []] if span.lengths is None else span.lengths.tolist()):
        lengths = [*sizes, length - sum(sizes)]
        document = [number for number, size in enumerate(lengths) for _ in range(size)]
        prefix = 0 if span.prefix is None else int(span.prefix[row])
        keys_of_queries = []
        for place in range(length):
            keys = [
                key
                for key in range(length)
                if document[key] == document[place]
                and (key <= place or not span.causal or key < prefix)
                and (span.window is None or abs(place - key) < span.window)
                and (span.mask is None or bool(span.mask[row, 0, 0, key]))
            ]
            keys_of_queries.append(keys or [place])
        rows.append(keys_of_queries)
    return rows


def output_and_gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    output_gradient = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad(output, inputs, output_gradient)]


@pytest.mark.parametrize("kind", list(SPANS))
def test_every_implementation_of_attention_equals_loops_over_queries(kind):
    inputs, span = draw_inputs(), SPANS[kind]
    if span.sinks is not None:
        span = replace(span, sinks=span.sinks.clone().requires_grad_())
    all_inputs = inputs if span.sinks is None else (*inputs, span.sinks)
    expected_results = output_and_gradients(attend_by_loops(*inputs, span), all_inputs)
    laid_out = span.laid_out(2, 5, CPU)
    ready = prepared(span, 2, 5, dtype=torch.float64, device=CPU)
    outputs = {
        "attend": attend(*inputs, span),
        "prepared": attend(*inputs, span.over(ready) if ready is not None else span),
        "operators": attend_by_operators(*inputs, laid_out).flatten(2),
        "parts": attend_by_parts(*inputs, laid_out).flatten(2),
    }
    for name, output in outputs.items():
        actual_results = output_and_gradients(output, all_inputs)
        for number, pair in enumerate(zip(actual_results, expected_results, strict=True)):
            assert_equal(*pair, f"{name} {number}")


def test_alibi_slopes_equal_those_of_hugging_face():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    for num_heads in (1, 12, 16, 71):
        slopes = AlibiSlopes(num_heads).on(CPU).float()
        torch.testing.assert_close(slopes, bloom._get_alibi_slopes(num_heads, CPU))
        for bias_max in (8, 4):
            # Reduction of the score of the last query for the key before it.
            theirs = -mpt.build_mpt_alibi_tensor(num_heads, 2, bias_max)[:, 0, 0]
            slopes = AlibiSlopes(num_heads, bias_max).on(CPU).float()
            torch.testing.assert_close(slopes, theirs)
        some = AlibiSlopes(num_heads, 4).of(range(1, num_heads)).on(CPU).float()
        assert torch.equal(some, slopes[1:])


def numbers(tensor: Tensor | None) -> list[Any]:
    assert tensor is not None
    return tensor.tolist()


def test_rows_have_padded_lengths_and_are_cut_at_their_end():
    span = AttentionSpan.packed([[3, 2], [4]], 8, num_documents=3)
    assert (numbers(span.lengths), span.longest) == ([[3, 2, 0], [4, 0, 0]], 4)
    rest = AttentionSpan.packed([[1], [2]], 8)
    assert rest.longest == 7, "the rest of a row counts as a document"
    laid_out = span.laid_out(2, 8, CPU)
    assert numbers(laid_out.borders) == [0, 3, 5, 5, 8, 12, 12, 12, 16]
    assert numbers(laid_out.positions) == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    beyond = AttentionSpan(torch.tensor([[9, 3], [2, 9]])).laid_out(2, 5, CPU)
    assert numbers(beyond.borders) == [0, 5, 5, 5, 7, 10, 10]
    span = AttentionSpan.padded(torch.tensor([2, 0, 9, 5, -1]), 5)
    assert numbers(span.key_borders) == [0, 2, 5, 10, 10, 15, 15, 20, 20, 25, 25]
    assert numbers(span.borders) == [0, 5, 5, 10, 10, 15, 15, 20, 20, 25, 25]
    mask = torch.arange(5) < torch.tensor([2, 5, 5, 5, 5])[:, None]
    pairs = seen_pairs(span, 5, 5, CPU)
    assert torch.equal(pairs, mask[:, None, None].expand(-1, -1, 5, -1))


MASKED = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
CUDNN, FLASH = "cudnn, flash, efficient, math", "flash without a mask"
LARGE = {"head_dim": 192, "value_dim": 128}
#: Span, dtype, further arguments, and what is chosen.
CORES: list[tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = [
    # Who hands in a mask has asked for it.
    ("keys hidden", HALF, {}, {"core": "sdpa", "backends": MASKED, "expand_kv": True, "remedy": None}),
    ("causal", HALF, {}, {"name": CUDNN}),
    ("window", HALF, {"seq_length": 2}, {"name": CUDNN}),
    *((kind, HALF, {}, {"name": FLASH}) for kind in ("documents", "window", "padded")),
    *(
        (kind, SINGLE, {}, {"backends": MASKED, "needs_mask": True})
        for kind in ("documents", "window", "padded")
    ),
    *(
        (kind, HALF, {"dropout": 0.1}, {"name": FLASH, "needs_mask": False})
        for kind in ("documents", "documents, window", "padded")
    ),
    ("window", HALF, {"dropout": 0.1}, {"needs_mask": True}),
    ("sinks", HALF, {"dropout": 0.1}, {"core": "operators"}),
    ("soft cap", HALF, {}, {"name": "FlexAttention", "needs_mask": False}),
    ("soft cap", WIDE, {}, {"core": "operators"}),
    ("soft cap", HALF, {"head_dim": 8}, {"core": "operators"}),
    ("prefix", HALF, {}, {"name": "FlexAttention", "needs_mask": False}),
    ("prefix", WIDE, {}, {"needs_mask": True}),
    ("prefix", HALF, {"head_dim": 8}, {"needs_mask": True}),
    ("sinks alone", HALF, {}, {"core": "flash"}),
    ("sinks", HALF, {"head_dim": 320}, {"core": "flex"}),
    ("slopes", HALF, {}, {"core": "flex"}),
    ("slopes", WIDE, {}, {"core": "operators"}),
    ("slopes, keys hidden", HALF, {}, {"core": "operators"}),
    # Values are padded for kernels that need one head size; cuDNN takes the sizes of LARGE.
    ("causal", HALF, LARGE, {"pads_values": False}),
    ("causal", HALF, {"head_dim": 96, "value_dim": 64}, {"pads_values": True}),
    ("documents", HALF, LARGE, {"pads_values": True}),
    ("documents", SINGLE, LARGE, {"pads_values": False}),
]  # fmt: skip
#: Span, dtype, further arguments, and the implementation of attention to a part of the keys.
PARTS: list[tuple[str, torch.dtype, dict[str, Any], str]] = [
    *((kind, HALF, {}, "flash") for kind in ("causal", "documents", "window", "both ways")),
    *((kind, SINGLE, {}, "flex") for kind in ("causal", "documents", "window", "both ways")),
    *((kind, HALF, {}, "flex") for kind in ("soft cap", "slopes", "slopes, window, cap")),
    ("window", HALF, {"behind": 1}, "flash"),
    ("window", HALF, {"behind": 2}, "flex"),  # no key for the last query
    ("causal", HALF, {"behind": -1}, "flex"),
    ("causal", WIDE, {}, "operators"),
    ("soft cap", HALF, {"head_dim": 8}, "operators"),
]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there is a GPU of a compute capability, which a test may change."""
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    return capability


def test_cores_are_chosen_by_span_dtype_head_size_and_dropout(capability):
    spans = {**SPANS, "sinks alone": AttentionSpan(sinks=torch.ones(4))}
    for kind, dtype, options, expected in CORES:
        choice = choose_core(CUDA, dtype, spans[kind], **options)
        actual = {name: getattr(choice, name) for name in expected}
        assert actual == expected, (kind, dtype, options)
    for kind, dtype, options, core in PARTS:
        assert choose_part(CUDA, dtype, spans[kind], **options).core == core, (kind, dtype, options)
    assert choose_core(CPU, HALF, **LARGE).pads_values
    capability[0] = 8
    assert choose_core(CUDA, HALF, **LARGE).pads_values


def test_slow_cores_have_a_reason_and_a_remedy(capability):
    reasons: list[tuple[str, dict[str, Any], str]] = [
        ("documents", {"dropout": 0.1}, "drop no weights"),
        ("window", {"head_dim": 320}, "at most 256"),
        ("soft cap", {"dropout": 0.1}, "no dropout"),
        ("causal", {"dropout": 0.1}, "flash attention draws its mask from torch's generator"),
        ("causal", {"head_dim": 96, "value_dim": 64}, "of 64 elements are padded to 96"),
    ]
    for kind, options, phrase in reasons:
        assert phrase in choose_core(CUDA, HALF, SPANS[kind], **options).reason
    for kind in ("documents", "window", "padded"):
        remedy = choose_core(CUDA, SINGLE, SPANS[kind]).remedy or ""
        assert "Trainer(precision='bf16-mixed')" in remedy
        # Half types suffice for documents: flash attention drops their weights.
        assert ("without attention dropout" in remedy) == (kind == "window")
    stored = "scores of all pairs of tokens are stored"
    assert stored in (choose_core(CUDA, WIDE, SPANS["slopes"]).remedy or "")
    assert stored in (choose_part(CUDA, WIDE, SPANS["causal"]).remedy or "")
    assert choose_part(CPU, WIDE, SPANS["slopes"]).remedy is None


def test_contradictory_spans_are_refused():
    check_refusals(
        AttentionSpan.packed,
        [
            (([[3], [4, 5]], 8), "8 tokens: row 1 has [4, 5]"),
            (([[-1, 3]], 8), "from 0 to 8 tokens: row 0"),
            (([[1, 1, 1]], 8, 2), "(2) documents: one has 3"),
        ],
    )
    check_refusals(
        AttentionSpan,
        [
            ({"lengths": LENGTHS, "mask": HIDDEN}, "either a mask or lengths"),
            ({"lengths": LENGTHS, "prefix": torch.tensor([1, 1])}, "either lengths or prefix"),
            ({"window": 0}, "span.window must be at least 1 token"),
            ({"soft_cap": 0.0}, "span.soft_cap must be above 0"),
        ],
    )
    check_refusals(
        partial(replace, PADDED),
        [
            ({"causal": True}, "causal is True"),
            ({"window": 2}, "window is 2"),
            ({"borders": None}, "borders are missing"),
        ],
    )


def test_keys_that_end_elsewhere_than_queries_are_aligned_at_the_end():
    # Two documents with 1 and 2 queries, of 2 and 3 keys.
    span = AttentionSpan(borders=torch.tensor([0, 1, 3], dtype=torch.int32))
    keys = KeyRows(5, torch.tensor([0, 2, 5], dtype=torch.int32))
    pairs = seen_pairs(span, 1, 3, CPU, keys)
    assert pairs.int().tolist() == [[[[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]]]
    pairs = seen_pairs(AttentionSpan(window=3), 1, 3, CPU, KeyRows(4, behind=1))
    assert pairs[0, 0].int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


def test_a_query_without_keys_adds_nothing_to_a_partial_sum():
    query, key, value = (tensor.detach()[:, :1, :2] for tensor in draw_inputs(4))
    total, span = PartialSum(query), AttentionSpan(scale=0.5)
    hidden = forward_part(query, key, value, span, KeyRows(4, behind=-2))
    total.add(slice(None), *hidden)
    assert total.out[:2].eq(0).all()
    assert total.log_sum[:, :, :2].isneginf().all()
    bidirectional = replace(span, causal=False)
    total.add(slice(2), *forward_part(query[:2], key, value, bidirectional, KeyRows(4)))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * 0.5
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value)
    assert_equal(total.out[:2], expected[:2], "sum", 1e-14)


@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(0, 24), max_size=6), min_size=1, max_size=3),
)
def test_one_rank_holds_each_token_of_packed_documents(ranks, lengths):
    longest = max(map(sum, lengths))
    seq_length = -(-max(longest, 1) // (2 * ranks)) * 2 * ranks
    span = AttentionSpan.packed(lengths, seq_length)
    full_span = span.laid_out(len(lengths), seq_length, CPU)
    assert full_span.borders is not None
    cut_of = partial(DocumentCut.of, full_span.borders, len(lengths), seq_length, ranks)
    cuts = [cut_of(rank, longest=span.longest) for rank in range(ranks)]
    first_cut = cuts[0]
    all_positions = torch.arange(seq_length).expand(len(lengths), -1)
    assert torch.equal(first_cut.order.flatten(1).sort(1).values, all_positions)
    assert torch.equal(first_cut.order.flatten(1).gather(1, first_cut.places), all_positions)
    documents = document_of_tokens(full_span.borders, len(lengths), seq_length)
    sizes = first_cut.piece_borders.diff()
    assert int(sizes.max()) <= first_cut.longest_piece
    # The pieces of a document differ by at most one token, and a rank holds them in order.
    assert int((sizes.max(0).values - sizes.min(0).values).max()) <= 1
    assert all(order.diff().gt(0).all() for order in first_cut.order.flatten(0, 1))
    for rank, cut in enumerate(cuts):
        documents_of_rank = documents.gather(1, cut.order[:, rank]).flatten()
        counts = torch.bincount(documents_of_rank, minlength=len(full_span.borders) - 1)
        assert torch.equal(counts, cut.part_borders[rank].diff().long())
        for keys, borders in cut.prefixes:
            counts = torch.bincount(
                documents.gather(1, keys).flatten(), minlength=len(full_span.borders) - 1
            )
            assert torch.equal(counts, borders.diff().long())


def first_elements(tensor: Tensor) -> Tensor:
    """Return the first 4 elements of every head of a result."""
    return tensor.unflatten(-1, (-1, 6))[..., :4].flatten(2)


@pytest.mark.parametrize(
    "kind", ["causal", "documents, window", "slopes, keys hidden", "sinks, cap, window"]
)
def test_attention_with_short_values_equals_the_first_elements_with_long_values(kind):
    query, key, value = inputs = draw_inputs()
    core = partial(attend, span=SPANS[kind])
    full = first_elements(core(query, key, value))
    weights = torch.randn(full.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(3))
    expected = [full, *torch.autograd.grad((full * weights).sum(), inputs)]
    for attention in (core, partial(with_wide_values, core)):
        output = attention(query, key, value[..., :4])
        actual = [output, *torch.autograd.grad((output * weights).sum(), inputs)]
        for number, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, f"{kind}: {number}")


SIZES: dict[str, Any] = {"key_value_rank": 8, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8}


def test_contradictory_settings_of_latent_attention_are_refused():
    check_refusals(
        lambda **changes: LatentAttentionConfig(**{**SIZES, **changes}),
        [
            ({"rotary_dim": 3}, "rotary_dim (3) of latent_attention must be even"),
            ({"value_dim": 11}, "at most plain_dim + rotary_dim (10)"),
            ({"key_value_rank": 0}, "latent_attention.key_value_rank must be"),
        ],
    )
    # The heads need not divide the hidden size.
    sizes = {"vocab_size": 16, "max_seq_length": 8, "num_layers": 1, "num_heads": 4}
    make = partial(GPTConfig.llama, **sizes, hidden_size=18, latent_attention=SIZES)
    config = make()
    assert (config.head_size, config.value_size, config.rotary_size) == (10, 8, 4)
    layout = ParallelLayout(3, tp=3)
    check_refusals(config.check_layout, [((layout,), "num_attention_heads (4) must be a multiple")])
    check_refusals(
        make,
        [
            ({"position": "learned"}, "position (learned) must be rotary with latent_attention"),
            ({"head_dim": 6}, "head_dim (6) must be None with latent_attention"),
            ({"num_kv_heads": 2}, "num_kv_heads (2) must be None or num_heads (4) with"),
            ({"qk_norm": True}, "qk_norm (True) must be False with latent_attention"),
        ],
    )
