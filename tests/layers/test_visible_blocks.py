"""FlexAttention visits the blocks that a span makes visible, and its output equals attention by
operators.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_megatron.layers import attention_flex
from lightning_megatron.layers.alibi import AlibiSlopes
from lightning_megatron.layers.attention_flex import attend_by_flex
from lightning_megatron.layers.attention_operators import attend_by_operators
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.dense_mask import KeyRows, seen_pairs
from lightning_megatron.layers.visible_blocks import BLOCK, visible_blocks

CPU = torch.device("cpu")
LENGTHS = torch.tensor([[100, 7, 0], [299, 0, 0]])
SPANS = {
    "causal": AttentionSpan(),
    "both ways": AttentionSpan(causal=False),
    "window": AttentionSpan(window=33),
    "wide window": AttentionSpan(window=200),
    "window both ways": AttentionSpan(window=200, causal=False),
    "documents": AttentionSpan(LENGTHS),
    "documents both ways": AttentionSpan(LENGTHS, causal=False),
    "documents, window": AttentionSpan(LENGTHS, window=40),
    "prefix": AttentionSpan(prefix=torch.tensor([50, 130])),
    "prefix, window": AttentionSpan(prefix=torch.tensor([0, 300]), window=20),
}


def listed_blocks(numbers: Tensor, indices: Tensor) -> Tensor:
    """Return, for each pair of blocks, whether the first ``numbers`` indices of its row name it."""
    is_first = torch.arange(indices.shape[-1]) < numbers[..., None]
    is_listed = torch.zeros_like(indices, dtype=torch.bool)
    return is_listed.scatter(-1, indices.long(), is_first)


@pytest.mark.parametrize("length", [300, 384, 1000])
@pytest.mark.parametrize("kind", list(SPANS))
def test_visible_blocks_equal_those_of_create_block_mask(kind: str, length: int) -> None:
    span = SPANS[kind].laid_out(2, length, CPU)
    blocks = visible_blocks(span, 2, length, CPU)
    expected = create_block_mask(
        blocks.mask_mod, 2, None, length, length, CPU, separate_full_blocks=True
    )
    pairs = [
        (listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices), listed_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
        for block_mask in (blocks, expected)
    ]  # fmt: skip
    (partial, full), (expected_partial, expected_full) = pairs
    assert not (partial & full).any()
    assert torch.equal((partial | full).expand_as(expected_full), expected_partial | expected_full)
    assert torch.equal(full.expand_as(expected_full), expected_full)
    assert full.any() or "window" in kind or length < 3 * BLOCK


@pytest.mark.parametrize("kind", list(SPANS))
def test_the_mask_function_equals_the_dense_mask(kind: str) -> None:
    length = 300
    span = SPANS[kind].laid_out(2, length, CPU)
    rule = visible_blocks(span, 2, length, CPU).mask_mod
    grid = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    actual = torch.stack([rule(torch.tensor(row), torch.tensor(0), *grid) for row in range(2)])
    expected = seen_pairs(span, 2, length, CPU).expand(2, 1, length, length)
    assert torch.equal(actual[:, None], expected)


def borders(*sizes: int) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


#: Spans whose keys have other positions than their queries, in two rows.
SPANS_OF_OTHER_KEYS = {
    "all keys": (AttentionSpan(causal=False), KeyRows(500)),
    "aligned at the end": (AttentionSpan(), KeyRows(500)),
    "keys end behind the queries": (AttentionSpan(window=150), KeyRows(500, behind=40)),
    "keys end before the queries": (AttentionSpan(), KeyRows(300, behind=-140)),
    "documents": (
        AttentionSpan(borders=borders(100, 0, 200, 299, 1, 0)),
        KeyRows(500, borders(130, 0, 370, 299, 150, 51)),
    ),
    "documents to all keys": (
        AttentionSpan(borders=borders(100, 0, 200, 299, 1, 0), causal=False),
        KeyRows(200, borders(40, 100, 60, 199, 0, 1)),
    ),
}


@pytest.mark.parametrize("kind", list(SPANS_OF_OTHER_KEYS))
def test_visible_blocks_of_other_keys_agree_with_the_dense_mask(kind: str) -> None:
    span, keys = SPANS_OF_OTHER_KEYS[kind]
    length = 300
    blocks = visible_blocks(span, 2, length, CPU, keys)
    assert blocks.seq_lengths == (length, keys.seq_length)
    grid = torch.meshgrid(torch.arange(length), torch.arange(keys.seq_length), indexing="ij")
    actual = torch.stack(
        [blocks.mask_mod(torch.tensor(row), torch.tensor(0), *grid) for row in range(2)]
    )
    expected = seen_pairs(span, 2, length, CPU, keys).expand(2, 1, length, keys.seq_length)
    assert torch.equal(actual[:, None], expected)
    # No pair of the omitted blocks is visible, and every pair of the full blocks is visible.
    full_blocks = listed_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    listed = full_blocks | listed_blocks(blocks.kv_num_blocks, blocks.kv_indices)
    pairs_of_blocks = [
        selected_blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[
            :, :, :length, : keys.seq_length
        ]
        for selected_blocks in (listed, full_blocks)
    ]
    assert not (expected & ~pairs_of_blocks[0]).any()
    assert not (pairs_of_blocks[1] & ~expected).any()
    assert listed.float().mean() < 1 or not span.causal, "blocks are left out"


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize(
    "span",
    [
        AttentionSpan(soft_cap=0.5, window=50),
        AttentionSpan(LENGTHS, soft_cap=0.3),
        AttentionSpan(prefix=torch.tensor([50, 0])),
        AttentionSpan(LENGTHS, slopes=AlibiSlopes(4), window=50),
        AttentionSpan(soft_cap=2.0, slopes=AlibiSlopes(4, 3.0), causal=False),
        AttentionSpan(soft_cap=2.0, sinks=torch.linspace(-1, 1, 4), scale=0.3),
    ],
    ids=[
        "cap and window",
        "cap and documents",
        "prefix",
        "slopes",
        "cap and slopes",
        "cap and sinks",
    ],
)
def test_flex_attention_equals_attention_by_operators(
    span: AttentionSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiled kernel has no backward pass on CPUs, and its compilation takes long.
    by_kinds = attention_flex._by_kinds(flex_attention)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: by_kinds)
    torch.manual_seed(0)
    inputs = [torch.randn(300, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    span = span.laid_out(2, 300, CPU)
    torch.testing.assert_close(
        attend_by_flex(*inputs, span), attend_by_operators(*inputs, span), rtol=1e-10, atol=1e-10
    )
